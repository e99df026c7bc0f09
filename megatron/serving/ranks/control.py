"""A rank's engine as a member of the control plane: tasks of the member reach the engine.

The first rank asks its engine for everything, which tells the others through its log; they only
say to the coordinator what became of it on them.
"""

import secrets
import time
from collections.abc import Sequence

from megatron.control.rank_thread import ControlThread
from megatron.errors import MachineError
from megatron.mpu.context import Group
from megatron.scheduling.control.member import EngineTask, TaskKind
from megatron.scheduling.control.rank_service import EngineLoad, RankOutput, RankService
from megatron.scheduling.control.service import ControlService
from megatron.serving.engine_thread import SERVING_TIMING, EngineThread
from megatron.serving.ranks.follower import Follower
from megatron.serving.ranks.round_log import GroupLog
from megatron.serving.ranks.votes import Votes

_SECRET_BYTES = 32
_START_S, _POLL_S = 60.0, 0.01


def start_control(engine: EngineThread | Follower, group: Group) -> ControlThread:
    """Let the ranks of an engine take part in a control plane, whose coordinator is the first rank.

    All ranks of `group` call this together, before the engine starts. It may compute when all have
    joined.
    """
    ranks = GroupLog(group)
    secret = ranks.agree(secrets.token_bytes(_SECRET_BYTES))
    votes = Votes(lambda done: control.take(done))

    def take(output: RankOutput) -> None:
        take_tasks(output.tasks, engine, votes)

    def load() -> EngineLoad:
        return EngineLoad() if isinstance(engine, Follower) else engine_load(engine)

    # A process that is started again has other ports: none of a former one is heard here.
    service = RankService(group.rank, 1, SERVING_TIMING)
    control = ControlThread(service, secret, take, load=load)
    port = 0
    if group.is_first:
        port = control.coordinate(ControlService((0,) * group.size, SERVING_TIMING))
    port = ranks.agree(port)
    if isinstance(engine, Follower):
        engine.report = votes.done
    else:
        engine.start(votes.done)
    control.join(port)
    return control


def wait_until_running(engine: EngineThread, within_s: float = _START_S) -> None:
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
