"""Mutants of what a run notices while it trains: ranks that are slow, numbers that are wrong."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "stragglers": (
        Mutant(
            "waits for other ranks are no computing",
            "megatron/peers/activity.py",
            "return StepTimes(in_steps - peers, self._step_data, peers)",
            "return StepTimes(in_steps, self._step_data, peers)",
            "tests/distributed/loop/test_stragglers.py::"
            "test_the_rank_that_is_slow_in_its_own_work_is_named",
        ),
        Mutant(
            "waits in evaluations are none of a step",
            "megatron/peers/activity.py",
            "            if self._section == STEP:\n                self._step_peers",
            "            if self._section:\n                self._step_peers",
            "tests/unit/peers/test_activity.py::test_waits_are_counted_within_steps_alone",
        ),
        Mutant(
            "a wait between pipeline stages is a wait",
            "megatron/pipeline/p2p.py",
            "nullcontext(), waiting_for(self._group):",
            "nullcontext():",
            "tests/distributed/loop/test_stragglers.py::"
            "test_the_rank_that_is_slow_in_its_own_work_is_named",
        ),
        Mutant(
            "a rank is compared with the median, not with the fastest",
            "megatron/loop/stragglers.py",
            "return Slowest(rank, seconds[rank], median_low(seconds))",
            "return Slowest(rank, seconds[rank], min(seconds))",
            "tests/unit/loop/test_stragglers.py::"
            "test_a_rank_that_takes_longest_is_found_whatever_the_others_take",
        ),
        Mutant(
            "a report is of the steps since the one before",
            "megatron/loop/stragglers.py",
            "            self._steps, self._before = 0, times\n",
            "            self._steps = 0\n",
            "tests/unit/loop/test_stragglers.py::"
            "test_a_report_is_of_the_steps_since_the_one_before",
        ),
    ),
}
