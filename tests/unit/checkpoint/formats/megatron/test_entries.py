"""Entries beside the model are what Megatron's loaders look at, from our config and scalars."""

import torch

from megatron.checkpoint.formats.megatron import entries, facts
from tests.support.checkpoints.sources import ROWS, MemorySource


def test_args_are_those_of_a_run_of_so_many_ranks() -> None:
    source = MemorySource.of_gpt(optimizer=True)
    args = entries.run_args(source, padded_rows=16, tp=2, pp=3)
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 3)
    assert (args["padded_vocab_size"], args["consumed_train_samples"]) == (16, 80)
    # 128 rows would be the padded size of Megatron's own divisor.
    assert args["make_vocab_size_divisible_by"] == 8
    assert ROWS < 16


def test_groups_are_told_apart_as_megatron_does() -> None:
    decayed, others = (entries.group_entry({"lr": 0.5}, 7, decayed=on) for on in (True, False))
    assert (decayed["wd_mult"], others["wd_mult"]) == (1.0, 0.0)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.01, 0.0)
    for group in (decayed, others):
        assert (group["lr"], group["lr_mult"], group["step"]) == (0.5, 1.0, 7)
        assert not group["is_expert_parallel"]
        assert not group["is_decoupled_lr"]


def test_a_loss_scale_goes_there_and_back() -> None:
    scaler = {"scale": 64.0, "good_iterations": 2, "overflows_left": 1}
    entry = entries.grad_scaler_entry({"loss_scaler": scaler})
    assert facts.loss_scaler(entry) == scaler
    assert entries.grad_scaler_entry({"loss_scaler": {}}) == {}


def test_a_schedule_counts_samples() -> None:
    source = MemorySource.of_gpt(optimizer=True)
    source.config |= {
        "schedule": {"lr": 1e-3, "lr_decay_iters": 50, "lr_warmup_fraction": 0.1},
        "training": {"global_batch_size": 4, "train_iters": 100},
    }
    entry = entries.scheduler_entry(source)
    assert (entry["max_lr"], entry["num_steps"]) == (1e-3, 80)
    assert (entry["lr_decay_steps"], entry["lr_warmup_steps"]) == (200, 20)
    assert torch.tensor(entry["min_lr"]) == 0.0
