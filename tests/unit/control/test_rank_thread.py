"""Ranks in threads take part in the control plane of the first one, and strangers do not."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron.control.client import ControlClient, ControlConnectionError, new_id
from megatron.control.rank_thread import HOST, ControlThread
from megatron.scheduling.control.member import PrepareDone, TaskKind
from megatron.scheduling.control.messages import Answer, Command
from megatron.scheduling.control.rank_service import RankOutput, RankService
from megatron.scheduling.control.service import ControlService
from megatron.scheduling.control.states import Code, CommandKind
from tests.support.deadlines import HANG_S
from tests.support.inference.loopback import TIMING

SECRET = b"known to the ranks alone"


def rank_of(number: int, refusing: bool = False) -> ControlThread:
    """A rank that prepares everything at once, or refuses everything after the start."""

    def take(output: RankOutput) -> None:
        for task in output.tasks:
            if task.kind is TaskKind.PREPARE and task.prepare is not None:
                is_refused = refusing and task.prepare.transition != "start"
                code, detail = ("refused", "it has its reasons") if is_refused else ("", "")
                rank.take(PrepareDone(task.prepare.epoch, code, detail))

    rank = ControlThread(RankService(number, 1, TIMING), SECRET, take)
    return rank


def asked(first: ControlThread, kind: CommandKind) -> Answer:
    return first.send(Command(new_id(), kind), wait_s=HANG_S).result(HANG_S)


@pytest.mark.parametrize("refusing", [False, True])
def test_all_ranks_decide_together(refusing: bool) -> None:
    first, second = rank_of(0), rank_of(1, refusing)
    port = first.coordinate(ControlService((0, 0), TIMING))
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda rank: rank.join(port), (first, second)))
    while asked(first, CommandKind.STATUS).state != "running":
        pass
    answer = asked(first, CommandKind.PAUSE)
    verdicts = [(one.member, one.verdict) for one in answer.ranks]
    if refusing:
        assert (answer.code, answer.state) == (Code.REFUSED, "running")
        assert verdicts == [(0, "ack"), (1, "refused")]
    else:
        assert (answer.code, answer.state) == (Code.OK, "paused")
        assert verdicts == [(0, "ack"), (1, "ack")]
    assert first.weights == 0
    second.close()
    first.close()


def test_a_connection_without_the_secret_is_closed_and_changes_nothing() -> None:
    first = rank_of(0)
    port = first.coordinate(ControlService((0,), TIMING))
    first.join(port)

    async def intrude(secret: bytes) -> None:
        async with asyncio.timeout(HANG_S):
            client = ControlClient(lambda done: None)
            await client.connect(HOST, port, secret=secret)
            await client.ask(CommandKind.STOP)

    for secret in (b"guessed", b""):
        with pytest.raises(ControlConnectionError, match="no connection to the coordinator"):
            asyncio.run(intrude(secret))
    while asked(first, CommandKind.STATUS).state != "running":
        pass
    assert first._coordinator is not None
    assert first._coordinator.service.counts["strangers"] == 2
    first.close()
