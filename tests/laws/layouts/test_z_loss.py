"""The z loss, C log^2 Z of each counted token, trains the same model at every layout.

Whole runs by `pretrain()` in float64 beside one process. Z is a sum over a vocabulary that tp
splits, of a head that makes its logits a few tokens at a time or at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.run import RunConfig
from megatron.model import losses
from megatron.mpu.linear_cross_entropy import LossState
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    FP64,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)
from tests.support.tiny_bert import tiny_bert_run, train_bert_all, write_tiny_sentences

# A mask leaves tokens out, and the vocabulary has rows of padding.
FLAGS: dict[str, Any] = {
    **MODELS["ragged"],
    "z_loss_coeff": 0.1,
    "train_iters": 2,
    "eval_iters": 1,
    "eval_interval": 2,
    "eval_at_start": True,
}
UNFUSED = {"cross_entropy_loss_fusion": False}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 4}
PP2 = {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}
# World size to layouts.
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"logits at once": {**UNFUSED, "micro_batch_size": 4}},
    2: {
        "tp, split sequences": SP,
        "tp, logits at once": {**UNFUSED, **SP, "sequence_parallel": False},
        "pp, zero bubble": {**PP2, "pipeline_schedule": "zero-bubble"},
        "dp": {"micro_batch_size": 2, "use_distributed_optimizer": True},
    },
    4: {
        "tp 4": {"tensor_model_parallel_size": 4, "micro_batch_size": 4},
        "tp, pp, logits at once": {**UNFUSED, **SP, **PP2},
    },
}
DEEPSPEED: dict[str, dict[str, Any]] = {
    "zero 3": {"zero_stage": "3", "micro_batch_size": 2},
    "tp, logits at once": {**UNFUSED, **SP, "zero_stage": "1"},
    "pp": {**PP2, "zero_stage": "0"},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


def run_of(corpus: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, **{**FLAGS, **flags})


def train_alone(configs: Sequence[RunConfig]) -> list[Record]:
    (records,) = run_on_ranks(1, train_all, configs)
    return records


def z_losses(record: Record) -> list[float]:
    """Return the reported means of log^2 Z."""
    found = [step.z_loss for step in record.steps]
    assert all(one is not None and one > 1 for one in found), found
    return [one or 0.0 for one in found]


def check_equal(found: Sequence[Record], alone: Record, tolerance: float) -> None:
    for record in found:  # every rank has the same numbers
        assert (record.losses, z_losses(record)) == (found[0].losses, z_losses(found[0]))
    assert_close(found[0].losses, alone.losses, tolerance)
    assert_close(found[0].grad_norms, alone.grad_norms, tolerance)
    assert_close(z_losses(found[0]), z_losses(alone), tolerance)
    evaluated = [[one.mean for one in record.evaluations] for record in (found[0], alone)]
    assert_close(*evaluated, tolerance)
    assert_all_close(whole(found, prefix="model/"), whole([alone], prefix="model/"), tolerance)


def check_layouts(
    by_rank: Sequence[Sequence[Record]], names: Sequence[str], alone: Record, tolerance: float
) -> None:
    for at, name in enumerate(names):
        try:
            check_equal([records[at] for records in by_rank], alone, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


@pytest.fixture(scope="module")
def alone(corpus: str) -> Record:
    return train_alone([run_of(corpus)])[0]


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_every_layout_trains_the_same_model(corpus: str, alone: Record, world_size: int) -> None:
    layouts = LAYOUTS[world_size]
    configs = [run_of(corpus, **flags) for flags in layouts.values()]
    by_rank = run_on_ranks(world_size, train_all, configs, timeout_s=120)
    check_layouts(by_rank, [*layouts], alone, FP64)


def test_deepspeed_trains_the_same_model(corpus: str) -> None:
    flags = {"fp64": False, "optimizer": "sgd", "lr": 0.1}
    (alone,) = train_alone([run_of(corpus, **flags)])
    configs = [run_of(corpus, **flags, deepspeed=True, **layout) for layout in DEEPSPEED.values()]
    by_rank = run_on_ranks(2, train_all, configs, timeout_s=120, deepspeed=True)
    check_layouts(by_rank, [*DEEPSPEED], alone, FP32)


def test_it_trains_another_model_and_is_no_part_of_the_loss(corpus: str, alone: Record) -> None:
    half, without = train_alone([run_of(corpus, z_loss_coeff=weight) for weight in (0.05, 0.0)])
    assert all(step.z_loss is None for step in without.steps)
    heads = [whole([record])["model/embedding.word.weight"] for record in (alone, half, without)]
    for at, one in enumerate(heads):
        for other in heads[at + 1 :]:
            assert float((one - other).abs().max()) > 1e-3
    # The first step and the first evaluation have the same weights in all runs.
    assert len({record.losses[0] for record in (alone, half, without)}) == 1
    assert len({record.evaluations[0].mean for record in (alone, half, without)}) == 1
    assert len({record.losses[1] for record in (alone, half, without)}) == 3
    assert z_losses(alone)[0] == z_losses(half)[0]


def train_with_z_of_padding(configs: Sequence[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`: the rows of padding count in Z."""
    inner: Callable[..., tuple[Tensor, Tensor]] = losses.cross_entropy_and_log_z

    def wrong(logits: Tensor, *given: Any, true_vocab_size: int, **named: Any) -> tuple[Any, ...]:
        found, _ = inner(logits, *given, true_vocab_size=true_vocab_size, **named)
        return found, torch.logsumexp(logits, dim=-1)

    losses.cross_entropy_and_log_z = wrong  # type: ignore[assignment]
    return train_all(configs)


def train_with_masked_tokens(configs: Sequence[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`: tokens that the mask leaves out have a z loss."""
    inner = LossState.note_log_z
    LossState.note_log_z = lambda state, log_z, weights: inner(  # type: ignore[method-assign]
        state, log_z, torch.ones_like(weights)
    )
    return train_all(configs)


@pytest.mark.parametrize("wrong", [train_with_z_of_padding, train_with_masked_tokens])
def test_the_law_sees_other_terms(
    corpus: str, alone: Record, wrong: Callable[[Sequence[RunConfig]], list[Record]]
) -> None:
    (records,) = run_on_ranks(1, wrong, [run_of(corpus, **UNFUSED)])
    with pytest.raises(AssertionError):
        check_equal(records, alone, FP64)


def test_the_masked_words_of_a_bert_have_it_too(tmp_path: Path) -> None:
    sentences = write_tiny_sentences(tmp_path)
    flags = {"z_loss_coeff": 2.0, "train_iters": 2}  # large, since log Z is small
    runs = [
        tiny_bert_run(sentences, **{**flags, **more})
        for more in ({}, {"z_loss_coeff": 0.0}, {"micro_batch_size": 8})
    ]
    ((alone, without, eight),) = run_on_ranks(1, train_bert_all, runs)
    by_rank = run_on_ranks(2, train_bert_all, [tiny_bert_run(sentences, **flags, **SP)])
    for found in ([ranks[0] for ranks in by_rank], [eight]):
        assert_close(found[0].losses, alone.losses, FP64)
        assert_close(found[0].grad_norms, alone.grad_norms, FP64)
        assert_close(z_losses(found[0]), z_losses(alone), FP64)
        assert_all_close(whole(found, prefix="model/"), whole([alone], prefix="model/"), FP64)
    assert alone.steps[0].means == without.steps[0].means
    assert alone.grad_norms[0] != pytest.approx(without.grad_norms[0], rel=0.01)
