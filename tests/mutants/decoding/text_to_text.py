"""Mutants of text-to-text models: beams, cached decoding, pairs, and Hugging Face's T5s."""

from tests.mutants.mutant import Mutant

BEAMS = "megatron/inference/encoder_decoder/beam_search.py"
STATE = "megatron/inference/encoder_decoder/decoder_state.py"
ANSWERS = "megatron/inference/encoder_decoder/generate.py"
PAIRS = "megatron/data/samples/text_pairs.py"
FAMILY = "megatron/checkpoint/formats/huggingface/families/t5.py"
LAYOUTS = "megatron/checkpoint/formats/huggingface/layouts.py"
_INFERENCE = "tests/unit/inference/encoder_decoder"
NAIVE = f"{_INFERENCE}/test_beam_search.py::test_the_sequences_are_those_of_a_naive_search"
CACHED = f"{_INFERENCE}/test_generate.py::test_the_cache_changes_no_token"
ROWS = "tests/unit/data/samples/test_text_pairs.py::"
THEIRS = "tests/unit/checkpoint/formats/huggingface/families/test_t5.py::"
SCORES = f"{THEIRS}test_scores_are_those_of_transformers"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "t5 text": (
        Mutant(
            "an end behind the best beams ends nothing",
            BEAMS,
            "            elif rank < beams:\n",
            "            else:\n",
            f"{_INFERENCE}/test_beam_search.py::test_an_end_behind_the_best_beams_ends_nothing",
        ),
        Mutant(
            "scores are divided by a power of the length",
            BEAMS,
            "score = sequence.total / math.pow(length, self._params.length_penalty)",
            "score = sequence.total / length",
            NAIVE,
        ),
        Mutant(
            "with never the longest length is compared",
            BEAMS,
            "            length = self._max_new_tokens\n",
            "            pass\n",
            f"{_INFERENCE}/test_beam_search.py::"
            "test_a_longer_sequence_that_would_be_better_is_missed_unless_never",
        ),
        Mutant(
            "tokens are of the beam that they stand behind",
            ANSWERS,
            "            state.reorder(parents)\n",
            "",
            f"{_INFERENCE}/test_generate.py::test_beams_are_those_of_transformers",
        ),
        Mutant(
            "distances have their biases in cached decoding",
            STATE,
            "            biases = (biases[0] + own, biases[1] + own)\n",
            "",
            CACHED,
        ),
        Mutant(
            "a window is one of cached decoding too",
            STATE,
            "mask = self._biases[is_wide].to(queries.dtype)",
            "mask = torch.zeros_like(self._biases[is_wide])",
            CACHED,
        ),
        Mutant(
            "padding of the encoder is not attended to",
            STATE,
            "            padding[row, : len(each)] = 1\n",
            "            padding[row] = 1\n",
            CACHED,
        ),
        Mutant(
            "tokens stand at their positions",
            STATE,
            "positions = torch.full_like(column, self._count)",
            "positions = torch.zeros_like(column)",
            CACHED,
        ),
        Mutant(
            "padding of the vocabulary is not drawn",
            STATE,
            "dim=-1)[:, : model.build.vocab.true]",
            "dim=-1)",
            f"{_INFERENCE}/test_generate.py::"
            "test_padding_tokens_of_the_vocabulary_are_never_chosen",
        ),
        Mutant(
            "scores that are not finite are an error",
            ANSWERS,
            "require_finite(dict(zip(running, scores.amax(dim=-1).isfinite().tolist())))",
            "pass",
            f"{_INFERENCE}/test_generate.py::test_scores_that_are_not_finite_are_an_error",
        ),
        Mutant(
            "a decoder reads what stands before a label",
            PAIRS,
            "padded([marks.start, *targets[:-1]], rows, marks.pad)",
            "padded(targets, rows, marks.pad)",
            f"{ROWS}test_a_pair_is_a_row_of_each_stack",
        ),
        Mutant(
            "pairs that do not fit are left out",
            PAIRS,
            "        return pairs[fits]\n",
            "        return pairs\n",
            f"{ROWS}test_pairs_that_just_fit_are_kept_and_longer_ones_counted",
        ),
        Mutant(
            "targets have to fit too",
            PAIRS,
            " & (targets <= recipe.decoder_seq_length)",
            "",
            f"{ROWS}test_pairs_that_just_fit_are_kept_and_longer_ones_counted",
        ),
        Mutant(
            "the end token takes room",
            PAIRS,
            "(0 if self._has_ends(part) else 1)",
            "0",
            f"{ROWS}test_pairs_that_just_fit_are_kept_and_longer_ones_counted",
        ),
        Mutant(
            "pairs are read as pairs of two corpora",
            "megatron/data/kinds/dataset_kind.py",
            "    if kind.is_packed or kind is DatasetKind.PAIRS:\n",
            "    if kind.is_packed:\n",
            "tests/unit/data/kinds/test_t5_data.py::test_pairs_become_rows_of_both_stacks",
        ),
        Mutant(
            "keys and values of cross attention are told apart",
            LAYOUTS,
            "yield Strip(at * width, width, keys[at % 2], at // 2 * width)",
            "yield Strip(at * width, width, keys[1 - at % 2], at // 2 * width)",
            SCORES,
        ),
        Mutant(
            "a tied head is scaled",
            FAMILY,
            '"logit_divisor": math.sqrt(hidden) if scales else 1.0,',
            '"logit_divisor": 1.0,',
            SCORES,
        ),
        Mutant(
            "scores of attention are not scaled",
            FAMILY,
            '        "softmax_scale": 1.0,\n        "logit',
            '        "logit',
            SCORES,
        ),
        Mutant(
            "transformers 5 says which head it is in a field of its own",
            FAMILY,
            '    scales = fields.boolean("scale_decoder_outputs", scales)\n',
            "",
            SCORES,
        ),
        Mutant(
            "a head that is not tied and yet scaled is not written",
            FAMILY,
            '        "logit_divisor": lambda config: math.sqrt(config.hidden_size) '
            "if config.tied else 1.0,\n",
            "",
            f"{THEIRS}test_what_t5_does_not_have_is_refused_by_flag",
        ),
    ),
}
