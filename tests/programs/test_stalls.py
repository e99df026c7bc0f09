"""Ranks that stop, or die without a word: the others name them and end, within seconds."""

import os
import signal
import time
from pathlib import Path

import pytest

from megatron.errors import MachineError, PeerError
from tests.support.launch import all_ended, each_rank, small_run

NAMED_S, ENDED_S = 1.0, 2.0
# For signs of life, two a second, to tell of steps: a rank whose last one is from before the first
# step has minutes, and on a fast machine 20 steps take less than the time between two signs.
SIGNS_OF_STEPS_S = 2.0
ENDS_WITHIN_S = 30.0  # about four by design, and room for a machine under load
FOREVER = (
    *("--train-iters", "1000000", "--eval-iters", "0", "--log-interval", "20"),
    *("--stall-timeout", str(NAMED_S), "--stall-exit-timeout", str(ENDED_S)),
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["SIGSTOP", "SIGKILL"])
def test_a_rank_that_stops_is_named_and_the_run_may_be_started_again(
    name: str, rank: int, tmp_path: Path
) -> None:
    with each_rank(2, small_run(None, *FOREVER), cwds=[tmp_path]) as ranks:
        ranks[1].wait_for("step 20/")
        time.sleep(SIGNS_OF_STEPS_S)
        os.kill(ranks[rank].process.pid, signal.Signals[name])
        stopped, other = ranks[rank], ranks[1 - rank]
        (ended,) = all_ended([other], within_s=ENDS_WITHIN_S)
        (victim,) = all_ended([stopped], within_s=ENDS_WITHIN_S)
    assert ended.status in (MachineError.exit_code, PeerError.exit_code), ended.text
    assert victim.status == -signal.SIGKILL, "what is stopped does not stay behind"
    if name == "SIGSTOP":
        assert f"rank {rank}" in ended.err
        assert "is stopped (SIGSTOP)" in ended.err
        assert "in step " in ended.err or "no answer of the store" in ended.err
    elif rank:
        assert "rank 1 has stopped, so the run ends" in ended.err
        assert "its process has ended without a message" in ended.err
    else:
        assert "the rank that hosts the rendezvous store is gone" in ended.err


def stuck_program(folder: Path, hang: str) -> Path:
    """Write a program whose rank 1 hangs before its step 11.

    Its steps take `SIGNS_OF_STEPS_S` together.
    """
    program = folder / "stuck.py"
    program.write_text(
        "import ctypes, os, time\n"
        "import megatron.loop.training_loop as loop\n"
        "from megatron.launch import launch_from_environment\n"
        "from pretrain_gpt import program\n"
        "plan_step = loop.plan_step\n"
        "def planned(config, duration, progress, curriculum):\n"
        f"    time.sleep({SIGNS_OF_STEPS_S / 10})\n"
        "    if progress.iteration == 10 and launch_from_environment().rank == 1:\n"
        f"        {hang}\n"
        "    return plan_step(config, duration, progress, curriculum)\n"
        "loop.plan_step = planned\n"
        "program()\n"
    )
    return program


def test_a_rank_that_holds_the_interpreters_lock_is_shown_by_another(tmp_path: Path) -> None:
    hang = "ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)"
    program = stuck_program(tmp_path, hang)
    flags = small_run(None, *FOREVER)
    with each_rank(2, flags, cwds=[tmp_path], program=str(program)) as ranks:
        first, second = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert (first.status, second.status) == (MachineError.exit_code, -signal.SIGKILL), first.text
    _, _, shown = first.err.partition("rank 1 was here:\nPython code")
    assert 'stuck.py", line 9 in planned\n' in shown, first.err
    assert "    read (libc" in shown or "no native stacks: they need the compiled code" in shown


def test_a_rank_stuck_in_its_own_work_is_named_with_the_line(tmp_path: Path) -> None:
    program = stuck_program(tmp_path, "time.sleep(600)")
    flags = small_run(None, *FOREVER)
    with each_rank(2, flags, cwds=[tmp_path], program=str(program)) as ranks:
        first, second = all_ended(ranks, within_s=ENDS_WITHIN_S)
    assert second.status == MachineError.exit_code, second.text
    assert first.status == PeerError.exit_code, first.text
    for one in (first, second):
        assert "in step 11: " in one.err
        assert "stuck.py:9 in planned" in one.err, one.err
        assert "native code, innermost" in one.err or "no native stacks: they need" in one.err
    assert "this rank waits for other ranks, in " in first.err
