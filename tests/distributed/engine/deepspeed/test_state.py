"""Checkpoints of the DeepSpeed engine: every bit within it, and to and from the native engine."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.config.deepspeed.plan import deepspeed_plan
from megatron.config.run import RunConfig
from megatron.errors import NumericsError
from megatron.preflight.memory import zero_bytes
from tests.support import tiny
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    BF16,
    FP32,
    MODELS,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

HALF, FULL = 3, 6
LEEWAY = 1024  # bytes, of models of 100 KB
STAGES = ("0", "1", "2", "3")
SGD = {"fp64": False, "micro_batch_size": 2, "optimizer": "sgd", "lr": 0.1, "train_iters": FULL}
ADAM = {**SGD, "optimizer": "adam", "lr": 0.01, "decoupled_lr": 0.02}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def through_deepspeed(corpus: str, stage: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, deepspeed=True, zero_stage=stage, **flags)


def saving(config: RunConfig, folder: Path) -> RunConfig:
    """The first half of a run, with a checkpoint at its end."""
    half = (config.training.train_iters or 0) // 2
    training = dataclasses.replace(config.training, exit_interval=half)
    checkpoint = dataclasses.replace(config.checkpoint, save=str(folder), save_interval=half)
    return dataclasses.replace(config, training=training, checkpoint=checkpoint)


def loading(config: RunConfig, folder: Path, **flags: Any) -> RunConfig:
    """The second half of it."""
    checkpoint = dataclasses.replace(config.checkpoint, load=str(folder), **flags)
    return dataclasses.replace(config, checkpoint=checkpoint)


def trained(ranks: int, runs: list[RunConfig]) -> list[list[Record]]:
    """Of each run the records of all ranks."""
    results = run_on_ranks(ranks, train_all, runs, timeout_s=120, deepspeed=True)
    return [[rank[at] for rank in results] for at in range(len(runs))]


def assert_every_bit(resumed: list[Record], straight: list[Record]) -> None:
    assert resumed[0].steps == straight[0].steps[len(straight[0].steps) // 2 :]
    assert resumed[0].scalars == straight[0].scalars
    found, expected = whole(resumed), whole(straight)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    "precision",
    [pytest.param({}, marks=pytest.mark.wide, id="fp32"), pytest.param({"bf16": True}, id="bf16")],
)
def test_a_resumed_run_is_the_uninterrupted_run(
    corpus: str, tmp_path: Path, precision: dict[str, bool]
) -> None:
    flags = {**MODELS["llama"], **ADAM, **DROPOUT, **precision, "train_iters": 4}
    plain = [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    halves = [saving(config, tmp_path / str(at)) for at, config in enumerate(plain)]
    rest = [loading(config, tmp_path / str(at)) for at, config in enumerate(plain)]
    before = trained(2, [*plain, *halves])
    after = trained(2, rest)
    for config, straight, resumed in zip(plain, before, after):
        assert_every_bit(resumed, straight)
        assert_no_rank_holds_less_than_is_counted_before_training(config, straight)


def assert_no_rank_holds_less_than_is_counted_before_training(
    config: RunConfig, records: list[Record]
) -> None:
    plan = deepspeed_plan(config, data_parallel_size=len(records))
    for record in records:
        held = {"model": 0, "optimizer": 0}
        for name, part in record.state.items():
            held[name.partition("/")[0]] += sum(values.nbytes for _, values in part.pieces)
        parameters = sum(math.prod(p.shape) for n, p in record.state.items() if "model/" in n)
        if plan.stage == 0 and config.precision.splits_masters:
            held["optimizer"] -= 2 * parameters  # masters, of which lower halves are kept
        counted = zero_bytes(config, plan, parameters, parameters // len(records))
        # Parts are of equal length, and the last one may be of padding.
        assert counted.weights - LEEWAY <= held["model"] <= counted.weights + LEEWAY
        assert counted.optimizer - LEEWAY <= held["optimizer"] <= counted.optimizer + LEEWAY


@pytest.mark.parametrize(
    "precision",
    [
        # The law of resharding holds it in `make test` too.
        pytest.param({}, marks=pytest.mark.wide, id="fp32"),
        pytest.param({"bf16": True}, id="bf16"),
    ],
)
def test_runs_move_between_engines_and_layouts(
    corpus: str, tmp_path: Path, precision: dict[str, bool]
) -> None:
    flags, tolerance = {**SGD, **precision}, BF16 if precision else FP32
    native = tiny_run(corpus, **flags)
    stages = [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    split = {"tensor_model_parallel_size": 2, **flags}

    def compared(records: list[Record]) -> dict[str, Tensor]:
        """All state. In bfloat16 without momentum: it is a mean of gradients, those of a bias
        cancel over tokens, and what is left of them has the rounding of all. Weights and masters
        show a momentum that was lost."""
        kept = whole(records)
        if not precision:
            return kept
        return {name: tensor for name, tensor in kept.items() if "momentum_buffer" not in name}

    runs = [native, saving(native, tmp_path / "native")]
    runs += [saving(config, tmp_path / f"zero{at}") for at, config in enumerate(stages)]
    straight = trained(2, runs)[0]
    onward = [loading(config, tmp_path / "native") for config in stages]
    onward += [loading(native, tmp_path / f"zero{at}") for at in range(len(stages))]
    # In bfloat16 the summands of two tensor-parallel ranks are rounded, so that a run of tp 2 is
    # compared with one of the native engine that went on from the same step at tp 2.
    for stage, saved in (("3", "zero2"), ("1", "zero3")):
        onward += [loading(tiny_run(corpus, **split), tmp_path / saved)]
        onward += [loading(through_deepspeed(corpus, stage, **split), tmp_path / saved)]
    alone = [loading(through_deepspeed(corpus, "2", **flags), tmp_path / "zero3")]
    alone += [loading(native, tmp_path / "zero3")]
    *same_tp, one, one_split, other, other_split = trained(2, onward)
    pairs = [(records, straight) for records in [*same_tp, *trained(1, alone)]]
    pairs += [(one_split, one), (other_split, other)]
    if not precision:
        pairs += [(one, straight), (other, straight)]
    for records, expected in pairs:
        assert_close(records[0].losses, expected[0].losses[-HALF:], tolerance)
        assert_close(records[0].grad_norms, expected[0].grad_norms[-HALF:], tolerance)
        assert records[0].scalars == expected[0].scalars
        assert_all_close(compared(records), compared(expected), tolerance)


def test_the_state_of_adam_moves_too(corpus: str, tmp_path: Path) -> None:
    native = tiny_run(corpus, **ADAM)
    stages = [through_deepspeed(corpus, stage, **ADAM) for stage in ("1", "3")]
    runs = [native, saving(native, tmp_path / "native")]
    runs += [saving(config, tmp_path / f"zero{at}") for at, config in enumerate(stages)]
    straight = trained(2, runs)[0]
    onward = [loading(config, tmp_path / "native") for config in stages]
    onward += [loading(native, tmp_path / f"zero{at}") for at in range(len(stages))]
    for records in trained(2, onward):
        assert_close(records[0].losses, straight[0].losses[HALF:], FP32)
        assert_close(records[0].grad_norms, straight[0].grad_norms[HALF:], FP32)


def test_weights_alone_can_be_loaded(corpus: str, tmp_path: Path) -> None:
    """Masters follow weights that come without them, so that training goes on from these."""
    flags = {**SGD, "bf16": True}
    native = tiny_run(corpus, **flags)
    trained(2, [saving(native, tmp_path / "native")])
    only = {"load_optim": False, "finetune": True}
    runs = [loading(native, tmp_path / "native", **only)]
    runs += [
        loading(through_deepspeed(corpus, stage, **flags), tmp_path / "native", **only)
        for stage in STAGES
    ]
    expected, *found = trained(2, runs)
    for records in found:
        assert_close(records[0].losses, expected[0].losses, BF16)
        assert_all_close(whole(records), whole(expected), BF16)


def test_models_begin_with_the_values_of_every_other_layout(corpus: str) -> None:
    """A step of next to nothing leaves every weight as it was."""
    still = {**SGD, "lr": 1e-60, "weight_decay": 0.0, "train_iters": 1, "sgd_momentum": 0.0}
    for flags in ({}, {"tensor_model_parallel_size": 2, **MODELS["llama"]}):
        runs = [tiny_run(corpus, **still, **flags)]
        runs += [through_deepspeed(corpus, stage, **still, **flags) for stage in STAGES]
        native, *others = trained(2, runs)
        expected = whole(native, prefix="model/")
        for records in others:
            for name, tensor in whole(records, prefix="model/").items():
                assert torch.equal(tensor, expected[name]), name


def most_parameters_at_once(config: RunConfig) -> tuple[int, int, int, int]:
    """The most elements that this rank held whole while it built its model, and the model's."""
    import megatron.engine.deepspeed.model as module

    def filling(root: torch.nn.Module, **rest: Any) -> None:
        seen.extend(root.parameters())
        sizes.append(sum(parameter.numel() for parameter in root.parameters()))
        held.append(sum(parameter.numel() for parameter in seen))
        real(root, **rest)

    seen: list[torch.nn.Parameter] = []
    held: list[int] = []
    sizes: list[int] = []
    real = module.initialize_parameters
    module.initialize_parameters = filling  # type: ignore[attr-defined]
    (record,) = train_all([config])
    shares = [
        values.numel()
        for name, part in record.state.items()
        for _, values in part.pieces
        if name.startswith("model/")
    ]
    return max(held), max(sizes), sum(sizes), sum(shares)


def test_no_rank_ever_holds_the_whole_model_at_stage_3(corpus: str) -> None:
    flags = {**SGD, "train_iters": 1, "num_layers": 6}
    results = run_on_ranks(
        2, most_parameters_at_once, through_deepspeed(corpus, "3", **flags), deepspeed=True
    )
    for held, largest_layer, whole_model, share in results:
        assert held == largest_layer < whole_model / 4
        assert share <= whole_model / 2 + 100, "a few elements round parts up to equal lengths"


def norms_and_agreements(configs: list[RunConfig]) -> list[tuple[float, str]]:
    """Of each run the norm of the parameters, and the error when they differ over ranks."""
    found = []

    def looked_at(*args: Any) -> Any:
        engine = build(*args)
        engine.check_replicas()
        norm, message = engine.params_norm(), ""
        if dist.get_rank() == 1:
            for tensor in engine.state(optimizer=False).tensors:
                if tensor.name == "model/final_norm.weight":
                    for part in tensor.parts:
                        part.view.add_(1)
        try:
            engine.check_replicas()
        except NumericsError as error:
            message = f"{error.problem}: {error.found}"
        found.append((norm, message))
        return engine

    build = tiny.REAL_BUILD_ENGINE
    tiny.REAL_BUILD_ENGINE = looked_at
    train_all(configs)
    return found


@pytest.mark.parametrize("tp", [1, 2])
def test_the_norm_of_parameters_and_what_has_parted(corpus: str, tp: int) -> None:
    flags = {**SGD, "train_iters": 1, "tensor_model_parallel_size": tp}
    runs = [tiny_run(corpus, **flags)]
    runs += [through_deepspeed(corpus, stage, **flags) for stage in STAGES]
    for native, *stages in run_on_ranks(2, norms_and_agreements, runs, deepspeed=True):
        for stage, (norm, message) in zip(STAGES, stages, strict=True):
            assert norm == pytest.approx(native[0], rel=FP32)
            if stage == "3" and tp == 1:
                assert not message, "no two replicas hold the same part of a weight"
            else:
                assert "hold different" in message
                assert "final_norm.weight, on ranks [1] against rank 0" in message
