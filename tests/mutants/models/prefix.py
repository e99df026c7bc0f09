"""Mutants of prefix LMs: what may be seen, how prefixes are drawn, and what is learned."""

from tests.mutants.mutant import Mutant

_BLOCKS = "tests/unit/ops/test_prefix_attention.py::test_blocks_are_a_dense_mask"
_GEOMETRY = "tests/unit/model/test_geometry.py::"

_BATCH = "tests/unit/data/loading/test_prefix_batch.py::"
_DATASET = "tests/unit/data/samples/test_prefix_dataset.py::"

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
            "many small documents have a mask",
            "megatron/ops/prefix_attention.py",
            "return pairs + len(spans) * PAIRS_OF_A_SPAN < rows * length**2",
            "return pairs < rows * length**2",
            "tests/unit/ops/test_prefix_attention.py::"
            "test_blocks_are_chosen_where_they_leave_much_out",
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
            "the tokens of a prompt that is a prefix see all of it",
            "megatron/model/geometry.py",
            "(distance >= 0) | (places < prefix)",
            "distance >= 0",
            "tests/unit/inference/test_forward.py::"
            "test_prompts_that_are_prefixes_are_seen_whole_and_new_tokens_are_causal",
        ),
        Mutant(
            "a prompt that is a prefix is computed in one pass",
            "megatron/inference/plan_limits.py",
            "(each.start > 0 or each.end < each.prefix)",
            "each.start > 0",
            "tests/unit/inference/test_plan_limits.py::"
            "test_a_plan_beyond_its_limits_is_an_internal_error",
        ),
        Mutant(
            "prefixes are marked for each token of each row",
            "megatron/model/gpt_model.py",
            "if is_prefix is not None and is_prefix.shape != tokens.shape:",
            "if is_prefix is not None and len(is_prefix) != len(tokens):",
            "tests/unit/model/test_gpt_model.py::test_prefixes_longer_than_a_row_are_refused",
        ),
    ),
    "prefix LM": (
        Mutant(
            "a prefix leaves something behind it",
            "megatron/data/samples/prefix_dataset.py",
            "rng.randint(stop - start)",
            "rng.randint(stop - start + 1)",
            f"{_DATASET}test_each_document_has_a_prefix_and_something_behind_it",
        ),
        Mutant(
            "every sample has draws of its own",
            "megatron/data/samples/prefix_dataset.py",
            'random_of_sample(self.seed, i, use="prefix")',
            'random_of_sample(self.seed, 0, use="prefix")',
            f"{_DATASET}test_draws_follow_from_seed_and_sample_alone",
        ),
        Mutant(
            "an end of a document belongs to it",
            "megatron/data/samples/prefix_dataset.py",
            "(np.flatnonzero(text[:length] == self.eod) + 1).tolist()",
            "np.flatnonzero(text[:length] == self.eod).tolist()",
            f"{_DATASET}test_each_document_has_a_prefix_and_something_behind_it",
        ),
        Mutant(
            "the last token of a prefix predicts a target",
            "megatron/data/loading/prefix_batch.py",
            "weights = weights * (is_prefix[:, 1:] == 0)",
            "weights = weights * (is_prefix[:, :-1] == 0)",
            f"{_BATCH}test_the_last_token_of_a_prefix_predicts_the_first_target",
        ),
        Mutant(
            "weights of positions fall",
            "megatron/data/loading/prefix_batch.py",
            "torch.arange(length, 0, -1, dtype=torch.float32, device=device)",
            "torch.arange(1, length + 1, dtype=torch.float32, device=device)",
            f"{_BATCH}test_weights_of_positions_fall_and_are_one_on_average",
        ),
        Mutant(
            "the inputs of pairs are prefixes",
            "megatron/data/loading/prefix_batch.py",
            "packed_batch(*rows, prefix_lm=True)",
            "packed_batch(*rows)",
            f"{_BATCH}test_the_inputs_of_pairs_and_of_texts_without_spans_are_prefixes",
        ),
        Mutant(
            "documents have prefixes of their own where they are separated",
            "megatron/data/kinds/prefix_maker.py",
            "PrefixedWindows(windows=made, eod=eod, seed=seed)",
            "PrefixedWindows(windows=made, eod=None, seed=seed)",
            "tests/unit/data/kinds/test_prefix_maker.py::"
            "test_documents_have_prefixes_where_they_are_separated",
        ),
        Mutant(
            "dialogues are refused",
            "megatron/data/kinds/dataset_kind.py",
            '_WITHOUT_PREFIX = {DatasetKind.SFT: "--sft", DatasetKind.FIM: "--fim-data"}',
            '_WITHOUT_PREFIX = {DatasetKind.FIM: "--fim-data"}',
            "tests/unit/data/kinds/test_dataset_kind.py::"
            "test_what_has_no_prefix_is_refused_for_a_prefix_lm",
        ),
        Mutant(
            "a GPT has no targets in windows of text",
            "megatron/data/kinds/dataset_kind.py",
            "    if data.loss_on_targets_only and not dataset_kind(data).is_packed:\n",
            "    if False:\n",
            "tests/unit/data/kinds/test_dataset_kind.py::"
            "test_a_gpt_has_targets_in_rows_of_pairs_and_dialogues_alone",
        ),
        Mutant(
            "a prefix LM does not go on from a GPT without being told to begin with it",
            "megatron/checkpointing.py",
            "if is_start and model_kind.has_same_parameters",
            "if model_kind.has_same_parameters",
            "tests/unit/test_checkpointing.py::"
            "test_a_prefix_lm_begins_with_the_weights_of_a_gpt_and_says_what_it_is",
        ),
        Mutant(
            "a loaded prefix LM takes its prompts as prefixes",
            "megatron/trained_model.py",
            "is_prefix_lm = kind == model_kind.PREFIX_LM",
            "is_prefix_lm = False",
            "tests/unit/test_trained_model.py::test_the_prompts_of_a_prefix_lm_are_prefixes",
        ),
        Mutant(
            "no family of Hugging Face models holds a prefix LM",
            "megatron/checkpoint/formats/huggingface/families/registry.py",
            "if kind in family.kinds]",
            'if kind.replace("prefix_lm", "gpt") in family.kinds]',
            "tests/unit/checkpoint/formats/huggingface/families/test_registry.py::"
            "test_a_prefix_lm_is_of_no_family",
        ),
        Mutant(
            "an evaluation divides by the sum of weights, whole or not",
            "megatron/engine/tally.py",
            "EvaluationSum(total, count)",
            "EvaluationSum(total, round(count))",
            "tests/unit/engine/test_tally.py::"
            "test_an_evaluation_is_a_mean_by_weights_that_are_no_whole_numbers",
        ),
        Mutant(
            "prefixes travel with hidden states to the next stage",
            "megatron/model/geometry.py",
            "return self.of(hidden, *(*ids, *[None] * (3 - len(ids))))",
            "return self.of(hidden, *(*ids[:2], *[None] * (3 - len(ids[:2]))))",
            "tests/unit/model/test_gpt_model.py::test_the_tokens_of_a_prefix_see_each_other",
        ),
        Mutant(
            "the program for pairs trains on pairs",
            "finetune_t0_non_causal_decoder.py",
            "tokenizer_type=TOKENIZER_TYPE, defaults=DEFAULTS)",
            "tokenizer_type=TOKENIZER_TYPE)",
            "tests/unit/test_command.py::test_a_program_may_have_defaults_of_its_own",
        ),
        Mutant(
            "a run through DeepSpeed takes over the updates that were counted",
            "megatron/engine/deepspeed/engine.py",
            "        self._updates.restored(given, optimizer=optimizer)\n",
            "        del given, optimizer\n",
            "tests/laws/layouts/models/test_prefix.py::"
            "test_a_resumed_run_through_deepspeed_is_the_uninterrupted_run[a prefix a document]",
        ),
    ),
}
