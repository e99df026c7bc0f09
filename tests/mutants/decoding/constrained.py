"""Mutants of constrained decoding: grammars, masks, and what becomes of wrong ones."""

from tests.mutants.mutant import Mutant

CONSTRAINT = "megatron/inference/constraint.py"
ENGINE = "megatron/serving/engine/running_requests.py"
GRAMMARS = "megatron/serving/answer_grammars.py"
MATCHED = "tests/unit/inference/test_constraint.py"
SERVED = "tests/unit/serving/engine/test_engine_thread.py"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "constrained decoding": (
        Mutant(
            "tokens that a grammar does not allow are not drawn",
            "megatron/inference/sampling.py",
            "row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)",
            "pass",
            "tests/unit/inference/test_sampling.py::"
            "test_only_tokens_that_a_constraint_allows_are_drawn",
        ),
        Mutant(
            "greedy choice follows a grammar too",
            "megatron/inference/sampling.py",
            "    return bool(changes) or draw.constraint is not None\n",
            "    return bool(changes)\n",
            "tests/unit/inference/test_sampling.py::"
            "test_only_tokens_that_a_constraint_allows_are_drawn",
        ),
        Mutant(
            "proposed tokens that were not drawn are taken back",
            CONSTRAINT,
            "            self._matcher = self._first.deep_copy()\n",
            "",
            f"{MATCHED}::test_what_is_allowed_is_a_function_of_the_output",
        ),
        Mutant(
            "what the library kept of tokens that were taken back is not used",
            CONSTRAINT,
            "            self._matcher = self._first.deep_copy()\n",
            "            self._matcher.reset()\n",
            f"{MATCHED}::test_what_was_taken_back_leaves_nothing",
        ),
        Mutant(
            "a text ends only where it is complete",
            CONSTRAINT,
            "            may_end = self._matcher.is_accepting() or self._matcher.is_error()\n",
            "",
            f"{MATCHED}::test_a_text_may_end_where_it_is_complete_and_has_to_where_nothing_follows",
        ),
        Mutant(
            "special tokens are no text",
            CONSTRAINT,
            'b"" if token >= tokenizer.vocab_size or is_special(token) else',
            'b"" if token >= tokenizer.vocab_size else',
            f"{MATCHED}::test_special_tokens_are_no_text",
        ),
        Mutant(
            "a text with a grammar can end",
            CONSTRAINT,
            "        if not silent:\n",
            "        if False:\n",
            f"{MATCHED}::test_a_text_that_could_not_end_is_refused",
        ),
        Mutant(
            "tokens that a grammar does not allow fail their request",
            ENGINE,
            "                failed[result.sequence] = problem\n",
            "                pass\n",
            f"{SERVED}::test_a_request_whose_tokens_do_not_match_its_grammar_fails_alone",
        ),
        Mutant(
            "samples of one request do not share a constraint",
            ENGINE,
            "copied = None if constraint is None else constraint.copy()",
            "copied = constraint",
            f"{SERVED}::test_every_sample_has_a_constraint_of_its_own",
        ),
        Mutant(
            "an unknown keyword of a schema is named",
            "megatron/inference/grammar.py",
            "                yield place, keyword\n",
            "                pass\n",
            "tests/unit/inference/test_grammar.py::test_an_unknown_keyword_is_named_with_its_place",
        ),
        Mutant(
            "a schema has a largest size",
            GRAMMARS,
            "        if (size := len(grammar.text.encode())) > limits.max_schema_bytes:\n",
            "        if (size := 0) > limits.max_schema_bytes:\n",
            "tests/unit/serving/test_app.py::test_a_chat_that_cannot_be_answered_is_refused",
        ),
        Mutant(
            "two grammars for one answer are refused",
            GRAMMARS,
            "    if len(given) > 1:\n",
            "    if False:\n",
            "tests/unit/serving/test_app.py::test_a_chat_that_cannot_be_answered_is_refused",
        ),
    ),
}
