"""Mutants of what ranks know of each other: meetings, failures, stalls, and starting again."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "the meeting of ranks": (
        Mutant(
            "values that differ between ranks are named",
            "megatron/peers/differences.py",
            "        if len(holders) > 1:\n",
            "        if len(holders) > 2:\n",
            "tests/unit/peers/test_differences.py::"
            "test_what_some_may_lack_is_compared_between_the_others",
        ),
        Mutant(
            "a value that one rank lacks differs",
            "megatron/peers/differences.py",
            'holders.setdefault(one.get(name, "(nothing)"), []).append(rank)',
            "if name in one:\n                holders.setdefault(one[name], []).append(rank)",
            "tests/unit/peers/test_differences.py::test_values_are_named_with_those_who_hold_them",
        ),
        Mutant(
            "a process whose rank is taken is refused",
            "megatron/peers/handshake.py",
            "    return None if before is None else _twice(before, arrived)",
            "    return None",
            "tests/unit/peers/test_handshake.py::"
            "test_two_processes_of_one_rank_are_told_where_they_are",
        ),
        Mutant(
            "a process that comes late is none of those that met",
            "megatron/peers/handshake.py",
            "        if own.rank < len(places) and places[own.rank] == place:\n",
            "        if own.rank < len(places):\n",
            "tests/unit/peers/test_handshake.py::"
            "test_a_process_that_comes_after_the_meeting_is_told_who_has_its_rank",
        ),
        Mutant(
            "ranks of another world are strangers",
            "megatron/peers/handshake.py",
            "    if arrived.world_size != own.world_size or not",
            "    if not",
            "tests/unit/peers/test_handshake.py::test_a_rank_of_another_job_is_told_from_ours",
        ),
        Mutant(
            "ranks that were told something else are refused",
            "megatron/peers/handshake.py",
            "    return problem or [places",
            "    return [places",
            "tests/unit/peers/test_handshake.py::"
            "test_ranks_that_were_told_something_else_are_named_with_it",
        ),
        Mutant(
            "a socket that accepts and says nothing is found out",
            "megatron/peers/handshake.py",
            "        if silent_for >= _SILENT_S:\n",
            "        if silent_for >= 100 * _SILENT_S:\n",
            "tests/unit/peers/test_handshake.py::"
            "test_a_socket_that_says_nothing_is_found_out_long_before_the_deadline",
        ),
    ),
    "ranks that have stopped": (
        Mutant(
            "a silent rank ends the run",
            "megatron/peers/stall.py",
            "        is_final = final is not None and silence >= final\n",
            "        is_final = False\n",
            "tests/unit/peers/test_stall.py::test_a_silent_rank_is_named_and_then_ends_the_run",
        ),
        Mutant(
            "a sign of life is one that changed",
            "megatron/peers/stall.py",
            "(self._beat is None or beat != self._beat)",
            "True",
            "tests/unit/peers/test_stall.py::test_signs_of_life_are_those_that_change",
        ),
        Mutant(
            "a rank that has left is not silent",
            "megatron/peers/stall.py",
            "        if beat is None or beat.section == CLOSED:\n",
            "        if beat is None:\n",
            "tests/unit/peers/test_stall.py::test_a_rank_that_has_left_is_not_silent",
        ),
        Mutant(
            "the pause of a process is none of its neighbour",
            "megatron/peers/stall.py",
            "            self._next.forgive(now)\n",
            "            pass\n",
            "tests/unit/peers/test_stall.py::test_a_pause_of_this_process_is_none_of_its_neighbour",
        ),
        Mutant(
            "who waits for another rank does not name itself",
            "megatron/peers/stall.py",
            "        elif final is None or doing.seconds < _LAST * final",
            "        elif False",
            "tests/unit/peers/test_stall.py::"
            "test_a_rank_that_waits_leaves_it_to_the_one_that_it_waits_for",
        ),
        Mutant(
            "an evaluation is no part of its step",
            "megatron/peers/activity.py",
            "                    self._outside += now - began\n",
            "                    pass\n",
            "tests/unit/peers/test_activity.py::"
            "test_an_evaluation_is_no_part_of_its_step_and_a_wait_for_data_is",
        ),
        Mutant(
            "a process is known by its start too",
            "megatron/peers/stacks.py",
            "self.started > 0 and _stat(self.pid)[1] == self.started",
            "self.started > 0 and _stat(self.pid)[1] > 0",
            "tests/unit/peers/test_stacks.py::test_a_process_is_known_by_its_pid_and_its_start",
        ),
    ),
    "stacks of ranks that have stopped": (
        Mutant(
            "one rank asks a silent one for its stacks",
            "megatron/peers/stall.py",
            "        if self._store.add(_ASKED, 1) == 1:",
            "        if True:",
            "tests/unit/peers/test_stall.py::"
            "test_one_rank_of_its_machine_asks_a_silent_one_for_its_stacks",
        ),
        Mutant(
            "a rank that stalls again is asked again",
            "megatron/peers/stall.py",
            "                self._store.delete_key(_ASKED)\n",
            "",
            "tests/unit/peers/test_stall.py::"
            "test_one_rank_of_its_machine_asks_a_silent_one_for_its_stacks",
        ),
        Mutant(
            "a silent rank outside of steps is named before collectives time out",
            "megatron/peers/stall.py",
            "return _NAMED_BEFORE_END * limits.start_s, limits.start_s",
            "return limits.start_s, limits.start_s",
            "tests/unit/peers/test_stall.py::"
            "test_a_rank_outside_of_its_steps_may_be_silent_for_minutes",
        ),
        Mutant(
            "a rank gives a sign of life before its first poll",
            "megatron/peers/stall.py",
            "        self._write(START, 0)  #",
            "        #",
            "tests/unit/peers/test_stall.py::test_a_rank_that_never_polls_is_named_too",
        ),
        Mutant(
            "a process without the handler is not signalled",
            "megatron/peers/native_stacks.py",
            "if not outputs or not _catches(pid, both) or not process.is_here:",
            "if not process.is_here:",
            "tests/unit/peers/test_native_stacks.py::"
            "test_a_process_that_has_no_handlers_is_not_signalled",
        ),
        Mutant(
            "a stopped process is not signalled",
            "megatron/peers/native_stacks.py",
            "    if process.is_stopped:\n",
            "    if False:\n",
            "tests/unit/peers/test_native_stacks.py::test_a_stopped_process_is_not_asked",
        ),
        Mutant(
            "frames of Python code that runs are not read",
            "megatron/peers/native_stacks.py",
            "has_native, runs_python = _catches(pid, native), _runs_python(outputs[0])\n",
            "has_native, runs_python = _catches(pid, native), False\n",
            "tests/unit/peers/test_native_stacks.py::"
            "test_python_frames_of_a_process_whose_python_code_runs_are_not_read",
        ),
        Mutant(
            "a rank notes that its Python code runs",
            "megatron/peers/watch.py",
            "            native_stacks.note_python_runs()\n",
            "",
            "tests/unit/peers/test_watch.py::test_a_rank_notes_that_its_python_code_runs",
        ),
        Mutant(
            "who asked for it is told of a rank that failed before the process ends",
            "megatron/peers/watch.py",
            "                self._tell(error)\n",
            "",
            "tests/distributed/peers/test_watch.py::"
            "test_whoever_looks_hears_of_a_failure_before_the_process_is_ended",
        ),
        Mutant(
            "whoever asked for it hears of a rank that has stopped",
            "megatron/peers/watch.py",
            "        self._tell(error)\n        # Others",
            "        # Others",
            "tests/unit/peers/test_watch.py::"
            "test_the_stop_of_a_rank_is_told_before_the_process_ends",
        ),
        Mutant(
            "a signal that something else uses is left alone",
            "megatron/peers/native_stacks.py",
            "        if any(_catches(os.getpid(), number) for number in (native, both, python)):\n",
            "        if False:\n",
            "tests/unit/peers/test_native_stacks.py::test_a_signal_that_is_in_use_is_left_alone",
        ),
        Mutant(
            "system calls are restarted after the handler",
            "csrc/peers/native_stacks.cpp",
            "SA_SIGINFO | SA_RESTART;",
            "SA_SIGINFO;",
            "tests/unit/peers/test_native_stacks.py::"
            "test_a_process_that_holds_the_interpreters_lock_shows_python_and_native_stacks",
        ),
        Mutant(
            "a process that is asked writes the stack of the thread that is asked too",
            "csrc/peers/native_stacks.cpp",
            "    write_all(true, number",
            "    write_all(false, number",
            "tests/unit/peers/test_native_stacks.py::"
            "test_a_process_that_holds_the_interpreters_lock_shows_python_and_native_stacks",
        ),
        Mutant(
            "a thread that blocks the signal is left after a moment",
            "csrc/peers/native_stacks.cpp",
            "kThreadNs = 100'000'000, ",
            "kThreadNs = 100'000'000'000, ",
            "tests/unit/peers/test_native_stacks.py::"
            "test_a_process_shows_its_own_threads_while_the_lock_is_free",
        ),
    ),
    "starting again": (
        Mutant(
            "what is wrong for good is not started again",
            "megatron/supervise.py",
            "or not is_retryable(cause.status)",
            "or False",
            "tests/unit/test_supervise.py::test_what_is_wrong_for_good_is_not_started_again",
        ),
        Mutant(
            "a rank that ended for another one is not the cause",
            "megatron/supervise.py",
            "end.status != PeerError.exit_code",
            "True",
            "tests/unit/test_supervise.py::test_the_cause_is_the_first_end_that_no_other_caused",
        ),
        Mutant(
            "starts that lead to a new checkpoint are not counted",
            "megatron/supervise.py",
            "in_vain = 0 if after != before else in_vain + 1",
            "in_vain = in_vain + 1",
            "tests/unit/test_supervise.py::"
            "test_starts_that_lead_to_a_new_checkpoint_are_not_counted",
        ),
        Mutant(
            "processes that a rank started end with it",
            "megatron/supervise.py",
            "        os.killpg(process.pid, signal.SIGKILL)\n",
            "        process.kill()\n",
            "tests/unit/test_supervise.py::test_processes_that_a_rank_started_end_with_it",
        ),
        Mutant(
            "no rank outlives its supervisor",
            "megatron/supervise.py",
            "            prctl(_DIE_WITH_PARENT, signal.SIGKILL)\n",
            "            pass\n",
            "tests/unit/test_supervise.py::test_no_rank_outlives_its_supervisor",
        ),
        Mutant(
            "a kill by the kernel is told from others",
            "megatron/supervise.py",
            "was_killed and host.kills_for_memory() > self._kills_before",
            "was_killed",
            "tests/unit/test_supervise.py::"
            "test_a_kill_by_the_kernel_is_told_from_others_by_its_counter",
        ),
        Mutant(
            "an end that is no kill is not the kernel's",
            "megatron/supervise.py",
            "was_killed = status == -signal.SIGKILL",
            "was_killed = status < 0",
            "tests/unit/test_supervise.py::"
            "test_another_end_is_not_the_kernel_s_whatever_its_counter_says",
        ),
        Mutant(
            "kills in groups within the own one count",
            "megatron/host.py",
            "for group, _, _ in os.walk(folder)) if own",
            "for group, _, _ in [*os.walk(folder)][:1]) if own",
            "tests/unit/test_host.py::"
            "test_kills_for_memory_are_those_of_the_own_group_and_of_groups_within",
        ),
    ),
}
