"""Flags that make a run fit into the memory of a rank: each is rehearsed, the cheapest first.

The order of `KNOBS` is that of what they cost a step: nothing or little, smaller matrices, more
computation, more communication, another layout. What a reader would get wrong: every flag is tried
alone before they are added up.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from megatron.config.activations import RecomputeGranularity, RecomputeMethod
from megatron.config.parallel import ShardingStrategy
from megatron.config.run import RunConfig
from megatron.planning.layouts import Choice, Layout, SearchedRun, layout_of
from megatron.planning.rehearsal import RankPlan, rehearsed


class Tried(NamedTuple):
    """A layout with other flags, as far as it was rehearsed: up to the first stage above the limit.

    `peak` is that of the rank that needs most, in bytes, or a lower bound if none was rehearsed.
    """

    layout: Layout
    peak: int
    fits: bool
    ranks: tuple[RankPlan, ...]


def fit(run: SearchedRun, memory: int) -> Iterator[Tried]:
    """Yield layouts with more flags as they are rehearsed, until one needs at most `memory` bytes.

    Flags that lead to no layout are left out.
    """
    for choice in _choices(run.config):
        layout = layout_of(run, choice)
        if layout is None:
            continue
        tried = _tried(layout, memory)
        yield tried
        if tried.fits:
            return


def _tried(layout: Layout, memory: int) -> Tried:
    if layout.at_least > memory:
        return Tried(layout, layout.at_least, False, ())
    ranks: list[RankPlan] = []
    for rank in rehearsed(layout.world, layout.world.representatives()):
        ranks.append(rank)
        if rank.bytes.peak > memory:
            break
    peak = max(rank.bytes.peak for rank in ranks)
    return Tried(layout, peak, peak <= memory, tuple(ranks))


def _choices(config: RunConfig) -> Iterator[Choice]:
    """Yield what each knob sets alone, and then all knobs up to each one together."""
    every = [choice for knob in KNOBS for choice in knob(config)]
    yield from every
    together: dict[str, Any] = {}
    for number, choice in enumerate(every):
        together |= choice
        if number:
            yield dict(together)


def _distributed_optimizer(config: RunConfig) -> Sequence[Choice]:
    if config.parallel.sharding.shards_state:
        return ()
    if config.parallel.data_parallel_sharding_strategy is None:
        return ({"use_distributed_optimizer": True},)
    return ({"data_parallel_sharding_strategy": ShardingStrategy.OPTIM},)


def _sequence_parallel(config: RunConfig) -> Sequence[Choice]:
    parallel = config.parallel
    if parallel.sequence_parallel or parallel.tensor_model_parallel_size == 1:
        return ()
    return ({"sequence_parallel": True},)


def _selective_recomputation(config: RunConfig) -> Sequence[Choice]:
    if config.training.recompute_granularity is not None:
        return ()
    return ({"recompute_granularity": RecomputeGranularity.SELECTIVE},)


def _smaller_microbatches(config: RunConfig) -> Sequence[Choice]:
    size = config.training.micro_batch_size
    smaller = [n for n in range(size - 1, 0, -1) if size % n == 0]
    return [{"micro_batch_size": n} for n in smaller]


def _full_recomputation(config: RunConfig) -> Sequence[Choice]:
    full = RecomputeGranularity.FULL
    if config.training.recompute_granularity is full:
        return ()
    return ({"recompute_granularity": full, "recompute_method": RecomputeMethod.UNIFORM},)


def _fully_sharded(config: RunConfig) -> Sequence[Choice]:
    full = ShardingStrategy.OPTIM_GRADS_PARAMS
    if config.parallel.sharding is full:
        return ()
    return ({"data_parallel_sharding_strategy": full},)


def _larger(name: str) -> Callable[[RunConfig], Sequence[Choice]]:
    def multiplied(config: RunConfig) -> Sequence[Choice]:
        size = int(getattr(config.parallel, name))
        return [{name: size * times} for times in (2, 4, 8)]

    return multiplied


KNOBS: tuple[Callable[[RunConfig], Sequence[Choice]], ...] = (
    _distributed_optimizer,
    _sequence_parallel,
    _selective_recomputation,
    _smaller_microbatches,
    _full_recomputation,
    _fully_sharded,
    _larger("tensor_model_parallel_size"),
    _larger("pipeline_model_parallel_size"),
)
