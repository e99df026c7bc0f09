"""What a rank sends is counted by phase, axis and operation."""

import torch

from megatron.mpu.collective_checks import MessageRecord
from megatron.mpu.context import ParallelContext
from megatron.planning.calls import CallKind, CallLog, CallSum, Phases


def test_calls_count_in_the_phase_that_runs_under_the_name_of_their_group() -> None:
    phases = Phases()
    log = CallLog(phases, 3)
    context = log.watch(ParallelContext.single())
    tp, dp = context.tp.observer, context.dp_cp.observer
    assert tp is not None
    assert dp is not None
    tensor = torch.empty(6, dtype=torch.bfloat16)
    with phases("step"):
        with phases("forward-compute"):
            tp.collective("all_gather(dim=0)", tensor, (2, 3))
            tp.collective("all_gather(dim=1)", tensor, (2, 3))
        dp.collective("all_reduce(sum)", tensor, (1, 3))
    dp.collective("barrier", None, (1, 3))
    assert log.totals() == {
        CallKind("forward-compute", "tp", "all_gather", (2, 3)): CallSum(2, 24),
        CallKind("step", "dp_cp", "all_reduce", (1, 3)): CallSum(1, 12),
        CallKind("between", "dp_cp", "barrier", (1, 3)): CallSum(1, 0),
    }
    assert log.totals() == {}


def test_of_messages_those_count_that_are_sent() -> None:
    phases = Phases()
    log = CallLog(phases, 3)
    observer = log.watch(ParallelContext.single()).pp.observer
    assert observer is not None
    out, into = torch.empty(2, 3), torch.empty(4)
    with phases("pipeline-exchange"):
        observer.messages([MessageRecord(True, 7, out), MessageRecord(False, 1, into)])
    assert log.totals() == {CallKind("pipeline-exchange", "pp", "send", (3, 7)): CallSum(1, 24)}
    assert log.shapes == {((2, 3), torch.float32), ((4,), torch.float32)}


def test_stages_that_are_not_there_gather_what_they_gave_before() -> None:
    known = [["first", 1], ["last", 2]]
    observer = CallLog(Phases(), 0, stages=known).watch(ParallelContext.single()).pp.observer
    assert observer is not None
    assert observer.objects_of_absent("first", (0, 1)) == ["first", "last"]
    assert observer.objects_of_absent(1, (0, 1)) == [1, 2]
    log = CallLog(Phases(), 0)
    context = log.watch(ParallelContext.single())
    for group in (context.pp, context.dp):
        assert group.observer is not None
        assert group.observer.objects_of_absent("own", (0, 1)) == ["own", "own"]
    assert log.objects == ["own"]
