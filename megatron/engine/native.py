"""The native engine: tensor x pipeline x data parallel training of a list of layers.

Gradients are those of the mean loss over all counted tokens of the global batch, whatever the
micro-batches and replicas: each backward pass adds a sum over its own tokens, and one factor in the
optimizer divides by the count of all of them.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from megatron import device, log
from megatron.checkpoint.sharded import ShardedTensor
from megatron.config.parallel import ParallelConfig, ShardingStrategy
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
from megatron.engine.cuts import stage_ranges
from megatron.engine.diagnosis import StepDiagnosis
from megatron.engine.expert_load import ExpertLoads
from megatron.engine.fp8 import FirstStep, amax_histories
from megatron.engine.state import FP8_SCALARS, history_tensors, model_tensors, optimizer_tensors
from megatron.engine.step_graph import StepGradients, step_graph
from megatron.engine.tally import (
    COUNTS,
    check_counts,
    counts_ahead,
    evaluation,
    loss_and_metrics,
    step_report,
    step_sums,
)
from megatron.json_values import JsonObject, object_at
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.init import initialize_parameters
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, ModelBuild
from megatron.model.stage import PipelineStage
from megatron.mpu.context import ParallelContext
from megatron.mpu.scalar_sums import HostScalars, flags_on_device
from megatron.mpu.stage_plan import ranges_of_stage
from megatron.mpu.weight_gradients import WeightGradients
from megatron.optimizer.clip_grads import parameters_norm
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.optimizer import APPLIED, build_optimizer
from megatron.optimizer.param_groups import LayerRates
from megatron.optimizer.replicated_grads import check_replicated_agree, reduce_replicated
from megatron.optimizer.sharded_grads import ShardedGradBuffer
from megatron.optimizer.sharded_parameters import ShardedParameters
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.plan import PipelinePlan, plan_of_run
from megatron.pipeline.schedule import ScheduleName
from megatron.pipeline.tied import TiedParameters
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import Tokenizer

_DIVISORS = "counts before the step"  # where the labels are counted before the losses


class NativeEngine:
    """Owns the stage of this rank, its gradient buffers and its optimizer."""

    def __init__(
        self,
        config: RunConfig,
        task: PretrainTask,
        build: ModelBuild,
        tokenizer: Tokenizer,
        timers: Timers | None = None,
    ) -> None:
        self._config, self._task, self._build = config, task, build
        self._context = build.ctx
        self._timers = timers or Timers()
        self._has_proven_fp8 = build.fp8 is None
        self._has_proven_compiled = build.compiler is None
        self._batch_options = BatchOptions(config.data, tokenizer)
        self._graph = step_graph(config, build)
        pipeline = plan_of_run(config)
        specs = task.layers(config.model, build)
        ranges = stage_ranges(specs, pipeline, build.ctx.pp.size)
        sharding = _sharding(config.parallel, build.ctx)
        self._weights = (
            ShardedParameters(
                build.ctx.replicas,
                prefetch=config.parallel.overlap_param_gather,
                reshard_after_forward=config.parallel.reshard_after_forward,
            )
            if sharding.shards_parameters
            else None
        )

        def built(name: str, module: nn.Module) -> None:
            initialize_parameters(module, seed=config.training.seed, ctx=build.ctx, prefix=name)
            if self._weights is not None:
                # Before the next layer is built, so that no rank ever holds the whole of a model.
                self._weights.add(module.parameters())

        with torch.device(device.current()):
            self.stage = PipelineStage(
                specs,
                ranges_of_stage(ranges, build.ctx.pp.rank, build.ctx.pp.size),
                built=built,
                weights=self._weights,
            )
        self._histories = amax_histories(build, specs, self.stage)
        has_experts = config.model.has_experts
        self._loads = ExpertLoads(self.stage, config.model, build.ctx) if has_experts else None
        # Before the buffers, which put tied parameters into separate buckets.
        self._tied = TiedParameters(self.stage.tied_parameters(), build.ctx.pp)
        self._executor = Executor(
            # Not a method of this engine: a circle of references would outlive it.
            StageWork(
                self.stage.run,
                partial(_loss_of, task, build, self._weights, len(specs) - 1),
                pipeline.num_chunks,
            ),
            build.ctx.pp,
            schedule=pipeline.schedule,
            weight_gradients=_weight_gradients(self.stage, pipeline),
            timers=self._timers,
            overlaps=config.parallel.overlap_p2p_communication,
        )
        gradient_dtype: torch.dtype = getattr(torch, config.precision.gradient_precision.value)
        self._replica = DistributedDataParallel(
            self.stage,
            build.ctx.replicas,
            gradient_dtype=gradient_dtype,
            bucket_elements=config.parallel.ddp_bucket_size,
            fuse_accumulation=config.training.gradient_accumulation_fusion,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            sharding=sharding if self._weights is None else self._weights,
        )
        self.optimizer = build_optimizer(
            self._replica,
            optimizer=config.optimizer,
            precision=config.precision,
            ctx=build.ctx,
            decoupled=config.schedule.is_decoupled,
            width=config.model.width_multiplier,
            layer_rates=LayerRates.of_run(config),
        )

    @property
    def task(self) -> PretrainTask:
        """The name of the task."""
        return self._task

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss before its backward pass; reading it may wait."""
        return self.optimizer.loss_scale

    def train_step(self, batches: Iterator[RawBatch], plan: StepPlan) -> StepReport:
        """Do one optimizer step and wait for its report."""
        return self.start_step(batches, plan)()

    def start_step(
        self, batches: Iterator[RawBatch], plan: StepPlan, signals: Sequence[bool] = ()
    ) -> PendingReport:
        """Start one optimizer step over `plan.num_microbatches` micro-batches of this replica.

        Reduces gradients over replicas, and all scalars of the step over all ranks together. The
        host reads nothing that the device computes: what they decide is decided on the device.
        """
        graph = self._graph
        compute = self._compute if graph is None else partial(graph.gradients, self._compute)
        gradients, reduced, divisors = compute(
            map(device.upload, batches),
            plan,
            self.optimizer.device_loss_scale,
            flags_on_device(signals),
        )
        with self._timers("optimizer"):
            outcome = self.optimizer.update(
                gradients,
                reduced,
                plan.rates,
                # Where nothing counts, this makes the norm not finite, and so the update void.
                grad_multiplier=_nominal_tokens(plan) / reduced[COUNTS][0],
            )
            if self._histories is not None:
                self._histories.advance(outcome[APPLIED])
            if self._loads is not None:
                outcome |= self._loads.finish(reduced, outcome[APPLIED])
        return partial(self._report, HostScalars(outcome | divisors), plan)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[RawBatch], num_microbatches: int) -> EvaluationSum:
        """Sum the loss over `num_microbatches` of every replica, with dropout off."""
        if self._task.metrics:
            measure = loss_and_metrics(self._task, self._build)
            sums = self.measure(batches, num_microbatches, measure)
            return evaluation(sums, self._task, self._build)
        with evaluation_mode(self.stage):
            sums = self._executor.evaluate(self._microbatches(batches), num_microbatches)
        return evaluation(sums, self._task, self._build)

    @torch.no_grad()
    def measure(
        self, batches: Iterator[RawBatch], num_microbatches: int, measure: Measure
    ) -> list[Tensor]:
        """Return the values of `measure` for this replica's micro-batches, on the last stage."""
        pipeline = plan_of_run(self._config)
        work = StageWork(self.stage.run, measure, pipeline.num_chunks)
        reader = Executor(work, self._context.pp, schedule=pipeline.schedule)
        with evaluation_mode(self.stage):
            return reader.evaluate(self._microbatches(batches), num_microbatches)

    def state(self, *, optimizer: bool) -> EngineState:
        """Return the model, and the optimizer if asked, as named parts of whole tensors."""
        self._replica.wait_for_parameters()
        scalars: JsonObject = {}
        if optimizer:
            scalars = {"optimizer": self.optimizer.scalars()}
            if self._histories is not None:
                scalars[FP8_SCALARS] = self._histories.scalars()
        return EngineState(self.tensors(optimizer=optimizer), scalars)

    def tensors(self, *, optimizer: bool) -> tuple[ShardedTensor, ...]:
        """Return the tensors of `state`, on `meta` too; waits for nothing."""
        found = model_tensors(self.stage, self._context, self._weights)
        if optimizer:
            named = self.stage.named_parameters()
            found += optimizer_tensors(named, self.optimizer, self._context)
            if self._histories is not None:
                found += history_tensors(self._histories)
        return tuple(found)

    def restored(self, scalars: JsonObject, *, optimizer: bool) -> None:
        """Take over tensors that were filled in place: counts, loss scale, master weights."""
        if self._weights is not None:
            self._weights.gather()  # when they are next needed
        if optimizer:
            self.optimizer.restored(object_at(scalars, "optimizer"))
            if self._histories is not None:
                self._histories.restored(object_at(scalars, FP8_SCALARS))
        else:
            self.optimizer.refresh_masters()

    def live(self) -> None:
        """Return None: only DeepSpeed's engine saves in DeepSpeed's layout."""

    def diagnosis(self) -> StepDiagnosis:
        """Return what computes steps again, to find errors."""
        self._replica.wait_for_parameters()
        return StepDiagnosis(self.stage, self._context.world, self._repeat, self.values)

    def values(self, parameter: nn.Parameter) -> Tensor:
        """Return what this rank keeps of a parameter of its stage: all, or its elements, flat."""
        return self._replica.values(parameter)

    def params_norm(self) -> float:
        """Return the L2 norm of all parameters of the model, each counted once.

        Reduces over the model group.
        """
        self._replica.wait_for_parameters()
        named, weights = list(self.stage.named_parameters()), self._weights
        return parameters_norm(named, self._context, None if weights is None else weights.values)

    def check_replicas(self) -> None:
        """Compare what several ranks hold bit by bit: replicas, unsplit weights, tied weights."""
        self._replica.check_replicas_agree()
        named, values = self.stage.named_parameters(), self._replica.values
        check_replicated_agree(named, self._context.tp, values)
        self._tied.check_equal(values)

    def _compute(
        self,
        batches: Iterator[RawBatch],
        plan: StepPlan,
        loss_scale: Tensor | float,
        flags: Tensor,
    ) -> StepGradients:
        """Compute the gradients of a step and all scalars that decide about its update.

        As `step_graph.Compute` says: of what is given, the plan alone is read by the host.
        """
        self._replica.start_step(plan.num_microbatches)
        microbatches, scale, divisors = self._scaled(batches, plan, loss_scale)
        losses = self._train(microbatches, plan, scale)
        self._build.loss_state.end_step()
        with self._timers("grads-all-reduce"):
            self._replica.finish(before=self._reduce_held)
        sums = step_sums(losses, self._task, self._build, flags)
        if self._loads is not None:
            split = self._build.sequence_parallel
            self._loads.add_to(sums, sequence_parallel=split)
        with self._timers("optimizer"):
            gradients = self.optimizer.add_to(
                sums, with_zeros=self._config.logging.log_num_zeros_in_grad
            )
            return StepGradients(gradients, sums.reduce(), divisors)

    def _scaled(
        self, batches: Iterator[RawBatch], plan: StepPlan, loss_scale: Tensor | float
    ) -> tuple[Iterator[MicroBatch], float | Tensor, dict[str, Tensor]]:
        """Return the micro-batches of a step, the factor on their losses, and what it is made of.

        Sets that of the losses of routers, and of one that is computed with its gradients.

        Args:
            batches: on the device.
        """
        microbatches: Iterator[MicroBatch] = map(self._microbatch, batches)
        factor = loss_scale / _nominal_tokens(plan)
        scale = factor
        divisors: dict[str, Tensor] = {}
        several = len(self._task.losses) > 1
        if several or self._config.model.has_router_loss:
            ahead = [next(microbatches) for _ in range(plan.num_microbatches)]
            microbatches = iter(ahead)
            counts = divisors[_DIVISORS] = counts_ahead(self._task, ahead, self._context)
            # So that one division by the first's count is right: each counts different things,
            # and the loss of a router counts sequences.
            self._build.router_loss.value = factor * counts[0] / plan.global_batch_size
            scale = factor * counts[0] / counts if several else factor
        state = self._build.loss_state
        state.factor = None if several else scale
        state.lend = self._replica.gradients.unwritten
        return microbatches, scale, divisors

    def _repeat(
        self, batches: Sequence[RawBatch], plan: StepPlan
    ) -> Generator[tuple[int, list[Tensor]], None, None]:
        """Compute the passes of a step again; see `diagnosis.Repeat`. No state of the run changes.

        Gradients are of this rank alone, but where replicas share them out.
        """
        uploaded = map(device.upload, batches)
        microbatches, scale, _ = self._scaled(uploaded, plan, self.optimizer.device_loss_scale)
        of = samples_of_passes(plan, self._build)
        pipeline = plan_of_run(self._config)
        at_once = pipeline.num_stages if pipeline.num_chunks > 1 else 1  # as interleaving needs
        try:
            for first in range(0, plan.num_microbatches, at_once):
                self._replica.start_step()
                losses = self._executor.train(
                    microbatches, at_once, scale=scale, of=partial(_shifted, of, first)
                )
                if isinstance(self._replica.gradients, ShardedGradBuffer):
                    self._replica.finish(before=self._reduce_held)
                yield first, losses
        finally:
            build = self._build
            build.loss_state.end_step()
            for forget in (build.router_loss.taken, build.loss_state.taken_log_z):
                forget()
            for counted in (self._loads, self._histories):
                if counted is not None:
                    counted.forget()

    def _train(
        self, microbatches: Iterator[MicroBatch], plan: StepPlan, scale: float | Tensor
    ) -> list[Tensor]:
        """Run all passes of a step; in the first one check that FP8 and compiling are active."""
        count, of = plan.num_microbatches, samples_of_passes(plan, self._build)
        if self._has_proven_fp8:
            losses = self._executor.train(microbatches, count, scale=scale, of=of)
        else:
            policy = self._build.activations
            recomputes = policy.method is not None or bool(policy.modules)
            products = FirstStep(self.stage, recomputes=recomputes)
            losses = self._executor.train(microbatches, count, scale=scale, of=of)
            products.check(count)
            self._has_proven_fp8 = True
        if self._build.compiler is not None and not self._has_proven_compiled:
            self._build.compiler.check()
            self._has_proven_compiled = True
        return losses

    def _report(self, scalars: HostScalars, plan: StepPlan) -> StepReport:
        values = scalars.read()
        for name in (_DIVISORS, COUNTS):
            if name in values:
                check_counts(self._task, values[name])
        done = self.optimizer.report(values)
        return step_report(values, done, self._config.model, plan)

    def _reduce_held(self) -> None:
        """Sum gradients that several ranks of a replica share, before the sum over replicas."""
        reduce_replicated(self.stage.parameters(), self._context.tp)
        self._tied.sum_gradients()

    def _microbatches(self, batches: Iterator[RawBatch]) -> Iterator[MicroBatch]:
        return map(self._microbatch, map(device.upload, batches))

    def _microbatch(self, batch: RawBatch) -> MicroBatch:
        """Return the micro-batch of one on the device."""
        return self._task.batch(batch, self._batch_options)


def _loss_of(
    task: PretrainTask,
    build: ModelBuild,
    weights: ShardedParameters | None,
    last: int,
    carry: Carry,
    labels: Carry,
) -> LossSum:
    loss = task.loss(carry, labels, build)
    if weights is not None:  # which may be computed with those of the last layer
        weights.before_backward(loss.total, last)
    return loss


def _shifted(
    of: Callable[[int], AbstractContextManager[None]], first: int, microbatch: int
) -> AbstractContextManager[None]:
    return of(first + microbatch)


def _nominal_tokens(plan: StepPlan) -> int:
    """Return a divisor of losses: any would do; this one keeps half-precision gradients small."""
    return plan.global_batch_size * plan.seq_length


def _sharding(parallel: ParallelConfig, ctx: ParallelContext) -> ShardingStrategy:
    """Return what replicas share out: updates at most where there is one, which does them all."""
    sharding = parallel.sharding
    if sharding.shards_state and max(group.size for group in ctx.replicas.groups) == 1:
        log.info(
            "nothing is shared out over replicas: there is one replica of the model, and no other "
            "rank to share parameters or the optimizer's state with"
        )
        return ShardingStrategy.OPTIM
    return sharding


def _weight_gradients(stage: PipelineStage, pipeline: PipelinePlan) -> WeightGradients | None:
    """Return the queue of deferred weight gradients, if the schedule defers them."""
    if pipeline.schedule != ScheduleName.ZERO_BUBBLE or pipeline.num_stages == 1:
        return None
    queue = WeightGradients()
    repeated = set(stage.repeated_parameters())
    queue.adopt(parameter for parameter in stage.parameters() if parameter not in repeated)
    return queue
