"""The DeepSpeed engine for models without pipelines: ZeRO 0 to 3 with tensor and data parallelism.

It does what the native engine does, to the same numbers: gradients are those of the mean loss over
all counted tokens of the global batch. DeepSpeed averages over replicas and divides by nothing
else, so the tokens of a step are counted before its first forward pass. What DeepSpeed reports of
losses is not used; how weights are updated is in `updates`.
"""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron import device, log
from megatron.checkpoint.formats.deepspeed.save import Live
from megatron.config.deepspeed.plan import DeepSpeedPlan, deepspeed_plan
from megatron.config.engine import RemoteDevice
from megatron.config.run import RunConfig
from megatron.engine.base import (
    BatchOptions,
    EngineState,
    EvaluationSum,
    Measure,
    MicroBatch,
    PendingReport,
    PretrainTask,
    RawBatch,
    StepPlan,
    StepReport,
    samples_of_passes,
)
from megatron.engine.deepspeed.grid import DeepSpeedGrid, mark_tensor_parallel
from megatron.engine.deepspeed.interface import DeepSpeedRuntime, partitioned
from megatron.engine.deepspeed.model import (
    DeepSpeedModel,
    weights_saved_by_reference,
    zero3_partitioner,
)
from megatron.engine.deepspeed.monitor import write_monitors
from megatron.engine.deepspeed.offload import cpu_adam_for
from megatron.engine.deepspeed.saving import LossScale, live_run
from megatron.engine.deepspeed.start import quietly, start_deepspeed
from megatron.engine.deepspeed.state import partition_range
from megatron.engine.deepspeed.updates import Updates, updates_for
from megatron.engine.tally import (
    check_counts,
    counts_ahead,
    evaluation,
    loss_and_metrics,
    step_report,
    step_sums,
)
from megatron.json_values import JsonObject, JsonValue, object_at
from megatron.model.specs import ModelBuild
from megatron.mpu.partition import is_split_over
from megatron.mpu.scalar_sums import HostScalars, flags_on_device
from megatron.optimizer.agreement import check_bitwise_equal
from megatron.optimizer.clip_grads import global_norm, owned_by_this_rank
from megatron.optimizer.optimizer import OptimizerReport, read_scalars
from megatron.optimizer.replicated_grads import check_replicated_agree
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import Tokenizer


class DeepSpeedEngine:
    """Owns a model that DeepSpeed runs, and how its weights are updated.

    Attributes:
        runtime: DeepSpeed's own engine.
        named: the trainable parameters of this rank, with their global names.
    """

    def __init__(
        self,
        config: RunConfig,
        task: PretrainTask,
        build: ModelBuild,
        tokenizer: Tokenizer,
        timers: Timers | None = None,
    ) -> None:
        self.plan = deepspeed_plan(config, data_parallel_size=build.ctx.dp.size)
        self._config, self._task, self._build = config, task, build
        self._context = build.ctx
        self._timers = timers or Timers()
        self._batch_options = BatchOptions(config.data, tokenizer)
        with quietly():
            self._deepspeed = start_deepspeed(build.ctx)
        _log_flags_without_effect(config, self.plan)
        model = self._build_model()
        self.named: tuple[tuple[str, Parameter], ...] = self._named_of(model)
        mark_tensor_parallel(parameter for _, parameter in self.named)
        self._updates: Updates = updates_for(
            config,
            self.named,
            build.ctx,
            stage=self.plan.stage,
            cpu_adam=cpu_adam_for(
                self.plan.offload_optimizer is not RemoteDevice.NONE,
                self.plan.cpu_adam,
                config.optimizer,
                build.ctx.world,
            ),
        )
        self.runtime: DeepSpeedRuntime
        with quietly():
            self.runtime = self._start(model)
        self._updates.adopt(self.runtime)

    @property
    def task(self) -> PretrainTask:
        """The name of the task."""
        return self._task

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss before its backward pass."""
        return self._updates.loss_scale

    def start_step(
        self, batches: Iterator[RawBatch], plan: StepPlan, signals: Sequence[bool] = ()
    ) -> PendingReport:
        """Do one optimizer step over `plan.num_microbatches` micro-batches of this replica.

        DeepSpeed waits for the device in each step, so the report is read at once.
        """
        with self._timers("batch-generator"):
            micro_batches = [self._next(batches) for _ in range(plan.num_microbatches)]
        counts = counts_ahead(self._task, micro_batches, self._context)
        check_counts(self._task, counts.tolist())
        if plan.global_batch_size != self.runtime.train_batch_size():
            self.runtime.set_train_batch_size(plan.global_batch_size)
        self._updates.begin(plan.num_microbatches, plan.rates)
        # DeepSpeed averages gradients over replicas; it must not divide by anything else.
        factors = self._updates.loss_factor * self._context.dp.size / counts
        self._weigh_router_losses(plan)
        self.runtime.train()
        sums, of = [], samples_of_passes(plan, self._build)
        with weights_saved_by_reference(self.plan.stage):
            for at in range(plan.num_microbatches):
                inputs, labels = micro_batches.pop(0)
                self.runtime.set_gradient_accumulation_boundary(not micro_batches)
                with self._timers("forward-compute"), of(at):
                    total, count = self.runtime(inputs, labels)
                with self._timers("backward-compute"):
                    loss = torch.sum(total * factors.to(total.dtype))
                    self.runtime.backward(loss, scale_wrt_gas=False)
                sums.append(torch.stack([total.detach(), count]))
        with self._timers("optimizer"):
            self.runtime.step()
            done = self._updates.outcome()
        return self._reported(sums, done, plan, signals)

    def train_step(self, batches: Iterator[RawBatch], plan: StepPlan) -> StepReport:
        """Do one optimizer step and return its report."""
        return self.start_step(batches, plan)()

    def _reported(
        self,
        sums: Sequence[Tensor],
        done: OptimizerReport,
        plan: StepPlan,
        signals: Sequence[bool],
    ) -> PendingReport:
        """Return the report of a step, also to DeepSpeed's monitors."""
        flags = flags_on_device(signals)
        reduced = step_sums(sums, self._task, self._build, flags).reduce()
        report = step_report(HostScalars(reduced).read(), done, self._config.model, plan)
        write_monitors(self.runtime, report)
        return lambda: report

    def _weigh_router_losses(self, plan: StepPlan) -> None:
        """Set the factor of the routers' losses, which DeepSpeed's own factor does not reach.

        These losses are sums over sequences.
        """
        replicas = self._context.dp.size
        self._build.router_loss.value = self.loss_scale * replicas / plan.global_batch_size

    @torch.no_grad()
    def evaluate(self, batches: Iterator[RawBatch], num_microbatches: int) -> EvaluationSum:
        """Sum the loss over `num_microbatches` of every replica, with dropout off."""
        sums = self.measure(batches, num_microbatches, loss_and_metrics(self._task, self._build))
        return evaluation(sums, self._task, self._build)

    @torch.no_grad()
    def measure(
        self, batches: Iterator[RawBatch], num_microbatches: int, measure: Measure
    ) -> list[Tensor]:
        """Return the values of `measure` for `num_microbatches` micro-batches of this replica."""
        self.runtime.eval()
        found = []
        with self.runtime.module.measured_by(measure):
            for _ in range(num_microbatches):
                inputs, labels = self._next(batches)
                found.append(torch.stack(self.runtime.module(inputs, labels)))
        return found

    def state(self, *, optimizer: bool) -> EngineState:
        """Return the model, and the optimizer if asked, as named parts of whole tensors."""
        tensors = self._updates.tensors(optimizer=optimizer)
        scalars = {"optimizer": self._updates.scalars()} if optimizer else {}
        return EngineState(tuple(tensors), scalars)

    def restored(self, scalars: JsonObject, *, optimizer: bool) -> None:
        """Take over tensors that were filled in place: counts, loss scale, copies of weights."""
        given = object_at(scalars, "optimizer")
        self._updates.restored(given, optimizer=optimizer)

    def diagnosis(self) -> None:
        """Return None: DeepSpeed adds gradients up as they come, and computes no step twice."""

    def live(self) -> Live:
        """Return what a save in DeepSpeed's own layout needs of this rank."""
        state = read_scalars(self._updates.scalars()).loss_scaler
        return live_run(
            self.runtime,
            self._updates.groups,
            self._context,
            precision=self._config.precision,
            loss_scale=LossScale(self._updates.loss_scale, state),
            own=self._updates.own,
        )

    def params_norm(self) -> float:
        """Return the L2 norm of all parameters of the model, each counted once.

        Reduces over the model group.
        """
        is_own = owned_by_this_rank(self.named, self._context)
        shared = self.plan.stage == 3
        counted = [self._values(p) for (_, p), here in zip(self.named, is_own) if here]
        return global_norm(counted, self._context, over_replicas=shared)

    def check_replicas(self) -> None:
        """Compare what several ranks hold bit by bit: replicas, and unsplit weights over tp.

        At stage 3 no two replicas hold the same part of a weight.
        """
        own_values = [(name, self._values(parameter)) for name, parameter in self.named]
        if self.plan.stage < 3:
            check_bitwise_equal(
                own_values, self._context.dp, problem="data-parallel ranks hold different weights"
            )
            check_replicated_agree(self.named, self._context.tp)
            return
        unsplit = [
            pair for pair, (_, p) in zip(own_values, self.named) if not is_split_over(p, "tp")
        ]
        check_bitwise_equal(
            unsplit,
            self._context.tp,
            problem="tensor-parallel ranks hold different values of weights that are not split",
        )

    def _build_model(self) -> nn.Module:
        share = None
        if self.plan.stage == 3:
            json, grid = json_for_deepspeed(self.plan), DeepSpeedGrid(self._context)
            share = zero3_partitioner(self._deepspeed, json, self._build, grid)
        return DeepSpeedModel(
            self._task.layers(self._config.model, self._build),
            self._task,
            self._build,
            seed=self._config.training.seed,
            share=share,
        )

    def _named_of(self, model: nn.Module) -> tuple[tuple[str, Parameter], ...]:
        """Return the parameters of what `_build_model` made, under their global names."""
        return tuple(model.named_parameters())

    def _start(self, model: nn.Module) -> DeepSpeedRuntime:
        """Return DeepSpeed's engine around the model of `_build_model`."""
        runtime: DeepSpeedRuntime
        runtime, *_ = self._deepspeed.initialize(
            model=model,
            optimizer=self._updates.torch_optimizer,
            model_parameters=[parameter for _, parameter in self.named],
            config=json_for_deepspeed(self.plan),
            mpu=DeepSpeedGrid(self._context),
        )
        if self.plan.stage == 3:
            assert isinstance(model, DeepSpeedModel)  # noqa: S101  # invariant: of `_build_model`
            for parameter in model.used_elsewhere():
                self._deepspeed.zero.register_external_parameter(model, parameter)
        return runtime

    def _next(self, batches: Iterator[RawBatch]) -> MicroBatch:
        return self._task.batch(device.upload(next(batches)), self._batch_options)

    def _values(self, parameter: Parameter) -> Tensor:
        """Return the part of a weight that this rank stores."""
        if self.plan.stage < 3:
            return parameter.detach()
        return partitioned(parameter).ds_tensor.detach()[: partition_range(parameter).size]


def json_for_deepspeed(plan: DeepSpeedPlan) -> dict[str, JsonValue]:
    """Return a copy of the plan's JSON, since DeepSpeed modifies the JSON it is given."""
    return copy.deepcopy(dict(plan.json))


def _log_flags_without_effect(config: RunConfig, plan: DeepSpeedPlan) -> None:
    if config.logging.log_num_zeros_in_grad and plan.stage > 0:
        log.warning(
            "--log-num-zeros-in-grad has no effect with a ZeRO stage above 0: gradients are gone "
            "when the step is over"
        )
