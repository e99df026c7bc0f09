"""Which rank holds which coordinate of the parallel grid: arithmetic only, no processes.

The order is Megatron's: tp varies fastest, so that it stays within a node, then cp, dp and pp, or
cp, pp and dp. An axis is a field of `Coord` and a size of the same name in `Topology`; nothing else
here depends on the number of axes. Expert parallelism has a grid of its own over the ranks of each
stage.
"""

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError

Groups = tuple[tuple[int, ...], ...]
"""Sets of ranks, each in order, that together hold every rank once."""


class Coord(NamedTuple):
    """The place of one rank in the grid, slowest axis first."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """A pp x dp x cp x tp grid of ranks; tp varies fastest, so it stays within a node.

    The ranks of cp share the sequences of one replica's batch. Those of a stage are also a grid of
    edp x ep x etp, in the same order: `etp` neighbours share the matrices of each of their experts,
    `ep` sets of them share the experts of a layer out, and ranks that are `ep * etp` apart hold
    the same.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # None: tp
    pp_before_dp: bool = False  # stages are neighbours, and replicas far apart
    instances: int = 1  # parts of the replicas, each of which shares everything out by itself

    def __post_init__(self) -> None:
        if any(self.size(axis) < 1 for axis in (*Coord._fields, "ep")) or self.expert_tp < 1:
            raise ConfigError(
                "a parallel size is not positive",
                found=f"tp={self.tp} pp={self.pp} dp={self.dp} cp={self.cp} ep={self.ep} "
                f"etp={self.expert_tp}",
                fix="use 1 to switch an axis off",
            )
        if self.stage_size % self.expert_ranks:
            raise ConfigError(
                "the ranks of a pipeline stage do not divide into groups that share experts",
                found=f"{self.stage_size} ranks (tp {self.tp} x cp {self.cp} x dp {self.dp}), "
                f"--expert-model-parallel-size {self.ep} x --expert-tensor-parallel-size "
                f"{self.expert_tp}" + ("" if self.etp is not None else " (not set: that of tp)"),
                fix=f"use sizes whose product divides {self.stage_size}"
                + (", such as --expert-tensor-parallel-size 1" if self.expert_tp > 1 else ""),
            )
        replicas = (self.dp * self.cp, self.stage_size // self.expert_ranks)
        if self.instances < 1 or any(size % self.instances for size in replicas):
            of_experts = f", {replicas[1]} of experts" if self.shares_experts_out else ""
            raise ConfigError(
                "the replicas do not divide into equal parts that share optimizer state out",
                found=f"{replicas[0]} replicas{of_experts}, "
                f"--num-distributed-optimizer-instances {self.instances}",
                fix=f"use a number that divides {math.gcd(*replicas)}",
            )

    @classmethod
    def fill(cls, world_size: int, *, tp: int, pp: int, cp: int = 1) -> "Topology":
        """Return the grid whose data-parallel size uses all ranks that the other sizes leave.

        Raises:
            ConfigError: `world_size` ranks do not divide into whole model replicas. The sizes are
                never changed to make them fit.
        """
        replica = cls(tp=tp, pp=pp, cp=cp).world_size
        if world_size < 1 or world_size % replica:
            raise ConfigError(
                "the ranks do not divide into whole model replicas",
                found=f"{world_size} ranks, --tensor-model-parallel-size {tp} x "
                f"--pipeline-model-parallel-size {pp} x --context-parallel-size {cp}",
                fix=f"start a multiple of {replica} ranks, or change the parallel sizes",
            )
        return cls(tp=tp, pp=pp, dp=world_size // replica, cp=cp)

    @classmethod
    def of(cls, flags: ParallelConfig, world_size: int) -> "Topology":
        """Return the grid that the flags give `world_size` ranks; raises as `fill` does."""
        grid = cls.fill(
            world_size,
            tp=flags.tensor_model_parallel_size,
            pp=flags.pipeline_model_parallel_size,
            cp=flags.context_parallel_size,
        )
        return replace(
            grid,
            ep=flags.expert_model_parallel_size,
            etp=flags.expert_tensor_parallel_size,
            pp_before_dp=flags.use_tp_pp_dp_mapping,
            instances=flags.num_distributed_optimizer_instances,
        )

    @property
    def expert_tp(self) -> int:
        """Number of ranks that share the matrices of an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that hold the experts of a layer once."""
        return self.ep * self.expert_tp

    @property
    def shares_experts_out(self) -> bool:
        """Whether tokens go to their experts; else these are split over tp as an MLP is."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        total = 1
        for axis in Coord._fields:
            total *= self.size(axis)
        return total

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    def size(self, axis: str) -> int:
        """Return the number of coordinates along `axis`."""
        return int(getattr(self, axis))

    def rank(self, at: Coord) -> int:
        """Return the rank at a coordinate; the inverse of `coord`."""
        rank = 0
        for axis in self._slowest_first:
            rank = rank * self.size(axis) + getattr(at, axis)
        return rank

    def coord(self, rank: int) -> Coord:
        """Return the coordinate of a rank; the inverse of `rank`."""
        assert 0 <= rank < self.world_size, rank  # noqa: S101  # invariant: ranks come from this grid
        indexes: dict[str, int] = {}
        for axis in reversed(self._slowest_first):
            rank, indexes[axis] = divmod(rank, self.size(axis))
        return Coord(**indexes)

    def peers(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only along `axes`, itself included, in order."""
        here = self.coord(rank)
        assert set(axes) <= set(Coord._fields), axes  # noqa: S101  # invariant: our own names
        ranges = [
            range(self.size(axis)) if axis in axes else (index,)
            for axis, index in zip(Coord._fields, here)
        ]
        return tuple(sorted(self.rank(Coord(*indexes)) for indexes in product(*ranges)))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every set of peers along `axes`: together they hold each rank exactly once."""
        firsts = (rank for rank in range(self.world_size) if self._leads(rank, axes))
        return tuple(self.peers(rank, *axes) for rank in firsts)

    def expert_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return every set of ranks that hold the experts of a layer once; etp is fastest."""
        return tuple(
            stage[first : first + self.expert_ranks]
            for stage in self.groups("dp", "cp", "tp")
            for first in range(0, len(stage), self.expert_ranks)
        )

    def whole_model_groups(self) -> Groups | None:
        """Return every set of ranks that hold all weights once; None: there are no such sets.

        Where experts are shared out it has, of each stage, the ranks that hold both the matrices
        and the experts of its layers: the larger of these sets, in which the smaller one repeats.
        """
        if not self.shares_experts_out:
            return self.groups("pp", "tp")
        smaller, larger = sorted((self.tp, self.expert_ranks))
        if larger % smaller:
            return None
        stages = self.groups("dp", "cp", "tp")
        return tuple(
            tuple(sorted(rank for stage in stages for rank in stage[first : first + larger]))
            for first in range(0, self.stage_size, larger)
        )

    def expert_replica_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return every set of ranks that hold the same parts of the same experts."""
        return tuple(
            stage[first :: self.expert_ranks]
            for stage in self.groups("dp", "cp", "tp")
            for first in range(self.expert_ranks)
        )

    def sharing_groups(self, replicas: Groups) -> tuple[Groups, Groups]:
        """Return the parts of `replicas` that share state out, and the sets with equal shares."""
        size = len(replicas[0]) // self.instances
        firsts = range(0, len(replicas[0]), size)
        sharing = [group[first : first + size] for group in replicas for first in firsts]
        across = [group[first::size] for group in replicas for first in range(size)]
        return tuple(sharing), tuple(across)

    @property
    def _slowest_first(self) -> tuple[str, ...]:
        return ("dp", "pp", "cp", "tp") if self.pp_before_dp else Coord._fields

    def _leads(self, rank: int, axes: tuple[str, ...]) -> bool:
        return all(getattr(self.coord(rank), axis) == 0 for axis in axes)
