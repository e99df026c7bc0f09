"""What keys about the course of a training mean together."""

import math
from typing import Any

import pytest

from megatron.optimizer.schedule import learning_rate
from tests.unit.config.neox.configs import a_config
from tests.unit.config.neox.runs import problem_of, run_of


@pytest.mark.parametrize(
    ("keys", "group", "fields"),
    [
        ({}, "optimizer", {"adam_beta2": 0.95, "weight_decay": 0.1, "clip_grad": 1.0}),
        ({"optimizer": None, "min_lr": 0}, "optimizer", {"adam_beta2": 0.999, "adam_eps": 1e-8}),
        ({"optimizer": None, "min_lr": 0}, "schedule", {"lr": 0.001}),
        ({"clip_grad": 7.0, "gradient_clipping": 0.5}, "optimizer", {"clip_grad": 0.5}),
        ({}, "schedule", {"lr_warmup_fraction": 0.01, "lr_decay_iters": 1000, "min_lr": 6e-5}),
        ({"warmup": 0.5}, "schedule", {"lr_warmup_fraction": 0.5}),
        ({"lr_decay_iters": None, "lr_decay_fraction": 1.5}, "schedule", {"lr_decay_iters": 1500}),
        ({}, "precision", {"fp16": False, "bf16": False}),
        ({"precision": "fp16"}, "precision", {"fp16": True, "initial_loss_scale": 2.0**16}),
        ({"precision": "bfloat16"}, "precision", {"bf16": True}),
        ({"bf16": {"enabled": True}}, "precision", {"bf16": True}),
        ({"fp16": {"type": "bfloat16", "enabled": True}}, "precision", {"bf16": True}),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 12, "loss_scale": 0}},
            "precision",
            {"fp16": True, "initial_loss_scale": 4096.0, "loss_scale": None},
        ),
        ({"fp16": {"enabled": True, "loss_scale": 8}}, "precision", {"loss_scale": 8.0}),
        ({"fp16": {"enabled": True, "hysteresis": 5}}, "precision", {"hysteresis": 5}),
        ({}, "parallel", {"data_parallel_sharding_strategy": "no_shard"}),
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1}},
            "parallel",
            {"data_parallel_sharding_strategy": "optim_grads_params"},
        ),
        (
            {"zero_optimization": {"stage": 1, "cpu_offload": True}},
            "optimizer",
            {"optimizer_cpu_offload": True},
        ),
        ({"pipe_partition_method": "parameters"}, "parallel", {"pipeline_balance": "parameters"}),
        ({"distributed_backend": "gloo"}, "launch", {"distributed_backend": "gloo"}),
        ({"distributed_backend": "nccl"}, "launch", {"distributed_backend": None}),
        (
            dict.fromkeys(("checkpoint_activations", "partition_activations"), True)
            | {"checkpoint_num_layers": 2},
            "training",
            {"recompute_num_layers": 2, "distribute_saved_activations": False},
        ),
        ({}, "training", {"recompute_granularity": None, "eval_interval": 1000, "eval_iters": 100}),
        ({"save": "here", "checkpoint_factor": 7}, "checkpoint", {"save_interval": 7}),
        ({"save": "here", "save_interval": 7}, "checkpoint", {"save_interval": 7}),
        ({"extra_save_iters": [0, 1, 2]}, "checkpoint", {"extra_save_iters": (1, 2)}),
        ({"extra_save_iters": [0]}, "checkpoint", {"extra_save_iters": ()}),
        ({"no_save_optim": True}, "checkpoint", {"save_optim": False, "save_rng": True}),
        ({"keep_last_n_checkpoints": 4}, "checkpoint", {"keep_last": 4}),
        ({}, "data", {"split": "969, 30, 1", "data_path": ("corpus",)}),
        (
            {
                "data_path": None,
                "train_data_paths": ["a", "b"], "train_data_weights": [1, 0.5],
                "valid_data_paths": ["c"], "test_data_paths": ["d"],
            },
            "data",
            {"train_data_path": ("1", "a", "0.5", "b"), "valid_data_path": ("1.0", "c")},
        ),
        ({"tokenizer_type": "HFTokenizer", "merge_file": None}, "tokenizer",
         {"tokenizer_name_or_path": "vocab.json"}),
        ({"tokenizer_type": "SPMTokenizer", "merge_file": None}, "tokenizer",
         {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "vocab.json"}),
        ({"use_wandb": True, "wandb_team": "we"}, "trackers",
         {"wandb_project": "neox", "wandb_entity": "we"}),
        ({"wandb_project": "unused"}, "trackers", {"wandb_project": None}),
    ],
)  # fmt: skip
def test_keys_become_fields(keys: dict[str, Any], group: str, fields: dict[str, Any]) -> None:
    found = getattr(run_of(a_config(**keys)), group)
    assert {name: getattr(found, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"lr_decay_style": "linear"}, "neox's linear decay goes to 0 and is clipped at min_lr"),
        ({"lr_decay_iters": 500}, "neox's cosine rises again after its end"),
        ({"lr_decay_style": "exponential"}, "this value has no counterpart here"),
        ({"optimizer": {"type": "Lion", "params": {"lr": 1.0}}}, "the optimizer lion is not here"),
        (
            {"optimizer": {"params": {"weight_decay": 0.1}}},
            "params of the optimizer are lr, betas and eps, not weight_decay",
        ),
        ({"optimizer": {"params": {"betas": 0.9}}}, "betas are no two numbers"),
        ({"zero_optimization": {"stage": 4}}, "there is no such stage"),
        (
            {"zero_optimization": {"zero_quantized_weights": True}},
            "zero_quantized_weights of this block has no counterpart here",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            "the optimizer's state cannot be in nvme",
        ),
        (
            {"precision": "fp32", "fp16": {"enabled": True}},
            "the block fp16 says otherwise",
        ),
        ({"fp16": {"enabled": True, "x": 1}}, "x of this block has no counterpart here"),
        (
            {"fp16": {"enabled": True, "initial_scale_power": "a"}},
            "initial_scale_power is no whole number",
        ),
        ({"checkpoint_factor": 2, "checkpoint_scale": "log"}, "this value has no counterpart here"),
        ({"extra_save_iters": 7}, "it is no list of iterations"),
        ({"train_data_paths": ["a"]}, "all three uses have paths, or none"),
        ({"tokenizer_type": "CharLevelTokenizer"}, "this value has no counterpart here"),
        ({"pipe_partition_method": "type:mlp"}, "this value has no counterpart here"),
    ],
)
def test_what_has_no_counterpart_is_refused(keys: dict[str, Any], problem: str) -> None:
    assert problem_of(a_config(**keys)).problem == problem


@pytest.mark.parametrize(
    ("part", "value", "problem"),
    [
        ("paths", "a", "it is no list of paths"),
        ("weights", [1, 2], "it is no list of a weight for each path"),
    ],
)
def test_lists_of_corpora_are_lists_of_one_length(part: str, value: Any, problem: str) -> None:
    paths = {f"{use}_data_paths": [use] for use in ("train", "valid", "test")}
    keys = {"data_path": None} | paths | {f"train_data_{part}": value}
    assert problem_of(a_config(**keys)).problem == problem


@pytest.mark.parametrize("style", ["linear", "cosine", "constant"])
def test_learning_rates_are_those_of_neoxs_formula(style: str) -> None:
    floor = 0.0 if style == "linear" else 6e-5
    run = run_of(
        a_config(lr_decay_style=style, min_lr=floor, train_iters=50, lr_decay_iters=50, warmup=0.1)
    )
    peak, end, warmup = 6e-4, 50, 5.0
    for done in range(50):
        share = (done - warmup) / (end - warmup)
        expected = {
            "linear": peak * (1 - share),
            "cosine": floor + (peak - floor) / 2 * (math.cos(math.pi * share) + 1),
            "constant": peak,
        }[style]
        expected = peak * done / warmup if done <= warmup else max(expected, floor)
        batch = run.training.global_batch_size or 0
        found = learning_rate(
            run.schedule, samples=done * batch, tokens=0, total_samples=50 * batch,
            global_batch_size=batch,
        )  # fmt: skip
        assert found == pytest.approx(expected, rel=1e-12)
