"""The passes of a step as one CUDA graph (`--cuda-graph`): launched at once, not kernel by kernel.

What varies from step to step lies in memory that stays where it is and is filled before a launch:
batches, the loss scale, flags, and the number of the first sample, which dropout draws from. Of the
code of a step nothing runs again, so nothing in it may depend on what the host counts.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import device, log
from megatron.config.run import RunConfig
from megatron.engine.base import RawBatch, StepPlan
from megatron.errors import MachineError, first_line
from megatron.model.specs import ModelBuild
from megatron.mpu.random import RandomStreams

# Libraries choose their kernels, and ranks make their connections, in the first steps.
WARMUP_STEPS = 3
_FLAGS, _FIRST_SAMPLE, _LOSS_SCALE = "flags", "first sample", "loss scale"


class StepGradients(NamedTuple):
    """What the passes of a step come to, on the device: all that its update needs."""

    gradients: list[Tensor]  # of `MegatronOptimizer.add_to`
    sums: dict[str, Tensor]  # over all ranks
    divisors: dict[str, Tensor]


# Takes micro-batches on the device, the plan, the loss scale, and flags of the host [n] float64.
Compute = Callable[[Iterator[RawBatch], StepPlan, Tensor | float, Tensor], StepGradients]


class StepGraph:
    """Computes the gradients of steps: the first ones of a kind as usual, all others by a graph.

    A step of another kind (more micro-batches, other lengths) drops the graph and starts again.
    Ranks see the same kinds in the same order, so they capture in the same step.

    Args:
        streams: what passes draw from.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._kind: tuple[object, ...] | None = None
        self._inputs: list[dict[str, Tensor]] = []  # micro-batches, and last what is of the step
        self._steps = 0  # of this kind that were computed as usual
        self._graph: device.CapturedCall[StepGradients] | None = None

    def gradients(
        self,
        compute: Compute,
        batches: Iterator[RawBatch],
        plan: StepPlan,
        loss_scale: Tensor | float,
        flags: Tensor,
    ) -> StepGradients:
        """Return the gradients of a step, which the next call overwrites.

        Args:
            compute: computes them kernel by kernel, always the same function.
            batches: on the device, of which as many are read as the plan has.
        """
        first_sample = torch.full((), plan.first_sample, device=flags.device)
        of_step = {_FLAGS: flags, _FIRST_SAMPLE: first_sample}
        # What the host knows of a step is in the graph as it is.
        known: list[float] = [plan.global_batch_size, plan.seq_length]
        if isinstance(loss_scale, Tensor):
            of_step[_LOSS_SCALE] = loss_scale
        else:
            known.append(loss_scale)
        read = [dict(next(batches)) for _ in range(plan.num_microbatches)]
        self._fill([*read, of_step], known)
        if self._graph is None:
            if self._steps < WARMUP_STEPS:
                self._steps += 1
                return self._run(compute, plan, loss_scale)
            self._graph = _captured(lambda: self._run(compute, plan, loss_scale))
        self._graph.replay()
        return self._graph.result

    def _fill(self, inputs: list[dict[str, Tensor]], known: Sequence[float]) -> None:
        """Copy the values of a step to where they are read, which is new for a new kind of step."""
        shapes = [
            (name, tensor.shape, tensor.dtype) for named in inputs for name, tensor in named.items()
        ]
        kind = (len(inputs), *known, *shapes)
        if kind != self._kind:
            self._graph = None  # before its successor takes memory
            self._kind, self._steps = kind, 0
            self._inputs = [
                {name: tensor.clone() for name, tensor in named.items()} for named in inputs
            ]
            return
        for places, values in zip(self._inputs, inputs, strict=True):
            for name, place in places.items():
                place.copy_(values[name])

    def _run(self, compute: Compute, plan: StepPlan, loss_scale: Tensor | float) -> StepGradients:
        *batches, of_step = self._inputs
        with self._streams.counted_from(of_step[_FIRST_SAMPLE]):
            return compute(
                iter(batches),
                replace(plan, first_sample=0),
                of_step.get(_LOSS_SCALE, loss_scale),
                of_step[_FLAGS],
            )


def step_graph(config: RunConfig, build: ModelBuild) -> StepGraph | None:
    """Return the graph of a run's steps, before its model is made; None: they have none."""
    if not config.training.cuda_graph:
        return None
    if not device.can_capture():
        log.info("--cuda-graph has no effect on a CPU")
        return None
    device.leave_default_stream()
    return StepGraph(build.streams)


def _captured(run: Callable[[], StepGradients]) -> "device.CapturedCall[StepGradients]":
    start = perf_counter()
    try:
        graph = device.CapturedCall(run)
    except RuntimeError as error:
        if device.is_out_of_memory(error):
            raise
        raise MachineError(
            "--cuda-graph was asked for, and the passes of a step cannot be captured",
            found=first_line(error),
            fix="leave --cuda-graph out",
        ) from error
    log.info(
        f"--cuda-graph: the passes of a step are one graph from now on; capturing took "
        f"{perf_counter() - start:.1f} s"
    )
    return graph
