"""Mutants of the planning of an inference engine."""

from tests.mutants.mutant import Mutant

SCHEDULER = "megatron/scheduling/scheduler.py"
UNIT = "tests/unit/scheduling"
COORDINATOR, MEMBER = (
    f"megatron/scheduling/control/{name}.py" for name in ("coordinator", "member")
)
CONTROL = f"{UNIT}/control"
TRANSITIONS = f"{CONTROL}/test_coordinator.py::TestTransitions"
MEMBERS = f"{CONTROL}/test_coordinator.py::TestMembers"

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
            "a sample that computes the prompt of others is ended without them",
            SCHEDULER,
            "        elif record.state.is_running and not any(record.runnable):\n",
            "        elif False:\n",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_a_sample_is_ended_between_steps_and_its_request_with_the_last_one",
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
    "inference control": (
        Mutant(
            "the state of an engine changes when all have acknowledged, not when it is sent",
            COORDINATOR,
            "        self._change(epoch=epoch, transition=transition, joined=frozenset())\n",
            "        self._change(epoch=epoch, transition=transition, state=edge.target)\n",
            f"{TRANSITIONS}::test_the_state_changes_when_all_have_committed_and_not_before",
        ),
        Mutant(
            "the ranks that were silent are named",
            COORDINATOR,
            "        silent = sorted(self.state.members - transition.acks)\n",
            "        silent = sorted(transition.acks - self.state.members)\n",
            f"{TRANSITIONS}::test_a_rank_that_is_silent_is_named_and_all_are_back_in_the_state_before",
        ),
        Mutant(
            "a decision is sent again",
            COORDINATOR,
            "                    self._send_phase(self.state.transition)\n            case",
            "                    pass\n            case",
            f"{TRANSITIONS}::test_a_decision_is_repeated_until_a_rank_knows_it_or_is_lost",
        ),
        Mutant(
            "a repeated command is done once",
            COORDINATOR,
            "            if (client, answer.id) == (asked.client, command.id):\n",
            "            if (client, answer.id) == (asked.client, command.id + asked.client):\n",
            f"{TRANSITIONS}::test_a_repeated_command_gets_the_same_answer_and_is_done_once",
        ),
        Mutant(
            "acknowledgements of another transition do not count",
            COORDINATOR,
            "        if transition is None or transition.epoch != message.epoch:\n",
            "        if transition is None:\n",
            f"{TRANSITIONS}::"
            "test_an_acknowledgement_of_another_transition_or_process_does_not_count",
        ),
        Mutant(
            "a replica is lost with one of its ranks",
            COORDINATOR,
            "        lost = self._replica_of(member) & self.state.members\n",
            "        lost = frozenset({member}) & self.state.members\n",
            f"{MEMBERS}::test_a_replica_is_lost_with_one_of_its_ranks_and_the_other_begins_again",
        ),
        Mutant(
            "an older process of a rank does not replace a newer one",
            COORDINATOR,
            "        if incarnation < newest:\n",
            "        if incarnation < newest - 100:\n",
            f"{MEMBERS}::test_an_older_process_of_a_rank_is_dismissed_and_a_newer_one_replaces_it",
        ),
        Mutant(
            "an engine starts when all ranks have joined",
            COORDINATOR,
            "        if is_idle and not self.state.missing:\n",
            "        if is_idle and self.state.members:\n",
            f"{MEMBERS}::"
            "test_an_engine_starts_when_all_ranks_have_joined_and_names_those_that_lack",
        ),
        Mutant(
            "a transition that has ended is not prepared again",
            MEMBER,
            "    if prepare.epoch <= newest:\n",
            "    if prepare.epoch < newest:\n",
            f"{CONTROL}/test_member.py::test_a_transition_that_has_ended_is_not_prepared_again",
        ),
        Mutant(
            "a rollback ends older transitions too",
            MEMBER,
            "prepared.epoch <= epoch:  # of",
            "prepared.epoch == epoch:  # of",
            f"{CONTROL}/test_member.py::"
            "test_a_rollback_undoes_what_was_prepared_and_an_older_transition_too",
        ),
        Mutant(
            "a member follows no older coordinator",
            MEMBER,
            "    if not is_own or event.term < state.term:\n",
            "    if not is_own:\n",
            f"{CONTROL}/test_member.py::"
            "test_an_older_coordinator_and_messages_to_others_change_nothing",
        ),
        Mutant(
            "a rank without a lease admits nothing",
            MEMBER,
            "        return self.is_member and not self.is_fenced and is_running\n",
            "        return self.is_member and is_running\n",
            f"{CONTROL}/test_member.py::"
            "test_a_rank_without_a_lease_admits_nothing_until_it_is_heard_again",
        ),
        Mutant(
            "a message has no unknown fields",
            "megatron/scheduling/control/messages.py",
            "    if unknown := sorted(values.keys() - types_of.keys()):\n",
            "    if unknown := sorted(types_of.keys() - types_of.keys()):\n",
            f"{CONTROL}/test_messages.py::test_what_is_no_message_is_refused",
        ),
        Mutant(
            "a number of a message is no truth value",
            "megatron/scheduling/control/messages.py",
            "    is_right = type(value) is hint\n",
            "    is_right = isinstance(value, hint)  # type: ignore[arg-type]\n",
            f"{CONTROL}/test_messages.py::test_what_is_no_message_is_refused",
        ),
        Mutant(
            "a request that has given something is not moved",
            "megatron/scheduling/control/routing.py",
            "            if others and not request.has_started:\n",
            "            if others:\n",
            f"{CONTROL}/test_routing.py::"
            "test_a_request_that_has_given_nothing_is_moved_and_others_fail",
        ),
        Mutant(
            "the end of a request counts only from its replica",
            "megatron/scheduling/control/routing.py",
            "        if self.replica_of(request) != replica:\n",
            "        if self.replica_of(request) is None:\n",
            f"{CONTROL}/test_routing.py::test_a_request_ends_once_and_only_where_it_is_served",
        ),
        Mutant(
            "messages of a rank come from its connection",
            "megatron/scheduling/control/service.py",
            "        is_newest = self._connection_of.get(member) == connection and",
            "        is_newest = connection and",
            f"{CONTROL}/test_service.py::TestRanks::"
            "test_a_message_in_the_name_of_a_rank_is_taken_from_its_connection_only",
        ),
        Mutant(
            "the requests of a lost replica are moved or fail",
            "megatron/scheduling/control/service.py",
            "            self._lose_replica(replica)\n",
            "            pass\n",
            f"{CONTROL}/test_service.py::TestEightFailures::"
            "test_4_requests_of_a_rank_that_died_are_moved_or_fail_within_its_lease",
        ),
        Mutant(
            "a rank that hears nothing fences itself",
            "megatron/scheduling/control/rank_service.py",
            "            self.take(LeaseEnded())\n",
            "            pass\n",
            f"{CONTROL}/test_rank_service.py::"
            "test_a_rank_that_hears_nothing_admits_nothing_until_it_does",
        ),
        Mutant(
            "ranks of a former coordinator begin again",
            MEMBER,
            "        case Welcome() if state.is_member and is_successor:\n",
            "        case Welcome() if state.is_member and not is_successor:\n",
            f"{CONTROL}/test_member.py::"
            "test_a_rank_that_a_new_coordinator_does_not_count_begins_again",
        ),
        Mutant(
            "a new connection of a rank begins with its name",
            "megatron/control/rank_connection.py",
            "        self._handle(self.service.hello())\n",
            "",
            "tests/unit/control/test_rank_connection.py::"
            "test_a_connection_that_breaks_is_made_again_and_the_rank_stays_a_member",
        ),
        Mutant(
            "a receiver that does not read is closed",
            "megatron/control/coordinator_server.py",
            "                writer.transport.abort()\n",
            "                self.service.counts.clear()\n",
            "tests/unit/control/test_coordinator_server.py::"
            "test_a_client_that_does_not_read_is_closed",
        ),
        Mutant(
            "a message that is too long is not read",
            "megatron/control/frames.py",
            "            if length > MAX_MESSAGE_BYTES:\n",
            "            if length > 2 * MAX_MESSAGE_BYTES:\n",
            "tests/unit/control/test_frames.py::"
            "test_a_message_that_is_too_long_is_refused_before_it_is_read",
        ),
        Mutant(
            "a command whose connection breaks is an error",
            "megatron/control/client.py",
            "                if not answer.done():\n",
            "                if answer.done():\n",
            "tests/unit/control/test_client.py::"
            "test_an_answer_that_is_waited_for_is_an_error_when_the_connection_breaks",
        ),
    ),
}
