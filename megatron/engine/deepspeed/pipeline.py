"""The DeepSpeed engine for models in pipeline stages: PP x TP x DP with ZeRO 0 and 1.

The list of layers is the native engine's, and so are cuts, initial values, recomputation and the
numbers of a step: gradients are those of the mean loss over all counted tokens of the global batch.
DeepSpeed's `PipelineEngine` trains whole batches and divides by micro-batches and replicas, so the
tokens of a step are counted before it begins.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.config.run import RunConfig
from megatron.engine.base import (
    Measure,
    PendingReport,
    PretrainTask,
    RawBatch,
    StepPlan,
    samples_of_passes,
)
from megatron.engine.cuts import StageCut, stage_ranges
from megatron.engine.deepspeed.engine import DeepSpeedEngine, json_for_deepspeed
from megatron.engine.deepspeed.interface import PipelineRuntime
from megatron.engine.deepspeed.start import quietly
from megatron.engine.tally import check_counts, counts_ahead
from megatron.errors import ConfigError
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import PipelineStage
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext
from megatron.pipeline.plan import PipelinePlan, plan_of_run
from megatron.pipeline.schedule import ScheduleName
from megatron.pipeline.tied import TiedParameters

GradientOf = Callable[[Parameter], Tensor | None]


class DeepSpeedPipelineEngine(DeepSpeedEngine):
    """Owns the stage of this rank, which DeepSpeed's pipeline runs."""

    runtime: PipelineRuntime

    def start_step(
        self, batches: Iterator[RawBatch], plan: StepPlan, signals: Sequence[bool] = ()
    ) -> PendingReport:
        """Do one optimizer step over `plan.num_microbatches` micro-batches of this replica."""
        count = plan.num_microbatches
        with self._timers("batch-generator"):
            micro_batches = [self._next(batches) for _ in range(count)]
        counts = counts_ahead(self._task, micro_batches, self._context)
        check_counts(self._task, counts.tolist())
        self._updates.begin(count, plan.rates)
        # DeepSpeed averages over replicas, and its pipeline over micro-batches.
        factors = self._updates.loss_factor * self._context.dp.size * count / counts
        self._weigh_router_losses(plan)
        with self._loss.multiplied_by(factors) as sums:
            self.runtime.train_on(micro_batches, samples_of_passes(plan, self._build))
        return self._reported(sums, self._updates.outcome(), plan, signals)

    def measure(
        self, batches: Iterator[RawBatch], num_microbatches: int, measure: Measure
    ) -> list[Tensor]:
        """Return the values of `measure` for this replica's micro-batches, on the last stage."""
        micro_batches = [self._next(batches) for _ in range(num_microbatches)]
        with self._loss.replaced_by(measure) as found:
            self.runtime.evaluate_on(micro_batches)
        return found

    def check_replicas(self) -> None:
        """Compare what several ranks hold bit by bit: replicas, unsplit weights, tied weights."""
        super().check_replicas()
        self._tied.check_equal()

    def _build_model(self) -> nn.Module:
        # Imported here because they import DeepSpeed, which has been brought up by now.
        from megatron.engine.deepspeed.layers import LayersPipe

        config, ctx = self._config, self._context
        specs = self._task.layers(config.model, self._build)
        self._loss = TokenLoss(self._task, self._build)
        cut = _cut(config, specs, self.plan.partition_method, ctx)
        with quietly():
            model = LayersPipe(specs, ctx, cut=cut, seed=config.training.seed, loss=self._loss)
        self.stage: PipelineStage = model.stage
        # Before the gradient buffers, which put tied parameters into separate buckets.
        self._tied = TiedGradients(self.stage, ctx)
        return model

    def _named_of(self, model: nn.Module) -> tuple[tuple[str, Parameter], ...]:
        del model  # registers them under DeepSpeed's names
        return tuple(self.stage.named_parameters())

    def _start(self, model: nn.Module) -> PipelineRuntime:
        from megatron.engine.deepspeed.layers import LayersPipe
        from megatron.engine.deepspeed.pipe_engine import PatchedPipelineEngine

        assert isinstance(model, LayersPipe)  # noqa: S101  # invariant: of `_build_model`
        return PatchedPipelineEngine(
            model,
            self._updates.torch_optimizer,
            [parameter for _, parameter in self.named],
            json=json_for_deepspeed(self.plan),
            held=self._tied,
            clock=self._timers,
        )


class TokenLoss:
    """The loss as DeepSpeed calls it; keeps sums and counts for the step's report."""

    def __init__(self, task: PretrainTask, build: ModelBuild) -> None:
        self._task, self._build = task, build
        self._measure: Measure | None = None
        self._factors: Tensor | None = None
        self._sums: list[Tensor] = []

    @contextmanager
    def multiplied_by(self, factors: Tensor) -> Iterator[list[Tensor]]:
        """Multiply the losses inside the block by `factors`; yields the list of their sums."""
        self._factors, self._sums = factors, []
        yield self._sums
        self._factors = None

    @contextmanager
    def replaced_by(self, measure: Measure) -> Iterator[list[Tensor]]:
        """Compute `measure` instead of the loss inside the block; yields the list of results."""
        self._measure, self._sums = measure, []
        yield self._sums
        self._measure = None

    def __call__(self, carry: Carry, labels: Carry) -> Tensor:
        """Return the sum of the losses of one micro-batch, multiplied; one number."""
        if self._measure is not None:
            total, count = self._measure(carry, labels)
            self._sums.append(torch.stack([total.detach(), count.detach()]))
            return total.sum()
        assert self._factors is not None  # noqa: S101  # invariant: DeepSpeed calls it in a step
        total, count = self._task.loss(carry, labels, self._build)
        self._sums.append(torch.stack([total.detach(), count.detach()]))
        return torch.sum(total * self._factors.to(total.dtype))


class TiedGradients:
    """The gradients of weights that several stages hold: one sum with the same bits on all.

    DeepSpeed sums them over stages too, but not where it adds up those of fp16, and then averages
    over replicas in buckets that differ between stages, which from three replicas on may round
    differently: copies of one weight would part, a bit at a time.
    """

    def __init__(self, stage: PipelineStage, ctx: ParallelContext) -> None:
        self._tied = TiedParameters(stage.tied_parameters(), ctx.pp)
        self._shared = [stage.get_parameter(name) for name in self._tied.names]
        self._replicas = ctx.dp

    def __call__(self, gradient_of: GradientOf) -> None:
        """Sum them, in place of `gradient_of`; DeepSpeed averages over replicas after this."""
        found = {parameter: gradient_of(parameter) for parameter in self._shared}
        for gradient in found.values():
            assert gradient is not None  # noqa: S101  # invariant: a backward pass has been
            if self._replicas.size > 2:  # of two, a + b is b + a
                all_reduce(gradient, self._replicas)
                if not self._replicas.is_first:
                    gradient.zero_()  # adding nothing to the sum is exact in any order
        with _as_main_grad(found):
            self._tied.sum_gradients()

    def check_equal(self) -> None:
        """Compare the weights bit by bit; NumericsError names those that differ."""
        self._tied.check_equal()


@contextmanager
def _as_main_grad(gradients: Mapping[Parameter, Tensor | None]) -> Iterator[None]:
    """Set `gradients` as the `main_grad` of their parameters inside the block."""
    before = {parameter: vars(parameter).get("main_grad") for parameter in gradients}
    for parameter, gradient in gradients.items():
        vars(parameter)["main_grad"] = gradient
    yield
    for parameter, own in before.items():
        if own is None:
            del vars(parameter)["main_grad"]
        else:
            vars(parameter)["main_grad"] = own


def _cut(
    config: RunConfig,
    specs: tuple[LayerSpec, ...],
    method: str | None,
    ctx: ParallelContext,
) -> StageCut:
    """Return the stage boundaries: the native engine's, unless DeepSpeed's method is chosen."""
    pipeline = plan_of_run(config)
    _refuse_what_deepspeed_cannot(pipeline)
    ranges = stage_ranges(specs, pipeline, ctx.pp.size)  # raises the errors of the flags too
    if method is None or method == "best":  # DeepSpeed's default in JSON, which it never reads
        return StageCut(ranges)
    if method.lower() not in ("uniform", "parameters") and not method.lower().startswith("type:"):
        raise ConfigError(
            "DeepSpeed cuts models into pipeline stages in no such way",
            found=f"--pp-partition-method {method}",
            fix="use uniform, parameters or type:REGEX, or leave it out: stages are then those of "
            "the native engine",
        )
    return StageCut(None, method)


def _refuse_what_deepspeed_cannot(pipeline: PipelinePlan) -> None:
    if pipeline.num_chunks > 1:
        raise ConfigError(
            "DeepSpeed's pipeline has one part of the model on each rank",
            found=f"{pipeline.num_chunks} virtual stages on each rank, --deepspeed",
            fix="leave out the flags of virtual stages, or --deepspeed",
        )
    if pipeline.schedule not in (ScheduleName.NONE, ScheduleName.ONE_F_ONE_B):
        raise ConfigError(
            "DeepSpeed's pipeline works in one order only",
            found=f"--pipeline-schedule {pipeline.schedule}, --deepspeed",
            fix="leave out --pipeline-schedule, or --deepspeed",
        )
