"""From summed gradients to new weights under DeepSpeed: who steps, and with which numbers.

At ZeRO stage 0 our own optimizer steps, inside DeepSpeed's: DeepSpeed would begin Adam at its
second step in half precision, divide fp16 gradients by a loss scale that it never multiplied with,
and clip pipelines by a norm that misses stages. At stages 1 to 3 DeepSpeed shards, clips and steps,
with our update rule and our loss scale (its own moves between the norm and the update).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron import device, log
from megatron.checkpoint.sharded import ShardedTensor
from megatron.config.optimizer import OptimizerConfig, OptimizerKind, StateDtype
from megatron.config.run import RunConfig
from megatron.engine.deepspeed.interface import CpuAdam, DeepSpeedRuntime
from megatron.engine.deepspeed.state import ZeroShards, state_of_shards
from megatron.engine.state import optimizer_tensors, parameter_tensors
from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group, ParallelContext, ReplicaGroups
from megatron.mpu.partition import is_sequence_parallel
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.grad_scaler import GradScaler, build_scaler
from megatron.optimizer.optimizer import (
    MegatronOptimizer,
    OptimizerReport,
    build_optimizer,
    read_scalars,
)
from megatron.optimizer.param_groups import (
    GroupingRules,
    LayerRates,
    ParamGroup,
    UpdateRates,
    in_groups,
    param_groups,
)
from megatron.optimizer.replicated_grads import reduce_replicated
from megatron.optimizer.update_rule import fresh_state, update_rule

Named = Sequence[tuple[str, Parameter]]


class Updates(Protocol):
    """The interface that turns the gradients of one step into new weights.

    All ranks call it together.
    """

    torch_optimizer: torch.optim.Optimizer
    """What `deepspeed.initialize` is given."""
    groups: tuple[ParamGroup, ...]
    """Its parameters, as `torch_optimizer` groups them."""

    @property
    def own(self) -> MegatronOptimizer | None:
        """Our optimizer, where it steps instead of DeepSpeed's."""

    @property
    def loss_scale(self) -> float:
        """The factor on gradients until the update."""

    @property
    def loss_factor(self) -> float:
        """The factor that the engine applies to a loss before DeepSpeed's `backward`."""

    def adopt(self, runtime: DeepSpeedRuntime) -> None:
        """Take over the result of `deepspeed.initialize`; once, before the first step."""

    def begin(self, num_passes: int, rates: UpdateRates) -> None:
        """Prepare for a step of `num_passes` backward passes, with these numbers for its update."""

    def outcome(self) -> OptimizerReport:
        """Return the result of DeepSpeed's `step`; call once, after every step."""

    def tensors(self, *, optimizer: bool) -> list[ShardedTensor]:
        """Return the weights, and the optimizer's state if asked, as views."""

    def scalars(self) -> dict[str, JsonValue]:
        """Return the rest of the optimizer's state, as JSON values."""

    def restored(self, scalars: JsonObject, *, optimizer: bool) -> None:
        """Take over the values loaded into `tensors`; without optimizer state, only the weights."""


def updates_for(
    config: RunConfig,
    named: Named,
    context: ParallelContext,
    *,
    stage: int,
    cpu_adam: CpuAdam | None = None,
) -> Updates:
    """Return how weights are updated at a ZeRO stage.

    Args:
        named: every trainable parameter of this rank with its global name.
        cpu_adam: DeepSpeed's class, where offloaded weights are to be updated by it.

    Raises:
        ConfigError: ZeRO cannot keep the optimizer's state as the flags require.
    """
    if stage == 0:
        return NativeUpdates(config, named, context)
    return ZeroUpdates(config, named, context, cpu_adam=cpu_adam)


class NativeUpdates:
    """Our own optimizer behind DeepSpeed's engine, which reduces our buffers of gradients."""

    def __init__(self, config: RunConfig, named: Named, context: ParallelContext) -> None:
        alone = Group((context.rank,), 0)  # DeepSpeed sums over replicas, not the buffer
        gradient_dtype: torch.dtype = getattr(torch, config.precision.gradient_precision.value)
        self._named, self._context = named, context
        self._gradients = GradBuffer(named, ReplicaGroups.one(alone), gradient_dtype=gradient_dtype)
        self._optimizer = build_optimizer(
            named,
            optimizer=config.optimizer,
            precision=config.precision,
            ctx=context,
            decoupled=config.schedule.is_decoupled,
            layer_rates=LayerRates.of_run(config),
        )
        self.groups = self._optimizer.groups
        self.torch_optimizer: torch.optim.Optimizer = _OwnOptimizerSteps(
            self.groups, self._gradients, self._step, config.optimizer
        )
        self._with_zeros = config.logging.log_num_zeros_in_grad
        self._rates = UpdateRates(0.0, 0.0)
        self._report: OptimizerReport | None = None

    @property
    def own(self) -> MegatronOptimizer:
        """Our optimizer, which steps instead of DeepSpeed's."""
        return self._optimizer

    @property
    def loss_scale(self) -> float:
        """The factor on gradients until the update."""
        return self._optimizer.loss_scale

    @property
    def loss_factor(self) -> float:
        """The loss scale: at stage 0 the caller of DeepSpeed's `backward` applies it."""
        return self._optimizer.loss_scale

    def adopt(self, runtime: DeepSpeedRuntime) -> None:
        """Do nothing: DeepSpeed keeps an optimizer of stage 0 as it is."""

    def begin(self, num_passes: int, rates: UpdateRates) -> None:
        """Forget the gradients, and note the numbers of this step."""
        self._gradients.start_step(num_passes)
        self._rates = rates
        self._report = None

    def outcome(self) -> OptimizerReport:
        """Return the result of the step."""
        assert self._report is not None  # noqa: S101  # invariant: DeepSpeed has called `_step`
        return self._report

    def tensors(self, *, optimizer: bool) -> list[ShardedTensor]:
        """Return the weights, and the optimizer's state if asked, as views."""
        found = parameter_tensors(self._named, self._context)
        if optimizer:
            found += optimizer_tensors(self._named, self._optimizer, self._context)
        return found

    def scalars(self) -> dict[str, JsonValue]:
        """Return the number of updates, and the loss scale."""
        return self._optimizer.scalars()

    def restored(self, scalars: JsonObject, *, optimizer: bool) -> None:
        """Take over the values loaded into `tensors`."""
        if optimizer:
            self._optimizer.restored(scalars)
        else:
            self._optimizer.refresh_masters()

    def _step(self) -> OptimizerReport:
        self._gradients.finish()
        reduce_replicated([parameter for _, parameter in self._named], self._context.tp)
        self._report = self._optimizer.step(self._rates, with_zeros=self._with_zeros)
        return self._report


class ZeroUpdates:
    """DeepSpeed's ZeRO optimizer around our update rule, whose flat shards are ours by name."""

    def __init__(
        self,
        config: RunConfig,
        named: Named,
        context: ParallelContext,
        *,
        cpu_adam: CpuAdam | None = None,
    ) -> None:
        _refuse_narrow_state(config.optimizer)
        self._named, self._context = named, context
        self._config = config.optimizer
        # A parameter of stage 3 is empty while it is not in use, so its own shape is meaningless.
        rules = GroupingRules(config.schedule.is_decoupled, layer_rates=LayerRates.of_run(config))
        own = param_groups(named, dimensions=_dimensions, rules=rules)
        self.groups = _as_many_on_each_stage(own, context.pp)
        self._scaler = build_scaler(config.precision)
        self._is_cpu_adam = cpu_adam is not None
        parts = [[parameter for _, parameter in group.parameters] for group in self.groups]
        self.torch_optimizer: torch.optim.Optimizer
        if cpu_adam is None:
            self.torch_optimizer = update_rule(parts, config.optimizer)
        else:
            self.torch_optimizer = cpu_adam(
                [{"params": part} for part in parts],
                lr=0.0,
                betas=(config.optimizer.adam_beta1, config.optimizer.adam_beta2),
                eps=config.optimizer.adam_eps,
                adamw_mode=True,
            )
        self._steps = 0
        self.own = None
        self._runtime: DeepSpeedRuntime | None = None
        _sum_over_tp(named, context.tp)

    @property
    def loss_scale(self) -> float:
        """The factor on gradients until the update."""
        return float(self._scaler.scale)

    @property
    def loss_factor(self) -> float:
        """1: DeepSpeed's `backward` applies the loss scale itself."""
        return 1.0

    def adopt(self, runtime: DeepSpeedRuntime) -> None:
        """Initialise the state of DeepSpeed's shards, and replace its loss scale by ours."""
        self._runtime = runtime
        _reduce_in_buckets(runtime)
        runtime.optimizer.print_rank_0 = log.debug  # it prints when it is destroyed
        self._shards = ZeroShards(runtime.optimizer, self._named, self._context)
        for flat in self._shards.flats:
            state: dict[str, Tensor | int] = dict(fresh_state(flat.master, self._config))
            if self._is_cpu_adam:
                state["step"] = 0  # CPUAdam counts in a Python number
            self.torch_optimizer.state[flat.master] = state
        if hasattr(runtime.optimizer, "loss_scaler"):  # its BF16 optimizer has none
            dynamic = runtime.optimizer.loss_scaler.dynamic
            runtime.optimizer.loss_scaler = FrozenLossScale(self._scaler, dynamic=dynamic)

    def begin(self, num_passes: int, rates: UpdateRates) -> None:
        """Note the numbers of this step."""
        del num_passes
        for group, target in zip(self.groups, self.torch_optimizer.param_groups):
            target["lr"], target["weight_decay"] = rates.of(group)

    def outcome(self) -> OptimizerReport:
        """Return the result of the step, and update the loss scale.

        Raises:
            NumericsError: the gradients overflow at the smallest loss scale.
        """
        assert self._runtime is not None  # noqa: S101  # invariant: `adopt` was called
        applied, scale = bool(self._runtime.was_step_applied()), self.loss_scale
        too_small = self._scaler.update(torch.tensor(not applied, device=device.current()))
        self._scaler.check(too_small=bool(too_small), scale=scale)
        self._steps += applied
        return OptimizerReport(
            applied=applied,
            finite=applied,
            grad_norm=float(self._runtime.get_global_grad_norm()),
            loss_scale=scale,
            overflow=not applied and self._scaler.expects_overflow,
        )

    def tensors(self, *, optimizer: bool) -> list[ShardedTensor]:
        """Return the weights, and the optimizer's state if asked, as views."""
        found = self._shards.weights()
        if optimizer:
            found += state_of_shards(self._shards, self.torch_optimizer)
        return found

    def scalars(self) -> dict[str, JsonValue]:
        """Return the number of updates, and the loss scale; spelled as our own optimizer does."""
        scalars: dict[str, JsonValue] = {
            "steps": self._steps,
            "loss_scaler": self._scaler.state_dict(),
        }
        return scalars | ({"rule": "DeepSpeedCPUAdam"} if self._is_cpu_adam else {})

    def restored(self, scalars: JsonObject, *, optimizer: bool) -> None:
        """Take over the values loaded into `tensors`: masters, counts, the loss scale."""
        self._shards.refresh(masters=not optimizer or not self._shards.has_masters)
        if not optimizer:
            return
        counts = read_scalars(scalars)
        self._scaler.load_state_dict(counts.loss_scaler)
        self._steps = counts.steps
        for state in self.torch_optimizer.state.values():
            if isinstance(state.get("step"), Tensor):
                state["step"].fill_(self._steps)
            elif "step" in state:
                state["step"] = self._steps
        if self._is_cpu_adam:
            _replay_steps(self.torch_optimizer, self._steps)


def _replay_steps(cpu_adam: Any, steps: int) -> None:
    """Advance CPUAdam's internal state by `steps` updates, exactly to the bit.

    It multiplies powers of its betas up, one update after the other, and where it skips some it
    takes a power instead, which rounds otherwise. Nothing real is updated here.
    """
    nothing = [torch.zeros(1) for _ in range(4)]
    betas, eps = cpu_adam.defaults["betas"], cpu_adam.defaults["eps"]
    for step in range(1, steps + 1):
        cpu_adam.ds_opt_adam.adam_update(
            cpu_adam.opt_id, step, 0.0, *betas, eps, 0.0, True, *nothing
        )


class _OwnOptimizerSteps(torch.optim.Optimizer):
    """An optimizer for DeepSpeed whose step is that of our own optimizer."""

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        gradients: GradBuffer,
        step: Callable[[], OptimizerReport],
        config: OptimizerConfig,
    ) -> None:
        parts = [{"params": [parameter for _, parameter in group.parameters]} for group in groups]
        # DeepSpeed reports learning rates and momenta of whatever it steps.
        super().__init__(parts, {"lr": 0.0, "betas": (config.adam_beta1, config.adam_beta2)})
        self._gradients, self._take_step = gradients, step
        self.overflow = False
        self._global_grad_norm = 0.0

    def get_grads_for_reduction(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Return the gradients to average over replicas, and none for expert groups."""
        return [flat.data for flat in self._gradients.flats], {}

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # never a loss
        """Clip and update; called by DeepSpeed once gradients are averaged."""
        del closure
        report = self._take_step()
        self.overflow, self._global_grad_norm = not report.applied, report.grad_norm


class FrozenLossScale:
    """A loss scale that stays constant during DeepSpeed's step, and is updated after it.

    DeepSpeed moves its own between the norm and the update, so that the update after a doubling
    is made with half of the gradients.
    """

    def __init__(self, scaler: GradScaler, *, dynamic: bool) -> None:
        self._scaler, self.dynamic = scaler, dynamic

    @property
    def cur_scale(self) -> float:
        """The factor on the loss."""
        return float(self._scaler.scale)

    @property
    def loss_scale(self) -> float:
        """The factor on the loss."""
        return self.cur_scale

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss as `backward` takes it."""
        scale = self.cur_scale
        return loss * scale if scale != 1.0 else loss

    def update_scale(self, overflow: bool) -> None:
        """Do nothing: `ZeroUpdates.outcome` moves the scale."""


def _reduce_in_buckets(runtime: DeepSpeedRuntime) -> None:
    """Make `reduce_bucket_size` apply at stage 1 in bf16 too.

    There DeepSpeed sums gradients of 500 million weights at once, whatever the size is, and makes a
    copy of all of them for that.
    """
    size, reduce = runtime.zero_reduce_bucket_size(), runtime.allreduce_no_retain

    def in_buckets(*given: object, **named: object) -> None:
        reduce(*given, **{**named, "numel_per_bucket": size})

    runtime.allreduce_no_retain = in_buckets


def _dimensions(parameter: Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _sum_over_tp(named: Iterable[tuple[str, Parameter]], tp: Group) -> None:
    """Sum the gradients of sequence-parallel parameters over tp, each time one is computed.

    ZeRO takes gradients away during the backward pass, so they cannot be summed after it.
    """
    if tp.size == 1:
        return

    def summed(gradient: Tensor) -> Tensor:
        return all_reduce(gradient.float(), tp).to(gradient.dtype)

    for _, parameter in named:
        if is_sequence_parallel(parameter) and parameter.requires_grad:
            parameter.register_hook(summed)  # type: ignore[no-untyped-call]


def _as_many_on_each_stage(groups: tuple[ParamGroup, ...], stages: Group) -> tuple[ParamGroup, ...]:
    """Return the groups of this stage as as many as those of the stage that has most.

    ZeRO adds up one norm for each group over all stages, and would wait for one that never comes
    where a stage has no table of words, or layers of other learning rates.

    Raises:
        ConfigError: a stage has fewer parameters than another has groups.
    """
    if stages.size == 1:
        return groups
    parameters = sum(len(group.parameters) for group in groups)
    here = torch.tensor([len(groups), -parameters], device=device.current())
    most, negative = all_reduce(here, stages, op="max").tolist()
    fewest = -negative
    if fewest < most:
        raise ConfigError(
            "under ZeRO 1 all pipeline stages have as many groups of learning rates and weight "
            "decays, and a stage has fewer parameters than that",
            found=f"{most} groups, and a stage of {fewest} parameters",
            fix="use --zero-stage 0, or give each stage more layers",
        )
    return in_groups(groups, most)


def _refuse_narrow_state(config: OptimizerConfig) -> None:
    narrow = [
        f"--{name.replace('_', '-')} bf16"
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype")
        if getattr(config, name) is StateDtype.BF16
    ]
    if narrow and config.optimizer is OptimizerKind.ADAM:
        raise ConfigError(
            "ZeRO keeps the optimizer's state in fp32",
            found=" ".join(narrow) + " with a ZeRO stage above 0",
            fix="leave it out, or use --zero-stage 0 or the native engine",
        )
