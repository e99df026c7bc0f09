"""Mutants of T5: what each stack sees, what travels between layers, and what rows hold."""

from tests.mutants.mutant import Mutant

_MODEL = "tests/unit/model/test_t5_model.py::"
_LAYERS = "tests/unit/model/encoder_decoder/"
_DATA = "tests/unit/data/kinds/test_t5_data.py::"
_CHECKS = "tests/unit/preflight/models/test_encoder_decoder.py::"
_PLAN = "tests/unit/pipeline/test_plan.py::"
_BIASES = f"{_LAYERS}test_relative_positions.py::"
_GEOMETRY = f"{_LAYERS}test_geometry.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "t5 model": (
        Mutant(
            "padding of the encoder is seen by no token of it",
            "megatron/model/encoder_decoder/geometry.py",
            "padding = None if self._causal else ids[0]",
            "padding = None",
            f"{_MODEL}test_what_stands_in_the_padding_changes_nothing",
        ),
        Mutant(
            "padding of the encoder is seen by no token of the decoder",
            "megatron/model/encoder_decoder/geometry.py",
            "mask = (padding_mask != 0)[:, None, None]  # [b, 1, 1, s]",
            "mask = (padding_mask == padding_mask)[:, None, None]",
            f"{_LAYERS}test_cross_attention.py::"
            "test_queries_see_the_tokens_of_their_row_and_no_padding",
        ),
        Mutant(
            "biases of a decoder leave its mask in place",
            "megatron/model/encoder_decoder/geometry.py",
            "    if mask is None and causal:\n",
            "    if mask is None and not causal:\n",
            f"{_GEOMETRY}test_scores_of_a_decoder_have_the_biases_of_keys_up_to_their_own",
        ),
        Mutant(
            "keys behind a query have ranges of their own in an encoder alone",
            "megatron/model/encoder_decoder/geometry.py",
            "both_directions=not causal",
            "both_directions=True",
            f"{_MODEL}test_scores_are_those_of_transformers",
        ),
        Mutant(
            "a query reads the biases of its own distances",
            "megatron/model/encoder_decoder/relative_positions.py",
            "diagonals.unfold(1, length, 1).flip(1)",
            "diagonals.unfold(1, length, 1)",
            f"{_BIASES}test_biases_are_those_of_a_loop_over_queries_and_keys",
        ),
        Mutant(
            "half of the ranges are of one distance each",
            "megatron/model/encoder_decoder/relative_positions.py",
            "    exact = num_buckets // 2\n",
            "    exact = num_buckets // 2 + 1\n",
            f"{_BIASES}test_ranges_of_distances_are_those_of_transformers",
        ),
        Mutant(
            "rows of distances are those of the present length",
            "megatron/model/encoder_decoder/relative_positions.py",
            "if self._rows is None or self._of != (length, device):",
            "if self._rows is None:",
            f"{_BIASES}test_another_length_has_other_rows",
        ),
        Mutant(
            "what a layer hands over of a table outlives its weight",
            "megatron/model/encoder_decoder/relative_positions.py",
            "self.weight.clone()",
            "self.weight.view_as(self.weight)",
            f"{_BIASES}test_a_rank_has_the_columns_of_its_heads_and_the_carry_a_copy_of_them",
        ),
        Mutant(
            "a decoder block adds what the encoder gives",
            "megatron/model/encoder_decoder/cross_attention.py",
            "return self._after_mlp(crossed, crossed, numbers)",
            "return self._after_mlp(after, after, numbers)",
            f"{_LAYERS}test_cross_attention.py::"
            "test_a_block_adds_what_the_encoder_gives_after_its_own_attention",
        ),
        Mutant(
            "scores of cross attention have the factor of the flags",
            "megatron/model/encoder_decoder/cross_attention.py",
            "        if self._query_factor != 1.0:\n"
            "            queries = queries * self._query_factor\n",
            "",
            f"{_MODEL}test_scores_are_those_of_transformers",
        ),
        Mutant(
            "two attentions of a layer drop other elements",
            "megatron/model/encoder_decoder/cross_attention.py",
            'place="cross attention"',
            'place="decoder attention"',
            f"{_MODEL}test_no_two_places_of_a_t5_drop_the_same_elements",
        ),
        Mutant(
            "embeddings of both stacks drop other elements",
            "megatron/model/encoder_decoder/embedding.py",
            'build, "decoder embedding")',
            'build, "embedding")',
            f"{_LAYERS}test_embedding.py::test_a_decoder_drops_other_elements_than_its_encoder",
        ),
        Mutant(
            "the norm of the encoder stays on its last stage",
            "megatron/model/t5_model.py",
            ', call="final_of_encoder", ends_stack=True)',
            ', call="final_of_encoder")',
            f"{_MODEL}test_a_cut_behind_the_encoder_stands_behind_its_norm",
        ),
        Mutant(
            "a decoder has layers of its own number",
            "megatron/model/t5_model.py",
            "decoder_geometry),\n            depth,",
            "decoder_geometry),\n            config.num_layers,",
            f"{_MODEL}test_tables_are_tied_where_flags_tie_them_and_a_bias_is_one_of_linear_layers",
        ),
        Mutant(
            "a fused loss has no bias of words",
            "megatron/model/t5_model.py",
            '"projection" if build.fuse_loss and not has_bias else "logits"',
            '"projection" if build.fuse_loss else "logits"',
            f"{_MODEL}test_a_fused_loss_is_the_loss",
        ),
        Mutant(
            "the matrices of cross attention are parameters",
            "megatron/model/encoder_decoder/accounting.py",
            "count = both + depth * _cross_parameters(config)",
            "count = both",
            f"{_LAYERS}test_accounting.py::test_parameters_are_those_of_the_model",
        ),
        Mutant(
            "queries of a decoder score all tokens of the encoder",
            "megatron/model/encoder_decoder/accounting.py",
            "across = source * target * width",
            "across = target * target * width",
            f"{_LAYERS}test_accounting.py::test_flops_are_those_that_torch_counts",
        ),
    ),
    "t5 data": (
        Mutant(
            "a decoder begins with its first token and reads each label one later",
            "megatron/data/loading/t5_batch.py",
            "torch.cat([first, targets[:, :-1]], dim=1)",
            "targets",
            f"{_DATA}test_samples_of_either_kind_become_rows_of_two_lengths",
        ),
        Mutant(
            "rows that are filled up count no padding",
            "megatron/data/loading/t5_batch.py",
            "F.pad(targets, room, value=-1)",
            "F.pad(targets, room)",
            "tests/unit/data/loading/test_t5_batch.py::"
            "test_targets_of_spans_are_read_one_token_later_and_filled_up",
        ),
        Mutant(
            "the decoder has room for the one token more of the targets",
            "megatron/data/kinds/t5_data.py",
            "needed = t5_span_lengths(data).targets + 1",
            "needed = t5_span_lengths(data).targets",
            f"{_DATA}test_rows_of_a_decoder_are_as_long_as_their_targets_or_as_their_flag",
        ),
        Mutant(
            "inputs of spans fill the encoder by themselves",
            "megatron/data/samples/mlm_dataset.py",
            "lambda lengths: lengths.inputs,",
            "lambda lengths: lengths.total,",
            "tests/unit/data/samples/test_mlm_dataset.py::"
            "test_inputs_alone_fill_an_encoder_with_as_much_text_as_fits",
        ),
        Mutant(
            "masked texts of a program travel with one mask",
            "megatron/data/kinds/t5_data.py",
            "square_masks=False",
            "square_masks=True",
            f"{_DATA}test_samples_of_either_kind_become_rows_of_two_lengths",
        ),
    ),
    "t5 pipelines": (
        Mutant(
            "a decoder begins with the stage of the flag",
            "megatron/pipeline/plan.py",
            "*even_counts(encoder.layers, encoder.stages, first=first),",
            "*even_counts(encoder.layers, stages - encoder.stages, first=first),",
            f"{_PLAN}test_a_decoder_may_begin_with_a_stage",
        ),
        Mutant(
            "layers of both stacks are shared out",
            "megatron/config/run.py",
            "return layers + self.encoder_decoder.decoder_layers(layers)",
            "return layers",
            f"{_PLAN}test_the_plan_of_a_run_is_of_both_stacks",
        ),
        Mutant(
            "rows of a decoder divide over ranks that split them",
            "megatron/preflight/models/encoder_decoder.py",
            "if config.parallel.sequence_parallel and length % tp:",
            "if config.parallel.sequence_parallel and tp % length == tp + 1:",
            f"{_CHECKS}test_rows_that_do_not_divide_over_ranks_are_refused_with_a_length_that_does",
        ),
        Mutant(
            "another decoder is another model",
            "megatron/checkpointing.py",
            '*("seq_length", "decoder_num_layers"),',
            '*("seq_length",),',
            "tests/unit/test_checkpointing.py::"
            "test_another_decoder_is_refused_before_anything_is_touched",
        ),
        Mutant(
            "gradients of a mask are computed from scores on meta",
            "megatron/ops/attention.py",
            "if q.is_meta and _may_fuse() and not has_gradient:",
            "if q.is_meta and _may_fuse():",
            "tests/programs/tools/test_plan.py::"
            "test_a_plan_of_a_t5_counts_the_flops_of_both_stacks",
        ),
        Mutant(
            "sentinels of a T5 fall",
            "megatron/tokenizer/sentence_piece.py",
            "wanted += reversed(sentinels) if name == _T5 else sentinels",
            "wanted += sentinels",
            "tests/unit/tokenizer/test_sentence_piece.py::"
            "test_sentinels_of_the_t5_kind_fall_and_are_found_in_a_text",
        ),
        Mutant(
            "Megatron's norm after the decoder's own attention stands before cross attention",
            "megatron/checkpoint/formats/megatron/t5_names.py",
            '"cross_norm": _ENCODER_BLOCK["post_attention_norm"]',
            '"cross_norm": ("post_inter_attention_layernorm",)',
            "tests/unit/checkpoint/formats/megatron/test_t5_names.py::"
            "test_names_and_order_are_those_of_megatrons_modules",
        ),
        Mutant(
            "Megatron registers the encoder before the decoder",
            "megatron/checkpoint/formats/megatron/t5_names.py",
            "return 1 + STACKS.index(stack), at",
            "return 2 - STACKS.index(stack), at",
            "tests/unit/checkpoint/formats/megatron/test_t5_names.py::"
            "test_names_and_order_are_those_of_megatrons_modules",
        ),
        Mutant(
            "keys and values of cross attention alternate in old versions",
            "megatron/checkpoint/formats/megatron/names.py",
            'return 2 if ".cross_attention.key_value." in name else 1',
            "return 1",
            "tests/unit/checkpoint/formats/megatron/test_t5_names.py::"
            "test_rows_of_older_versions_are_read_in_our_order",
        ),
        Mutant(
            "cross attention is split over tensor-parallel ranks by heads",
            "megatron/checkpoint/formats/megatron/names.py",
            '"cross_attention.output.weight", "mlp.fc2.weight"',
            '"mlp.fc2.weight"',
            "tests/distributed/checkpoint/formats/megatron/test_save.py::"
            "test_a_run_that_saves_as_megatron_goes_on_at_another_layout[t5-tiny_t5-train_t5_all-1]",
        ),
        Mutant(
            "layers of a stage are counted in their own stack",
            "megatron/checkpoint/formats/megatron/source.py",
            "first_layers[facts.stack_of(name)]",
            'first_layers[""]',
            "tests/unit/checkpoint/formats/megatron/test_t5_names.py::"
            "test_stages_of_encoder_and_decoder_are_read",
        ),
    ),
}
