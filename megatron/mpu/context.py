"""One process's membership of every parallel group; built once and passed down explicitly.

The only caller of `new_group`. To torch.distributed a group of `None` means *the whole world*, so
once processes exist every group here has a real handle, groups of one included.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron.errors import ConfigError, NotInitialisedError
from megatron.mpu.collective_checks import CollectiveChecks, MessageRecord
from megatron.mpu.partition import Partition, is_shared_out
from megatron.mpu.topology import Coord, Groups, Topology
from megatron.peers.activity import Activity

DEFAULT_TIMEOUT = timedelta(minutes=10)  # what torch gives NCCL; gloo's own default is 30 minutes


class CallObserver(Protocol):
    """Notified of every communication of a rank before it is made."""

    def collective(
        self, operation: str, tensor: Tensor | None, ranks: Sequence[int], *, is_equal: bool = True
    ) -> None:
        """Record a call of all `ranks`, and what this one sends.

        Args:
            operation: with everything that has to be equal on all of them.
            tensor: None for objects.
            is_equal: whether its shape is, apart from its dtype and the shape of a row.
        """

    def messages(self, messages: Sequence[MessageRecord]) -> None:
        """Record messages that are posted together."""

    def objects_of_absent(self, obj: object, ranks: Sequence[int]) -> list[object] | None:
        """Return the objects of `ranks` where they are not there; None: gather them."""


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share one axis with this process, and the handle to communicate with them.

    `ranks` are global ranks in group order; `rank` is this process's index among them. The handle
    is None only in `ParallelContext.single()`, where no process group exists and our collectives
    return at once. `observer` is notified of calls before they are made; that of
    --check-collectives compares them. `name` is the field of `ParallelContext`, for traces.
    `activity` is given the time that this process waits for the others, where that is measured.
    """

    ranks: tuple[int, ...]
    rank: int
    handle: dist.ProcessGroup | None = field(default=None, repr=False)
    observer: CallObserver | None = field(default=None, repr=False, compare=False)
    name: str = field(default="", repr=False, compare=False)
    activity: Activity | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether this process has index 0 in the group."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this process has the highest index in the group."""
        return self.rank == self.size - 1


@dataclass(frozen=True, slots=True)
class Replicas:
    """Ranks that hold the same parameters: gradients are summed over all of them.

    Where they share out what they keep, those of `sharing` do; several such parts have equal shares
    `across` them (None: there is one part).
    """

    all: Group
    sharing: Group
    across: Group | None = None

    @property
    def counts_share(self) -> bool:
        """Whether this rank counts its share where those of all parts are equal."""
        return self.across is None or self.across.is_first


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """Over which ranks the gradients of a parameter are summed."""

    dense: Replicas
    experts: Replicas  # of experts to which tokens go

    @classmethod
    def one(cls, group: Group) -> "ReplicaGroups":
        """Return the same group for all parameters."""
        return cls(Replicas(group, group), Replicas(group, group))

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups, some of them several times."""
        both = (self.dense, self.experts)
        parts = [group for one in both for group in (one.all, one.sharing, one.across)]
        return tuple(group for group in parts if group is not None)

    def of(self, parameter: Tensor) -> Replicas:
        """Return the ranks that hold the same part of `parameter`."""
        return self.experts if is_shared_out(parameter) else self.dense


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """The place of this process in the grid, and its groups. Immutable."""

    topology: Topology
    world: Group
    tp: Group
    pp: Group
    dp: Group
    cp: Group
    dp_cp: Group  # the ranks with the same weights: gradients are summed over them
    tp_cp: Group  # the ranks that take the same samples
    etp_ep: Group  # hold the experts of a layer once: tokens go from each of them to the others
    ep: Group  # those of them with the same parts of other experts
    etp: Group  # those with other parts of the same experts
    edp: Group  # the ranks with the same parts of the same experts
    model: Group  # tp x pp: the whole weights once, but for experts that are shared out
    replicas: ReplicaGroups  # dp_cp and edp, and the parts of them that share state out
    all_weights: Group | None  # `whole_model`; None where ranks do not hold one
    gloo_tp_cp: Group | None = None  # tp_cp again, where that sends tensors of GPUs alone

    @classmethod
    def single(cls) -> "ParallelContext":
        """Return the context of a process that runs alone, without torch.distributed."""
        alone = Group(ranks=(0,), rank=0)
        return cls(Topology(), *(alone,) * 12, ReplicaGroups.one(alone), alone)

    @classmethod
    def build(
        cls,
        topology: Topology,
        timeout: timedelta = DEFAULT_TIMEOUT,
        *,
        check_seconds: float | None = None,
        activity: Activity | None = None,
    ) -> "ParallelContext":
        """Create every process group of `topology`; all ranks must call this together.

        `timeout` bounds every collective in the groups made here; the world group keeps the one
        that `init_process_group` was given. With `check_seconds` ranks compare every call before
        they make it, and wait so long for one that is behind. `activity` is that of all groups.

        Raises:
            NotInitialisedError: there is no process group yet.
            ConfigError: the topology is for another number of ranks.
        """
        if not dist.is_initialized():
            raise NotInitialisedError(
                "parallel groups were asked for before the processes found each other",
                fix="call initialize_megatron() first, or use ParallelContext.single()",
            )
        if topology.world_size != dist.get_world_size():
            raise ConfigError(
                "the parallel grid is for another number of ranks",
                found=f"{topology} needs {topology.world_size} ranks, "
                f"{dist.get_world_size()} were started",
                fix=f"start {topology.world_size} ranks",
            )
        checks = None
        if check_seconds is not None:
            store = dist.distributed_c10d._get_default_store()
            checks = CollectiveChecks(store, dist.get_rank(), seconds=check_seconds)
        maker = _GroupMaker(timeout, checks, activity=activity)
        everyone = tuple(range(topology.world_size))
        # Enumerated once: a world may have thousands of ranks.
        dense, experts = topology.groups("dp", "cp"), topology.expert_replica_groups()
        etp, whole = topology.expert_tp, topology.whole_model_groups()
        dp_cp, edp = maker.make("dp_cp", dense), maker.make("edp", experts)
        ctx = cls(
            topology,
            world=Group(everyone, dist.get_rank(), dist.group.WORLD, checks, "world", activity),
            tp=maker.make("tp", topology.groups("tp")),
            pp=maker.make("pp", topology.groups("pp")),
            dp=maker.make("dp", topology.groups("dp")),
            cp=maker.make("cp", topology.groups("cp")),
            dp_cp=dp_cp,
            tp_cp=maker.make("tp_cp", topology.groups("cp", "tp")),
            etp_ep=maker.make("etp_ep", sharing := topology.expert_groups()),
            ep=maker.make("ep", [one[at::etp] for one in sharing for at in range(etp)]),
            etp=maker.make(
                "etp", [one[at : at + etp] for one in sharing for at in range(0, len(one), etp)]
            ),
            edp=edp,
            model=maker.make("model", topology.groups("pp", "tp")),
            replicas=ReplicaGroups(
                maker.parts(dp_cp, dense, topology), maker.parts(edp, experts, topology)
            ),
            all_weights=None if whole is None else maker.make("whole_model", whole),
        )
        if dist.get_backend() == dist.Backend.NCCL and ctx.tp_cp.size > 1:
            by_gloo = _GroupMaker(timeout, checks, backend=dist.Backend.GLOO, activity=activity)
            ctx = replace(ctx, gloo_tp_cp=by_gloo.make("tp_cp", topology.groups("cp", "tp")))
        if dist.get_backend() == dist.Backend.GLOO:
            # gloo connects here, NCCL at first use: a rank that went on and ended would close
            # connections that the others are still making.
            dist.barrier()
        return ctx

    @property
    def host_tp_cp(self) -> Group:
        """The ranks of `tp_cp`, to send tensors of the host."""
        return self.gloo_tp_cp or self.tp_cp

    @property
    def whole_model(self) -> Group:
        """The ranks that hold all weights once, experts that are shared out as well.

        In text generation they compute every step together.

        Raises:
            ConfigError: there is no such group in this grid.
        """
        if self.all_weights is None:
            grid = self.topology
            raise ConfigError(
                "the ranks that share experts out do not hold one whole model",
                found=f"--tensor-model-parallel-size {grid.tp}, --expert-model-parallel-size "
                f"{grid.ep}, --expert-tensor-parallel-size {grid.expert_tp}",
                fix="use a tensor-parallel size that divides or is a multiple of the product of "
                "the other two",
            )
        return self.all_weights

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.world.rank

    @property
    def coord(self) -> Coord:
        """The place of this process in the grid."""
        return self.topology.coord(self.rank)

    @property
    def is_first_stage(self) -> bool:
        """Whether this process holds the first pipeline stage."""
        return self.pp.is_first

    @property
    def is_last_stage(self) -> bool:
        """Whether this process holds the last pipeline stage."""
        return self.pp.is_last

    def axis(self, name: str) -> Group:
        """Return the group of the grid axis called `name`, as in `Partition.axis`."""
        group: Group = getattr(self, name)
        return group

    def share(self, partition: Partition | None) -> tuple[int, int]:
        """Return the index of this rank's part of a parameter, and the number of its parts."""
        if partition is None:
            return 0, 1
        group = self.axis(partition.axis)
        return group.rank, group.size

    def counts(self, partition: Partition | None) -> bool:
        """Return whether this rank counts its part when a replica's parameters are summed up.

        Where tensor-parallel ranks hold equal copies the first one counts them. Experts that are
        shared out are other ones on each rank of `ep`.
        """
        return partition is not None or self.tp.is_first


class _GroupMaker:
    """Creates process groups, once per set of ranks.

    Axes of size one make the same sets again (at tp = pp = 1 every rank is its own tp, pp and
    model group); a second communicator for them would cost memory and start-up time. The
    world handle is not shared this way, so that groups can be destroyed without it.
    """

    def __init__(
        self,
        timeout: timedelta,
        checks: CollectiveChecks | None,
        *,
        backend: str | None = None,
        activity: Activity | None = None,
    ) -> None:
        self._timeout, self._checks, self._backend = timeout, checks, backend
        self._activity = activity
        self._handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {}

    def make(self, name: str, groups: Sequence[tuple[int, ...]]) -> Group:
        """Return this process's group among `groups`; every rank creates all, in the same order."""
        me = dist.get_rank()
        for ranks in groups:
            if ranks not in self._handles:
                self._handles[ranks] = dist.new_group(
                    list(ranks), timeout=self._timeout, backend=self._backend
                )
        own_ranks = next(ranks for ranks in groups if me in ranks)
        handle = self._handles[own_ranks]
        place = own_ranks.index(me)
        return Group(own_ranks, place, handle, self._checks, name, self._activity)

    def parts(self, whole: Group, groups: Groups, topology: Topology) -> Replicas:
        """Return `whole`, this process's group of replicas, with the parts that share state out."""
        if topology.instances == 1:
            return Replicas(whole, whole)
        sharing, across = topology.sharing_groups(groups)
        return Replicas(whole, self.make(whole.name, sharing), self.make(whole.name, across))
