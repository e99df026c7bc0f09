"""Mutants of an inference engine: its planning, and what executes a step."""

from tests.mutants.mutant import Mutant

SCHEDULER = "megatron/scheduling/scheduler.py"
UNIT = "tests/unit/scheduling"
TENSORS = "tests/unit/inference"

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
            "        if count > 1:\n",
            "        if count > 0:\n",
            "tests/unit/ops/test_row_products.py::"
            "test_a_row_has_its_bits_among_any_number_of_rows[dtype0-False]",
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
}
