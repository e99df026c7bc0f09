"""Mutants of an inference engine: its planning, and what executes a step."""

from tests.mutants.mutant import Mutant

SCHEDULER = "megatron/scheduling/scheduler.py"
UNIT = "tests/unit/scheduling"
TENSORS = "tests/unit/inference"
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
    "generation": (
        Mutant(
            "a product is made again when its weights have changed",
            "megatron/model/gpt_model.py",
            "self._products is None or self._products.are_stale(weights)",
            "self._products is None",
            f"{TENSORS}/test_forward.py::test_new_weights_are_those_of_the_next_step",
        ),
        Mutant(
            "top-p keeps the token that crosses it",
            "megatron/inference/sampling.py",
            "(before >= top_p)",
            "(before + weights > top_p)",
            f"{TENSORS}/test_sampling.py::test_top_p_keeps_the_fewest_tokens_that_reach_it",
        ),
        Mutant(
            "top-k leaves nothing to other tokens",
            "megatron/inference/sampling.py",
            "likeliest.masked_fill(ranks >= top_k, -torch.inf)",
            "likeliest.masked_fill(ranks > top_k, -torch.inf)",
            f"{TENSORS}/test_sampling.py::test_top_k_keeps_exactly_k_even_among_equals",
        ),
        Mutant(
            "top-p is a share of the top k",
            "megatron/inference/sampling.py",
            "        top_k <= count,\n        likeliest.logsumexp",
            "        top_k < 0,\n        likeliest.logsumexp",
            f"{TENSORS}/test_sampling.py::test_top_p_is_a_share_of_the_top_k",
        ),
        Mutant(
            "min-p is relative to the likeliest token",
            "megatron/inference/sampling.py",
            "(weights < min_p * weights[:, :1])",
            "(weights < min_p)",
            f"{TENSORS}/test_sampling.py::"
            "test_min_p_keeps_what_is_so_many_times_as_likely_as_the_likeliest",
        ),
        Mutant(
            "a nucleus that the first candidates do not cover is drawn from all tokens",
            "megatron/inference/sampling.py",
            "    for row in (~few.cover).nonzero().flatten().tolist():\n",
            "    for row in ():\n",
            f"{TENSORS}/test_sampling.py::"
            "test_few_candidates_give_the_draws_of_the_sorted_vocabulary[{'top_p': 0.99}]",
        ),
        Mutant(
            "scores are divided by the temperature",
            "megatron/inference/sampling.py",
            "logits.float() / params.temperature",
            "logits.float() * params.temperature",
            f"{TENSORS}/test_sampling.py::test_without_limits_the_distribution_is_the_softmax",
        ),
        Mutant(
            "each choice of one prompt draws by itself",
            "megatron/inference/sampling.py",
            "self.sequence, position, self.choice)",
            "self.sequence, position)",
            f"{TENSORS}/test_sampling.py::"
            "test_a_draw_depends_on_seed_sequence_position_and_choice_alone",
        ),
        Mutant(
            "presence counts once, however often a token was generated",
            "megatron/inference/sampling.py",
            "params.presence_penalty + params.frequency_penalty * counts",
            "(params.presence_penalty + params.frequency_penalty) * counts",
            f"{TENSORS}/test_sampling.py::test_penalties_are_the_formulas",
        ),
        Mutant(
            "logprobs are of the scores before penalties",
            "megatron/inference/logprobs.py",
            "logits.float().log_softmax(dim=-1)",
            "logits.float().relu().log_softmax(dim=-1)",
            f"{TENSORS}/test_logprobs.py::test_they_are_the_log_softmax",
        ),
        Mutant(
            "each new token has the next position",
            "megatron/inference/generate.py",
            "len(self._prompts[row]) + len(new) - 1, True)",
            "len(self._prompts[row]) + len(new), True)",
            f"{TENSORS}/test_generate.py::test_the_cache_changes_no_token[learned_absolute-2]",
        ),
        Mutant(
            "an end of document ends its row",
            "megatron/inference/generate.py",
            "if token == self._eod:",
            "if token == -1:",
            f"{TENSORS}/test_generate.py::"
            "test_a_row_ends_at_the_end_of_document_and_the_others_go_on",
        ),
        Mutant(
            "a row that ended takes no more tokens",
            "megatron/inference/generate.py",
            "                if self._ended[row] is None\n",
            "",
            f"{TENSORS}/test_generate.py::test_a_row_ends_where_it_is_told_to_and_the_others_go_on",
        ),
        Mutant(
            "padded columns are never drawn",
            "megatron/inference/forward.py",
            "logits[: len(sampled), : self.limits.vocabulary]",
            "logits[: len(sampled)]",
            f"{TENSORS}/test_generate.py::test_padding_tokens_are_never_chosen",
        ),
        Mutant(
            "a token outside of the vocabulary is refused",
            "megatron/inference/generate.py",
            "wrong = [token for token in prompt if not 0 <= token < vocabulary]",
            "wrong = [token for token in prompt if not 0 <= token <= vocabulary]",
            f"{TENSORS}/test_generate.py::test_requests_without_a_meaning_are_refused",
        ),
    ),
    "paged attention": (
        Mutant(
            "a block that two sequences share is copied before one of them writes",
            "megatron/inference/forward.py",
            "        self.cache.copy(plan.copies)\n",
            "",
            f"{TENSORS}/test_start.py::test_a_scheduled_request_gets_what_it_gets_alone[rope]",
        ),
        Mutant(
            "an engine that is to be deterministic looks at its probe",
            "megatron/inference/start.py",
            "    if options.deterministic:\n        require",
            "    if False:\n        require",
            f"{TENSORS}/test_start.py::test_an_engine_that_cannot_hold_what_is_asked_does_not_start",
        ),
        Mutant(
            "a sequence does not read what another one left in its blocks",
            "megatron/inference/forward.py",
            "        self.cache.clear([",
            "        len([",
            f"{TENSORS}/test_forward.py::test_scores_of_any_parts_are_those_of_the_whole_sequence",
        ),
        Mutant(
            "tables are padded with the block of zeros",
            "megatron/inference/paged_attention.py",
            "    null = cache.null_block\n",
            "    null = 0\n",
            f"{TENSORS}/test_forward.py::test_scores_of_any_parts_are_those_of_the_whole_sequence",
        ),
        Mutant(
            "a key goes to the offset of its position in its block",
            "megatron/inference/paged_attention.py",
            "each.blocks[at // size] * size + at % size",
            "each.blocks[at // size] * size + (at - each.start) % size",
            f"{TENSORS}/test_paged_attention.py::"
            "test_outputs_are_the_formula_for_tokens_and_for_longer_slices[None-None-None]",
        ),
        Mutant(
            "padding of a step writes no keys",
            "megatron/inference/paged_attention.py",
            "            out[count:] = 0.0\n",
            "            out[count:] = 1.0\n",
            f"{TENSORS}/test_paged_attention.py::"
            "test_outputs_are_the_formula_for_tokens_and_for_longer_slices[None-None-None]",
        ),
        Mutant(
            "sinks of a slice of several tokens are those of its heads",
            "megatron/inference/paged_attention.py",
            "sinks.view(-1, each).t().unsqueeze(-1)",
            "sinks.view(each, -1).unsqueeze(-1)",
            f"{TENSORS}/test_paged_attention.py::"
            "test_outputs_are_the_formula_for_tokens_and_for_longer_slices[None-None-sinks1]",
        ),
        Mutant(
            "layers without a window see all keys",
            "megatron/inference/paged_attention.py",
            "group.biases[is_wide]",
            "group.biases[0]",
            f"{TENSORS}/test_forward.py::"
            "test_every_kind_of_model_decodes_and_reads_prompts[rope-window of some layers]",
        ),
        Mutant(
            "blocks are copied before anything is written",
            "megatron/inference/paged_cache.py",
            "self.pool.index_copy_(2, targets, self.pool.index_select(2, sources))",
            "[self.pool[:, :, b].copy_(self.pool[:, :, a]) for a, b in pairs]",
            f"{TENSORS}/test_paged_cache.py::test_copies_are_those_of_the_contents_before",
        ),
        Mutant(
            "keys are padded to the split of the kernel",
            "megatron/inference/attention_plan.py",
            "math.lcm(key_multiple, block_size)",
            "block_size",
            f"{TENSORS}/test_attention_plan.py::"
            "test_every_slice_is_in_one_group_that_covers_its_keys",
        ),
        Mutant(
            "products of one row have the bits of products of several",
            "megatron/ops/row_products.py",
            "    return max(2, ",
            "    return max(1, ",
            "tests/unit/ops/test_row_products.py::"
            "test_a_row_has_its_bits_among_any_number_of_rows[dtype0-False]",
        ),
        Mutant(
            "kernels are compiled for few numbers of rows",
            "megatron/ops/row_products.py",
            "padded_rows(count) - count",
            "int(count == 1)",
            "tests/unit/ops/test_row_products.py::"
            "test_steps_of_any_size_multiply_few_numbers_of_rows",
        ),
        Mutant(
            "a step of a float32 model uses products that do not depend on its rows",
            "megatron/inference/forward.py",
            "model.row_products() if batch_invariant else None",
            "None",
            f"{TENSORS}/test_invariance.py::test_bits_are_those_of_the_sequence_alone[llama-fp32]",
        ),
        Mutant(
            "the probe compares a sequence with itself in a batch",
            "megatron/inference/invariance.py",
            "torch.equal(alone, probe.in_batch())",
            "torch.equal(alone, probe.alone())",
            f"{TENSORS}/test_invariance.py::test_the_probe_finds_what_depends_on_the_batch",
        ),
        Mutant(
            "what a step holds is not given to blocks",
            "megatron/inference/cache_size.py",
            "max(0, free - reserved) // of_one - 1",
            "free // of_one - 1",
            f"{TENSORS}/test_cache_size.py::test_what_is_free_beside_a_step_is_blocks",
        ),
        Mutant(
            "a plan that writes one block for two sequences is refused",
            "megatron/inference/plan_limits.py",
            "written.setdefault(block, each.sequence) != each.sequence",
            "written.setdefault(block, each.sequence) < 0",
            f"{TENSORS}/test_plan_limits.py::test_a_plan_beyond_its_limits_is_an_internal_error",
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
            "!= replica:\n            return None\n        return self._pop(request).client",
            "is None:\n            return None\n        return self._pop(request).client",
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
