"""A rank's engine as a member of the control plane: tasks of the member reach the engine.

The first rank asks its engine for everything, which tells the others through its log; they only
say to the coordinator what became of it on them.
"""

import secrets
import time
from collections.abc import Sequence

from megatron.control.rank_thread import ControlThread
from megatron.errors import MachineError
from megatron.mpu.context import ParallelContext
from megatron.scheduling.control.member import EngineFailure, EngineTask, TaskKind
from megatron.scheduling.control.rank_service import EngineLoad, RankOutput, RankService
from megatron.scheduling.control.service import ControlService
from megatron.serving.engine.engine_thread import SERVING_TIMING, EngineThread
from megatron.serving.engine_client import EngineClient
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.replica_requests import ReplicaRequests
from megatron.serving.ranks.round_log import GroupLog, engine_group
from megatron.serving.ranks.votes import Votes
from megatron.serving.server import EngineLostError

_SECRET_BYTES = 32
_START_S, _POLL_S = 60.0, 0.01
_LOOK_S = 0.25
_ORPHANED_S = 15.0  # after the fence
_MOST_DETAIL = 1000  # characters


def start_control(engine: EngineThread | Follower, ctx: ParallelContext) -> ControlThread:
    """Let the ranks of all engines take part in a control plane, which rank 0 coordinates.

    All ranks call this together, before their engines start. These may compute when all have
    joined.
    """
    world = GroupLog(ctx.world)
    secret = world.agree(secrets.token_bytes(_SECRET_BYTES))
    replicas = replica_numbers(world.gather(engine_group(ctx).ranks[0]))
    votes = Votes(lambda done: control.take(done))

    def take(output: RankOutput) -> None:
        if any(task.kind is TaskKind.RESET for task in output.tasks):
            control.leave()  # a rank that was lost stays so until it is started again
        take_tasks(output.tasks, engine, votes)
        if requests is not None:
            for request in output.requests:
                requests.take(request)

    def load() -> EngineLoad:
        return EngineLoad() if isinstance(engine, Follower) else engine_load(engine)

    # A process that is started again has other ports: none of a former one is heard here.
    service = RankService(ctx.rank, 1, SERVING_TIMING)
    control = ControlThread(service, secret, take, load=load)
    requests: ReplicaRequests | None = None
    if isinstance(engine, Follower):
        engine.report = votes.done
    else:
        requests = ReplicaRequests(engine, control.send_message)
        engine.on_failure = lambda detail: control.take(EngineFailure(detail[:_MOST_DETAIL]))
        engine.start(votes.done)
    port = control.coordinate(ControlService(replicas, SERVING_TIMING)) if ctx.rank == 0 else 0
    control.join(world.agree(port))
    return control


def replica_numbers(leaders: Sequence[int]) -> tuple[int, ...]:
    """Return the number of each rank's replica, from the first rank of its engine."""
    numbers = {leader: number for number, leader in enumerate(sorted(set(leaders)))}
    return tuple(numbers[leader] for leader in leaders)


def run_replica(engine: EngineThread, control: ControlThread) -> None:
    """Serve what the coordinator gives to this replica, until it is stopped.

    Raises:
        EngineLostError: the engine failed, or the coordinator was not heard for so long that
            another replica serves its requests.
    """
    fenced_at: float | None = None
    while not engine.join(_LOOK_S):
        now = time.monotonic()
        fenced_at = (fenced_at or now) if control.is_fenced else None
        status = engine.status()
        if not status.is_alive and status.state != "stopped":
            raise _lost(status.detail or status.state)
        if fenced_at is not None and now - fenced_at > _ORPHANED_S:
            raise _lost(f"rank 0 was not heard for {_ORPHANED_S:g} s")
    if (status := engine.status()).state != "stopped":
        raise _lost(status.detail)


def _lost(found: str) -> EngineLostError:
    return EngineLostError(
        "the engine of this replica no longer works",
        found=found,
        fix="read the messages of its other ranks, and start all of them again",
    )


def wait_until_running(engine: EngineClient, within_s: float = _START_S) -> None:
    """Return when all ranks have started.

    Raises:
        MachineError: they have not, in that time.
    """
    deadline = time.monotonic() + within_s
    while (status := engine.status()).state != "running":
        if time.monotonic() > deadline or not status.is_alive:
            raise MachineError(
                "the ranks of the engine have not started together",
                found=f"{status.detail or status.state} after {within_s:g} s",
                fix="read the messages of the other ranks, and start all of them again",
            )
        time.sleep(_POLL_S)


def take_tasks(tasks: Sequence[EngineTask], engine: EngineThread | Follower, votes: Votes) -> None:
    """Give the tasks of a member to its engine; returns at once."""
    for task in tasks:
        if task.kind is TaskKind.PREPARE and task.prepare is not None:
            votes.ask(task.prepare.epoch)
        if isinstance(engine, EngineThread):
            engine.take_task(task)


def engine_load(engine: EngineThread) -> EngineLoad:
    """Return what heartbeats tell of an engine."""
    status = engine.status()
    return EngineLoad(status.running, status.waiting, status.blocks - status.used_blocks)
