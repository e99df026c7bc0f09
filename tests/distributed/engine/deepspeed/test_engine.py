"""The DeepSpeed engine against the native one: the same numbers from real runs, and its traps.

The law over stages, precisions and grids is in `tests/laws/layouts/test_engine.py`; here is what it
does not vary: offloading, loss scales, ramps, sequence parallelism, recomputation, evaluation,
faults.
"""

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.run import RunConfig
from megatron.engine.base import PendingReport, StepReport
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train,
    train_all,
    whole,
    write_tiny_corpus,
)

STAGES = ("0", "1", "2", "3")
# SGD compares weights: AdamW makes steps of the learning rate out of gradients that are rounding
# (of the keys' biases), so that only losses and norms can be compared under it.
SGD = {"fp64": False, "micro_batch_size": 2, "optimizer": "sgd", "lr": 0.1, "train_iters": 3}
# Two micro-batches where there are no replicas, as of two replicas with the flags above.
TWO_MICROBATCHES = {"micro_batch_size": 4}
ADAM = {**SGD, "optimizer": "adam", "lr": 0.01}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def through_deepspeed(corpus: str, stage: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, deepspeed=True, zero_stage=stage, **flags)


def assert_same_run(
    found: list[Record], expected: list[Record], tolerance: float, *, weights: bool = True
) -> None:
    """What every rank reports is the same, and close to what the other engine does."""
    for record in found:
        assert [report.loss for report in record.steps] == found[0].losses
        assert_close(record.losses, expected[0].losses, tolerance)
        assert_close(record.grad_norms, expected[0].grad_norms, tolerance)
    assert [step.skipped for step in found[0].steps] == [s.skipped for s in expected[0].steps]
    assert found[0].scalars == expected[0].scalars
    assert found[0].state.keys() == expected[0].state.keys()
    if weights:
        assert_all_close(whole(found), whole(expected), tolerance)


def runs_of(results: list[list[Record]], at: int) -> list[Record]:
    return [rank[at] for rank in results]


def compared(
    ranks: int, corpus: str, tolerance: float, *, stages: tuple[str, ...] = STAGES, **flags: Any
) -> None:
    """Train natively and at each stage, and compare."""
    runs = [tiny_run(corpus, **flags)]
    runs += [through_deepspeed(corpus, stage, **flags) for stage in stages]
    results = run_on_ranks(ranks, train_all, runs, timeout_s=120, deepspeed=True)
    native = runs_of(results, 0)
    clipped = [norm > flags.get("clip_grad", 0.5) for norm in native[0].grad_norms]
    assert any(clipped), "clipping is meant to be active"
    for at in range(1, len(runs)):
        assert_same_run(
            runs_of(results, at), native, tolerance, weights=flags["optimizer"] == "sgd"
        )


@pytest.mark.parametrize("flags", [SGD, ADAM], ids=["sgd", "adamw"])
def test_every_stage_trains_as_the_native_engine_does(corpus: str, flags: dict[str, Any]) -> None:
    compared(2, corpus, FP32, **flags, eval_iters=1, eval_interval=3)


def gathered_after_steps(config: RunConfig) -> tuple[Record, set[str]]:
    """Train, and name the weights that have values on this rank when a step of stage 3 is over."""
    from megatron.engine.deepspeed.engine import DeepSpeedEngine

    names: set[str] = set()
    inner = DeepSpeedEngine.start_step

    def noted(engine: DeepSpeedEngine, *args: Any) -> PendingReport:
        report = inner(engine, *args)
        names.update(name for name, parameter in engine.named if parameter.numel())
        return report

    DeepSpeedEngine.start_step = noted  # type: ignore[method-assign]
    record = train(config)
    DeepSpeedEngine.start_step = inner  # type: ignore[method-assign]
    return record, names


def all_gathered_after_steps(configs: list[RunConfig]) -> list[tuple[Record, set[str]]]:
    """A body for `run_on_ranks`."""
    return [gathered_after_steps(config) for config in configs]


def test_a_fused_loss_finds_its_weight_at_stage_3_and_leaves_it_partitioned(
    corpus: str, tmp_path: Path
) -> None:
    # By default stage 3 keeps weights as small as these on every rank.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")
    runs = [
        tiny_run(corpus, **{**MODELS[model], **SGD, "cross_entropy_loss_fusion": fused}, **engine)
        for model in ("gpt2", "llama")
        for fused, engine in (
            (True, {"deepspeed": True, "deepspeed_config": str(path)}),
            (False, {}),
        )
    ]
    by_rank = run_on_ranks(2, all_gathered_after_steps, runs, timeout_s=120, deepspeed=True)
    for at in (0, 2):
        partitioned, native = ([rank[at + i][0] for rank in by_rank] for i in (0, 1))
        assert_same_run(partitioned, native, FP32)
        assert not by_rank[0][at][1]


def test_the_first_step_of_adam_is_its_first(corpus: str) -> None:
    """In half precision DeepSpeed's stage 0 takes a step of zeros before it, and makes 0.74 of it.

    A first step moves a weight by the learning rate, whatever its gradient.
    """
    flags = {**ADAM, "bf16": True, "train_iters": 1, "weight_decay": 0.0}
    still = {**flags, "lr": 1e-60}
    runs = [tiny_run(corpus, **still)]
    runs += [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    results = run_on_ranks(2, train_all, runs, timeout_s=120, deepspeed=True)
    name = "optimizer/master/layers.0.mlp.fc1.weight"
    before = whole(runs_of(results, 0), prefix=name)[name]
    for at in range(1, len(runs)):
        moved = (whole(runs_of(results, at), prefix=name)[name] - before).abs()
        assert float(moved.median()) == pytest.approx(flags["lr"], rel=1e-3)


def test_tensor_and_sequence_parallel_ranks_clip_by_the_norm_of_the_whole_model(
    corpus: str,
) -> None:
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    compared(2, corpus, FP32, **{**SGD, **TWO_MICROBATCHES, **split})


def test_replicas_of_tensor_parallel_models_in_bf16(corpus: str) -> None:
    compared(4, corpus, BF16, **{**SGD, "fp64": False, "bf16": True}, tensor_model_parallel_size=2)


def test_recomputed_layers_draw_the_same_dropout_and_get_their_weights_again(corpus: str) -> None:
    flags = {
        **MODELS["llama"],
        **SGD,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    compared(2, corpus, FP32, **flags)


def test_masked_tokens_weigh_nothing_whichever_replica_has_them(corpus: str) -> None:
    compared(2, corpus, FP32, **{**SGD, **MODELS["ragged"]}, stages=("0", "2", "3"))


def test_a_batch_that_grows_takes_more_micro_batches(corpus: str) -> None:
    ramp = {"rampup_batch_size": (4, 2, 16), "train_samples": 2 * 4 + 2 * 6 + 8}
    flags = {**SGD, "micro_batch_size": 1, "train_iters": None, **ramp}
    runs = [tiny_run(corpus, **flags)]
    runs += [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    results = run_on_ranks(2, train_all, runs, timeout_s=120, deepspeed=True)
    assert len({plan.num_microbatches for plan in results[0][0].plans}) == 3
    for at in range(1, len(runs)):
        assert_same_run(runs_of(results, at), runs_of(results, 0), FP32)


@pytest.mark.parametrize(
    ("stage", "offloaded"),
    [("1", ["optimizer"]), ("2", ["optimizer"]), ("3", ["optimizer", "param"])],
)
def test_what_is_offloaded_is_updated_alike(
    corpus: str, tmp_path: Path, stage: str, offloaded: list[str]
) -> None:
    block = {"device": "cpu", "pin_memory": False}
    file = tmp_path / "ds.json"
    zero = {"stage": int(stage)} | {f"offload_{what}": block for what in offloaded}
    file.write_text(json.dumps({"zero_optimization": zero}))
    runs = []
    for flags in (SGD, {**SGD, "bf16": True}):
        runs.append(tiny_run(corpus, **flags))
        runs.append(through_deepspeed(corpus, stage, **flags, deepspeed_config=str(file)))
    results = run_on_ranks(2, train_all, runs, timeout_s=120, deepspeed=True)
    assert_same_run(runs_of(results, 1), runs_of(results, 0), FP32)
    assert_same_run(runs_of(results, 3), runs_of(results, 2), BF16)


def with_fp16(configs: list[RunConfig]) -> list[Record]:
    """Several runs where DeepSpeed is made to compute in float16 on the CPU, as torch does."""
    from deepspeed.accelerator import get_accelerator

    import megatron.preflight.deepspeed as preflight

    type(get_accelerator()).is_fp16_supported = lambda self: True
    preflight.stage_of = lambda *args: 0  # type: ignore[attr-defined]  # at which it is allowed
    return train_all(configs)


def test_the_loss_scale_of_fp16_moves_as_natively(corpus: str) -> None:
    flags = {
        **SGD,
        **TWO_MICROBATCHES,
        "fp16": True,
        # It overflows at first, halves, and doubles again within the run.
        "initial_loss_scale": 2.0**20,
        "loss_scale_window": 2,
        "hysteresis": 1,
        "train_iters": 8,
    }
    runs = [tiny_run(corpus, **flags)]
    runs += [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    # On one rank: DeepSpeed averages over replicas after the backward pass, where we divide before
    # it, so that with two replicas it overflows at half the scale.
    results = run_on_ranks(1, with_fp16, runs, timeout_s=120, deepspeed=True)
    native = results[0][0]
    scales = [step.loss_scale for step in native.steps]
    assert any(step.overflow for step in native.steps)
    assert any(after > before for before, after in itertools.pairwise(scales))
    for at in range(1, len(runs)):
        found = results[0][at]
        assert [step.loss_scale for step in found.steps] == scales
        assert [step.overflow for step in found.steps] == [s.overflow for s in native.steps]
        assert_close(found.losses, native.losses, BF16)
        assert found.scalars == native.scalars


def steps_with_a_broken_weight(configs: list[RunConfig]) -> list[list[StepReport]]:
    """Runs in which one weight is infinite in the second step."""
    import megatron.engine.deepspeed.engine as module

    def broken(self: Any, *given: Any) -> PendingReport:
        steps.append(1)
        if len(steps) != 2:
            return real(self, *given)
        views = [
            part.view
            for tensor in self.state(optimizer=False).tensors
            for part in tensor.parts
            if tensor.name == "model/final_norm.weight"
        ]
        kept = [view.clone() for view in views]
        report = None
        for values in ([torch.full_like(view, math.inf) for view in kept], kept):
            for view, value in zip(views, values):
                view.copy_(value)
            if self.plan.stage == 3:  # forget what was gathered before
                self.runtime.optimizer.parameter_offload.partition_all_parameters()
            report = report or real(self, *given)
        return report

    real, reports = module.DeepSpeedEngine.start_step, []
    module.DeepSpeedEngine.start_step = broken  # type: ignore[method-assign]
    for config in configs:
        steps: list[int] = []
        reports.append(train(config).steps)
    return reports


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_gradients_that_are_not_finite_change_nothing(
    corpus: str, precision: dict[str, bool]
) -> None:
    flags = {**SGD, **precision, "train_iters": 3, "nonfinite_policy": "skip"}
    runs = [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    for reports in run_on_ranks(2, steps_with_a_broken_weight, runs, timeout_s=120, deepspeed=True):
        for steps in reports:
            assert [step.skipped for step in steps] == [False, True, False]
            assert not math.isfinite(steps[1].grad_norm)
            assert not steps[1].overflow, "nothing but loss scaling expects this"
            assert math.isfinite(steps[2].loss)
            assert abs(steps[2].loss - steps[0].loss) < 1, "the weights are as they were"


def linear_afterwards(config: RunConfig) -> bool:
    before = torch.nn.functional.linear
    train(config)
    return torch.nn.functional.linear is before


def test_torchs_linear_is_not_replaced_for_the_whole_process(corpus: str) -> None:
    run = through_deepspeed(corpus, "3", **{**SGD, "train_iters": 1})
    assert run_on_ranks(1, linear_afterwards, run, deepspeed=True) == [True]
