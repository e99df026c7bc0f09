"""Mutants of an inference engine: its planning, and what executes a step."""

from tests.mutants.mutant import Mutant

SCHEDULER = "megatron/scheduling/scheduler.py"
UNIT = "tests/unit/scheduling"
TENSORS = "tests/unit/inference"
COORDINATOR, MEMBER = (
    f"megatron/scheduling/control/{name}.py" for name in ("coordinator", "member")
)
EVERY_LOAD = (
    f"{UNIT}/test_scheduler.py::TestEveryLoad::"
    "test_every_request_ends_once_with_the_text_that_it_has_alone"
)
QUANTIZED = "megatron/ops/quantized_products.py"
QUANTIZED_TESTS = "tests/unit/ops/test_quantized_products.py"
CONTROL = f"{UNIT}/control"
OFFLOAD = "megatron/inference/offload"
OFFLOAD_TESTS = f"{TENSORS}/offload"
TRANSITIONS = f"{CONTROL}/test_coordinator.py::TestTransitions"
MEMBERS = f"{CONTROL}/test_coordinator.py::TestMembers"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "served prefixes": (
        Mutant(
            "a prompt that is a prefix is computed in one step",
            SCHEDULER,
            "            is_cut = self.limits.prompt_is_prefix and ",
            "            is_cut = False and ",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_a_prompt_that_is_a_prefix_waits_for_a_step_that_has_room_for_all_of_it",
        ),
        Mutant(
            "keys of a prefix are of no use to another prompt",
            SCHEDULER,
            "        if self.limits.prompt_is_prefix:\n            return",
            "        if False:\n            return",
            EVERY_LOAD,
        ),
        Mutant(
            "tokens of a prompt are a prefix of their model",
            SCHEDULER,
            "if self.limits.prompt_is_prefix and start == 0 else 0",
            "if False else 0",
            "tests/unit/serving/engine/test_model_engine.py::test_a_prefix_lm_is_served_as_it_generates",
        ),
        Mutant(
            "a prefix that no step computes is refused",
            "megatron/scheduling/limits.py",
            "        if len(request.prompt) > self.max_tokens_per_step:\n",
            "        if False:\n",
            f"{UNIT}/test_limits.py::test_a_prefix_is_computed_in_one_step_and_has_no_scores",
        ),
        Mutant(
            "a step of a prefix LM has room for its longest prompt",
            "megatron/serving/engine/model_engine.py",
            "        step_tokens = max(step_tokens, length + size.sequences)\n",
            "        pass\n",
            "tests/unit/serving/engine/test_model_engine.py::test_a_prefix_lm_is_served_as_it_generates",
        ),
    ),
    "failed sequences": (
        Mutant(
            "scores that are not finite fail the sequences that they concern",
            "megatron/inference/forward.py",
            "{each.sequence for each in sampled} - {row.sequence for row in rows}\n",
            "{each.sequence for each in sampled if len(rows) < len(every)}\n",
            f"{TENSORS}/test_forward.py::"
            "test_scores_that_are_not_finite_concern_their_sequence_alone",
        ),
        Mutant(
            "targets whose scores are not finite fail their sequence",
            "megatron/inference/forward.py",
            "{each.sequence for each in plan.slices if each.targets} - targets.keys()\n",
            "set()\n",
            f"{TENSORS}/test_forward.py::"
            "test_scores_that_are_not_finite_concern_their_sequence_alone",
        ),
        Mutant(
            "blocks of a sequence that failed leave the cache",
            SCHEDULER,
            "                        self.pool.forget(block)\n                self._end(",
            "                        pass\n                self._end(",
            f"{UNIT}/test_scheduler.py::TestSteps::"
            "test_a_sequence_that_fails_ends_its_request_alone_and_leaves_the_cache",
        ),
        Mutant(
            "other ranks are told which sequences failed",
            "megatron/scheduling/replay.py",
            "        self._commands.append(SequenceFailures(dict(failed)))\n",
            "",
            f"{UNIT}/test_replay.py::test_a_second_scheduler_makes_the_same_plans_from_the_records",
        ),
        Mutant(
            "a request whose scores are not finite ends as failed",
            "megatron/serving/engine/engine_thread.py",
            "        if failed:\n            self._leading.fail_sequences(failed)\n",
            "        tokens |= dict.fromkeys(failed, 0)\n",
            "tests/unit/serving/engine/test_engine_thread.py::"
            "test_scores_that_are_not_finite_fail_their_request_and_no_other",
        ),
    ),
    "embeddings": (
        Mutant(
            "states of a prompt are added in order and in float64",
            "megatron/inference/pooling.py",
            "        self._pooled = states.cumsum(dim=0)[-1]",
            "        self._pooled = states.float().flip(0).sum(dim=0).double()",
            f"{TENSORS}/test_pooling.py::test_states_in_parts_have_the_bits_of_those_at_once",
        ),
        Mutant(
            "a prompt that is computed again begins anew",
            "megatron/inference/pooling.py",
            "        if start > 0 and self._pooled is not None:\n",
            "        if self._pooled is not None:\n",
            f"{TENSORS}/test_pooling.py::test_states_in_parts_have_the_bits_of_those_at_once",
        ),
        Mutant(
            "an embedding is of the states after the last norm",
            "megatron/model/gpt_model.py",
            "        return self.run((hidden.unsqueeze(0),), start=-2, stop=-1)[0][0]\n",
            "        return hidden\n",
            f"{TENSORS}/test_pooling.py::test_embeddings_have_the_same_bits_in_any_company",
        ),
        Mutant(
            "an embedding that has no direction fails its request",
            "megatron/serving/engine/running_requests.py",
            "                failed[part.sequence] = first_line(error)\n",
            "                log.error(first_line(error))\n",
            "tests/unit/serving/engine/test_engine_thread.py::"
            "test_hidden_states_become_an_embedding_or_fail_their_request",
        ),
        Mutant(
            "the limit of requests counts embeddings",
            "megatron/serving/app.py",
            "        _, done = await unless_client_leaves(request, self._all_parts(job))\n",
            "        done = JobRun(job, self._backend)\n"
            "        done._submit()\n"
            "        done._take(*await done._events.get())\n",
            "tests/unit/serving/test_app.py::test_embeddings_wait_and_end_as_other_requests_do",
        ),
    ),
    "quantised weights": (
        Mutant(
            "weights are rounded to the nearest value",
            QUANTIZED,
            "        values = values.round()\n",
            "        values = values.floor()\n",
            f"{QUANTIZED_TESTS}::test_values_are_the_nearest_and_none_is_cut",
        ),
        Mutant(
            "each output has a scale of its own",
            QUANTIZED,
            "wide.abs().amax(dim=-1)",
            "wide.abs().amax().expand(wide.shape[:-1])",
            f"{QUANTIZED_TESTS}::test_values_are_the_nearest_and_none_is_cut",
        ),
        Mutant(
            "each of several weights has its own scales",
            QUANTIZED,
            "scales = self._scales[group]",
            "scales = self._scales[0]",
            f"{QUANTIZED_TESTS}::test_each_of_several_weights_has_its_own_product",
        ),
        Mutant(
            "without kernels int8 is converted",
            QUANTIZED,
            "        and library.INSTRUCTION_SET is not None\n",
            "",
            f"{QUANTIZED_TESTS}::test_without_kernels_weights_are_converted",
        ),
        Mutant(
            "the weight itself is replaced",
            "megatron/inference/weight_quantization.py",
            "        weight.data = product.values\n",
            "",
            f"{TENSORS}/test_weight_quantization.py::"
            "test_weights_of_linear_layers_take_half_of_the_memory",
        ),
        Mutant(
            "a matrix that a product converts has room beside the blocks",
            "megatron/inference/cache_size.py",
            "    reserved += dense_bytes(model)\n",
            "",
            f"{TENSORS}/test_cache_size.py::"
            "test_a_matrix_that_is_converted_has_room_beside_the_blocks",
        ),
    ),
    "prompt logprobs": (
        Mutant(
            "a prompt whose log-probabilities are wanted is computed whole",
            "megatron/scheduling/requests.py",
            "        return self.prompt_logprobs is None and not self.embeds\n",
            "        return True\n",
            f"{TENSORS}/test_logprobs.py::"
            "test_a_prompt_that_is_scored_is_computed_whole_behind_one_that_is_cached",
        ),
        Mutant(
            "targets are the tokens behind those of the slice",
            "megatron/scheduling/sequences.py",
            "        return self.request.prompt[start + 1 : last + 1]\n",
            "        return self.request.prompt[start:last]\n",
            EVERY_LOAD,
        ),
        Mutant(
            "scores of a part of a prompt stand behind those of the part before",
            "megatron/serving/engine/running_requests.py",
            "            submitted.scores[part.start :] = [",
            "            submitted.scores[:] = [",
            "tests/unit/serving/engine/test_engine_thread.py::"
            "test_a_prompt_is_scored_in_parts_before_its_first_token",
        ),
        Mutant(
            "which of equal tokens are reported does not depend on other rows",
            "megatron/inference/logprobs.py",
            "topk(count, dim=-1)",
            "topk(max(counts), dim=-1)",
            f"{TENSORS}/test_logprobs.py::"
            "test_which_of_equal_tokens_are_the_likeliest_does_not_depend_on_other_rows",
        ),
        Mutant(
            "a prompt without an answer has to fit as well",
            "megatron/scheduling/limits.py",
            "        if request.max_new_tokens > longest or is_too_long:\n",
            "        if request.max_new_tokens > longest:\n",
            f"{UNIT}/test_limits.py::test_a_prompt_without_an_answer_may_be_as_long_as_the_model",
        ),
    ),
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
            "                if sample.remaining == 1:\n",
            "                if False:\n",
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
            "        self._end_oldest()\n        for record in self._by_seniority():\n"
            "            if any",
            "        self._end_oldest()\n"
            "        for record, sample in self._runnable():\n"
            "            sample.computed = len(sample.tokens)\n"
            "            self._enter_full_blocks(record, sample)\n"
            "        for record in self._by_seniority():\n            if any",
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
            "samples * (self.blocks_for(prompt + max(1, new_tokens) - 1) - shared)",
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
            "            if part.sequence not in by_sequence:\n",
            "            if False:\n",
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
            "[: len(rows), : self.limits.vocabulary]",
            "[: len(rows)]",
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
            f"{TENSORS}/test_start.py::test_a_scheduled_request_gets_what_it_gets_alone",
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
            "megatron/inference/paged_cache.py",
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
            "bfloat16 is left to PyTorch where oneDNN does not multiply it",
            "megatron/ops/row_products.py",
            "    if not onednn_multiplies(weight.dtype):",
            "    if False:",
            "tests/unit/ops/test_row_products.py::"
            "test_a_dtype_that_onednn_does_not_multiply_here_is_left_to_pytorch",
        ),
        Mutant(
            "packed weights are multiplied by our kernel where it is built",
            "megatron/ops/row_products.py",
            "if library.INSTRUCTION_SET is None:",
            "if True:",
            "tests/unit/ops/test_row_products.py::"
            "test_packed_weights_are_those_of_the_kernels_that_are_there",
        ),
        Mutant(
            "a tile of the kernel begins where its slice does",
            "megatron/inference/kernel_attention.py",
            "tiles.append((token, own.start,",
            "tiles.append((0, own.start,",
            f"{TENSORS}/test_kernel_attention.py::test_tiles_hold_every_row_once",
        ),
        Mutant(
            "layers without a window see all keys in the kernel",
            "megatron/inference/kernel_attention.py",
            "window=0 if is_wide else self._window",
            "window=self._window",
            f"{TENSORS}/test_kernel_attention.py::"
            "test_scores_of_any_parts_are_those_of_the_whole_sequence"
            "[rope-window of some layers]",
        ),
        Mutant(
            "a prefix is seen whole by the kernel",
            "megatron/inference/kernel_attention.py",
            "own.prefix if len(own.tokens) > 1 else 0",
            "0",
            f"{TENSORS}/test_kernel_attention.py::test_a_prefix_is_seen_whole_by_its_prompt",
        ),
        Mutant(
            "models with sinks are none of the kernel",
            "megatron/inference/kernel_attention.py",
            "        and not config.has_sinks\n",
            "",
            f"{TENSORS}/test_kernel_attention.py::test_models_that_the_kernel_serves",
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
    "offload": (
        Mutant(
            "keys, values and a step are counted where layers are computed",
            f"{OFFLOAD}/placement.py",
            "    left[compute] -= working.total + _room(largest)\n",
            "    left[compute] -= _room(largest)\n",
            f"{OFFLOAD_TESTS}/test_placement.py::"
            "test_keys_values_and_a_step_are_counted_where_layers_are_computed",
        ),
        Mutant(
            "there is room for the layer that comes beside the one that is computed",
            f"{OFFLOAD}/placement.py",
            "    return LAYERS_IN_ROOM * largest\n",
            "    return largest\n",
            f"{OFFLOAD_TESTS}/test_placement.py::"
            "test_what_is_placed_fits_everywhere_and_what_is_refused_lacks_room",
        ),
        Mutant(
            "small layers fill what large ones leave",
            f"{OFFLOAD}/placement.py",
            " or put(layer, memory.name, left[memory.name]):\n",
            " or put(layer, memories[-1].name, left[memory.name]):\n",
            f"{OFFLOAD_TESTS}/test_placement.py::"
            "test_small_layers_behind_a_large_one_fill_what_is_left",
        ),
        Mutant(
            "no more is promised than is free",
            f"{OFFLOAD}/memory_limits.py",
            "    if limit is None or (free is not None and free < limit):\n",
            "    if limit is None:\n",
            f"{OFFLOAD_TESTS}/test_memory_limits.py::test_more_than_is_free_is_not_promised",
        ),
        Mutant(
            "a file of an offload folder is named by the content of its checkpoint",
            f"{OFFLOAD}/offload_folder.py",
            "        key = _digest([_VERSION, self._content, layer, tensors])\n",
            "        key = _digest([_VERSION, layer, tensors])\n",
            f"{OFFLOAD_TESTS}/test_place_model.py::"
            "test_the_offload_folder_is_written_once_for_each_content",
        ),
        Mutant(
            "a file of an offload folder is compared with its digest before it is used",
            f"{OFFLOAD}/offload_folder.py",
            ".entries if found == record else {}\n",
            ".entries\n",
            f"{OFFLOAD_TESTS}/test_place_model.py::"
            "test_damaged_files_are_written_again_and_the_bits_are_right",
        ),
        Mutant(
            "nothing of a file remains where the disk is full",
            f"{OFFLOAD}/offload_folder.py",
            "                unfinished.unlink()\n",
            "                pass\n",
            f"{OFFLOAD_TESTS}/test_offload_folder.py::"
            "test_a_full_disk_is_named_and_leaves_nothing_behind",
        ),
        Mutant(
            "files without recorded digests are read, whatever their time says",
            f"{OFFLOAD}/offload_folder.py",
            "store.digest_of(file) for file in files}",
            "file.stat()[6:] for file in files}",
            f"{OFFLOAD_TESTS}/test_offload_folder.py::test_files_without_recorded_digests_are_read",
        ),
        Mutant(
            "weights are taken away after a layer",
            f"{OFFLOAD}/offloaded_layers.py",
            "            parameter.data = nothing\n",
            "            pass\n",
            f"{OFFLOAD_TESTS}/test_offloaded_layers.py::test_weights_that_are_not_there_are_nan",
        ),
        Mutant(
            "a layer that was brought for another pass is dropped",
            f"{OFFLOAD}/offloaded_layers.py",
            "            self._layers[coming[0]].stored.drop()\n",
            "",
            f"{OFFLOAD_TESTS}/test_offloaded_layers.py::"
            "test_each_layer_has_its_weights_whatever_parts_are_run",
        ),
        Mutant(
            "pages leave the process when they are dropped",
            "megatron/checkpoint/files/mapped_tensors.py",
            "        self._advise(start, stop, mmap.MADV_DONTNEED)\n",
            "",
            "tests/unit/checkpoint/files/test_mapped_tensors.py::"
            "test_dropped_pages_are_not_resident_and_brought_ones_are",
        ),
        Mutant(
            "products are made with weights that begin where PyTorch's do",
            "megatron/checkpoint/files/mapped_tensors.py",
            "        return self.start % ALIGNMENT == 0\n",
            "        return self.start % 4 == 0\n",
            "tests/unit/checkpoint/files/test_mapped_tensors.py::"
            "test_every_tensor_begins_where_one_in_memory_would",
        ),
        Mutant(
            "a file that changed is not read",
            "megatron/checkpoint/files/mapped_tensors.py",
            "        if (found := _stamp(os.fstat(self._descriptor))) != self._stamp:\n",
            "        if (found := _stamp(os.fstat(self._descriptor))) is None:\n",
            "tests/unit/checkpoint/files/test_mapped_tensors.py::"
            "test_a_file_that_was_changed_or_cut_is_an_error",
        ),
        Mutant(
            "a room on a GPU is not filled while kernels read it",
            "megatron/device.py",
            "        self._is_free[upload.room] = torch.cuda.current_stream().record_event()\n",
            "        self._is_free[upload.room] = None\n",
            "tests/unit/test_device.py::"
            "test_what_arrives_on_a_gpu_waits_for_the_kernels_that_had_its_room",
        ),
        Mutant(
            "a tensor in several files is not read in place",
            "megatron/checkpoint/formats/native/sharded.py",
            "    if len(files) != 1 or not isinstance(directory, Path):\n",
            "    if not isinstance(directory, Path):\n",
            "tests/unit/checkpoint/formats/native/test_sharded.py::"
            "test_tensors_that_lie_together_can_be_read_there",
        ),
        Mutant(
            "a transposed tensor is not read in place",
            "megatron/checkpoint/formats/huggingface/source.py",
            "        if layout.transposed or layout.columns",
            "        if layout.columns",
            "tests/unit/checkpoint/formats/huggingface/test_source.py::"
            "test_tensors_that_files_hold_as_they_are_can_be_read_there",
        ),
    ),
}
