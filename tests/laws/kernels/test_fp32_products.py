"""Whichever library multiplies fp32 matrices on a CPU, the model that is trained is the same."""

from pathlib import Path
from unittest.mock import patch

from megatron.config.run import RunConfig
from megatron.ops import cpu_products
from megatron.ops.cpu_products import MKL, ONEDNN, fp32_products_are_exact
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    assert_same_bits,
    tiny_run,
    train,
    whole,
    write_tiny_corpus,
)


def train_by(config: RunConfig, *libraries: str) -> list[tuple[Record, bool]]:
    """A body for `run_on_ranks`: records of a run, and whether oneDNN was asked to multiply."""
    found = []
    for library in libraries:
        with (
            patch.object(cpu_products, "_BREAK_EVEN", 0),
            patch.object(cpu_products, "onednn_is_faster_in_fp32", return_value=library == ONEDNN),
            patch.object(
                cpu_products, "fp32_products_are_exact", wraps=fp32_products_are_exact
            ) as probe,
        ):
            found.append((train(config), probe.called))
    return found


def test_either_library_trains_the_same_model(tmp_path: Path) -> None:
    """Where oneDNN would round, MKL multiplies twice: `fp32_products_are_exact` finds it."""
    model = {**MODELS["llama"], "micro_batch_size": 8, "cross_entropy_loss_fusion": True}
    config = tiny_run(write_tiny_corpus(tmp_path), fp64=False, adam_eps=1e-4, **model)
    ((mkl, one, again),) = run_on_ranks(1, train_by, config, MKL, ONEDNN, ONEDNN)
    assert [is_asked for _, is_asked in (mkl, one, again)] == [False, True, True]
    (expected, _), (found, _) = mkl, one
    assert_close(found.losses, expected.losses, FP32)
    assert_close(found.grad_norms, expected.grad_norms, FP32)
    assert_all_close(whole([found], prefix="model/"), whole([expected], prefix="model/"), FP32)
    assert_same_bits(again[0], found)
