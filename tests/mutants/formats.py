"""Mutants of names, row orders and flags in other programs' checkpoints."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "exports": (
        Mutant(
            "a group's rows are queries, key, value",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "((0, queries), (1, width), (2, width))",
            "((0, queries), (2, width), (1, width))",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_heads_stand_group_by_group_with_their_key_and_value",
        ),
        Mutant(
            "blocks of queries, keys and values have their sizes",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "block = (0, queries, queries + config.query_groups * config.head_width)",
            "block = (0, queries, 2 * queries)",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_heads_stand_group_by_group_with_their_key_and_value",
        ),
        Mutant(
            "stacked matrices stand in their order",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "yield Strip(place * each, each, key, 0)",
            "yield Strip((len(keys) - 1 - place) * each, each, key, 0)",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_every_row_on_both_sides_is_in_one_strip",
        ),
        Mutant(
            "experts' matrices stand in their order",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "start = (expert * len(keys) + place) * each",
            "start = (place * experts + expert) * each",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_each_expert_has_tensors_of_its_own",
        ),
        Mutant(
            "queries of a group stay together",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "yield start, which, count, group * count",
            "yield start, which, count, (groups - 1 - group) * count",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_heads_stand_group_by_group_with_their_key_and_value",
        ),
        Mutant(
            "Llama's gate comes before its values",
            "megatron/checkpoint/formats/huggingface/families/llama.py",
            'for name in ("gate", "up")',
            'for name in ("up", "gate")',
            "tests/unit/checkpoint/formats/huggingface/test_source.py::"
            "test_a_part_touches_no_more_than_its_rows",
        ),
        Mutant(
            "BLOOM's residual is taken where its config says",
            "megatron/checkpoint/formats/huggingface/families/bloom.py",
            """            "apply_residual_connection_post_layernorm", False
        ),""",
            """            "apply_residual_connection_post_layernorm", False
        ) and False,""",
            "tests/unit/checkpoint/formats/huggingface/families/test_bloom.py::"
            "test_the_residual_is_taken_where_the_config_says",
        ),
        Mutant(
            "the rotating share of a head is read in either spelling",
            "megatron/checkpoint/formats/huggingface/fields.py",
            'inner.number("partial_rotary_factor", fields.number(name, default))',
            'inner.number("partial_rotary_factor", default)',
            "tests/unit/checkpoint/formats/huggingface/families/test_phi3.py::"
            "test_the_rotating_share_is_read_from_both_spellings_and_written",
        ),
        Mutant(
            "a layer that SmolLM3 does not rotate is not rotated",
            "megatron/model/attention.py",
            "layer not in config.layers_without_rotation",
            "layer + 1 not in config.layers_without_rotation",
            "tests/unit/checkpoint/formats/huggingface/test_source.py::"
            "test_logits_are_those_of_transformers[smollm3]",
        ),
        Mutant(
            "a layer without the window of others sees all before",
            "megatron/model/attention.py",
            "layer in config.layers_without_window",
            "layer - 1 in config.layers_without_window",
            "tests/unit/model/test_gpt_model.py::"
            "test_logits_equal_those_of_the_naive_gpt[window in the first layer]",
        ),
        Mutant(
            "a norm of all heads has its mean over all tensor-parallel ranks",
            "megatron/model/norms.py",
            "total = reduce_from_tp(rows.sum(-1, keepdim=True), self._tp)",
            "total = rows.sum(-1, keepdim=True) * self._tp.size",
            "tests/laws/layouts/test_layout.py::test_every_layout_trains_the_same_model[mixtral]",
        ),
        Mutant(
            "the gradient of a norm of all heads is summed over tensor-parallel ranks",
            "megatron/model/norms.py",
            "return copy_to_tp(total, self._tp) / self._count",
            "return total / self._count",
            "tests/laws/layouts/test_layout.py::test_every_layout_trains_the_same_model[mixtral]",
        ),
        Mutant(
            "norms after branches are applied to what is added",
            "megatron/model/transformer.py",
            "normed: Tensor = result if norm is None else norm(result)",
            "normed: Tensor = result",
            "tests/unit/model/test_gpt_model.py::"
            "test_logits_equal_those_of_the_naive_gpt[norms on both sides]",
        ),
        Mutant(
            "Granite's logits are divided where the loss makes them itself",
            "megatron/model/embedding.py",
            "return (divided(carry[0], self._divisor), alias",
            "return (carry[0], alias",
            "tests/unit/model/test_gpt_model.py::"
            "test_a_list_with_a_fused_loss_ends_without_logits[granite's factors]",
        ),
        Mutant(
            "Granite's scale of scores is 1 where its config has none",
            "megatron/checkpoint/formats/huggingface/families/granite.py",
            "fields.number(there, 1.0)",
            "fields.number(there, 0.5)",
            "tests/unit/checkpoint/formats/huggingface/families/test_granite.py::"
            "test_a_scale_of_scores_that_is_absent_is_one_and_not_that_of_llama",
        ),
        Mutant(
            "the positions of OPT begin behind two other rows",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "yield Strip(0, rows, keys[0], self.skipped)",
            "yield Strip(0, rows, keys[0], self.skipped - 1)",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_a_tensor_may_begin_with_rows_that_are_none_of_ours",
        ),
        Mutant(
            "OPT-350m, whose norms stand elsewhere, is refused",
            "megatron/checkpoint/formats/huggingface/families/opt.py",
            'fields.must_be("do_layer_norm_before", True, True',
            'fields.must_be("do_layer_norm_before", False, False',
            "tests/unit/checkpoint/formats/huggingface/families/test_opt.py::test_the_release",
        ),
        Mutant(
            "YaRN divides slow frequencies and not fast ones",
            "megatron/model/positions.py",
            "frequencies * (slow / config.rotary_scaling_factor + (1 - slow))",
            "frequencies * ((1 - slow) / config.rotary_scaling_factor + slow)",
            "tests/unit/model/test_positions.py::"
            "test_yarn_leaves_fast_frequencies_and_divides_slow_ones_by_its_factor",
        ),
        Mutant(
            "YaRN makes scores larger",
            "megatron/model/positions.py",
            "((size * table).to(dtype)",
            "(table.to(dtype)",
            "tests/unit/model/test_positions.py::test_yarn_makes_rotated_queries_longer",
        ),
        Mutant(
            "columns of gate and up alternate in gpt-oss's files",
            "megatron/checkpoint/formats/huggingface/layouts.py",
            "2 * (row % half) + row // half",
            "2 * (row % half) + 1 - row // half",
            "tests/unit/checkpoint/formats/huggingface/test_layouts.py::"
            "test_the_rows_of_a_stack_in_one_tensor_are_columns_there",
        ),
        Mutant(
            "a router's bias is part of its scores",
            "megatron/model/experts/router.py",
            "linear_rows(hidden, self.weight, self.bias)",
            "linear_rows(hidden, self.weight, None)",
            "tests/unit/model/experts/test_router.py::test_a_bias_is_part_of_the_scores",
        ),
        Mutant(
            "Gemma's gains are read as gains",
            "megatron/checkpoint/formats/huggingface/source.py",
            "return result.copy_(stored).add_(layout.less)",
            "return result.copy_(stored)",
            "tests/unit/checkpoint/formats/huggingface/test_source.py::"
            "test_logits_are_those_of_transformers[gemma2]",
        ),
        Mutant(
            "Gemma's gains of half precision are read in fp32",
            "megatron/checkpoint/formats/huggingface/source.py",
            'code = "F32"  # half',
            "pass  # half",
            "tests/unit/checkpoint/formats/huggingface/test_writer.py::"
            "test_gains_of_half_precision_come_back_to_the_bit",
        ),
        Mutant(
            "a soft cap of scores is applied before masks",
            "megatron/ops/attention.py",
            "scores = soft_capped(scores, changes.soft_cap)",
            "scores = scores if changes.soft_cap is None else scores.clamp(max=changes.soft_cap)",
            "tests/unit/model/test_gpt_model.py::"
            "test_logits_equal_those_of_the_naive_gpt[soft caps]",
        ),
        Mutant(
            "a fused loss multiplies gradients by the slopes of its soft cap",
            "megatron/mpu/linear_cross_entropy.py",
            "grad_logits.mul_(slopes)",
            "grad_logits.mul_(1.0)",
            "tests/unit/model/test_gpt_model.py::"
            "test_a_list_with_a_fused_loss_ends_without_logits[soft caps]",
        ),
        Mutant(
            "layers without a window rotate as the flags of all layers say",
            "megatron/model/attention.py",
            "own = None if self._is_wide else geometry.window_rotation",
            "own = geometry.window_rotation",
            "tests/unit/model/test_gpt_model.py::test_logits_equal_those_of_the_naive_gpt[gemma 3]",
        ),
        Mutant(
            "Falcon's old architecture has one group where it says multi-query",
            "megatron/checkpoint/formats/huggingface/families/falcon.py",
            "groups = 1 if is_multi_query else heads",
            "groups = groups if is_multi_query else heads",
            "tests/unit/checkpoint/formats/huggingface/families/test_falcon.py::"
            "test_groups_depend_on_the_architecture",
        ),
        Mutant(
            "GPT-NeoX has parallel branches unless it says no",
            "megatron/checkpoint/formats/huggingface/families/gpt_neox.py",
            'fields.boolean("use_parallel_residual", True)',
            'fields.boolean("use_parallel_residual", False)',
            "tests/unit/checkpoint/formats/huggingface/families/test_gpt_neox.py::"
            "test_defaults_are_those_of_the_release",
        ),
    ),
    "distributed checkpoints": (
        Mutant(
            "a layer is taken from its place in the stack",
            "megatron/checkpoint/formats/torch_dist/names.py",
            'yield f"layers.{layer}.{BLOCK[match[1]]}", (layer,)',
            'yield f"layers.{layer}.{BLOCK[match[1]]}", (num_layers - 1 - layer,)',
            "tests/unit/checkpoint/formats/torch_dist/test_source.py::"
            "test_weights_are_read_however_they_are_cut[gpt2-by_rank]",
        ),
        Mutant(
            "the norm before the MLP is not that before the attention",
            "megatron/checkpoint/formats/megatron/names.py",
            '"mlp.linear_fc1.layer_norm_weight": "post_attention_norm.weight"',
            '"mlp.linear_fc1.layer_norm_weight": "input_norm.weight"',
            "tests/unit/checkpoint/formats/torch_dist/test_source.py::"
            "test_weights_are_read_however_they_are_cut[gpt2-by_rank]",
        ),
        Mutant(
            "elements are found by the strides that they were saved with",
            "megatron/checkpoint/formats/torch_dist/index.py",
            "first = sum(at * step for at, step in zip(inside.offset, record.strides))",
            "first = inside.offset[-1] if inside.offset else 0",
            "tests/unit/checkpoint/formats/torch_dist/test_source.py::"
            "test_a_box_is_read_from_the_chunks_that_hold_it",
        ),
        Mutant(
            "an index opens no file outside of its folder",
            "megatron/checkpoint/formats/torch_dist/index.py",
            """if "/" in item.file or item.file.startswith("."):""",
            "if False:",
            "tests/unit/checkpoint/formats/torch_dist/test_index.py::"
            "test_an_index_that_promises_too_much_is_refused",
        ),
        Mutant(
            "a pickle names only what a list allows",
            "megatron/checkpoint/files/unpickle.py",
            "        if dotted not in self._allowed:",
            "        if dotted not in self._allowed and super().find_class(module, name) is None:",
            "tests/unit/checkpoint/files/test_unpickle.py::"
            "test_a_pickle_runs_nothing_that_the_list_lacks",
        ),
        Mutant(
            "cells of a grid lie where their place says",
            "megatron/checkpoint/formats/torch_dist/source.py",
            "cell_box = Box(tuple(i * n for i, n in zip(at, cell)), cell)",
            "cell_box = Box(tuple(i * n for i, n in zip(at[::-1], cell)), cell)",
            "tests/unit/checkpoint/formats/torch_dist/test_source.py::"
            "test_optimizer_state_by_model_key_is_read[gpt2-fp32_param--cells]",
        ),
        Mutant(
            "fp32 weights have no masters beside them",
            "megatron/checkpoint/formats/torch_dist/source.py",
            "dtype.itemsize > 2:",
            "dtype.itemsize > 4:",
            "tests/unit/checkpoint/formats/torch_dist/test_source.py::"
            "test_masters_of_fp32_weights_are_the_weights",
        ),
        Mutant(
            "layers are stacked by number, not as text",
            "megatron/checkpoint/formats/torch_dist/writer.py",
            'int(name.partition("layers.")[2].split(".")[0])',
            'name.partition("layers.")[2].split(".")[0]',
            "tests/unit/checkpoint/formats/torch_dist/test_t5.py::"
            "test_layers_are_stacked_by_number",
        ),
        Mutant(
            "every layer of a stack has a state beside its linear layers",
            "megatron/checkpoint/formats/torch_dist/names.py",
            "axes = shape[:1] if is_stacked(key) else ()",
            "axes: tuple[int, ...] = ()",
            "tests/unit/checkpoint/formats/torch_dist/test_writer.py::"
            "test_files_hold_what_loaders_look_at",
        ),
        Mutant(
            "core keeps the state of what it names twice under the second name",
            "megatron/checkpoint/formats/torch_dist/writer.py",
            "{tuple(parts): key for key, parts in by_key.items()}",
            "{tuple(parts): key for key, parts in reversed(by_key.items())}",
            "tests/unit/checkpoint/formats/torch_dist/test_t5.py::"
            "test_files_hold_the_keys_that_core_looks_for",
        ),
        Mutant(
            "queries of cross attention have a key of their own",
            "megatron/checkpoint/formats/torch_dist/names.py",
            '"cross_attention.query": "cross_attention.linear_q",',
            '"cross_attention.query": "self_attention.linear_q",',
            "tests/unit/checkpoint/formats/torch_dist/test_t5.py::"
            "test_files_hold_the_keys_that_core_looks_for",
        ),
        Mutant(
            "a GPT has the keys of a GPT, whichever program trained it",
            "megatron/checkpoint/formats/torch_dist/writer.py",
            'trunk = "decoder" if kind == GPT else "encoder"',
            'trunk = "decoder" if source.kind == GPT else "encoder"',
            "tests/unit/checkpoint/formats/torch_dist/test_writer.py::"
            "test_a_gpt_of_another_program_has_the_keys_of_a_gpt",
        ),
        Mutant(
            "what core keeps twice is the same twice",
            "megatron/checkpoint/formats/torch_dist/source.py",
            "        if not torch.equal(*values):",
            "        if False:",
            "tests/unit/checkpoint/formats/torch_dist/test_t5.py::"
            "test_what_is_kept_twice_has_to_be_equal",
        ),
        Mutant(
            "core's T5 has a bias for each word only where its head is tied",
            "megatron/checkpoint/formats/torch_dist/writer.py",
            "(has_bias and not model.tied,",
            "(False,",
            "tests/unit/checkpoint/formats/torch_dist/test_t5.py::"
            "test_a_t5_that_core_does_not_have_is_refused_by_name",
        ),
        Mutant(
            "files that torch writes are durable",
            "megatron/checkpoint/formats/torch_dist/dcp_files.py",
            "    writer.fs = _DurableFileSystem()\n",
            "",
            "tests/unit/checkpoint/formats/torch_dist/test_dcp_files.py::"
            "test_every_file_is_on_the_disk_at_the_end",
        ),
        Mutant(
            "core numbers parameters in the order of its own modules",
            "megatron/checkpoint/formats/megatron/spellings.py",
            '(*_EDGE, "attention.output", "input_norm", *_ATTENTION, *_MLP)',
            '(*_EDGE, "input_norm", "attention.output", *_ATTENTION, *_MLP)',
            "tests/unit/checkpoint/formats/megatron/test_spellings.py::"
            "test_modules_stand_in_the_order_of_core",
        ),
        Mutant(
            "core's copy of the embedding stands where its projection does",
            "megatron/checkpoint/formats/megatron/writer.py",
            "chunk_names.insert(place, names.WORD)",
            "chunk_names.insert(0, names.WORD)",
            "tests/unit/checkpoint/formats/megatron/test_writer.py::"
            "test_the_names_of_core_go_there_and_back_with_the_optimizer",
        ),
        Mutant(
            "padding between buckets is not in the distributed optimizer's file",
            "megatron/checkpoint/formats/megatron/distributed_optimizer.py",
            "        if parameter.is_shared or (size is not None and at >= size):",
            "        if parameter.is_shared:",
            "tests/unit/checkpoint/formats/megatron/test_source.py::"
            "test_state_of_the_distributed_optimizer_is_read",
        ),
        Mutant(
            "an embedding of two stages is a bucket of its own",
            "megatron/checkpoint/formats/megatron/distributed_optimizer.py",
            "        if parameter.is_shared or (size is not None and at >= size):",
            "        if size is not None and at >= size:",
            "tests/unit/checkpoint/formats/megatron/test_source.py::"
            "test_state_of_the_distributed_optimizer_is_read",
        ),
        Mutant(
            "the last parameter is the first in the distributed optimizer's buffer",
            "megatron/checkpoint/formats/megatron/distributed_optimizer.py",
            "    for parameter in reversed(parameters):",
            "    for parameter in parameters:",
            "tests/unit/checkpoint/formats/megatron/test_source.py::"
            "test_state_of_the_distributed_optimizer_is_read",
        ),
    ),
    "gpt-neox": (
        Mutant(
            "gpt-neox's halves are up, then gate",
            "megatron/checkpoint/formats/deepspeed/neox.py",
            "up, gate = local.chunk(2)",
            "gate, up = local.chunk(2)",
            "tests/unit/checkpoint/formats/deepspeed/test_neox.py::"
            "test_weights_are_read_at_any_layout",
        ),
        Mutant(
            "gpt-neox's grouped rows are all queries, all keys, all values",
            "megatron/checkpoint/formats/deepspeed/neox.py",
            "return torch.cat(parts, dim=1).reshape(local.shape)",
            "return torch.cat([parts[0], parts[2], parts[1]], dim=1).reshape(local.shape)",
            "tests/unit/checkpoint/formats/deepspeed/test_neox.py::"
            "test_weights_are_read_at_any_layout",
        ),
        Mutant(
            "biases of parallel branches are summed over tensor-parallel ranks",
            "megatron/checkpoint/formats/deepspeed/source.py",
            "return result.copy_(torch.stack(parts).sum(dim=0))",
            "return result.copy_(parts[0])",
            "tests/unit/checkpoint/formats/deepspeed/test_neox.py::"
            "test_weights_are_read_at_any_layout",
        ),
        Mutant(
            "the first block is where gpt-neox's list has it",
            "megatron/checkpoint/formats/deepspeed/neox.py",
            'return f"layers.{int(match[1]) - first}.{inside}"',
            'return f"layers.{int(match[1])}.{inside}"',
            "tests/unit/checkpoint/formats/deepspeed/test_neox.py::"
            "test_weights_are_read_at_any_layout",
        ),
        Mutant(
            "gains of an RMSNorm are called scale",
            "megatron/checkpoint/formats/deepspeed/neox.py",
            'leaf = "weight" if leaf == "scale" else leaf',
            'leaf = "weight" if leaf == "gain" else leaf',
            "tests/unit/checkpoint/formats/deepspeed/test_neox.py::"
            "test_weights_are_read_at_any_layout",
        ),
    ),
}
