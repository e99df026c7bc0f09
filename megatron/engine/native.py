"""The native engine: tensor x pipeline x data parallel training of a list of layers.

Gradients are those of the mean loss over all counted tokens of the global batch, whatever the
micro-batches and replicas: each backward pass adds a sum over its own tokens, and one factor in the
optimizer divides by the count of all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from megatron import device, log
from megatron.config.run import RunConfig
from megatron.engine.base import (
    BatchOptions,
    EngineState,
    EvaluationSum,
    MicroBatch,
    PretrainTask,
    RawBatch,
    StepPlan,
    StepReport,
)
from megatron.engine.state import model_tensors, optimizer_tensors
from megatron.errors import ConfigError, DataError
from megatron.model.init import initialize_parameters
from megatron.model.losses import LossSum
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import Stage, blocks_of, parameters_of_layers
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group
from megatron.mpu.stage_plan import (
    LayerRange,
    even_counts,
    plan_stages,
    ranges_of_counts,
    ranges_of_stage,
)
from megatron.mpu.weight_gradients import WeightGradients
from megatron.optimizer.clip_grads import counted_here, global_norm
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.optimizer import build_optimizer
from megatron.optimizer.replicated_grads import check_replicated_agree, reduce_replicated
from megatron.pipeline.executor import Executor, StageWork
from megatron.pipeline.plan import PipelinePlan, pipeline_plan
from megatron.pipeline.schedule import ZERO_BUBBLE
from megatron.pipeline.tied import TiedParameters
from megatron.timers import Timers
from megatron.tokenizer.tokenizer import Tokenizer


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
        self._batch_options = BatchOptions(config.data, tokenizer)
        pipeline = pipeline_plan(config.parallel, config.model.num_layers)
        specs = task.layers(config.model, build)
        with torch.device(device.current()):
            self.stage = Stage(specs, _ranges(specs, pipeline, build.ctx.pp))
        initialize_parameters(self.stage, seed=config.training.seed, ctx=build.ctx)
        # Before the buffers, which put what is tied into buckets of its own.
        self._tied = TiedParameters(self.stage.tied_parameters(), build.ctx.pp)
        self._executor = Executor(
            # Not a method of this engine: a circle of references would outlive it.
            StageWork(self.stage.run, partial(_loss_of, task, build), pipeline.num_chunks),
            build.ctx.pp,
            schedule=pipeline.schedule,
            weight_gradients=_weight_gradients(self.stage, pipeline),
            timers=self._timers,
        )
        if config.parallel.use_distributed_optimizer and build.ctx.dp.size == 1:
            log.info(
                "--use-distributed-optimizer has no effect with one replica of the model: there is "
                "no other rank to share the optimizer's state with"
            )
        gradient_dtype: torch.dtype = getattr(torch, config.precision.gradient_precision.value)
        self._replica = DistributedDataParallel(
            self.stage,
            build.ctx.dp,
            gradient_dtype=gradient_dtype,
            bucket_elements=config.parallel.ddp_bucket_size,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            distributed_optimizer=config.parallel.use_distributed_optimizer,
            overlap_param_gather=config.parallel.overlap_param_gather,
        )
        self.optimizer = build_optimizer(
            self._replica, optimizer=config.optimizer, precision=config.precision, ctx=build.ctx
        )

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by before its backward pass."""
        return self.optimizer.loss_scale

    def train_step(self, batches: Iterator[RawBatch], plan: StepPlan) -> StepReport:
        """Do one optimizer step over `plan.num_microbatches` micro-batches of this replica.

        Reduces gradients over replicas, and the loss over replicas and stages.
        """
        self.stage.train()
        self._replica.start_step(plan.num_microbatches)
        # Any constant would do here; this one keeps half-precision gradients near their mean.
        nominal_tokens = plan.global_batch_size * self._config.data.seq_length
        scale = self.loss_scale / nominal_tokens
        sums = self._executor.train(
            map(self._next, repeat(batches)), plan.num_microbatches, scale=scale
        )
        with self._timers("grads-all-reduce"):
            self._replica.finish(before=self._reduce_held)
        total, count = self._reduced(sums)
        if count == 0:
            raise DataError(
                "a global batch has no token that counts",
                found="a loss mask of zeros",
                fix="look at --eod-mask-loss and at the training data",
            )
        with self._timers("optimizer"):
            done = self.optimizer.step(
                learning_rate=plan.learning_rate,
                weight_decay=plan.weight_decay,
                grad_multiplier=nominal_tokens / count,
                with_zeros=self._config.logging.log_num_zeros_in_grad,
            )
        return StepReport(
            loss=total / count,
            grad_norm=done.grad_norm,
            skipped=not done.applied,
            overflow=done.overflow,
            loss_scale=done.loss_scale,
            num_zeros=done.num_zeros,
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterator[RawBatch], num_microbatches: int) -> EvaluationSum:
        """Sum the loss over `num_microbatches` of every replica, with dropout off."""
        self.stage.eval()
        sums = self._executor.evaluate(map(self._next, repeat(batches)), num_microbatches)
        total, count = self._reduced(sums)
        return EvaluationSum(total, round(count))

    def state(self, *, optimizer: bool) -> EngineState:
        """The model, and the optimizer if asked, as named parts of whole tensors."""
        self._replica.wait_for_parameters()
        tensors = model_tensors(self.stage, self._context)
        scalars: dict[str, Any] = {}
        if optimizer:
            tensors += optimizer_tensors(self.stage, self.optimizer, self._context)
            scalars = {"optimizer": self.optimizer.scalars()}
        return EngineState(tuple(tensors), scalars)

    def restored(self, scalars: Mapping[str, Any], *, optimizer: bool) -> None:
        """Take over tensors that were filled in place: counts, loss scale, master weights."""
        if optimizer:
            self.optimizer.load_state(self.optimizer.named_state(), scalars["optimizer"])
        else:
            self.optimizer.refresh_masters()

    def params_norm(self) -> float:
        """L2 norm of the whole model's parameters, each counted once. Reduces over the model."""
        self._replica.wait_for_parameters()
        named = list(self.stage.named_parameters())
        mine = counted_here(named, self._context)
        return global_norm([p.detach() for (_, p), here in zip(named, mine) if here], self._context)

    def check_replicas(self) -> None:
        """Compare what several ranks hold bit by bit: replicas, unsplit weights, tied weights."""
        self._replica.check_replicas_agree()
        check_replicated_agree(self.stage.named_parameters(), self._context.tp)
        self._tied.check_equal()

    def _reduce_held(self) -> None:
        """Sum the gradients of what several ranks of one replica hold, before the replicas' sum."""
        reduce_replicated(self.stage.parameters(), self._context.tp)
        self._tied.sum_gradients()

    def _next(self, batches: Iterator[RawBatch]) -> MicroBatch:
        # From pinned memory the copy to a GPU runs beside the kernels that were launched before.
        here = device.current()
        raw = {name: tensor.to(here, non_blocking=True) for name, tensor in next(batches).items()}
        return self._task.batch(raw, self._batch_options)

    def _reduced(self, sums: list[Tensor]) -> tuple[float, float]:
        """Total and count over all micro-batches and replicas, in float64, on every stage."""
        mine = torch.zeros(2, dtype=torch.float64, device=device.current())
        if sums:  # the last stage has the losses
            mine = torch.stack(sums).double().sum(0)
        both = all_reduce(all_reduce(mine, self._context.dp), self._context.pp)
        total, count = both.tolist()
        return total, count


def _loss_of(task: PretrainTask, build: ModelBuild, carry: Carry, labels: Carry) -> LossSum:
    return task.loss(carry, labels, build)


def _ranges(
    specs: Sequence[LayerSpec], pipeline: PipelinePlan, stages: Group
) -> tuple[LayerRange, ...]:
    """The layers of this rank, chunk by chunk."""
    if pipeline.num_stages != stages.size:
        raise ConfigError(
            "the pipeline is for another number of ranks",
            found=f"--pipeline-model-parallel-size {pipeline.num_stages}, "
            f"{stages.size} ranks in the pipeline group",
            fix="build the parallel context with the sizes of the run's flags",
        )
    blocks = blocks_of(specs)
    costs = parameters_of_layers(specs) if pipeline.by_parameters else pipeline.costs
    if costs is not None:
        if len(costs) != len(specs):
            raise ConfigError(
                "the costs are not of the layers of this model",
                found=f"{len(costs)} in --pipeline-layer-costs, {len(specs)} layers: "
                + ", ".join(spec.name for spec in specs),
                fix=f"give {len(specs)} numbers, one for each of them",
            )
        ranges = plan_stages(costs, stages.size, num_chunks=pipeline.num_chunks, blocks=blocks)
    elif blocks.size != sum(pipeline.counts):
        # A list whose blocks are not marked, or not as many as the flag says: all layers count.
        even = even_counts(sum(pipeline.counts), stages.size, num_chunks=pipeline.num_chunks)
        if pipeline.counts != even:
            raise ConfigError(
                "layers are counted for each pipeline stage, but not marked in the model's list",
                found=f"{blocks.size} layers that count, --num-layers {sum(pipeline.counts)}",
                fix="give the layers that are meant block=True, or leave out the flags that "
                "count layers per stage",
            )
        ranges = plan_stages([1.0] * len(specs), stages.size, num_chunks=pipeline.num_chunks)
    else:
        ranges = ranges_of_counts(pipeline.counts, blocks=blocks, num_layers=len(specs))
    return ranges_of_stage(ranges, stages.rank, stages.size)


def _weight_gradients(stage: Stage, pipeline: PipelinePlan) -> WeightGradients | None:
    """Where gradients of weights wait for their turn, if the schedule gives them one."""
    if pipeline.schedule != ZERO_BUBBLE or pipeline.num_stages == 1:
        return None
    queue = WeightGradients()
    repeated = set(stage.repeated_parameters())
    queue.adopt(parameter for parameter in stage.parameters() if parameter not in repeated)
    return queue
