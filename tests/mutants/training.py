"""Mutants of a training step and of the loop around it."""

from tests.mutants.mutant import Mutant

_GRAPH = "tests/laws/test_step_graph.py::test_a_captured_step_is_the_step_on_one_rank"
SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "muP": (
        Mutant(
            "learning rates of matrices are divided by the width",
            "megatron/optimizer/param_groups.py",
            "(1.0 if given else 1 / width), 1 / width",
            "1.0, 1 / width",
            "tests/laws/test_width.py::"
            "test_wider_is_better_at_the_learning_rate_of_the_small_model",
        ),
        Mutant(
            "tables are read row by row",
            "megatron/optimizer/param_groups.py",
            'is_matrix and name.partition(".")[0] != "embedding"',
            "is_matrix",
            "tests/unit/optimizer/test_param_groups.py::"
            "test_mup_divides_what_has_rows_as_long_as_the_model_is_wide",
        ),
        Mutant(
            "epsilon shrinks with the width",
            "megatron/optimizer/slot_rules.py",
            "config.adam_eps * epsilon_multiplier",
            "config.adam_eps",
            "tests/unit/optimizer/test_slot_rules.py::test_a_factor_on_epsilon_reaches_adamw",
        ),
        Mutant(
            "scores are divided by the width of a head",
            "megatron/config/model.py",
            "base / self.head_width**self.mup_attn_scale_power",
            "base / self.head_width**0.5",
            "tests/unit/config/test_blocks.py::test_factors_of_mup_follow_from_the_width_of_another_model",
        ),
        Mutant(
            "initial values shrink with the width",
            "megatron/config/model.py",
            "self.init_method_std / math.sqrt(self.width_multiplier)",
            "self.init_method_std",
            "tests/unit/config/test_blocks.py::test_factors_of_mup_follow_from_the_width_of_another_model",
        ),
    ),
    "steps as a graph": (
        Mutant(
            "a graph trains on the batches that it was captured with",
            "megatron/engine/step_graph.py",
            "                place.copy_(values[name])\n",
            "                del place\n",
            f"{_GRAPH}[ragged]",
        ),
        Mutant(
            "a graph drops what its first step has dropped",
            "megatron/mpu/random.py",
            "            rows += self._origin * (batch // size)\n",
            "            pass\n",
            f"{_GRAPH}[fp8, delayed]",
        ),
        Mutant(
            "numbers of tokens are kept from the step before",
            "megatron/mpu/random.py",
            "self._origin, self._of = origin, None",
            "self._origin = origin",
            "tests/unit/mpu/test_random.py::test_what_is_made_once_is_made_anew_for_other_origins",
        ),
        Mutant(
            "numbers of tokens of a graph are kept for other passes",
            "megatron/mpu/random.py",
            "self._origin, self._of = None, None",
            "self._origin = None",
            "tests/unit/mpu/test_random.py::test_what_is_made_once_is_made_anew_for_other_origins",
        ),
        Mutant(
            "a graph has the loss scale that it was captured with",
            "megatron/engine/step_graph.py",
            "of_step.get(_LOSS_SCALE, loss_scale),",
            "loss_scale,",
            f"{_GRAPH}[a loss scale that moves]",
        ),
        Mutant(
            "what the host knows of a step is forgotten",
            "megatron/engine/step_graph.py",
            "kind = (len(inputs), *known, *shapes)",
            "kind = (0,)",
            f"{_GRAPH}[batches that grow]",
        ),
        Mutant(
            "a generator of the host is seeded by samples it does not know",
            "megatron/mpu/random.py",
            "        if self._origin is not None:\n            raise ValueError",
            "        if False:\n            raise ValueError",
            "tests/unit/mpu/test_random.py::"
            "test_samples_that_only_the_device_knows_number_rows_and_seed_no_generator",
        ),
    ),
    "where a step went": (
        Mutant(
            "steps alone are counted",
            "megatron/loop/breakdown.py",
            "    rest = union(interval_of(event) for event in steps)\n",
            "    rest = union(interval_of(event) for event in whole)\n",
            "tests/unit/loop/test_breakdown.py::test_every_moment_of_a_step_has_one_class",
        ),
        Mutant(
            "on a GPU the steps are those of its kernels",
            "megatron/loop/breakdown.py",
            'ranges = "gpu_user_annotation" if on_gpu else "user_annotation"',
            'ranges = "user_annotation"',
            "tests/unit/loop/test_breakdown.py::"
            "test_on_a_gpu_kernels_have_the_classes_and_the_host_is_idle_time",
        ),
        Mutant(
            "a moment has one class",
            "megatron/loop/breakdown.py",
            "length(taken) / 1e6, without(rest, taken)",
            "length(taken) / 1e6, rest",
            "tests/unit/loop/test_breakdown.py::test_classes_add_up_to_the_steps",
        ),
        Mutant(
            "products within attention are attention",
            "megatron/loop/breakdown.py",
            '        ("attention", r"attention|flash|fmha|sdpa|^aten::(bmm|baddbmm|_softmax)"),\n',
            "",
            "tests/unit/loop/test_breakdown.py::test_every_moment_of_a_step_has_one_class",
        ),
        Mutant(
            "waiting makes no rank late",
            "megatron/loop/breakdown.py",
            "_WORK = tuple(kind for kind in CLASSES if kind not in _WAITS)",
            "_WORK = CLASSES",
            "tests/unit/loop/test_breakdown.py::"
            "test_a_rank_that_computes_longer_than_others_is_named_with_its_reason",
        ),
    ),
    "lion and muon": (
        Mutant(
            "ranks orthogonalize whole matrices",
            "megatron/optimizer/muon.py",
            "        return ctx.axis(partition.axis), partition\n",
            "        return ParallelContext.single().tp, None\n",
            "tests/laws/layouts/test_optimizers.py::test_two_ranks_update_as_one_process",
        ),
        Mutant(
            "so do ranks of experts",
            "megatron/optimizer/muon.py",
            'return ctx.etp, Partition("etp", within.dim, within.blocks)',
            "return ParallelContext.single().tp, None",
            "tests/laws/layouts/test_optimizers.py::test_ranks_of_experts_update_as_one_process",
        ),
        Mutant(
            "queries, keys and values are three matrices",
            "megatron/model/attention.py",
            "(self._queries * width, width, width)",
            "((self._queries + 2) * width,)",
            "tests/unit/model/test_attention.py::test_rows_are_of_queries_keys_and_values",
        ),
        Mutant(
            "a void update leaves weights alone",
            "megatron/optimizer/slots.py",
            "torch.where(applied, weight, self.weight)",
            "weight",
            "tests/unit/optimizer/test_lion.py::test_an_update_that_does_not_count_changes_nothing",
        ),
        Mutant(
            "Lion's sign is of the mean that beta1 makes",
            "megatron/optimizer/lion.py",
            "torch.lerp(gradient, mean, rule.beta1).sign()",
            "torch.lerp(gradient, mean, rule.beta2).sign()",
            "tests/unit/optimizer/test_lion.py::"
            "test_an_update_goes_by_signs_of_a_mean_that_the_gradient_leads",
        ),
        Mutant(
            "tables of words are no matrices of Muon",
            "megatron/optimizer/muon.py",
            '_TABLES = ("embedding", "output")',
            '_TABLES = ("embedding",)',
            "tests/unit/optimizer/test_muon.py::test_tables_biases_and_norms_are_no_matrices",
        ),
    ),
    "a step beside its products": (
        Mutant(
            "weights that are loaded have no lower halves",
            "megatron/optimizer/slots.py",
            "self.weight.zero_()",
            "pass",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_refresh_takes_over_loaded_weights[halves]",
        ),
        Mutant(
            "masters are put together in float32 alone",
            "megatron/optimizer/optimizer.py",
            "(values.dtype, gradient.dtype) != (torch.bfloat16, torch.float32)",
            "values.dtype != torch.bfloat16",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_masters_stay_whole_where_they_cannot_be_put_together[narrow gradients]",
        ),
        Mutant(
            "masters that are loaded are taken apart",
            "megatron/optimizer/optimizer.py",
            "            slot.take_apart()\n",
            "            slot.put_together()\n",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_masters_that_are_written_where_gradients_were_are_taken_over",
        ),
        Mutant(
            "whole masters give way where halves do",
            "megatron/ops/adamw.py",
            "            new_weight = _between_halves(new_weight)\n",
            "            new_weight = new_weight.clone()\n",
            "tests/unit/ops/test_adamw.py::test_halves_and_whole_weights_give_way_alike[reference]",
        ),
        Mutant(
            "a linear layer of one rank gives its input a gradient",
            "megatron/mpu/layers.py",
            "matrix_product(rows, weight).view(shape) if needs_input else None,",
            "rows.new_zeros(shape) if needs_input else None,",
            "tests/unit/mpu/test_weight_gradients.py::"
            "test_products_that_add_to_the_buffer_give_the_same_sums",
        ),
        Mutant(
            "a linear layer of one rank gives its bias the sum over rows",
            "megatron/mpu/layers.py",
            "rows.sum(dim=0) if needs_bias else None,",
            "grad[0].sum(dim=0) if needs_bias else None,",
            "tests/unit/mpu/test_weight_gradients.py::"
            "test_products_that_add_to_the_buffer_give_the_same_sums",
        ),
        Mutant(
            "an operator saves nothing where no gradient is wanted",
            "megatron/ops/library.py",
            "if torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs):",
            "if torch._C._any_requires_grad(*inputs):",
            "tests/unit/ops/test_library.py::test_a_gradient_is_only_prepared_where_one_is_wanted",
        ),
        Mutant(
            "an operator whose first output is not used has the gradient of the other",
            "megatron/ops/library.py",
            "return grad_added, grad_added, *[None] * ctx.weights, None",
            "return grad_added, None, *[None] * ctx.weights, None",
            "tests/unit/ops/test_rms_norm.py::test_the_sum_alone_has_a_gradient_too",
        ),
        Mutant(
            "what a full collection has found in use is looked at by no other",
            "megatron/host.py",
            "                gc.freeze()\n",
            "",
            "tests/unit/test_host.py::"
            "test_what_a_full_collection_has_found_in_use_is_looked_at_by_no_other",
        ),
        Mutant(
            "what others have left out of collections stays so",
            "megatron/host.py",
            "            if gc.get_freeze_count() <= _FROZEN_BY_PYTHON:\n",
            "            if True:\n",
            "tests/unit/test_host.py::test_what_others_have_left_out_of_collections_stays_so",
        ),
    ),
    "fp8": (
        Mutant(
            "codes beyond the largest one are the largest one",
            "megatron/ops/quantize.py",
            "parts.clamp(-largest, largest).float()",
            "parts.float()",
            "tests/unit/ops/test_quantize.py::"
            "test_every_code_every_tie_and_what_is_beside_it_is_rounded_right",
        ),
        Mutant(
            "a NaN spoils all of its block",
            "megatron/ops/quantize.py",
            "nan_to_num(nan=torch.inf,",
            "nan_to_num(nan=0.0,",
            "tests/unit/ops/test_quantize.py::"
            "test_what_is_not_finite_spoils_its_block_and_no_other",
        ),
        Mutant(
            "a margin leaves room",
            "megatron/ops/quantize.py",
            "2.0**margin / largest",
            "1 / largest",
            "tests/unit/ops/test_quantize.py::test_a_margin_leaves_room_above_the_largest_value",
        ),
        Mutant(
            "scales of 32 stand in tiles",
            "megatron/ops/scaled_matmul.py",
            "tiles.permute(0, 3, 2, 1, 4)",
            "tiles.permute(0, 3, 1, 2, 4)",
            "tests/unit/ops/test_scaled_matmul.py::"
            "test_scales_of_32_are_tiled_as_the_manual_of_cublas_says",
        ),
        Mutant(
            "ranks share the largest value of a weight",
            "megatron/ops/fp8_products.py",
            "(weight, self._weight, _is_shared(self._weight, split=True, summed=split)),",
            "(weight, self._weight, False),",
            "tests/laws/layouts/test_fp8.py::test_every_layout_rounds_alike",
        ),
        Mutant(
            "ranks share the largest values of a history",
            "megatron/engine/amax_history.py",
            '        all_reduce(self._seen, self._world, op="max")\n',
            "",
            "tests/laws/layouts/test_fp8.py::test_every_layout_rounds_alike[delayed]",
        ),
        Mutant(
            "a step that is void adds nothing to a history",
            "megatron/engine/amax_history.py",
            "torch.where(applied, moved, self._values)",
            "moved",
            "tests/unit/engine/test_amax_history.py::"
            "test_a_void_step_leaves_the_histories_and_its_values_are_forgotten",
        ),
        Mutant(
            "an infinity beyond a delayed scale does not saturate",
            "megatron/ops/fp8_products.py",
            "torch.where(measured.isfinite(), self.history.before[operand], measured)",
            "self.history.before[operand].view(1, 1)",
            "tests/unit/engine/test_amax_history.py::test_what_is_not_finite_is_not_clamped_away",
        ),
        Mutant(
            "gradients have a format of their own",
            "megatron/ops/fp8_products.py",
            "self._quantize(rows, self._rows, of_grad, self._scaling.gradient_dtype)",
            "self._quantize(rows, self._rows, of_grad)",
            "tests/unit/ops/test_fp8_products.py::"
            "test_every_product_is_that_of_the_rounded_operands",
        ),
        Mutant(
            "a layer that was not compiled in the first step ends the run",
            "megatron/model/compilation.py",
            "if not 0 < self._calls == self._runs:",
            "if not 0 < self._calls:",
            "tests/unit/model/test_compilation.py::"
            "test_a_layer_that_did_not_run_as_a_graph_ends_the_run",
        ),
        Mutant(
            "graphs on disk are those of the operators that are there",
            "megatron/model/compilation.py",
            "torch.compiler.config.cache_key_tag = _operators_digest()",
            "_operators_digest()",
            "tests/unit/model/test_compilation.py::"
            "test_graphs_on_disk_are_those_of_these_operators",
        ),
        Mutant(
            "gradients of weights are computed in FP8",
            "megatron/mpu/layers.py",
            "product = call.fp8.of_weight(call.amax, of_grad)",
            "pass",
            "tests/unit/ops/test_fp8_products.py::"
            "test_every_product_is_that_of_the_rounded_operands",
        ),
        Mutant(
            "a compiled graph hands the largest values of input and weight over in their order",
            "megatron/ops/fp8_products.py",
            "        one, other, *measured = values",
            "        other, one, *measured = values",
            "tests/unit/ops/test_opaque_linear.py::test_products_in_fp8_are_those_of_the_layer",
        ),
        Mutant(
            "every gradient of the first step is counted",
            "megatron/engine/fp8.py",
            "if gradients != [once, once * fp8.wgrad] or outputs",
            "if outputs",
            "tests/unit/engine/test_fp8.py::test_a_first_step_without_a_product_is_an_error",
        ),
        Mutant(
            "products as exact as bfloat16 are not FP8",
            "megatron/engine/fp8.py",
            "if not expected / _BAND < error",
            "if not error",
            "tests/unit/engine/test_fp8.py::test_products_that_are_not_in_fp8_are_refused",
        ),
        Mutant(
            "the first and last layers stay out of FP8",
            "megatron/model/specs.py",
            "if self.fp8 is None or self.fp8.has_layer(layer, num_layers):",
            "if True:",
            "tests/unit/engine/test_fp8.py::test_first_and_last_layers_are_out_with_their_reason",
        ),
    ),
    "optimizer": (
        Mutant(
            "gradients below the limit are not scaled up",
            "megatron/optimizer/clip_grads.py",
            "return torch.clamp(max_norm / (norm + _EPSILON), max=1.0) if max_norm > 0 else 1.0",
            "return max_norm / (norm + _EPSILON) if max_norm > 0 else 1.0",
            "tests/unit/optimizer/test_clip_grads.py::"
            "test_clip_factor_leaves_small_norms_alone_and_zero_means_no_limit",
        ),
        Mutant(
            "clipping does not wait for the norm",
            "megatron/optimizer/clip_grads.py",
            "return torch.clamp(max_norm / (norm + _EPSILON), max=1.0) if max_norm > 0 else 1.0",
            "return min(1.0, max_norm / (float(norm) + _EPSILON)) if max_norm > 0 else 1.0",
            "tests/laws/layouts/test_host_reads.py::"
            "test_a_step_reads_no_value_and_mixes_no_devices",
        ),
        Mutant(
            "a loss scale does not wait for the device",
            "megatron/engine/native.py",
            "factor = loss_scale / _nominal_tokens(plan)",
            "factor = float(loss_scale) / _nominal_tokens(plan)",
            "tests/laws/layouts/test_host_reads.py::"
            "test_a_step_reads_no_value_and_mixes_no_devices[fp16, stages]",
        ),
        Mutant(
            "a limit of zero does not clip",
            "megatron/optimizer/clip_grads.py",
            "if max_norm > 0 else 1.0",
            "if max_norm >= 0 else 1.0",
            "tests/unit/optimizer/test_clip_grads.py::"
            "test_clip_factor_leaves_small_norms_alone_and_zero_means_no_limit",
        ),
        Mutant(
            "the loss scale is taken out of gradients",
            "megatron/optimizer/optimizer.py",
            "factor = grad_multiplier / loss_scale",
            "factor = grad_multiplier",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_one_factor_takes_out_loss_scale_and_makes_the_mean",
        ),
        Mutant(
            "gradients are clipped",
            "megatron/optimizer/optimizer.py",
            "        factor = factor * clip_factor(norm, self._config.clip_grad)\n",
            "",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_float64_updates_and_clipping_equal_torchs",
        ),
        Mutant(
            "an overflow lowers the loss scale",
            "megatron/optimizer/optimizer.py",
            "self._scaler.update(~applied)",
            "self._scaler.update(applied & ~applied)",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_overflows_at_the_smallest_loss_scale_end_the_run",
        ),
        Mutant(
            "all replicas skip a step that overflows on one",
            "megatron/optimizer/optimizer.py",
            "sums.add(_NOT_FINITE, ~torch.isfinite(seen))",
            "sums.add(_NOT_FINITE, ~torch.isfinite(squares))",
            "tests/distributed/optimizer/test_optimizer.py::"
            "test_all_ranks_skip_together_when_one_overflows[grid1-1]",
        ),
        Mutant(
            "a step with an overflow changes no weight",
            "megatron/optimizer/optimizer.py",
            "rule.found_inf = (~applied).float()",
            "rule.found_inf = torch.zeros(())",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_a_bad_gradient_changes_nothing_and_is_reported",
        ),
        Mutant(
            "a step with an overflow is not counted",
            "megatron/optimizer/optimizer.py",
            "self._steps += applied",
            "self._steps += 1",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_scalars_are_json_and_count_updates_but_not_skips",
        ),
        Mutant(
            "the norm of a step that one replica made void is not finite",
            "megatron/optimizer/optimizer.py",
            "norm = torch.where(hidden, torch.nan, norm)\n        applied = torch.isfinite(norm)",
            "applied = torch.isfinite(norm) & ~hidden",
            "tests/distributed/optimizer/test_optimizer.py::"
            "test_all_ranks_skip_together_when_one_overflows[grid1-1]",
        ),
        Mutant(
            "norms and biases are not decayed",
            "megatron/optimizer/param_groups.py",
            "self.weight_decay * group.weight_decay_multiplier",
            "self.weight_decay",
            "tests/unit/optimizer/test_optimizer.py::test_biases_and_norms_are_not_decayed",
        ),
        Mutant(
            "masters that SGD updated are rounded into the model",
            "megatron/optimizer/optimizer.py",
            "torch._foreach_copy_([slot.values for slot in slots], [slot.weight for slot in "
            "slots])",
            "torch._foreach_copy_([slot.weight for slot in slots], [slot.values for slot in "
            "slots])",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_half_precision_updates_equal_a_loop_over_fp32_masters",
        ),
        Mutant(
            "half-precision weights have fp32 masters",
            "megatron/optimizer/optimizer.py",
            "return values.detach().float() if values.dtype in HALF_DTYPES else values",
            "return values",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_half_precision_updates_equal_a_loop_over_fp32_masters",
        ),
        Mutant(
            "a missing gradient is refused",
            "megatron/optimizer/optimizer.py",
            "        if gradient is None:\n            raise",
            "        if gradient is None and slot.owned:\n            raise",
            "tests/unit/optimizer/test_optimizer.py::test_a_step_without_backward_is_an_error",
        ),
        Mutant(
            "the output layer has the learning rate of word tables",
            "megatron/optimizer/param_groups.py",
            '("embedding.word.weight", "output.weight")',
            '("embedding.word.weight",)',
            "tests/unit/optimizer/test_param_groups.py::"
            "test_the_tables_of_words_alone_are_decoupled_and_only_where_asked",
        ),
        Mutant(
            "under ZeRO every pipeline stage has as many groups as any",
            "megatron/engine/deepspeed/updates.py",
            "    if fewest < most:",
            "    if False:",
            "tests/distributed/engine/deepspeed/test_layers.py::"
            "test_stages_are_cut_as_natively_or_by_a_method_of_deepspeeds",
        ),
        Mutant(
            "DeepSpeed's optimizer has the learning rate of word tables",
            "megatron/engine/deepspeed/updates.py",
            "named, dimensions=_dimensions, rules=rules)",
            "named, dimensions=_dimensions)",
            "tests/laws/layouts/test_engine.py::"
            "test_deepspeed_trains_what_the_native_engine_trains[dp 2-0]",
        ),
        Mutant(
            "a bias of several dimensions is not decayed",
            "megatron/optimizer/param_groups.py",
            'return dimensions(parameter) > 1 and name.rpartition(".")[2] != "bias"',
            "return dimensions(parameter) > 1",
            "tests/unit/optimizer/test_param_groups.py::"
            "test_a_matrix_called_bias_is_not_decayed_and_a_scalar_neither",
        ),
        Mutant(
            "Adam uses both of its decay rates",
            "megatron/optimizer/update_rule.py",
            "betas = (config.adam_beta1, config.adam_beta2)",
            "betas = (config.adam_beta1, config.adam_beta1)",
            "tests/unit/optimizer/test_update_rule.py::test_the_flags_reach_torchs_rules",
        ),
        Mutant(
            "SGD has its momentum",
            "megatron/optimizer/update_rule.py",
            "momentum=config.sgd_momentum",
            "momentum=0.0",
            "tests/unit/optimizer/test_update_rule.py::test_fresh_state_changes_no_result",
        ),
        Mutant(
            "AdamW makes no rule of torch's",
            "megatron/optimizer/optimizer.py",
            "if self._is_sgd:\n            weights",
            "if self._by_group:\n            weights",
            "tests/unit/optimizer/test_optimizer.py::test_adamw_makes_no_rule_of_torchs",
        ),
        Mutant(
            "garbage is collected at its interval alone",
            "megatron/loop/hooks.py",
            "        if due(self.interval, progress):\n            gc.collect()",
            "        if self.interval:\n            gc.collect()",
            "tests/unit/loop/test_hooks.py::test_garbage_is_collected_at_its_interval",
        ),
        Mutant(
            "AdamW skips a step with an overflow",
            "megatron/optimizer/optimizer.py",
            "StepScalars(norm.new_ones(()) * factor, applied, ",
            "StepScalars(norm.new_ones(()) * factor, torch.ones_like(applied), ",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_a_bad_gradient_changes_nothing_and_is_reported",
        ),
        Mutant(
            "AdamW counts its own step in the corrections of its state",
            "megatron/optimizer/optimizer.py",
            "applied, self._steps)",
            "applied, self._steps + 1)",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_float64_updates_and_clipping_equal_torchs",
        ),
    ),
    "loss scale": (
        Mutant(
            "the scale grows after as many good steps as asked for",
            "megatron/optimizer/grad_scaler.py",
            "grows = good == self._growth_interval",
            "grows = good > self._growth_interval",
            "tests/unit/optimizer/test_grad_scaler.py::"
            "test_the_scale_doubles_after_a_window_without_overflow",
        ),
        Mutant(
            "overflows within the hysteresis leave the scale alone",
            "megatron/optimizer/grad_scaler.py",
            "used_up = overflow & (left <= 0)",
            "used_up = overflow & (left <= self._hysteresis)",
            "tests/unit/optimizer/test_grad_scaler.py::"
            "test_the_scale_halves_after_hysteresis_overflows",
        ),
        Mutant(
            "a move of the scale renews the hysteresis",
            "megatron/optimizer/grad_scaler.py",
            "self._overflows_left = torch.where(moves, self._hysteresis, left)",
            "self._overflows_left = torch.where(moves, 1.0, left)",
            "tests/unit/optimizer/test_grad_scaler.py::"
            "test_hysteresis_is_refilled_after_a_doubling",
        ),
        Mutant(
            "an overflow at the smallest scale ends the run",
            "megatron/optimizer/grad_scaler.py",
            "too_small = used_up & (self._scale * BACKOFF < self._min_scale)",
            "too_small = used_up & (self._scale < self._min_scale)",
            "tests/unit/optimizer/test_grad_scaler.py::"
            "test_an_overflow_at_the_smallest_scale_ends_the_run",
        ),
        Mutant(
            "an overflow begins the count of good steps anew",
            "megatron/optimizer/grad_scaler.py",
            "good = torch.where(overflow, 0.0, self._good_iterations + 1)",
            "good = self._good_iterations + (~overflow).double()",
            "tests/unit/optimizer/test_grad_scaler.py::test_an_overflow_starts_the_window_anew",
        ),
        Mutant(
            "fp16 without a constant scale has a dynamic one",
            "megatron/optimizer/grad_scaler.py",
            "precision.precision is not Precision.FP16 or precision.loss_scale is not None",
            "precision.precision is not Precision.FP16 or precision.loss_scale is None",
            "tests/unit/optimizer/test_optimizer.py::"
            "test_overflows_at_the_smallest_loss_scale_end_the_run",
        ),
    ),
    "schedule": (
        Mutant(
            "warm-up begins at its initial rate",
            "megatron/optimizer/schedule.py",
            "return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * done / needed",
            "return config.lr * done / needed",
            "tests/unit/optimizer/test_schedule.py::"
            "test_the_first_iteration_of_a_warmup_runs_at_its_initial_value",
        ),
        Mutant(
            "the rate stays at its minimum after the decay",
            "megatron/optimizer/schedule.py",
            "    if at > decay:\n        return config.min_lr",
            "    if at > decay:\n        return config.lr",
            "tests/unit/optimizer/test_schedule.py::"
            "test_a_decay_shorter_than_the_training_stays_at_its_end",
        ),
        Mutant(
            "an inverse square root stops at the minimum",
            "megatron/optimizer/schedule.py",
            "return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1) / at))",
            "return config.lr * math.sqrt(max(warmup, 1) / at)",
            "tests/unit/optimizer/test_schedule.py::"
            "test_the_rate_equals_an_independent_formula_and_stays_in_its_bounds",
        ),
        Mutant(
            "a schedule in tokens reads tokens",
            "megatron/optimizer/schedule.py",
            "at = samples if config.lr_decay_tokens is None else tokens",
            "at = samples",
            "tests/unit/optimizer/test_schedule.py::"
            "test_a_schedule_in_tokens_looks_at_tokens_alone",
        ),
        Mutant(
            "a decay in tokens begins at the tokens of a warm-up in iterations",
            "megatron/loop/step_plan.py",
            "warmup_tokens=warmup_tokens(schedule, batches, curriculum, full_length)",
            "warmup_tokens=0",
            "tests/laws/schedules/test_tokens.py::"
            "test_a_decay_in_tokens_begins_where_a_warmup_in_iterations_ended",
        ),
        Mutant(
            "a decay begins where warm-up ends",
            "megatron/optimizer/schedule.py",
            "(at - warmup) / (decay - warmup)",
            "at / decay",
            "tests/unit/optimizer/test_schedule.py::"
            "test_a_schedule_in_tokens_looks_at_tokens_alone",
        ),
        Mutant(
            "WSD anneals at its end",
            "megatron/optimizer/schedule.py",
            "stable_until = decay - anneal",
            "stable_until = decay",
            "tests/unit/optimizer/test_schedule.py::"
            "test_every_wsd_decay_has_its_known_value_a_quarter_in",
        ),
        Mutant(
            "weight decay grows along a cosine",
            "megatron/optimizer/schedule.py",
            "done = 0.5 * (math.cos(math.pi * (1 - done)) + 1)",
            "done = 0.5 * (math.cos(math.pi * done) + 1)",
            "tests/unit/optimizer/test_schedule.py::test_weight_decay_goes_from_start_to_end",
        ),
        Mutant(
            "weight decay stays at its end",
            "megatron/optimizer/schedule.py",
            "done = min(samples / total_samples, 1.0)",
            "done = samples / total_samples",
            "tests/unit/optimizer/test_schedule.py::test_weight_decay_goes_from_start_to_end",
        ),
        Mutant(
            "minus-sqrt annealing is 1 - sqrt",
            "megatron/optimizer/schedule.py",
            "return 1 - math.sqrt(done)",
            "return math.sqrt(1 - done)",
            "tests/unit/optimizer/test_schedule.py::"
            "test_every_wsd_decay_has_its_known_value_a_quarter_in",
        ),
        Mutant(
            "a rate decays to its minimum, not to zero",
            "megatron/optimizer/schedule.py",
            "return config.min_lr + share * (config.lr - config.min_lr)",
            "return max(config.min_lr, share * config.lr)",
            "tests/unit/optimizer/test_schedule.py::test_every_style_has_its_known_values",
        ),
        Mutant(
            "warm-up in samples of a run in iterations is refused",
            "megatron/optimizer/schedule.py",
            'for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):',
            'for stem in ("lr_decay", "lr_wsd_decay"):',
            "tests/unit/optimizer/test_schedule.py::"
            "test_what_is_wrong_with_a_schedule_is_said_in_flags",
        ),
        Mutant(
            "a batch ramp ends at the global batch size",
            "megatron/progress.py",
            "min(steps, consumed_samples * steps // samples)",
            "consumed_samples * steps // samples",
            "tests/unit/test_progress.py::test_a_ramp_grows_as_in_megatron",
        ),
        Mutant(
            "a step of the batch size begins with its tokens",
            "megatron/lengths.py",
            "step.first_token // config.data.seq_length",
            "step.first_token",
            "tests/unit/test_lengths.py::test_steps_of_the_batch_size_begin_at_their_tokens",
        ),
        Mutant(
            "a run ends with the last batch that fits",
            "megatron/progress.py",
            "fitting = (samples - consumed) // size",
            "fitting = -(-(samples - consumed) // size)",
            "tests/unit/test_progress.py::test_a_run_in_samples_ends_with_the_last_whole_batch",
        ),
        Mutant(
            "a good step ends a row of bad ones",
            "megatron/progress.py",
            "self.nonfinite_in_a_row + 1 if bad else 0",
            "self.nonfinite_in_a_row + 1 if bad else self.nonfinite_in_a_row",
            "tests/unit/test_progress.py::"
            "test_a_skipped_iteration_consumes_its_samples_and_counts_as_nonfinite",
        ),
        Mutant(
            "a run in samples stops before it takes too many",
            "megatron/progress.py",
            "return progress.consumed_samples + following > self.train_samples",
            "return progress.consumed_samples >= self.train_samples",
            "tests/unit/test_progress.py::test_a_run_in_samples_ends_with_the_last_whole_batch",
        ),
        Mutant(
            "a step counts its tokens",
            "megatron/progress.py",
            "consumed_tokens=self.consumed_tokens + tokens,",
            "consumed_tokens=self.consumed_tokens + samples,",
            "tests/unit/test_progress.py::test_progress_counts_one_iteration",
        ),
        Mutant(
            "an evaluation counts its samples",
            "megatron/progress.py",
            "self, consumed_valid_samples=self.consumed_valid_samples + samples",
            "self, consumed_valid_samples=self.consumed_valid_samples",
            "tests/unit/test_progress.py::test_evaluation_consumes_validation_samples_only",
        ),
        Mutant(
            "the evaluation at the end is counted in the samples",
            "megatron/lengths.py",
            "(length.total_iterations // interval if interval else 0) + 1",
            "(length.total_iterations // interval if interval else 0)",
            "tests/unit/test_lengths.py::test_samples_are_enough_for_every_evaluation",
        ),
    ),
    "loop": (
        Mutant(
            "one rank's signal stops all",
            "megatron/loop/stop.py",
            'all_reduce(flags, self._world, op="max").tolist()',
            "flags.tolist()",
            "tests/distributed/loop/test_stop.py::test_one_rank_that_saw_something_stops_all",
        ),
        Mutant(
            "a run that resumes at an interval takes a step",
            "megatron/loop/stop.py",
            "if interval is not None and steps_done and",
            "if interval is not None and",
            "tests/unit/loop/test_stop.py::test_an_exit_interval_needs_a_step_of_this_process",
        ),
        Mutant(
            "too many bad iterations in a row end the run",
            "megatron/loop/anomaly.py",
            "too_many = progress.nonfinite_in_a_row > config.nonfinite_limit",
            "too_many = progress.nonfinite_in_a_row > 10 * config.nonfinite_limit",
            "tests/unit/loop/test_anomaly.py::"
            "test_the_policy_skip_allows_a_number_of_them_in_a_row",
        ),
        Mutant(
            "an infinite gradient ends the run",
            "megatron/loop/anomaly.py",
            "if math.isfinite(report.loss) and (report.overflow or "
            "math.isfinite(report.grad_norm)):",
            "if math.isfinite(report.loss):",
            "tests/unit/loop/test_anomaly.py::test_the_policy_stop_stops_at_once",
        ),
        Mutant(
            "a loss that is not finite ends the run",
            "megatron/loop/anomaly.py",
            "    if stop:\n        raise",
            "    if stop and math.isfinite(report.loss):\n        raise",
            "tests/unit/loop/test_anomaly.py::test_the_policy_stop_stops_at_once",
        ),
        Mutant(
            "an evaluation takes all its micro-batches",
            "megatron/loop/evaluate.py",
            "iterations * microbatches",
            "iterations",
            "tests/unit/loop/test_evaluate.py::test_it_takes_every_micro_batch_of_every_iteration",
        ),
        Mutant(
            "an evaluation without tokens is refused",
            "megatron/loop/evaluate.py",
            "    if result.tokens == 0:\n",
            "    if result.tokens < 0:\n",
            "tests/unit/loop/test_evaluate.py::test_an_evaluation_that_counts_nothing_is_an_error",
        ),
    ),
}
