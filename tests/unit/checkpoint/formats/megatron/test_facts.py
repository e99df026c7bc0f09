"""Facts about a Megatron run: its progress, its tokens, its layers, its loss scale."""

from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats.megatron import facts
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError

ITERATION, RELEASE = Path("iter_0000010"), Path("release")


def test_progress_is_recorded_or_counted() -> None:
    args = {"global_batch_size": 8, "seq_length": 4}
    assert facts.progress({"iteration": 10}, args, RELEASE) == {}
    assert facts.progress({"iteration": 10}, {}, ITERATION) == {"iteration": 10}
    counted = {"iteration": 10, "consumed_samples": 80, "consumed_tokens": 320}
    assert facts.progress({"iteration": 10}, args, ITERATION) == counted
    recorded = {**args, "consumed_train_samples": 70, "consumed_valid_samples": 3}
    assert facts.progress({"total_iters": 10, "tokens": 9}, recorded, ITERATION) == {
        "iteration": 10,
        "consumed_samples": 70,
        "consumed_tokens": 9,
        "consumed_valid_samples": 3,
    }


@pytest.mark.parametrize(("tp", "tokens", "rows"), [(1, 41, 41), (1, 40, 44), (2, 37, 37)])
def test_rows_beyond_the_tokens_are_padding_where_they_can_be(
    tp: int, tokens: int, rows: int
) -> None:
    args = {"make_vocab_size_divisible_by": 4}
    assert facts.true_rows(44, {}, args, SourceOptions(vocab_size=tokens), tp=tp) == rows
    info = {"checkpoint_info": {"original_vocab_size": tokens}}
    assert facts.true_rows(44, info, args, SourceOptions(), tp=tp) == rows


def test_every_layer_has_to_be_there() -> None:
    model = {"model": {"num_layers": 2}}
    facts.check_layers(["layers.0.a", "layers.1.a", "final_norm.weight"], model, ITERATION)
    with pytest.raises(CheckpointError, match="does not hold every layer") as error:
        facts.check_layers(["layers.0.a"], model, ITERATION)
    assert "iter_0000010: 1 layers, but num_layers=2 in args" in str(error.value.found)


def test_a_loss_scale_that_moves_is_kept() -> None:
    assert facts.loss_scaler({}) == facts.loss_scaler({"grad_scaler": {"scale": 2.0}}) == {}
    kept = {"scale": torch.tensor([64.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
    assert facts.loss_scaler({"grad_scaler": kept}) == {
        "scale": 64.0,
        "good_iterations": 3,
        "overflows_left": 1,
    }
