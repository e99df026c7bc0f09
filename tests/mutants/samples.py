"""Mutants of sample orders, masks and tokenizers."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "sample orders": (
        Mutant(
            "the documents of the last epoch are shuffled",
            "megatron/data/gpt_dataset.py",
            "    rng.shuffle(last)\n",
            "",
            "tests/unit/data/test_gpt_dataset.py::test_orders_have_their_golden_hashes",
        ),
        Mutant(
            "a separate last epoch is shuffled apart",
            "megatron/data/gpt_dataset.py",
            "rng.shuffle(order[: plan.shuffled_apart_from])",
            "rng.shuffle(order)",
            "tests/unit/data/test_gpt_dataset.py::test_orders_have_their_golden_hashes",
        ),
        Mutant(
            "the samples of a separate last epoch are shuffled",
            "megatron/data/gpt_dataset.py",
            "        rng.shuffle(order[plan.shuffled_apart_from :])\n",
            "        order[plan.shuffled_apart_from :]\n",
            "tests/unit/data/test_gpt_dataset.py::test_orders_have_their_golden_hashes",
        ),
        Mutant(
            "an epoch is added for the token that neighbours share",
            "megatron/data/gpt_dataset.py",
            "-(-(num_samples * seq_length + 1) // tokens_per_epoch)",
            "-(-(num_samples * seq_length) // tokens_per_epoch)",
            "tests/unit/data/test_gpt_dataset.py::"
            "test_a_tiny_corpus_takes_many_epochs_without_a_spurious_error",
        ),
        Mutant(
            "a last epoch is separate below the cut-off",
            "megatron/data/gpt_dataset.py",
            "num_samples - before_last < int(last_epoch_cutoff * per_epoch)",
            "num_samples - before_last <= int(last_epoch_cutoff * per_epoch)",
            "tests/unit/data/test_gpt_dataset.py::test_any_order_is_the_naive_one",
        ),
        Mutant(
            "samples are read in shuffled order",
            "megatron/data/gpt_dataset.py",
            'row = self._index["shuffle_idx"].item(i)',
            "row = i",
            "tests/unit/data/test_gpt_dataset.py::test_samples_cover_the_shuffled_stream_in_order",
        ),
        Mutant(
            "neighbouring samples share one token",
            "megatron/data/gpt_dataset.py",
            "total = (num_epochs * tokens_per_epoch - 1) // seq_length",
            "total = (num_epochs * tokens_per_epoch) // seq_length",
            "tests/unit/data/test_gpt_dataset.py::test_only_the_documents_of_the_split_are_read",
        ),
        Mutant(
            "a cached order is of its seed",
            "megatron/data/gpt_dataset.py",
            '            "seed": seed,\n',
            "",
            "tests/unit/data/test_gpt_dataset.py::"
            "test_whatever_the_order_depends_on_changes_the_fingerprint",
        ),
        Mutant(
            "a corpus of sentences is refused",
            "megatron/data/gpt_dataset.py",
            "        _refuse_sentences(indexed)\n",
            "",
            "tests/unit/data/test_gpt_dataset.py::"
            "test_a_corpus_of_sentences_is_refused_when_its_sidecar_says_so",
        ),
        Mutant(
            "the twin of the blend draws as the compiled one",
            "megatron/data/orders/sample_maps.py",
            "drawn = float(max(k, 1))",
            "drawn = float(k + 1)",
            "tests/unit/data/orders/test_sample_maps.py::test_blends_are_megatrons",
        ),
        Mutant(
            "the twin of the sample map skips empty documents",
            "megatron/data/orders/sample_maps.py",
            'np.searchsorted(ends, firsts, side="right")',
            'np.searchsorted(ends, firsts, side="left")',
            "tests/unit/data/orders/test_sample_maps.py::"
            "test_without_a_compiled_module_the_twin_serves_and_says_so",
        ),
        Mutant(
            "a blend's fingerprint has its weights",
            "megatron/data/blendable_dataset.py",
            "        digest.update(np.array(weights, np.float64).data)\n",
            "",
            "tests/unit/data/test_blendable_dataset.py::"
            "test_the_fingerprint_follows_components_weights_and_size",
        ),
        Mutant(
            "a blend's fingerprint has its length",
            "megatron/data/blendable_dataset.py",
            "        digest.update(str(size).encode())\n",
            "",
            "tests/unit/data/test_blendable_dataset.py::"
            "test_the_fingerprint_follows_components_weights_and_size",
        ),
        Mutant(
            "a blend reads each component in its own order",
            "megatron/data/blendable_dataset.py",
            "int(self.dataset_sample_index[i])",
            "i % len(self.datasets[0])",
            "tests/unit/data/test_blendable_dataset.py::"
            "test_a_blend_draws_each_component_in_its_own_order",
        ),
        Mutant(
            "made-up validation samples are others than those of training",
            "megatron/data/samples/mock_dataset.py",
            "(self.seed, i, *self.name.encode())",
            "(self.seed, i)",
            "tests/unit/data/kinds/test_dataset_makers.py::"
            "test_made_up_windows_are_split_like_those_of_a_corpus",
        ),
    ),
    "masks": (
        Mutant(
            "an end of document belongs to its document",
            "megatron/data/loading/gpt_batch.py",
            "return ends_so_far - is_eod.long()",
            "return ends_so_far",
            "tests/unit/data/loading/test_gpt_batch.py::"
            "test_the_end_of_document_belongs_to_the_document_that_it_ends",
        ),
        Mutant(
            "positions start anew after an end of document",
            "megatron/data/loading/gpt_batch.py",
            "starts[:, 1:] = torch.where(is_eod[:, :-1], positions[:, 1:], 0)",
            "starts[:, 1:] = torch.where(is_eod[:, 1:], positions[:, 1:], 0)",
            "tests/unit/data/loading/test_gpt_batch.py::"
            "test_the_end_of_document_belongs_to_the_document_that_it_ends",
        ),
        Mutant(
            "ends of documents are not counted as inputs",
            "megatron/data/loading/gpt_batch.py",
            "loss_mask.masked_fill_(is_eod, 0.0)",
            "loss_mask.masked_fill_(labels == eod, 0.0)",
            "tests/unit/data/loading/test_gpt_batch.py::"
            "test_the_end_of_document_belongs_to_the_document_that_it_ends",
        ),
        Mutant(
            "documents are kept apart when asked",
            "megatron/data/loading/gpt_batch.py",
            "_document_ids(is_eod) if reset_attention_mask else None",
            "_document_ids(is_eod) if reset_position_ids else None",
            "tests/unit/data/loading/test_gpt_batch.py::"
            "test_a_batch_is_what_a_loop_over_its_tokens_says",
        ),
        Mutant(
            "a truncate_batch row has one token more than its length",
            "megatron/data/loading/gpt_batch.py",
            "rows[:, : length + 1]",
            "rows[:, :length]",
            "tests/unit/data/loading/test_gpt_batch.py::"
            "test_a_shortened_row_keeps_the_token_after_its_last_one",
        ),
        Mutant(
            "labels are the tokens that follow",
            "megatron/data/loading/gpt_batch.py",
            "labels = text[:, 1:].contiguous()",
            "labels = text[:, :-1].contiguous()",
            "tests/unit/data/loading/test_gpt_batch.py::"
            "test_a_batch_is_what_a_loop_over_its_tokens_says",
        ),
        Mutant(
            "padding is not predicted",
            "megatron/data/loading/packed_batch.py",
            "counts = (next_segments != PADDING) & (segments == next_segments)",
            "counts = segments == next_segments",
            "tests/unit/data/loading/test_packed_batch.py::test_a_row_by_hand",
        ),
        Mutant(
            "the first token of a document is not predicted",
            "megatron/data/loading/packed_batch.py",
            "(next_segments != PADDING) & (segments == next_segments) &",
            "(next_segments != PADDING) &",
            "tests/unit/data/loading/test_packed_batch.py::"
            "test_a_batch_is_what_a_loop_over_its_tokens_says",
        ),
        Mutant(
            "inputs of a dialogue are not predicted",
            "megatron/data/loading/packed_batch.py",
            " & (is_input[:, 1:] == 0)",
            "",
            "tests/unit/data/loading/test_packed_batch.py::"
            "test_corrupted_spans_are_one_document_of_which_the_targets_count",
        ),
        Mutant(
            "each packed document counts positions from 0",
            "megatron/data/loading/packed_batch.py",
            "positions = positions - _starts(segments, positions)",
            "positions = positions - 0 * _starts(segments, positions)",
            "tests/unit/data/loading/test_packed_batch.py::test_a_row_by_hand",
        ),
        Mutant(
            "a token does not see what follows",
            "megatron/model/geometry.py",
            "allowed = distance >= 0 if self._causal else",
            "allowed = distance >= -1 if self._causal else",
            "tests/unit/model/test_geometry.py::test_a_document_mask_is_causal_and_block_diagonal",
        ),
        Mutant(
            "a token does not see other documents",
            "megatron/model/geometry.py",
            "            allowed = allowed & same  # [b, 1, s, k]\n",
            "            allowed = allowed & (same | ~same)\n",
            "tests/unit/model/test_geometry.py::test_a_document_mask_is_causal_and_block_diagonal",
        ),
        Mutant(
            "another batch has a mask of its own",
            "megatron/model/geometry.py",
            "and all(now is before for now, before in zip(ids, self._ids))",
            "and len(ids) > 0",
            "tests/unit/model/test_geometry.py::test_the_layers_of_one_pass_share_one_object",
        ),
        Mutant(
            "a batch that was changed in place has a new mask",
            "megatron/model/geometry.py",
            "            and self._versions == _versions(ids)\n",
            "",
            "tests/unit/model/test_geometry.py::test_ids_changed_in_place_are_noticed",
        ),
    ),
    "tokenizers": (
        Mutant(
            "a padded vocabulary splits over ranks",
            "megatron/tokenizer/tokenizer.py",
            "multiple = divisible_by * tp",
            "multiple = divisible_by",
            "tests/unit/tokenizer/test_tokenizer.py::test_padding_agrees_with_megatrons_numbers",
        ),
        Mutant(
            "a true size below the tokenizer's is refused",
            "megatron/tokenizer/tokenizer.py",
            "    if wanted < vocab_size:\n",
            "    if wanted < 0:\n",
            "tests/unit/tokenizer/test_tokenizer.py::"
            "test_a_model_may_have_more_rows_than_the_tokenizer_has_tokens",
        ),
        Mutant(
            "a padded size below the tokenizer's is refused",
            "megatron/tokenizer/tokenizer.py",
            "    if pad_to < vocab_size:\n",
            "    if pad_to < 0:\n",
            "tests/unit/tokenizer/test_tokenizer.py::test_a_wanted_size_must_hold_the_vocabulary",
        ),
        Mutant(
            "a flag that a tokenizer does not read is refused",
            "megatron/tokenizer/tokenizer.py",
            "        if given:\n            raise",
            "        if len(given) > 4:\n            raise",
            "tests/unit/tokenizer/test_tokenizer.py::test_a_flag_that_changes_nothing_is_refused",
        ),
        Mutant(
            "GPT-2 puts no space before a text",
            "megatron/tokenizer/gpt2_bpe.py",
            "add_prefix_space=False",
            "add_prefix_space=True",
            "tests/unit/tokenizer/test_gpt2_bpe.py::"
            "test_a_vocabulary_without_a_byte_refuses_text_that_needs_it",
        ),
        Mutant(
            "ranks of TikTokenizer that are left out are the last",
            "megatron/tokenizer/tiktoken_ranks.py",
            "ranks[: wanted - count]",
            "ranks[-(wanted - count) :]",
            "tests/unit/tokenizer/test_tiktoken_ranks.py::"
            "test_only_the_first_ranks_are_used_where_fewer_are_asked_for",
        ),
        Mutant(
            "a cased BERT keeps its case",
            "megatron/tokenizer/bert_wordpiece.py",
            'lowercase=name == "BertWordPieceLowerCase"',
            "lowercase=True",
            "tests/unit/tokenizer/test_bert_wordpiece.py::test_case_is_kept_where_asked",
        ),
        Mutant(
            "a piece that stands twice is refused",
            "megatron/tokenizer/bert_wordpiece.py",
            "            if piece in vocab:\n",
            "            if piece in vocab and not number:\n",
            "tests/unit/tokenizer/test_bert_wordpiece.py::"
            "test_a_piece_that_stands_twice_is_refused",
        ),
    ),
}
