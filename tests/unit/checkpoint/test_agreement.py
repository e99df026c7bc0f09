"""Errors of one rank, and of many ranks from what they would have gathered."""

import errno
from dataclasses import replace

import pytest

from megatron.checkpoint import agreement
from megatron.errors import FIX_OF_MEMORY, CheckpointError, ConfigError, MachineError
from megatron.mpu import collectives
from megatron.mpu.context import Group, ParallelContext

CTX = ParallelContext.single()


def fail(error):
    raise error


def test_results_come_in_rank_order():
    assert agreement.run_on_all_ranks(CTX, "counting", lambda: 3) == [3]


def test_an_error_of_the_only_rank_is_raised_as_it_was():
    error = ConfigError("problem", found="f", fix="x")
    with pytest.raises(ConfigError, match="problem"):
        agreement.run_on_all_ranks(CTX, "checking", lambda: fail(error))


def test_what_the_system_refused_becomes_an_error_with_a_fix():
    error = OSError(errno.ENOSPC, "No space left on device", "/save/x")
    with pytest.raises(CheckpointError, match="writing failed: No space left") as caught:
        agreement.run_on_all_ranks(CTX, "writing", lambda: fail(error))
    assert caught.value.__cause__ is error


def test_a_defect_is_called_one_and_keeps_its_cause():
    with pytest.raises(CheckpointError, match="writing failed by a defect") as caught:
        agreement.run_on_all_ranks(CTX, "writing", lambda: {}["x"])
    assert "KeyError: 'x'" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_memory_that_ran_out_is_no_defect():
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried\nstack")
    with pytest.raises(MachineError, match="memory ran out while writing") as caught:
        agreement.run_on_all_ranks(CTX, "writing", lambda: fail(error))
    assert caught.value.found == "DefaultCPUAllocator: can't allocate memory: you tried"
    assert caught.value.fix == FIX_OF_MEMORY


@pytest.fixture
def of_ranks(monkeypatch):
    """Make one rank's `together` gather given outcomes."""

    def gather(errors):
        world = Group(tuple(range(len(errors))), 0)
        ctx = replace(CTX, world=world)
        outcomes = [agreement._Outcome(None, error) for error in errors]
        monkeypatch.setattr(collectives, "all_gather_object", lambda obj, group: outcomes)
        return ctx

    return gather


def test_one_failing_rank_is_named_on_those_that_did_not_fail(of_ranks):
    ctx = of_ranks([None, None, CheckpointError("full", found="disk", fix="clean"), None])
    with pytest.raises(CheckpointError, match="rank 2 of 4 failed while writing") as caught:
        agreement.run_on_all_ranks(ctx, "writing", lambda: None)
    assert "rank 2: full; disk" in str(caught.value)
    assert caught.value.fix == "clean"


def test_what_may_pass_on_all_that_failed_may_pass(of_ranks):
    ctx = of_ranks([None, MachineError("memory ran out", found="rank 1", fix="again")])
    with pytest.raises(MachineError, match="rank 1 of 2 failed while writing"):
        agreement.run_on_all_ranks(ctx, "writing", lambda: None)
    both = [MachineError("full", found=0, fix="clean"), CheckpointError("bad", found=1, fix="-")]
    with pytest.raises(CheckpointError, match="ranks 0, 1 of 2 failed"):
        agreement.run_on_all_ranks(of_ranks(both), "writing", lambda: None)


def test_many_failing_ranks_are_summed_up(of_ranks):
    ctx = of_ranks([None] + [CheckpointError("full", found=i, fix="clean") for i in range(6)])
    with pytest.raises(CheckpointError, match=r"ranks 1, 2, 3, 4 of 7 failed") as caught:
        agreement.run_on_all_ranks(ctx, "writing", lambda: None)
    assert "and 2 more ranks" in str(caught.value)


def test_an_error_that_all_ranks_share_is_raised_without_ranks(of_ranks):
    ctx = of_ranks([ConfigError("same", found=1, fix="x") for _ in range(3)])
    with pytest.raises(ConfigError, match=r"^same"):
        agreement.run_on_all_ranks(ctx, "writing", lambda: None)
