"""DeepSpeed's `PipelineEngine`, corrected where it fails for this program's models.

Order of work, messages, reductions over replicas and the update are DeepSpeed's. Corrected are the
gradients of weights that several stages hold, carries of several floating tensors, activations
whose shapes change, and memory that it shares between tensors of different types. Importing this
module imports DeepSpeed: do so where a run asks for it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.nn import Parameter

from megatron.engine.base import MicroBatch
from megatron.engine.deepspeed.layers import LayersPipe
from megatron.json_values import JsonValue
from megatron.mpu.autograd import FunctionContext

Signature = tuple[tuple[torch.Size, torch.dtype], ...]


class ReduceTiedGradients(Protocol):
    """Sums the gradients of what several stages hold, in place; all ranks call it together."""

    def __call__(self, gradient_of: Callable[[Parameter], Tensor | None]) -> None:
        """Sum the gradients in place; `gradient_of` returns the accumulated one."""


class PatchedPipelineEngine(PipelineEngine):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's engine for a `PipelineModule`, with its errors corrected.

    Args:
        clock: a timer by its name.
    """

    grad_layer: Any  # DeepSpeed's room for received gradients

    def __init__(
        self,
        model: LayersPipe,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Parameter],
        *,
        json: dict[str, JsonValue],
        held: ReduceTiedGradients,
        clock: Callable[[str], AbstractContextManager[object]],
    ) -> None:
        self._held, self._clock = held, clock
        self._shapes: set[Signature] = set()
        self._of: Callable[[int], AbstractContextManager[object]] = nullcontext
        self._forward_passes = 0
        super().__init__(
            args=None,
            model=model,
            optimizer=optimizer,
            model_parameters=list(parameters),
            mpu=model.mpu(),
            config=json,
            config_class=DeepSpeedConfig(json, model.mpu()),
        )

    def train_on(
        self,
        batches: Sequence[MicroBatch],
        of: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        """Do one optimizer step; gradients are the mean of the micro-batches' and replicas'.

        Args:
            of: the context of the forward pass of a micro-batch, by its number.
        """
        count = len(batches)
        self.set_train_batch_size(
            count * self.train_micro_batch_size_per_gpu() * self.dp_world_size
        )
        if hasattr(self.optimizer, "gradient_accumulation_steps"):
            self.optimizer.gradient_accumulation_steps = count
        self.module.train()
        self._of, self._forward_passes = of, 0
        self._run(batches, self._train_schedule())
        self._of = nullcontext

    @torch.no_grad()
    def evaluate_on(self, batches: Sequence[MicroBatch]) -> None:
        """Run forward passes alone, with dropout off."""
        self.module.eval()
        self._run(batches, self._inference_schedule(len(batches)))

    def _run(self, batches: Sequence[MicroBatch], steps: schedule.PipeSchedule) -> None:
        # What train_batch and eval_batch do, but for their means over micro-batches, which they
        # would reduce, print and hand to monitors: means over tokens are what is reported.
        self._expect(batches)
        self.total_loss = self.total_additional_losses = None
        self._compute_loss = True
        self.set_dataiterator(iter(batches))
        self._exec_schedule(steps)

    def _expect(self, batches: Sequence[MicroBatch]) -> None:
        """Reset the message shapes where those of the next messages may differ.

        DeepSpeed sends shapes with the first message and assumes them from then on.
        """
        shapes = {tuple((t.shape, t.dtype) for t in batch.inputs) for batch in batches}
        self.dynamic_shape = len(shapes) > 1  # a header goes before every message
        if shapes != self._shapes:
            self.reset_activation_shape()
        self._shapes = shapes

    def _allocate_or_extend_buffers(
        self, idx: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        # DeepSpeed receives activations and gradients in the same memory, which it takes for
        # large enough by elements, whatever the dtypes.
        del idx
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def _timed(self, name: str) -> AbstractContextManager[object]:
        return self._clock(name) if self.module.training else nullcontext()  # as natively

    def _exec_forward_pass(self, buffer_id: int) -> None:
        # A stage passes micro-batches forward in their order.
        with self._timed("forward-compute"), self._of(self._forward_passes):
            super()._exec_forward_pass(buffer_id)
        self._forward_passes += 1

    def _exec_backward_pass(self, buffer_id: int) -> None:
        with self._timed("backward-compute"):
            if self.is_last_stage():
                super()._exec_backward_pass(buffer_id)
                return
            outputs = self.pipe_buffers["outputs"][buffer_id]
            floating = [tensor for tensor in outputs if tensor.is_floating_point()]
            if len(floating) == 1 and floating[0].requires_grad:
                super()._exec_backward_pass(buffer_id)
                return
            received = self.grad_layer
            pairs = [(t, g) for t, g in zip(floating, received) if t.requires_grad]
            joint: Tensor = _Joint.apply(  # type: ignore[no-untyped-call]
                [g for _, g in pairs], *(t for t, _ in pairs)
            )
            self.pipe_buffers["outputs"][buffer_id] = joint
            self.grad_layer = torch.ones_like(joint)
            super()._exec_backward_pass(buffer_id)
            self.grad_layer = received

    def _exec_send_grads(self, buffer_id: int) -> None:
        for tensor in self.pipe_buffers["inputs"][buffer_id]:
            if tensor.is_floating_point() and tensor.grad is None:  # nothing here depends on it
                tensor.grad = torch.zeros_like(tensor)
        super()._exec_send_grads(buffer_id)

    def _exec_reduce_tied_grads(self) -> None:
        with self._timed("grads-all-reduce"):
            self._held(_accumulated)

    def _exec_reduce_grads(self) -> None:
        with self._timed("grads-all-reduce"):
            super()._exec_reduce_grads()

    def _exec_optimizer_step(self, lr_kwargs: object = None) -> None:
        with self._timed("optimizer"):
            super()._exec_optimizer_step(lr_kwargs)

    # DeepSpeed looks its methods up here, and not by name.
    _INSTRUCTION_MAP = PipelineEngine._INSTRUCTION_MAP | {
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.SendGrad: _exec_send_grads,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
        schedule.OptimizerStep: _exec_optimizer_step,
    }


def _accumulated(parameter: Parameter) -> Tensor | None:
    """Return the sum of the gradients of all micro-batches, wherever the optimizer stores it.

    Our buffer at stage 0; at stage 1 DeepSpeed's for bf16, its for other half precision (which its
    own sum over stages forgets), or the gradient itself.
    """
    for name in ("main_grad", "_hp_grad", "grad_accum", "grad"):
        found: Tensor | None = getattr(parameter, name, None)
        if found is not None:
            return found
    return None


class _JointContext(FunctionContext):
    gradients: list[Tensor]


class _Joint(torch.autograd.Function):
    """A scalar whose backward pass enters several tensors with given gradients.

    One pass, because a second one would find shared parts of the graph freed, or recompute them.
    """

    @staticmethod
    def forward(ctx: _JointContext, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: _JointContext, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, *ctx.gradients)
