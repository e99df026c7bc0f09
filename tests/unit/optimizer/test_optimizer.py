"""Tests of megatron.optimizer.optimizer in one process, against torch's own optimizers."""

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig, OptimizerKind, StateDtype
from megatron.config.parallel import ShardingStrategy
from megatron.config.precision import PrecisionConfig
from megatron.errors import CheckpointError, ConfigError, NumericsError
from megatron.mpu.context import ParallelContext
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.optimizer import (
    FP32Optimizer,
    MegatronOptimizer,
    MixedPrecisionOptimizer,
    build_optimizer,
)
from megatron.optimizer.param_groups import UpdateRates

NO_SHARD, OPTIM = ShardingStrategy.NO_SHARD, ShardingStrategy.OPTIM

SINGLE = ParallelContext.single()
ADAM = OptimizerConfig(clip_grad=0.0)
SGD = OptimizerConfig(optimizer=OptimizerKind.SGD, clip_grad=0.0)
NARROW = OptimizerConfig(
    clip_grad=0.0,
    adam_beta2=0.95,
    exp_avg_dtype=StateDtype.BF16,
    exp_avg_sq_dtype=StateDtype.BF16,
)
PLAIN_SGD = dataclasses.replace(SGD, sgd_momentum=0.0)
LION = OptimizerConfig(optimizer=OptimizerKind.LION, clip_grad=0.0)
MUON = OptimizerConfig(optimizer=OptimizerKind.MUON, clip_grad=0.0)
FP16 = PrecisionConfig(fp16=True, initial_loss_scale=1024.0)
PRECISIONS = {
    "fp32": PrecisionConfig(),
    "fp64": PrecisionConfig(fp64=True),
    "bf16": PrecisionConfig(bf16=True),
    "bf16-narrow": PrecisionConfig(bf16=True, accumulate_allreduce_grads_in_fp32=False),
    "fp16": FP16,
    "fp16-constant": PrecisionConfig(fp16=True, loss_scale=256.0),
}
RATE, DECAY = 1e-2, 0.1
# float64 against torch's plain loop: fused kernels and one factor for mean and clipping round
# differently, by a few times 1e-16 per step.
FP64_ROUNDING = 1e-12
# float32 AdamW against torch's fused one, of weights up to 1: the kernel multiplies and adds with
# one rounding where torch's has two, which is a unit in the last place, 1.2e-7, in a step or two.
FP32_ROUNDING = 5e-7


class Run:
    """A small model, its data-parallel wrapper and its optimizer."""

    def __init__(
        self,
        precision: PrecisionConfig,
        config: OptimizerConfig = ADAM,
        *,
        distributed: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.precision = precision
        self.dtype = getattr(torch, precision.precision.value)
        module = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
        self.module = module.to(self.dtype)
        self.ddp = DistributedDataParallel(
            self.module,
            SINGLE.replicas,
            gradient_dtype=getattr(torch, precision.gradient_precision.value),
            sharding=OPTIM if distributed else NO_SHARD,
        )
        self.optimizer = build_optimizer(
            self.ddp, optimizer=config, precision=precision, ctx=SINGLE
        )

    def backward(self, seed: int) -> None:
        self.ddp.zero_grad()
        for micro_batch in range(2):
            (loss(self.module, 2 * seed + micro_batch) * self.optimizer.loss_scale).backward()
        self.ddp.finish()

    def step(self, seed: int, **options: Any) -> Any:
        self.backward(seed)
        return self.optimizer.step(UpdateRates(RATE, DECAY), **options)

    def main_grads(self) -> list[Tensor]:
        return [parameter.main_grad for parameter in self.module.parameters()]

    def copied_state(self) -> dict[str, dict[str, Tensor]]:
        return copy.deepcopy(self.optimizer.named_state())


def loss(module: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(3, 6, generator=generator)
    outputs: Tensor = module(inputs.to(next(module.parameters()).dtype))
    return (
        outputs.float().square().sum() if outputs.dtype != torch.float64 else outputs.square().sum()
    )


def torch_optimizer(
    module: nn.Module, config: OptimizerConfig, **fast: bool
) -> torch.optim.Optimizer:
    pairs = list(module.named_parameters())
    groups = [
        {"params": [p for _, p in pairs if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for _, p in pairs if p.ndim <= 1], "weight_decay": 0.0},
    ]
    if config.optimizer is OptimizerKind.SGD:
        return torch.optim.SGD(groups, lr=RATE, momentum=config.sgd_momentum, **fast)
    return torch.optim.AdamW(groups, lr=RATE, **fast)


@pytest.mark.parametrize("config", [ADAM, SGD, PLAIN_SGD], ids=["adam", "sgd", "plain-sgd"])
@pytest.mark.parametrize("clip", [0.0, 0.7, 1e6])
def test_float64_updates_and_clipping_equal_torchs(config: OptimizerConfig, clip: float) -> None:
    run = Run(PRECISIONS["fp64"], dataclasses.replace(config, clip_grad=clip))
    plain = copy.deepcopy(run.module)
    reference = torch_optimizer(plain, config, foreach=False)
    for seed in range(5):
        reference.zero_grad()
        for micro_batch in range(2):
            (loss(plain, 2 * seed + micro_batch) / 6).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf)
        reference.step()
        report = run.step(seed, grad_multiplier=1 / 6)
        assert report.applied
        assert report.grad_norm == pytest.approx(float(norm), rel=FP64_ROUNDING)
        for ours, expected in zip(run.module.parameters(), plain.parameters()):
            torch.testing.assert_close(ours, expected, rtol=FP64_ROUNDING, atol=FP64_ROUNDING)


@pytest.mark.parametrize("config", [ADAM, SGD, PLAIN_SGD], ids=["adam", "sgd", "plain-sgd"])
def test_float32_updates_equal_torchs_fused_ones(config: OptimizerConfig) -> None:
    run = Run(PRECISIONS["fp32"], config)
    plain = copy.deepcopy(run.module)
    reference = torch_optimizer(plain, config, fused=True)
    for seed in range(5):
        reference.zero_grad()
        for micro_batch in range(2):
            loss(plain, 2 * seed + micro_batch).backward()
        reference.step()
        run.step(seed)
        for ours, expected in zip(run.module.parameters(), plain.parameters()):
            bound = FP32_ROUNDING if config is ADAM else 0.0  # SGD is torch's own
            torch.testing.assert_close(ours, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp16-constant"])
@pytest.mark.parametrize("config", [ADAM, SGD], ids=["adam", "sgd"])
def test_half_precision_updates_equal_a_loop_over_fp32_masters(
    name: str, config: OptimizerConfig
) -> None:
    run = Run(PRECISIONS[name], config)
    plain = copy.deepcopy(run.module)
    masters = copy.deepcopy(plain).float()
    reference = torch_optimizer(masters, config, fused=True)
    scale = run.optimizer.loss_scale
    for seed in range(3):
        for master in masters.parameters():
            master.grad = torch.zeros_like(master)
        for micro_batch in range(2):
            (loss(plain, 2 * seed + micro_batch) * scale).backward()
            for master, parameter in zip(masters.parameters(), plain.parameters()):
                assert master.grad is not None
                assert parameter.grad is not None
                master.grad += parameter.grad / scale  # exact: the scale is a power of two
                parameter.grad = None
        reference.step()
        with torch.no_grad():
            for master, parameter in zip(masters.parameters(), plain.parameters()):
                parameter.copy_(master)
        run.step(seed)
        state = run.optimizer.named_state()
        for name_, parameter in plain.named_parameters():
            ours, master = run.module.get_parameter(name_), state[name_]["master"]
            bound = FP32_ROUNDING if config is ADAM else 0.0
            torch.testing.assert_close(master, masters.get_parameter(name_), rtol=0, atol=bound)
            assert torch.equal(ours, master.to(ours.dtype))
            with torch.no_grad():  # where they round to the other side, the next gradients differ
                parameter.copy_(ours)


def test_masters_remember_updates_that_are_too_small_to_show() -> None:
    run = Run(PRECISIONS["bf16"], PLAIN_SGD)
    weight = run.module[0].weight
    with torch.no_grad():
        weight.fill_(1.0)
    run.optimizer.refresh_masters()
    for step in range(8):  # the spacing of bfloat16 below 1 is 2^-8
        assert torch.equal(weight, torch.ones_like(weight)) == (step < 5)
        run.ddp.zero_grad()
        weight.main_grad.fill_(1.0)
        run.optimizer.step(UpdateRates(2.0**-11, 0.0))
    assert torch.equal(weight, torch.full_like(weight, 1 - 2.0**-8))


@pytest.mark.parametrize("config", [ADAM, SGD], ids=["halves", "whole"])
def test_refresh_takes_over_loaded_weights(config: OptimizerConfig) -> None:
    run = Run(PRECISIONS["bf16"], config)
    with torch.no_grad():
        run.module[0].weight.fill_(0.5)
    run.optimizer.refresh_masters()
    assert (run.optimizer.named_state()["0.weight"]["master"] == 0.5).all()
    run.step(0)
    with torch.no_grad():
        run.module[0].weight.fill_(0.5)
    run.optimizer.refresh_masters()
    assert (run.optimizer.named_state()["0.weight"]["master"] == 0.5).all()
    wide = Run(PRECISIONS["fp32"])
    before = [parameter.clone() for parameter in wide.module.parameters()]
    wide.optimizer.refresh_masters()
    assert all(map(torch.equal, before, wide.module.parameters()))


def test_lower_halves_of_masters_have_the_bits_of_whole_masters() -> None:
    """Between two steps masters are read, so gradients are lost, as when a checkpoint is saved."""
    whole = dataclasses.replace(ADAM, optimizer_cpu_offload=True)
    halves, expected = Run(PRECISIONS["bf16"]), Run(PRECISIONS["bf16"], whole)
    for seed in range(4):
        assert halves.step(seed) == expected.step(seed)
        assert all(map(torch.equal, halves.module.parameters(), expected.module.parameters()))
        found = halves.optimizer.named_state()
        for name, tensors in expected.optimizer.named_state().items():
            for kind, tensor in tensors.items():
                assert torch.equal(found[name][kind], tensor)
    elements = sum(parameter.numel() for parameter in halves.module.parameters())
    bytes_of_each = [
        sum(tensor.nbytes for tensor in run.optimizer.kept()) for run in (halves, expected)
    ]
    assert bytes_of_each == [(4 + 4 + 2) * elements, (4 + 4 + 4) * elements]


@pytest.mark.parametrize(
    ("precision", "config"),
    [
        (PRECISIONS["bf16"], SGD),
        (PRECISIONS["fp16"], ADAM),
        (PrecisionConfig(bf16=True, accumulate_allreduce_grads_in_fp32=False), ADAM),
    ],
    ids=["sgd", "fp16", "narrow gradients"],
)
def test_masters_stay_whole_where_they_cannot_be_put_together(
    precision: PrecisionConfig, config: OptimizerConfig
) -> None:
    run = Run(precision, config)
    for name, tensors in run.optimizer.named_state().items():
        gradient = run.module.get_parameter(name).main_grad
        assert tensors["master"].data_ptr() != gradient.data_ptr()
        assert tensors["master"].dtype == torch.float32
    assert {tensor.dtype for tensor in run.optimizer.kept()} == {torch.float32}


def test_masters_that_are_written_where_gradients_were_are_taken_over() -> None:
    run = Run(PRECISIONS["bf16"])
    run.step(0)
    written = {
        name: torch.linspace(-1, 1, tensors["master"].numel()).view(tensors["master"].shape)
        for name, tensors in run.optimizer.named_state().items()
    }
    for name, tensors in run.optimizer.named_state().items():
        gradient = run.module.get_parameter(name).main_grad
        assert tensors["master"].data_ptr() == gradient.data_ptr()
        tensors["master"].copy_(written[name])
    run.optimizer.restored(run.optimizer.scalars())
    for gradient in run.main_grads():
        gradient.fill_(torch.nan)
    for name, tensors in run.optimizer.named_state().items():
        assert torch.equal(tensors["master"], written[name])
        assert torch.equal(run.module.get_parameter(name), written[name].bfloat16())


def test_one_factor_takes_out_loss_scale_and_makes_the_mean() -> None:
    precision = PrecisionConfig(fp16=True, loss_scale=64.0)
    run = Run(precision, PLAIN_SGD)
    run.backward(0)
    raw = [gradient.clone() for gradient in run.main_grads()]
    before = [state["master"].clone() for state in run.optimizer.named_state().values()]
    report = run.optimizer.step(UpdateRates(1.0, 0.0), grad_multiplier=0.5)
    for gradient, scaled in zip(raw, run.main_grads()):
        assert torch.equal(scaled, gradient / 128)
    names = [name for name, _ in run.module.named_parameters()]
    masters = run.optimizer.named_state()
    old = dict(zip(masters, before))
    for name, scaled in zip(names, run.main_grads()):
        assert torch.equal(masters[name]["master"], old[name] - scaled)
    assert report.loss_scale == 64.0
    exact = math.sqrt(sum(float((g.double() / 128).square().sum()) for g in raw))
    assert report.grad_norm == pytest.approx(exact, rel=1e-6)  # float32 norms, see test_clip_grads


def test_biases_and_norms_are_not_decayed() -> None:
    run = Run(PRECISIONS["fp64"], PLAIN_SGD)
    before = {name: p.detach().clone() for name, p in run.module.named_parameters()}
    run.ddp.zero_grad()
    run.optimizer.step(UpdateRates(0.5, 0.2))
    for name, parameter in run.module.named_parameters():
        factor = 0.9 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter, factor * before[name])


@pytest.mark.parametrize("name", ["fp32", "fp64", "bf16", "bf16-narrow", "fp16-constant"])
@pytest.mark.parametrize(
    ("bad", "config"),
    [
        (math.inf, ADAM),
        (math.nan, ADAM),
        (math.nan, SGD),
        (math.inf, PLAIN_SGD),
        (math.nan, NARROW),
        (math.inf, LION),
        (math.nan, MUON),
    ],
    ids=["inf-adam", "nan-adam", "nan-sgd", "inf-plain-sgd", "nan-narrow", "inf-lion", "nan-muon"],
)
def test_a_bad_gradient_changes_nothing_and_is_reported(
    name: str, bad: float, config: OptimizerConfig
) -> None:
    run = Run(PRECISIONS[name], config)
    run.step(0)
    weights = [parameter.clone() for parameter in run.module.parameters()]
    state, scalars = run.copied_state(), run.optimizer.scalars()
    run.backward(1)
    run.main_grads()[2][0] = bad
    report = run.optimizer.step(UpdateRates(RATE, DECAY))
    assert (report.applied, report.finite, report.overflow) == (False, False, False)
    assert not math.isfinite(report.grad_norm)
    assert all(map(torch.equal, weights, run.module.parameters()))
    assert run.optimizer.scalars() == scalars
    for key, tensors in run.optimizer.named_state().items():
        for kind, tensor in tensors.items():
            assert torch.equal(tensor, state[key][kind])
    assert run.step(2).applied


def test_overflows_of_fp16_are_expected_and_halve_the_loss_scale() -> None:
    run = Run(FP16)
    run.step(0)
    weights = [parameter.clone() for parameter in run.module.parameters()]
    scales = []
    for seed in range(1, 5):
        run.backward(seed)
        run.main_grads()[0][0] = math.inf
        report = run.optimizer.step(UpdateRates(RATE, DECAY))
        assert (report.applied, report.finite, report.overflow) == (False, False, True)
        scales.append((report.loss_scale, run.optimizer.loss_scale))
    assert scales == [(1024, 1024), (1024, 512), (512, 512), (512, 256)]
    assert all(map(torch.equal, weights, run.module.parameters()))
    assert run.step(9).applied


def test_a_real_overflow_of_fp16_is_found() -> None:
    run = Run(dataclasses.replace(FP16, initial_loss_scale=2.0**24, hysteresis=1))
    applied = [run.step(0).applied for _ in range(20)]
    assert (applied[0], applied[-1]) == (False, True)
    assert applied == sorted(applied)
    assert run.optimizer.loss_scale == 2.0 ** (24 - applied.count(False))


def test_the_loss_scale_grows_after_its_window() -> None:
    run = Run(dataclasses.replace(FP16, initial_loss_scale=2.0, loss_scale_window=2))
    assert [run.step(seed).loss_scale for seed in range(5)] == [2, 2, 4, 4, 8]


def test_overflows_at_the_smallest_loss_scale_end_the_run() -> None:
    run = Run(dataclasses.replace(FP16, initial_loss_scale=1.0, hysteresis=1))
    run.backward(0)
    run.main_grads()[0][0] = math.inf
    with pytest.raises(NumericsError, match="gradients overflow although the loss scale"):
        run.optimizer.step(UpdateRates(RATE, DECAY))


@pytest.mark.parametrize(
    "config",
    [ADAM, SGD, PLAIN_SGD, LION, MUON],
    ids=["adam", "sgd", "plain-sgd", "lion", "muon"],
)
@pytest.mark.parametrize("name", list(PRECISIONS))
def test_a_run_goes_on_bit_by_bit_from_its_state(name: str, config: OptimizerConfig) -> None:
    config = dataclasses.replace(config, clip_grad=0.5)
    precision = dataclasses.replace(PRECISIONS[name], loss_scale_window=4)
    run, other = Run(precision, config), Run(precision, config)
    for seed in range(3):
        run.step(seed)
    other.step(7)  # state of its own, to be overwritten
    other.module.load_state_dict(run.module.state_dict())
    other.optimizer.load_state(run.copied_state(), json.loads(json.dumps(run.optimizer.scalars())))
    for seed in range(3, 6):
        assert run.step(seed) == other.step(seed)
        assert all(map(torch.equal, run.module.parameters(), other.module.parameters()))
    assert run.optimizer.scalars() == other.optimizer.scalars()
    for key, tensors in run.optimizer.named_state().items():
        for kind, tensor in tensors.items():
            assert torch.equal(tensor, other.optimizer.named_state()[key][kind])


def test_state_of_the_start_can_be_saved_and_loaded() -> None:
    run, other = Run(PRECISIONS["fp32"]), Run(PRECISIONS["fp32"])
    other.step(7)
    other.module.load_state_dict(run.module.state_dict())
    other.optimizer.load_state(run.copied_state(), run.optimizer.scalars())
    assert run.step(0) == other.step(0)
    assert all(map(torch.equal, run.module.parameters(), other.module.parameters()))


@pytest.mark.parametrize(
    ("name", "config", "kinds"),
    [
        ("fp32", ADAM, {"exp_avg", "exp_avg_sq"}),
        ("bf16", ADAM, {"exp_avg", "exp_avg_sq", "master"}),
        ("fp64", SGD, {"momentum_buffer"}),
        ("fp16", SGD, {"momentum_buffer", "master"}),
        ("fp32", PLAIN_SGD, set()),
        ("bf16", PLAIN_SGD, {"master"}),
    ],
)
def test_named_state_has_the_shapes_of_the_parameters(
    name: str, config: OptimizerConfig, kinds: set[str]
) -> None:
    run = Run(PRECISIONS[name], config)
    dtype = torch.float64 if name == "fp64" else torch.float32
    for _ in range(2):  # before and after an update
        state = run.optimizer.named_state()
        assert state.keys() == dict(run.module.named_parameters()).keys()
        for key, parameter in run.module.named_parameters():
            assert state[key].keys() == kinds
            assert all(t.shape == parameter.shape and t.dtype == dtype for t in state[key].values())
        run.step(0)


def test_scalars_are_json_and_count_updates_but_not_skips() -> None:
    run = Run(FP16)
    run.step(0)
    run.backward(1)
    run.main_grads()[0][0] = math.nan
    run.optimizer.step(UpdateRates(RATE, DECAY))
    assert json.loads(json.dumps(run.optimizer.scalars())) == {
        "steps": 1,
        "loss_scaler": {"scale": 1024.0, "good_iterations": 0, "overflows_left": 1},
    }


@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "message"),
    [
        ("fp32", "bf16", r"0.bias/master: missing for \(16,\)"),
        ("bf16", "fp32", r"0.bias/master: \(16,\) for none"),
    ],
)
def test_state_of_another_precision_is_refused(saved_by: str, loaded_by: str, message: str) -> None:
    saved, run = Run(PRECISIONS[saved_by]), Run(PRECISIONS[loaded_by])
    with pytest.raises(CheckpointError, match=rf"not of this model(.|\n)*{message}(.|\n)*more"):
        run.optimizer.load_state(saved.copied_state(), saved.optimizer.scalars())


def test_state_of_another_shape_is_refused_and_nothing_is_changed() -> None:
    run = Run(PRECISIONS["fp32"])
    run.step(0)
    before, changed = run.copied_state(), run.copied_state()
    changed["0.weight"]["exp_avg"] = torch.zeros(6, 15)
    with pytest.raises(CheckpointError, match=r"0.weight/exp_avg: \(6, 15\) for \(16, 6\)"):
        run.optimizer.load_state(changed, run.optimizer.scalars())
    assert torch.equal(
        run.optimizer.named_state()["0.bias"]["exp_avg"], before["0.bias"]["exp_avg"]
    )


@pytest.mark.parametrize("missing", ["steps", "loss_scaler"])
def test_state_without_its_scalars_is_refused(missing: str) -> None:
    run = Run(PRECISIONS["fp32"])
    scalars = run.optimizer.scalars()
    del scalars[missing]
    with pytest.raises(CheckpointError, match="lacks the optimizer's number of updates"):
        run.optimizer.load_state(run.copied_state(), scalars)


def test_zero_gradients_are_counted_when_asked() -> None:
    run = Run(PRECISIONS["fp32"])
    run.backward(0)
    run.main_grads()[0][0] = 0.0
    assert run.optimizer.step(UpdateRates(0.0, 0.0)).num_zeros is None
    run.backward(0)
    run.main_grads()[0][0] = 0.0
    report = run.optimizer.step(UpdateRates(0.0, 0.0), with_zeros=True)
    assert report.num_zeros == 6


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_zero_grad_zeroes_buffers_and_plain_gradients(name: str) -> None:
    run = Run(PRECISIONS[name])
    run.backward(0)
    run.optimizer.zero_grad()
    assert all(not gradient.any() for gradient in run.main_grads())
    plain, optimizer = unbuffered(PRECISIONS[name])
    loss(plain, 0).backward()
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in plain.parameters())


def unbuffered(precision: PrecisionConfig) -> tuple[nn.Module, MegatronOptimizer]:
    """The same model without gradient buffers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    module.to(getattr(torch, precision.precision.value))
    pairs = module.named_parameters()
    return module, build_optimizer(pairs, optimizer=ADAM, precision=precision, ctx=SINGLE)


@pytest.mark.parametrize("name", ["fp32", "bf16-narrow"])
def test_gradients_need_no_buffer(name: str) -> None:
    run = Run(PRECISIONS[name])
    plain, optimizer = unbuffered(PRECISIONS[name])
    for seed in range(3):
        optimizer.zero_grad()
        for micro_batch in range(2):
            loss(plain, 2 * seed + micro_batch).backward()
        report = optimizer.step(UpdateRates(RATE, DECAY))
        assert report == run.step(seed)
        assert all(map(torch.equal, plain.parameters(), run.module.parameters()))


def test_a_step_without_backward_is_an_error() -> None:
    _, optimizer = unbuffered(PRECISIONS["fp32"])
    with pytest.raises(ConfigError, match=r"a parameter has no gradient(.|\n)*0.weight"):
        optimizer.step(UpdateRates(RATE, DECAY))


def test_the_kind_of_optimizer_follows_the_precision() -> None:
    for name, precision in PRECISIONS.items():
        wide = name in ("fp32", "fp64")
        kind = FP32Optimizer if wide else MixedPrecisionOptimizer
        assert type(Run(precision).optimizer) is kind


def test_fp32_parameters_of_a_half_precision_model_are_updated_in_place() -> None:
    module = nn.Sequential(nn.Linear(6, 16).bfloat16(), nn.LayerNorm(16))
    optimizer = build_optimizer(module, optimizer=ADAM, precision=PRECISIONS["bf16"], ctx=SINGLE)
    kinds = {name: "master" in state for name, state in optimizer.named_state().items()}
    assert kinds == {"0.weight": True, "0.bias": True, "1.weight": False, "1.bias": False}
    module[1](module[0](torch.ones(1, 6).bfloat16()).float()).square().sum().backward()
    optimizer.step(UpdateRates(RATE, DECAY))
    assert not torch.equal(module[1].weight, torch.ones(16))


def test_a_parameter_of_another_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"weight \(torch.bfloat16\)(.|\n)*run in float32"):
        build_optimizer(
            nn.Linear(2, 2).bfloat16(), optimizer=ADAM, precision=PrecisionConfig(), ctx=SINGLE
        )


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to train"):
        build_optimizer(
            nn.Linear(2, 2).requires_grad_(False),
            optimizer=ADAM,
            precision=PrecisionConfig(),
            ctx=SINGLE,
        )


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("config", [ADAM, SGD, NARROW], ids=["adam", "sgd", "narrow"])
def test_a_lone_replica_that_shares_out_its_work_does_all_of_it(
    name: str, config: OptimizerConfig
) -> None:
    config = dataclasses.replace(config, clip_grad=0.7)
    plain, sharded = (Run(PRECISIONS[name], config, distributed=on) for on in (False, True))
    for seed in range(3):
        assert repr(plain.step(seed, with_zeros=True)) == repr(sharded.step(seed, with_zeros=True))
    for one, other in zip(plain.module.parameters(), sharded.module.parameters(), strict=True):
        assert torch.equal(one, other)
    expected, found = plain.optimizer.named_state(), sharded.optimizer.named_state()
    for key, owned in sharded.optimizer.owned_ranges().items():
        assert found[key].keys() == expected[key].keys()
        for kind, tensor in found[key].items():
            assert (tensor.dim(), tensor.numel()) == (1, owned.size)
            assert torch.equal(tensor, expected[key][kind].flatten())
    assert plain.optimizer.owned_ranges() == {}


def test_state_may_be_kept_in_bf16_and_the_masters_never_are() -> None:
    run = Run(PRECISIONS["bf16"], NARROW)
    run.step(0)
    kinds = {k: t.dtype for k, t in run.optimizer.named_state()["0.weight"].items()}
    assert kinds == {
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
        "master": torch.float32,
    }
    other = Run(PRECISIONS["bf16"], NARROW)
    other.module.load_state_dict(run.module.state_dict())
    other.optimizer.load_state(run.copied_state(), run.optimizer.scalars())
    assert repr(run.step(1)) == repr(other.step(1))
    for one, two in zip(run.module.parameters(), other.module.parameters(), strict=True):
        assert torch.equal(one, two)


def test_adamw_makes_no_rule_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its constructor loads the compiler, which takes 70 MB and seconds of every rank.
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", _refuse)
    assert Run(PRECISIONS["bf16"]).step(0).applied


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("torch.optim.Optimizer")
