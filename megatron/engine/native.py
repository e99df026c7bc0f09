"""The native engine: tensor x data parallel training of a list of layers on one stage per rank.

Gradients are those of the mean loss over all counted tokens of the global batch, whatever the
micro-batches and replicas: each backward pass adds a sum over its own tokens, and one factor in the
optimizer divides by the count of all of them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron import device
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
from megatron.errors import DataError
from megatron.model.init import initialize_parameters
from megatron.model.specs import ModelBuild
from megatron.model.stage import Stage
from megatron.mpu.collectives import all_reduce
from megatron.optimizer.clip_grads import counted_here, global_norm
from megatron.optimizer.data_parallel import DistributedDataParallel
from megatron.optimizer.optimizer import build_optimizer
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
        with torch.device(device.current()):
            self.stage = Stage(task.layers(config.model, build))
        initialize_parameters(self.stage, seed=config.training.seed, ctx=build.ctx)
        gradient_dtype: torch.dtype = getattr(torch, config.precision.gradient_precision.value)
        self._replica = DistributedDataParallel(
            self.stage, build.ctx.dp, gradient_dtype=gradient_dtype
        )
        self.optimizer = build_optimizer(
            self.stage, optimizer=config.optimizer, precision=config.precision, ctx=build.ctx
        )

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by before its backward pass."""
        return self.optimizer.loss_scale

    def train_step(self, batches: Iterator[RawBatch], plan: StepPlan) -> StepReport:
        """Do one optimizer step over `plan.num_microbatches` micro-batches of this replica.

        Reduces gradients and the loss over the data-parallel group.
        """
        self.stage.train()
        self._replica.zero_grad()
        # Any constant would do here; this one keeps half-precision gradients near their mean.
        nominal_tokens = plan.global_batch_size * self._config.data.seq_length
        scale = self.loss_scale / nominal_tokens
        sums: list[Tensor] = []
        for _ in range(plan.num_microbatches):
            with self._timers("batch-generator"):
                inputs, labels = self._next(batches)
            with self._timers("forward-compute"):
                loss = self._task.loss(self.stage(inputs), labels, self._build)
            with self._timers("backward-compute"):
                torch.autograd.backward(loss.total * scale)
            sums.append(torch.stack([loss.total.detach(), loss.count.detach()]))
        with self._timers("grads-all-reduce"):
            self._replica.all_reduce()
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
        sums = []
        for _ in range(num_microbatches):
            inputs, labels = self._next(batches)
            loss = self._task.loss(self.stage(inputs), labels, self._build)
            sums.append(torch.stack([loss.total, loss.count]))
        total, count = self._reduced(sums)
        return EvaluationSum(total, round(count))

    def state(self, *, optimizer: bool) -> EngineState:
        """The model, and the optimizer if asked, as named parts of whole tensors."""
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
        named = list(self.stage.named_parameters())
        mine = counted_here(named, self._context)
        return global_norm([p.detach() for (_, p), here in zip(named, mine) if here], self._context)

    def check_replicas(self) -> None:
        """Compare the parameters of the replicas bit by bit over the data-parallel group."""
        self._replica.check_replicas_agree()

    def _next(self, batches: Iterator[RawBatch]) -> MicroBatch:
        # From pinned memory the copy to a GPU runs beside the kernels that were launched before.
        here = device.current()
        raw = {name: tensor.to(here, non_blocking=True) for name, tensor in next(batches).items()}
        return self._task.batch(raw, self._batch_options)

    def _reduced(self, sums: list[Tensor]) -> tuple[float, float]:
        """Total and count over all micro-batches and replicas, in float64."""
        both = all_reduce(torch.stack(sums).double().sum(0), self._context.dp)
        total, count = both.tolist()
        return total, count
