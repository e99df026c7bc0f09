"""Time each layer of a GPT, forward and backward, for `--pipeline-layer-costs`.

`python -m tools.planning.measure_layer_costs <the flags of the launch of pretrain_gpt.py>`, on the
machine that will train; under torchrun with --tensor-model-parallel-size N on N ranks, of which the
slowest counts. One layer is built at a time, so a model that needs a pipeline can be measured on a
device that could not hold it; a few of the transformer layers, which are alike, are timed for all.
Corpora and checkpoints are not touched.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from megatron import device
from megatron.arguments import parse_args
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.initialize import initialize_megatron, shutdown_megatron
from megatron.model.gpt_model import gpt_carry, gpt_layers, gpt_loss
from megatron.model.init import initialize_parameters
from megatron.model.specs import Carry, LayerSpec, ModelBuild
from megatron.model.stage import PipelineStage, blocks_of, ends_of_blocks
from megatron.model_build import model_build
from megatron.mpu.collectives import all_reduce
from megatron.mpu.random import Samples
from megatron.mpu.stage_plan import LayerRange, plan_stages, ranges_of_counts
from megatron.pipeline.plan import pipeline_plan
from megatron.preflight.checks import MODEL_CHECKS
from megatron.program import run_program
from pretrain_gpt import TOKENIZER_TYPE

DIGITS = 3  # significant ones of a cost; clocks are not better than that
BLOCKS_TIMED = 3  # transformer layers, whose passes together give the median of each


class LayerTime(NamedTuple):
    """The time of one layer for one micro-batch, in milliseconds."""

    name: str
    forward: float
    backward: float

    @property
    def cost(self) -> float:
        """The time of both passes, as `--pipeline-layer-costs` expects it."""
        return float(f"{self.forward + self.backward:.{DIGITS}g}")


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags of a training run, time its layers, and print the flag to use."""
    # Megatron's scripts for GPT name no tokenizer: it is GPT-2's unless they do.
    config = parse_args(
        argv,
        extra_args_provider=_own_flags,
        args_defaults={"tokenizer_type": TOKENIZER_TYPE},
    )
    repeats = int(config.extra["repeats"])
    if repeats < 1:
        raise ConfigError(
            "layers cannot be timed without running them",
            found=f"--repeats {repeats}",
            fix="use --repeats 5, or another number from 1",
        )
    runtime = initialize_megatron(_without_pipeline(config), checks=MODEL_CHECKS)
    try:
        build = model_build(runtime)
        times = measure(config, build, repeats=repeats)
        if runtime.context.rank == 0:
            print(report(config, gpt_layers(config.model, build), times))
    finally:
        shutdown_megatron()


def measure(config: RunConfig, build: ModelBuild, *, repeats: int) -> list[LayerTime]:
    """Return the median time of every layer, in order: that of the slowest rank, on all ranks.

    The last layer's includes the loss.
    """
    specs = gpt_layers(config.model, build)
    blocks = blocks_of(specs)
    # Blocks of one kind differ by noise alone: their first ones are timed together.
    kinds: dict[bool, list[int]] = {}
    for at, has_experts in enumerate(config.model.expert_layers, blocks.start):
        kinds.setdefault(has_experts, []).append(at)
    timed = {at for alike in kinds.values() for at in alike[:BLOCKS_TIMED]}
    carry, labels = _first_carry(config, build)
    passes: dict[int, list[tuple[float, float]]] = {}
    build.router_loss.value = 1.0  # as good as any: how long it takes does not depend on it
    for at in sorted(timed | set(range(len(specs))) - set(range(*blocks))):
        with torch.device(device.current()):
            layer = PipelineStage(specs, [LayerRange(at, at + 1)])
        initialize_parameters(layer, seed=config.training.seed, ctx=build.ctx)
        layer.train()
        targets = labels if at == len(specs) - 1 else None
        with build.streams.of(Samples(0, config.training.micro_batch_size)):
            passes[at] = [_timed(layer, build, carry, targets) for _ in range(repeats + 1)][1:]
            with torch.no_grad():
                carry = layer(carry)
    for alike in kinds.values():
        of_all = [one for at in alike for one in passes.get(at, ())]
        passes |= dict.fromkeys(alike, of_all)
    return [LayerTime(spec.name, *_slowest(passes[at], build)) for at, spec in enumerate(specs)]


def report(config: RunConfig, specs: Sequence[LayerSpec], times: Sequence[LayerTime]) -> str:
    """Return a table of the layers, the flag to use, and the stages that result from it."""
    width = max(len(time.name) for time in times)
    lines = [f"{'layer':<{width}}  forward ms  backward ms"]
    lines += [f"{t.name:<{width}}  {t.forward:>10.3f}  {t.backward:>11.3f}" for t in times]
    costs = [time.cost for time in times]
    lines += ["", "--pipeline-layer-costs " + " ".join(f"{cost:g}" for cost in costs)]
    parallel = config.parallel
    if parallel.pipeline_model_parallel_size > 1:
        plan = pipeline_plan(_by_layers(parallel), config.num_blocks)
        blocks, virtual = blocks_of(specs), plan.num_stages * plan.num_chunks
        counted = ranges_of_counts(plan.counts, ends=ends_of_blocks(specs), num_layers=len(specs))
        by_cost = plan_stages(costs, plan.num_stages, num_chunks=plan.num_chunks, blocks=blocks)
        lines += ["", f"{virtual} stages; the costliest takes, as a multiple of the mean:"]
        lines += [
            f"  {name}: {_unevenness(costs, ranges):.3f}, with {_sizes(ranges)} layers of the list"
            for name, ranges in (("by number of layers", counted), ("by these costs", by_cost))
        ]
    return "\n".join(lines)


def _own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument(
        "--repeats", type=int, default=5, help="how often each layer is timed, after a first time"
    )
    return parser


def _without_pipeline(config: RunConfig) -> RunConfig:
    """Return the run without pipeline; layers are built one at a time on every rank."""
    parallel = config.parallel
    alone = ParallelConfig(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        tp_comm_overlap=parallel.tp_comm_overlap,
    )
    return replace(config, parallel=alone)


def _by_layers(parallel: ParallelConfig) -> ParallelConfig:
    """Return the stages of the flags, without costs measured before."""
    return replace(parallel, pipeline_layer_costs=None)


def _first_carry(config: RunConfig, build: ModelBuild) -> tuple[Carry, Tensor]:
    shape = (config.training.micro_batch_size, config.data.seq_length)
    drawn = torch.Generator().manual_seed(config.training.seed)
    tokens = torch.randint(build.vocab.true, shape, generator=drawn).to(device.current())
    return gpt_carry(tokens), tokens.roll(-1, dims=1)


def _timed(
    layer: PipelineStage, build: ModelBuild, carry: Carry, labels: Tensor | None
) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass of one micro-batch."""
    inputs = tuple(tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in carry)
    device.synchronize()
    began = time.perf_counter()
    left = layer(inputs)
    outputs = [tensor for tensor in left if tensor.requires_grad]
    if labels is not None:
        outputs = [gpt_loss(build, left, labels).total]
    device.synchronize()
    forward = time.perf_counter() - began
    gradients = [torch.ones_like(tensor) for tensor in outputs]
    device.synchronize()
    began = time.perf_counter()
    torch.autograd.backward(outputs, gradients)
    device.synchronize()
    layer.zero_grad(set_to_none=True)
    return forward, time.perf_counter() - began


def _slowest(passes: Sequence[tuple[float, float]], build: ModelBuild) -> tuple[float, float]:
    """Return the medians in milliseconds of the slowest rank."""
    own_medians = [1e3 * median(column) for column in zip(*passes)]
    both = torch.tensor(own_medians, dtype=torch.float64, device=device.current())
    forward, backward = all_reduce(both, build.ctx.world, op="max").tolist()
    return forward, backward


def _unevenness(costs: Sequence[float], ranges: Sequence[LayerRange]) -> float:
    sums = [sum(costs[start:stop]) for start, stop in ranges]
    return max(sums) * len(sums) / sum(sums)


def _sizes(ranges: Sequence[LayerRange]) -> str:
    return " ".join(str(part.size) for part in ranges)


if __name__ == "__main__":
    run_program(main)
