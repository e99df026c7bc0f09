"""What DeepSpeed is given to save, seen by an engine that keeps it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron.checkpoint.formats.deepspeed.save import DurableWriter
from megatron.checkpoint.formats.deepspeed.shards import rank_state
from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig
from megatron.engine.deepspeed.saving import LossScale, live_run
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Init, Partition, set_parameter_metadata
from megatron.optimizer.optimizer import build_optimizer
from megatron.optimizer.param_groups import UpdateRates, param_groups

CONSTANT = LossScale(1.0, {})


class Runtime:
    """DeepSpeed's engine, as far as saving goes."""

    def __init__(self, module: nn.Module, optimizer: Any = None) -> None:
        self.module, self.optimizer = module, optimizer or SimpleNamespace()
        self.checkpoint_engine = SimpleNamespace(kept="kept")
        self.seen: dict[str, Any] = {}

    def save_checkpoint(
        self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool
    ) -> None:
        assert not save_latest
        assert self.checkpoint_engine.kept == "kept"
        self.seen = {"state": client_state, "scale": getattr(self.optimizer, "loss_scaler", None)}
        Path(folder, tag).mkdir()
        self.checkpoint_engine.save(state_dict={"a": 1}, path=f"{folder}/{tag}/mp_rank_00.pt")


def model() -> nn.Module:
    root = nn.Module()
    root.add_module("tied_modules", nn.ModuleDict({"word": nn.Linear(4, 6, bias=False)}))
    root.add_module("1", nn.LayerNorm(4))
    table = root.get_submodule("tied_modules.word").weight
    set_parameter_metadata(
        table, init=Init("normal", 0.1, true_rows=5), partition=Partition("tp", 0)
    )  # type: ignore[arg-type]
    return root


def named(root: nn.Module) -> list[tuple[str, nn.Parameter]]:
    norm = root.get_submodule("1")
    return [
        ("embedding.word.weight", root.get_submodule("tied_modules.word").weight),
        ("final_norm.weight", norm.weight),
        ("final_norm.bias", norm.bias),
    ]  # type: ignore[list-item]


def test_names_splits_and_order_are_those_of_deepspeeds_module(tmp_path: Path) -> None:
    root = model()
    runtime = Runtime(root)
    before = runtime.checkpoint_engine
    live = live_run(
        runtime,
        param_groups(named(root)),
        ParallelContext.single(),
        precision=PrecisionConfig(),
        loss_scale=CONSTANT,
        own=None,
    )
    table = live.parameters["tied_modules.word.weight"]
    assert (table.name, table.shape, table.tied) == ("embedding.word.weight", (5, 4), True)
    assert not live.parameters["1.bias"].tied
    assert live.order == ("tied_modules.word.weight", "1.weight", "1.bias")
    writer = DurableWriter()
    live.write(tmp_path, "tag", {"iteration": 3}, writer)
    assert set(writer.files) == {"mp_rank_00.pt"}
    assert writer.error is None
    assert runtime.checkpoint_engine is before
    assert runtime.seen["state"] == {"iteration": 3}


@pytest.mark.parametrize("half", [False, True])
def test_our_optimizer_is_written_as_deepspeed_writes_one_without_zero(
    half: bool, tmp_path: Path
) -> None:
    root = model()
    precision = PrecisionConfig(bf16=half)
    if half:
        values = {name: p.detach().bfloat16() for name, p in root.named_parameters()}
        for name, value in values.items():
            parent, _, leaf = name.rpartition(".")
            setattr(root.get_submodule(parent), leaf, nn.Parameter(value))
    pairs = named(root)
    context = ParallelContext.single()
    own = build_optimizer(pairs, optimizer=OptimizerConfig(), precision=precision, ctx=context)
    for _, parameter in pairs:
        parameter.grad = torch.randn_like(parameter)
    own.step(UpdateRates(0.1, 0.1))
    runtime = Runtime(root)
    live = live_run(
        runtime, param_groups(pairs), context, precision=precision, loss_scale=CONSTANT, own=own
    )
    live.write(tmp_path, "tag", {}, DurableWriter())
    weights = {name: p.detach() for name, p in root.named_parameters()}
    state = rank_state(runtime.seen["state"], [], weights, live.order)
    assert state.steps == 1
    for name, kinds in own.named_state().items():
        deepspeed_name = next(n for n, known in live.parameters.items() if known.name == name)
        assert set(kinds) == set(state.held[deepspeed_name].kinds) - {"weight"}
        for kind, value in kinds.items():
            (found,) = state.held[deepspeed_name].kinds[kind]
            assert torch.equal(found.values, value.reshape(-1)), (name, kind)
            assert found.values.untyped_storage().nbytes() == value.numel() * 4


def test_a_loss_scale_is_one_of_deepspeeds_own_while_it_saves(tmp_path: Path) -> None:
    root = model()
    own = SimpleNamespace()
    for state, kind in (
        ({}, "LossScaler"),
        ({"scale": 8.0, "good_iterations": 3, "overflows_left": 1}, "DynamicLossScaler"),
    ):
        runtime = Runtime(root, SimpleNamespace(loss_scaler=own))
        live = live_run(runtime, param_groups(named(root)), ParallelContext.single(), own=None,
                        precision=PrecisionConfig(), loss_scale=LossScale(8.0, state))  # fmt: skip
        live.write(tmp_path, kind, {}, DurableWriter())
        scale = runtime.seen["scale"]
        assert type(scale).__name__ == kind
        assert scale.cur_scale == 8.0
        if state:
            assert (scale.cur_iter, scale.cur_hysteresis) == (3, 1)
        assert runtime.optimizer.loss_scaler is own
