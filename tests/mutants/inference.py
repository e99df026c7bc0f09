"""Mutants of the planning of an inference engine."""

from tests.mutants.mutant import Mutant

SCHEDULER = "megatron/scheduling/scheduler.py"
UNIT = "tests/unit/scheduling"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "inference scheduler": (
        Mutant(
            "a block that others read is copied before a sequence writes into it",
            SCHEDULER,
            "        if self.pool.references(source) > 1:\n",
            "        if self.pool.references(source) > 9:\n",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_samples_share_the_prompt_and_copy_the_block_that_they_write",
        ),
        Mutant(
            "decodes come before prefills",
            SCHEDULER,
            "            if sample.remaining == 1 and sample.is_forked:  ",
            "            if False and sample.is_forked:  ",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_decodes_come_first_and_the_oldest_prefill_has_the_rest_of_the_tokens",
        ),
        Mutant(
            "a request that was passed too often is not passed again",
            SCHEDULER,
            "        return record.passes >= self.limits.max_passes\n",
            "        return record.passes > self.limits.max_passes\n",
            f"{UNIT}/test_scheduler.py::TestMemory::"
            "test_a_large_head_is_passed_so_often_and_no_more",
        ),
        Mutant(
            "older requests are not preempted",
            SCHEDULER,
            "            if other.seniority > record.seniority\n",
            "            if other.seniority != record.seniority\n",
            f"{UNIT}/test_scheduler.py::TestMemory::"
            "test_the_youngest_loses_its_blocks_which_are_used_in_the_same_step",
        ),
        Mutant(
            "what was preempted too often has its blocks reserved",
            SCHEDULER,
            "        is_last_try = record.preemptions >= self.limits.max_preemptions\n",
            "        is_last_try = record.preemptions > self.limits.max_preemptions\n",
            f"{UNIT}/test_scheduler.py::TestMemory::"
            "test_what_was_preempted_too_often_has_all_its_blocks_and_keeps_them",
        ),
        Mutant(
            "blocks of a step that failed are not cached",
            SCHEDULER,
            "        plan = self._require_in_flight()\n        self.in_flight = None\n"
            "        failed =",
            "        plan = self._require_in_flight()\n        self.in_flight = None\n"
            "        for record, sample in self._runnable():\n"
            "            sample.computed = len(sample.tokens)\n"
            "            self._enter_full_blocks(record, sample)\n"
            "        failed =",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_a_step_that_failed_is_not_in_the_cache_and_ends_its_requests",
        ),
        Mutant(
            "the tokens of a block are compared on a hit",
            "megatron/scheduling/prefix_index.py",
            "self.root == root and self.tokens == tokens",
            "self.root == root",
            f"{UNIT}/test_prefix_index.py::"
            "test_whatever_collides_a_hit_has_the_text_that_was_entered[<lambda>0]",
        ),
        Mutant(
            "a block is found only behind the blocks that it was computed behind",
            "megatron/scheduling/prefix_index.py",
            "        return self.parent is parent and",
            "        return",
            f"{UNIT}/test_prefix_index.py::"
            "test_equal_tokens_behind_other_tokens_are_another_block_whatever_their_hash_is",
        ),
        Mutant(
            "one token of a prompt is always computed",
            "megatron/scheduling/prefix_index.py",
            "range(0, len(tokens) - self._block_size, self._block_size)",
            "range(0, len(tokens) - self._block_size + 1, self._block_size)",
            f"{UNIT}/test_prefix_index.py::"
            "test_the_longest_beginning_is_found_and_one_token_is_left",
        ),
        Mutant(
            "a cached block is evicted when it was used longest ago",
            "megatron/scheduling/blocks.py",
            "        self.forget(next(iter(self._cached)))\n",
            "        self.forget(next(reversed(self._cached)))\n",
            f"{UNIT}/test_blocks.py::"
            "test_the_block_that_was_used_longest_ago_is_evicted_and_of_one_text_its_end",
        ),
        Mutant(
            "the last token of a sample needs no place in a block",
            "megatron/scheduling/limits.py",
            "samples * (self.blocks_for(prompt + new_tokens - 1) - shared)",
            "samples * (self.blocks_for(prompt + new_tokens) - shared)",
            f"{UNIT}/test_sequences.py::test_the_worst_case_of_a_request_is_that_of_the_limits",
        ),
        Mutant(
            "a plan is compared with the leader's before it is computed",
            "megatron/scheduling/replay.py",
            "        if (digest := plan_digest(plan)) != record.digest:\n",
            "        if (digest := plan_digest(plan)) != record.digest and not plan.slices:\n",
            f"{UNIT}/test_replay.py::test_a_plan_that_differs_is_noticed_before_it_is_computed",
        ),
        Mutant(
            "the time of a deadline is that of the command",
            SCHEDULER,
            "deadline <= now_ns:",
            "deadline < now_ns:",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_a_request_expires_at_its_deadline_wherever_it_is",
        ),
        Mutant(
            "tokens of a request that ended meanwhile are dropped",
            SCHEDULER,
            "            if part.samples and part.sequence in by_sequence:\n",
            "            if part.samples:\n",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_the_result_of_a_request_that_was_aborted_meanwhile_is_dropped",
        ),
    ),
}
