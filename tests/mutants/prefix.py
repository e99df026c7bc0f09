"""Mutants of prefix LMs: what may be seen, how prefixes are drawn, and what is learned."""

from tests.mutants.mutant import Mutant

_BLOCKS = "tests/unit/ops/test_prefix_attention.py::test_blocks_are_a_dense_mask"
_GEOMETRY = "tests/unit/model/test_geometry.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "prefix attention": (
        Mutant(
            "tokens of a prefix see those behind them",
            "megatron/ops/prefix_attention.py",
            "out[prefix], log_sums[prefix] = attend_block(*given, None, causal=False)",
            "out[prefix], log_sums[prefix] = attend_block(*given, None, causal=True)",
            _BLOCKS,
        ),
        Mutant(
            "tokens behind a prefix see it",
            "megatron/ops/prefix_attention.py",
            "                    merge_(part, sums, *attend_block(*given, None, causal=False))\n",
            "",
            _BLOCKS,
        ),
        Mutant(
            "keys of a prefix have the gradients of what stands behind it",
            "megatron/ops/prefix_attention.py",
            "_put(gradients, prefix, parts, (None, *shared[1:]))",
            "_put(gradients, prefix, parts, (None, None, None))",
            _BLOCKS,
        ),
        Mutant(
            "queries behind a prefix have the gradients of its keys",
            "megatron/ops/prefix_attention.py",
            "_put(gradients, rest, parts, (shared[0], None, None))",
            "_put(gradients, rest, parts, (None, None, None))",
            _BLOCKS,
        ),
        Mutant(
            "marks that do not begin a document are no prefix",
            "megatron/ops/prefix_attention.py",
            "            if not all(marks[start : start + count]):\n                return None\n",
            "",
            "tests/unit/ops/test_prefix_attention.py::test_what_is_no_prefix_and_rest_has_no_spans",
        ),
        Mutant(
            "a mask shows prefixes",
            "megatron/model/geometry.py",
            "allowed = allowed | (is_prefix[:, keys] != 0)[:, None, None]  # [b, 1, s, k]",
            "pass",
            f"{_GEOMETRY}test_a_prefix_is_seen_by_all_of_its_document",
        ),
        Mutant(
            "ranks that share a sequence with a prefix see the keys of later ranks",
            "megatron/model/geometry.py",
            "causal = self._causal and is_prefix is None",
            "causal = self._causal",
            f"{_GEOMETRY}test_a_prefix_is_seen_by_all_of_its_document",
        ),
        Mutant(
            "attention with dropout has a mask",
            "megatron/model/geometry.py",
            "            and config.attention_dropout == 0\n",
            "",
            f"{_GEOMETRY}test_what_needs_all_scores_has_a_mask",
        ),
        Mutant(
            "other prefixes of the same documents make another mask",
            "megatron/model/geometry.py",
            "        ids = (position_ids, document_ids, is_prefix)\n",
            "        ids = (position_ids, document_ids, document_ids)\n",
            f"{_GEOMETRY}test_other_prefixes_make_another_geometry",
        ),
        Mutant(
            "a prompt that is a prefix ends with its last true token",
            "megatron/model/gpt_model.py",
            "last + 1 if is_prefix else None",
            "last + 2 if is_prefix else None",
            "tests/unit/model/test_gpt_model.py::"
            "test_prompts_that_are_prefixes_are_seen_whole_and_new_tokens_are_causal",
        ),
    ),
}
