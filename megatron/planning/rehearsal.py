"""Runs a step of chosen ranks of a world of any size in this process, without what it computes.

The engine and the model are the real ones. Their tensors are on `meta`, which has shapes and no
values, and torch's fake process group stands in for the other ranks. What a reader would get wrong:
values that the host of a real rank reads have to be answered (`_Answers`), and few micro-batches
are run: each further one adds the same, so the rest is a multiplication.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron import device
from megatron.config.optimizer import OptimizerKind
from megatron.config.run import RunConfig
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.kinds.t5_data import decoder_rows
from megatron.engine.base import BatchOptions, PretrainTask, RawBatch, StepPlan
from megatron.engine.cuts import stage_ranges
from megatron.engine.native import NativeEngine
from megatron.errors import ConfigError, MachineError, MegatronError, NotInitialisedError
from megatron.lengths import batch_schedule
from megatron.model.experts.balance import SINKHORN_CHANGE
from megatron.model.experts.mixture import ROW_COUNTS
from megatron.model.specs import ModelBuild
from megatron.model.stage import PipelineStage
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams, Samples
from megatron.mpu.topology import Coord, Topology
from megatron.pipeline.plan import plan_of_run
from megatron.pipeline.schedule import ScheduleName
from megatron.pipeline.signature import (
    HEADER_NUMBERS,
    Signature,
    encode_signature,
    format_signature,
    header_into,
    signature_of,
)
from megatron.planning.calls import CallKind, CallLog, CallSum, Phases
from megatron.planning.meter import OpMeter
from megatron.tokenizer.tokenizer import Tokenizer

_BEYOND = 2  # micro-batches after as many as stages, from which on each one adds the same


class RankBytes(NamedTuple):
    """Bytes of tensors on the device of one rank."""

    weights: int
    gradients: int  # with what else is kept between steps: some scalars
    optimizer: int  # its state, and master weights
    peak: int  # of all within a step

    @property
    def kept(self) -> int:
        """Bytes between two steps."""
        return self.weights + self.gradients + self.optimizer

    @property
    def step(self) -> int:
        """Bytes at the peak beside those: activations, messages and temporary tensors."""
        return self.peak - self.kept


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank keeps, computes and sends in a step; not in its first one."""

    rank: int
    coord: Coord
    bytes: RankBytes
    flops: dict[str, int]  # by phase
    calls: dict[CallKind, CallSum]
    saved: dict[str, int]  # bytes of the whole tensors in a checkpoint of which it has a part


@dataclass(frozen=True, slots=True)
class World:
    """A run on ranks that are not there.

    `microbatches` are those of a replica in one step.
    """

    config: RunConfig
    task: PretrainTask
    tokenizer: Tokenizer
    topology: Topology
    microbatches: int

    @classmethod
    def of(
        cls, config: RunConfig, task: PretrainTask, tokenizer: Tokenizer, world_size: int
    ) -> "World":
        """Return the world of a run of so many ranks.

        Raises:
            ConfigError: the ranks do not divide into replicas, or the batch over them, or the run
                does what is not planned.
        """
        for flag, is_given in (
            ("--deepspeed", config.engine.deepspeed),
            (
                f"--optimizer {config.optimizer.optimizer}",
                config.optimizer.optimizer is not OptimizerKind.ADAM,
            ),
            ("--optimizer-cpu-offload", config.optimizer.optimizer_cpu_offload),
            ("--checkpoint-in-cpu", config.training.checkpoint_in_cpu),
            ("--cpu-offloading-num-layers", config.training.cpu_offloading_num_layers > 0),
        ):
            if is_given:
                raise ConfigError(
                    "a plan does not support a flag of the run", found=flag, fix=f"leave out {flag}"
                )
        topology = Topology.of(config.parallel, world_size)
        batches = batch_schedule(config, topology.dp)
        # Compiled layers have the same shapes, and captured steps the same kernels.
        training = replace(config.training, compile=False, cuda_graph=False)
        plain = replace(config, training=training)
        count = batches.global_batch_size // batches.samples_per_microbatch
        return cls(plain, task, tokenizer, topology, count)

    @property
    def samples(self) -> int:
        """Samples of a step, of all replicas."""
        return self.microbatches * self.config.training.micro_batch_size * self.topology.dp

    def representatives(self) -> tuple[int, ...]:
        """Return a rank of each pipeline stage: the first of every other axis."""
        return tuple(self.topology.rank(Coord(pp, 0, 0, 0)) for pp in range(self.topology.pp))


def rehearse(world: World, ranks: Sequence[int]) -> tuple[RankPlan, ...]:
    """Return what each of `ranks` keeps, computes and sends in a step.

    Raises:
        ConfigError: there is no such rank.
        MegatronError: stages hand over something else than the layers of the whole model.
    """
    return tuple(rehearsed(world, ranks))


def rehearsed(world: World, ranks: Sequence[int]) -> Iterator[RankPlan]:
    """Yield the same, one rank after the other, for a caller that may stop early."""
    check_ranks(ranks, world.topology.world_size)
    stages, carries = _survey(world) if world.topology.pp > 1 else ([], ())
    for rank in ranks:
        yield _plan_of(world, rank, stages, carries)


def check_ranks(ranks: Sequence[int], world_size: int) -> None:
    """Check that a world of so many ranks has these.

    Raises:
        ConfigError: it does not.
    """
    absent = [rank for rank in ranks if not 0 <= rank < world_size]
    if absent:
        raise ConfigError(
            "there are no such ranks in this world",
            found=f"rank {', '.join(map(str, absent))} of {world_size} ranks",
            fix=f"choose among 0 to {world_size - 1}",
        )


def flops_of_model(world: World) -> tuple[int, int]:
    """Return the FLOPs of a token by formula: of the model, and with what is computed again."""
    with standing_in(world, 0) as context:
        flops = world.task.flops_per_token(world.config.model, _build(world, context))
    return flops.model, flops.hardware


@contextmanager
def standing_in(
    world: World, rank: int, carries: Sequence[Signature] = ()
) -> Iterator[ParallelContext]:
    """Be a rank of a world that is not there, on `meta`, within the block.

    Args:
        carries: what goes into each virtual stage.

    Raises:
        NotInitialisedError: this process has real process groups.
        MachineError: this torch has no fake process group.
    """
    if dist.is_initialized():
        raise NotInitialisedError(
            "a process that communicates cannot stand in for ranks that are not there",
            fix="plan in a process of its own, without torchrun",
        )
    try:
        from torch.testing._internal.distributed.fake_pg import FakeStore
    except ImportError as error:  # it is internal to torch
        raise MachineError(
            "torch's fake process group is not where it is looked for",
            found=f"torch {torch.__version__}, no torch.testing._internal.distributed.fake_pg",
            fix="plan with torch 2.10 to 2.13",
        ) from error
    with device.on_meta(_Answers(world, carries)):
        dist.init_process_group(
            "cpu:fake,meta:fake",
            rank=rank,
            world_size=world.topology.world_size,
            store=FakeStore(),
        )
        assert dist.group.WORLD is not None  # noqa: S101  # invariant: just made
        # Without it torch warns when the groups are destroyed.
        dist.group.WORLD._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        try:
            yield ParallelContext.build(world.topology)
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class StandIn:
    """One rank of a world, as far as its model depends on it (`RunState`)."""

    config: RunConfig
    context: ParallelContext
    streams: RandomStreams
    tokenizer: Tokenizer


def engine_of(world: World, context: ParallelContext, phases: Phases) -> NativeEngine:
    """Return the engine of the rank that `context` is of."""
    return NativeEngine(world.config, world.task, _build(world, context), world.tokenizer, phases)


def _build(world: World, context: ParallelContext) -> ModelBuild:
    streams = RandomStreams(world.config.training.seed)
    streams.samples = Samples(0, 1)  # of the pass outside of a step
    return model_build(StandIn(world.config, context, streams, world.tokenizer))


def run_step(engine: NativeEngine, world: World, microbatches: int) -> None:
    """Do one step; its report is not read."""
    plan = StepPlan(
        microbatches,
        microbatches * world.config.training.micro_batch_size * world.topology.dp,
        learning_rate=1e-4,
        weight_decay=world.config.optimizer.weight_decay,
        seq_length=world.config.data.seq_length,
        first_sample=0,
    )
    engine.start_step(repeat(raw_batch(world.config, world.task)), plan, (False,))


def raw_batch(config: RunConfig, task: PretrainTask) -> RawBatch:
    """Return the tensors of a micro-batch as a data loader yields them, of zeros, or on `meta`.

    Raises:
        ConfigError: samples of this kind are not planned.
    """
    kind = task.reads.kind(config.data)
    if kind is DatasetKind.IMAGES:
        return _images(config)
    if task.reads.has_decoder:
        shapes = _shapes_with_decoder(config, kind)
    elif kind in _TENSORS:
        rows = config.training.micro_batch_size
        more = kind not in (DatasetKind.BERT, DatasetKind.ICT)
        row = (rows, config.data.seq_length + more)
        shapes = {name: row if name != "is_random" else (rows,) for name in _TENSORS[kind]}
    else:
        planned = ", ".join(_TENSORS)
        raise ConfigError(
            "samples of this kind are not planned",
            found=f"{kind}",
            fix=f"plan with {planned}: leave out the flags that choose others",
        )
    with torch.device(device.current()):
        return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in shapes.items()}


def _images(config: RunConfig) -> RawBatch:
    rows, vision = config.training.micro_batch_size, config.vision
    with torch.device(device.current()):
        return {
            "image": torch.zeros((rows, vision.num_channels, vision.height, vision.width)),
            "targets": torch.zeros((rows, 2), dtype=torch.int64),
            "shares": torch.zeros((rows, 2)),
        }


def _shapes_with_decoder(config: RunConfig, kind: DatasetKind) -> dict[str, tuple[int, ...]]:
    samples, decoder = config.training.micro_batch_size, config.encoder_decoder
    source, rows = (samples, config.data.seq_length), decoder_rows(config.data, decoder)
    if kind is DatasetKind.MLM:
        return {"input_tokens": source, "target_tokens": (samples, rows.filled)}
    target = (samples, rows.length)
    of_decoder = dict.fromkeys(("text_dec", "labels", "loss_mask"), target)
    return {"text_enc": source, "padding_mask": source, **of_decoder}


_TENSORS = {
    DatasetKind.GPT: ("text",),
    DatasetKind.FIM: ("text",),
    DatasetKind.MOCK: ("text",),
    DatasetKind.PREFIX: ("text", "is_prefix"),
    DatasetKind.SFT: ("text", "segment_ids", "is_input"),
    DatasetKind.MTF: ("text", "segment_ids", "is_input"),
    DatasetKind.BERT: ("text", "types", "padding_mask", "labels", "loss_mask", "is_random"),
    DatasetKind.ICT: (
        *("query_tokens", "query_pad_mask", "context_tokens", "context_pad_mask"),
        "block_data",
    ),
}


class _Answers:
    """The values that the host reads of tensors which have none (`device.values_for_host`)."""

    def __init__(self, world: World, carries: Sequence[Signature]) -> None:
        self._headers = {header_into(at): carry for at, carry in enumerate(carries)}
        config, grid = world.config, world.topology
        tokens = config.training.micro_batch_size * config.data.seq_length // grid.cp
        if grid.shares_experts_out:  # each rank has other tokens, which go to parts of experts
            tokens = tokens // grid.tp * grid.expert_tp
        dropped_beyond = config.model.moe_expert_capacity_factor or 1.0
        self._rows = int(tokens * config.model.moe_router_topk * min(1.0, dropped_beyond))

    def __call__(self, what: str, tensor: Tensor) -> Tensor:
        if what in self._headers:
            return torch.tensor(encode_signature(self._headers[what]))
        if what == SINKHORN_CHANGE:
            return torch.zeros((), device="cpu")
        assert what == ROW_COUNTS, what  # noqa: S101  # invariant: nothing else is read in a step
        # Experts are equally busy, or nearly.
        each, rest = divmod(self._rows, tensor.shape[-1])
        counts = each + (torch.arange(tensor.shape[-1], device="cpu") < rest).long()
        return counts.expand(tensor.shape).contiguous()


def _survey(world: World) -> tuple[list[list[object]], tuple[Signature, ...]]:
    """Return what each stage gives to gathers of objects, and what goes into each virtual stage.

    A rank's engine depends on what the other stages gather: which of them hold a tied weight.
    """
    objects: list[list[object]] = []
    for rank in world.representatives():
        with standing_in(world, rank) as bare:
            log = CallLog(Phases(), rank)
            engine_of(world, log.watch(bare), Phases())
            objects.append(log.objects)
    with standing_in(world, 0) as context:
        carries = tuple(_carries(world, _build(world, context)))
    return objects, carries


def _carries(world: World, build: ModelBuild) -> Iterator[Signature]:
    """Yield what goes into each virtual stage, by running one after the other on this rank."""
    options = BatchOptions(world.config.data, world.tokenizer)
    carry = world.task.batch(raw_batch(world.config, world.task), options).inputs
    specs = world.task.layers(world.config.model, build)
    for part in stage_ranges(specs, plan_of_run(world.config), world.topology.pp):
        signature = signature_of(carry)
        yield signature
        received = [one.room(device.current()) for one in signature]
        for tensor, one in zip(received, signature, strict=True):
            tensor.requires_grad_(one.needs_grad)
        with torch.device(device.current()):
            carry = PipelineStage(specs, [part]).run(0, tuple(received))


def _plan_of(
    world: World, rank: int, stages: Sequence[Sequence[object]], carries: Sequence[Signature]
) -> RankPlan:
    phases = Phases()
    meter = OpMeter(phases)
    with standing_in(world, rank, carries) as bare:
        log = CallLog(phases, rank, stages=stages)
        context = log.watch(bare)
        with meter:
            engine = engine_of(world, context, phases)
            meter.live()
            run_step(engine, world, 1)  # the first step makes state, and sends headers
            readings = []
            for count in (counts := _few(world)):
                kept = meter.live()
                meter.reading()
                log.totals()
                run_step(engine, world, count)
                flops, peak = meter.reading()
                readings.append(_Reading(flops, peak, log.totals()))
        _check_carries(log, carries)
        found = readings[0]
        if len(readings) > 1:
            found = _extended(*readings, times=(world.microbatches - counts[0]) / _step_of(counts))
        bytes_ = _by_purpose(engine, kept, found.peak)
        saved = _saved(engine, optimizer=world.config.checkpoint.save_optim)
        return RankPlan(rank, context.coord, bytes_, found.flops, found.calls, saved)


class _Reading(NamedTuple):
    flops: dict[str, int]
    peak: int
    calls: dict[CallKind, CallSum]


def _few(world: World) -> tuple[int, ...]:
    """Return one or two numbers of micro-batches, from which those of all are known."""
    pipeline = plan_of_run(world.config)
    # Interleaved micro-batches come in groups of as many as stages.
    period = pipeline.num_stages if pipeline.schedule == ScheduleName.INTERLEAVED else 1
    first = pipeline.num_stages + _BEYOND
    first += (world.microbatches - first) % period
    if world.microbatches <= first + period:
        return (world.microbatches,)
    return first, first + period


def _step_of(counts: Sequence[int]) -> int:
    return counts[1] - counts[0]


def _extended(one: _Reading, other: _Reading, *, times: float) -> _Reading:
    """Return the reading of more micro-batches, each of which adds as much as those of `other`."""
    assert times == int(times), times  # noqa: S101  # invariant: `_few` chose whole periods

    def line(first: int, second: int) -> int:
        return first + int(times) * (second - first)

    none = CallSum(0, 0)
    return _Reading(
        {phase: line(one.flops.get(phase, 0), more) for phase, more in other.flops.items()},
        line(one.peak, other.peak),
        {
            kind: CallSum(*map(line, one.calls.get(kind, none), more))
            for kind, more in other.calls.items()
        },
    )


def _by_purpose(engine: NativeEngine, kept: int, peak: int) -> RankBytes:
    weights = _storages(map(engine.values, engine.stage.parameters()))
    optimizer = _storages(engine.optimizer.kept())
    of_weights = sum(weights.values())
    of_optimizer = sum(size for key, size in optimizer.items() if key not in weights)
    return RankBytes(of_weights, kept - of_weights - of_optimizer, of_optimizer, peak)


def _saved(engine: NativeEngine, *, optimizer: bool) -> dict[str, int]:
    """Return the bytes of the whole tensors of a checkpoint of which this stage has parts.

    Where replicas share out the optimizer's state, a rank has none of some parameters, which have
    the same kinds of it as others.
    """
    sizes: dict[str, int] = {}
    elements: dict[str, int] = {}  # of parameters without state here
    widths: dict[str, int] = {}  # of each kind of state
    for tensor in engine.tensors(optimizer=optimizer):  # parameters come first
        count, width = math.prod(tensor.global_shape), tensor.dtype.itemsize
        sizes[tensor.name] = count * width
        group, _, name = tensor.name.partition("/")
        if group == "model":
            elements[name] = count
        elif group == "optimizer":
            kind, _, parameter = name.partition("/")
            widths[kind] = width
            elements.pop(parameter, None)
    for kind, width in widths.items():
        sizes |= {f"optimizer/{kind}/{name}": width * count for name, count in elements.items()}
    return sizes


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def _check_carries(log: CallLog, carries: Sequence[Signature]) -> None:
    header = ((HEADER_NUMBERS,), torch.int64)
    planned = {(one.shape, one.dtype) for carry in carries for one in carry} | {header}
    other = log.shapes - planned
    if other:
        raise MegatronError(
            "a stage hands over something else than the same layers on one rank",
            found=f"{', '.join(str(shape) for shape, _ in other)}; "
            f"expected {'; '.join(map(format_signature, carries[1:]))}",
            fix="let what a layer returns depend on nothing but what its input looks like",
        )
