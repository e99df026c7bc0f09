"""Mutants of speculative decoding: planning, proposing and checking tokens."""

from tests.mutants.mutant import Mutant

SCHEDULER = "megatron/scheduling/scheduler.py"
SEQUENCES = "megatron/scheduling/sequences.py"
REPLAY = "megatron/scheduling/replay.py"
FORWARD = "megatron/inference/forward.py"
DRAFTS = "megatron/inference/drafts.py"
DRAFT_MODEL = "megatron/inference/draft_model.py"
WINDOW = "megatron/scheduling/draft_window.py"
WINDOWS = "tests/unit/scheduling/test_draft_window.py"
PLANNED = "tests/unit/scheduling/test_scheduler.py"
TENSORS = "tests/unit/inference"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "speculative decoding": (
        Mutant(
            "proposed tokens get no more than a step has left",
            SCHEDULER,
            "                step.budget,\n                record.tokens_left(sample) - 1,",
            "                record.tokens_left(sample) - 1,",
            f"{PLANNED}::TestSteps::"
            "test_proposed_tokens_get_what_the_step_the_pool_and_the_request_have_left",
        ),
        Mutant(
            "no token is proposed behind the last one of a request",
            SCHEDULER,
            "record.tokens_left(sample) - 1,",
            "record.tokens_left(sample) + 1,",
            f"{PLANNED}::TestSteps::"
            "test_proposed_tokens_get_what_the_step_the_pool_and_the_request_have_left",
        ),
        Mutant(
            "proposed tokens take no block that is reserved for another request",
            SCHEDULER,
            "sample.reserved + max(0, self._available() - self.limits.watermark_blocks)",
            "9",
            f"{PLANNED}::TestSteps::"
            "test_proposed_tokens_take_no_block_that_a_request_would_lose_for_them",
        ),
        Mutant(
            "the token that was drawn last is not computed yet",
            SCHEDULER,
            "part.end + max(0, len(tokens) - 1)",
            "part.end + len(tokens)",
            f"{PLANNED}::TestEveryLoad::"
            "test_every_request_ends_once_with_the_text_that_it_has_alone",
        ),
        Mutant(
            "tokens behind the end of a sample are dropped",
            SEQUENCES,
            "            if self.finish_of(len(sample.tokens) + count, token) is not None:\n",
            "            if self.finish_of(0, token) is not None:\n",
            f"{PLANNED}::TestSteps::test_tokens_behind_a_stop_token_are_dropped",
        ),
        Mutant(
            "followers compute the tokens that the leader proposed",
            REPLAY,
            "        plan = self.scheduler.propose(record.drafts)\n",
            "        plan = self.scheduler.propose({})\n",
            "tests/unit/scheduling/test_replay.py::"
            "test_a_second_scheduler_makes_the_same_plans_from_the_records",
        ),
        Mutant(
            "a token counts only if all proposed ones before it were drawn",
            FORWARD,
            "        if token != row.draft:\n",
            "        if row.draft is None:\n",
            f"{TENSORS}/test_forward.py::test_proposed_tokens_count_as_far_as_they_are_drawn",
        ),
        Mutant(
            "a token is drawn with the penalties of the proposed ones before it",
            FORWARD,
            "replace(draw, output=(*draw.output, *drafts[:count])) if count else draw",
            "draw",
            f"{TENSORS}/test_start.py::test_a_scheduled_request_gets_what_it_gets_alone",
        ),
        Mutant(
            "a token is drawn with the random number of its own position",
            FORWARD,
            "yield _Row(part.sequence, after, part.start + first + count, following)",
            "yield _Row(part.sequence, after, part.end, following)",
            f"{TENSORS}/test_start.py::test_a_scheduled_request_gets_what_it_gets_alone",
        ),
        Mutant(
            "scores behind a wrong token may be anything",
            FORWARD,
            "        if row.sequence not in ended:\n            usable.append(at)\n",
            "        usable.append(at)\n",
            f"{TENSORS}/test_forward.py::"
            "test_scores_that_are_not_finite_behind_a_proposed_token_are_not_used",
        ),
        Mutant(
            "the bytes of two tokens are not taken for one",
            DRAFTS,
            "        while at % size and at >= 0:",
            "        while False:",
            f"{TENSORS}/test_drafts.py::"
            "test_what_followed_the_last_place_of_the_longest_tokens_is_proposed",
        ),
        Mutant(
            "a draft model makes up for the proposed token that it has not computed",
            DRAFT_MODEL,
            "len(draw.output) > 1:",
            "len(draw.output) > 999:",
            f"{TENSORS}/test_draft_model.py::"
            "test_a_draft_model_has_computed_every_position_that_it_reads",
        ),
        Mutant(
            "a draft model draws with the random numbers of the model",
            DRAFT_MODEL,
            "                    top_logprobs=None,\n",
            "                    top_logprobs=None,\n                    seed=8,\n",
            f"{TENSORS}/test_draft_model.py::"
            "test_all_tokens_that_the_model_itself_proposes_are_right",
        ),
        Mutant(
            "a draft model has the vocabulary of the model",
            "megatron/serving/engine/model_engine.py",
            "    check_draft_model(draft, model, limits.max_length)\n",
            "",
            "tests/unit/serving/engine/test_model_engine.py::"
            "test_speculation_without_tokens_or_with_another_vocabulary_is_refused",
        ),
        Mutant(
            "the memory of a draft model's keys and values is counted",
            "megatron/inference/cache_size.py",
            "model_block_bytes(model, ctx, block_size) + draft_block_bytes",
            "model_block_bytes(model, ctx, block_size)",
            "tests/unit/serving/engine/test_model_engine.py::test_the_blocks_of_a_draft_model_are_counted",
        ),
        Mutant(
            "requests go on without a drafter that fails",
            "megatron/serving/engine/engine_thread.py",
            "            self._drafter = None\n            return {}\n",
            "            raise\n",
            "tests/unit/serving/engine/test_engine_thread.py::"
            "test_without_a_drafter_that_fails_requests_go_on",
        ),
        Mutant(
            "what is proposed in vain becomes less",
            SCHEDULER,
            "{sequence: len(tokens) for sequence, tokens in drafts.items()}",
            "{}",
            f"{PLANNED}::TestSteps::"
            "test_where_proposed_tokens_are_wrong_a_sequence_gets_ever_less_room_for_them",
        ),
        Mutant(
            "a pause is twice as long each time",
            WINDOW,
            "    longer = min(LONGEST_PAUSE, 2 * window.next_pause)\n",
            "    longer = window.next_pause\n",
            f"{WINDOWS}::test_where_all_are_wrong_few_are_proposed",
        ),
        Mutant(
            "a window grows up to the most of the engine",
            WINDOW,
            "DraftWindow(min(most, 2 * max(window.size, 1)))",
            "DraftWindow(2 * max(window.size, 1))",
            f"{WINDOWS}::test_there_is_never_room_for_more_than_the_most",
        ),
        Mutant(
            "a window grows again where tokens are right",
            WINDOW,
            "DraftWindow(min(most, 2 * max(window.size, 1)))",
            "DraftWindow(min(most, window.size))",
            f"{WINDOWS}::test_where_all_are_right_again_all_are_proposed_soon",
        ),
    ),
}
