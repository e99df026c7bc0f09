"""Mutants of what all layouts compute alike: reductions, placement, normalisation of losses."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "reductions": (
        Mutant(
            "the gradient of a copied tensor is summed over the tensor-parallel ranks",
            "megatron/mpu/mappings.py",
            "return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None",
            "return grad.clone(), None",
            "tests/distributed/mpu/test_mappings.py::"
            "test_mappings_are_conjugate_and_change_no_input",
        ),
        Mutant(
            "the gradient of a sum passes unchanged",
            "megatron/mpu/mappings.py",
            "        return grad, None\n",
            "        return 2 * grad, None\n",
            "tests/distributed/mpu/test_mappings.py::"
            "test_mappings_are_conjugate_and_change_no_input",
        ),
        Mutant(
            "the gradient of a gathered sequence is summed before it is split",
            "megatron/mpu/mappings.py",
            "return reduce_scatter(grad, ctx.group, dim=0), None",
            "return grad.chunk(ctx.group.size)[ctx.group.rank].contiguous(), None",
            "tests/distributed/mpu/test_mappings.py::"
            "test_mappings_are_conjugate_and_change_no_input",
        ),
        Mutant(
            "the gradient of a scattered sequence is gathered unscaled",
            "megatron/mpu/mappings.py",
            "return all_gather(grad, ctx.group, dim=0), None",
            "return all_gather(grad / ctx.group.size, ctx.group, dim=0), None",
            "tests/distributed/mpu/test_mappings.py::"
            "test_mappings_are_conjugate_and_change_no_input",
        ),
        Mutant(
            "each rank takes its own part of the sequence",
            "megatron/mpu/mappings.py",
            "return slice(group.rank * part, (group.rank + 1) * part)",
            "return slice(0, part)",
            "tests/unit/mpu/test_mappings.py::test_parts_of_a_sequence_are_equal_and_in_order",
        ),
        Mutant(
            "a mean over ranks is divided by their number",
            "megatron/mpu/collectives.py",
            "dense.div_(group.size)",
            "dense.div_(1)",
            "tests/distributed/mpu/test_collectives.py::"
            "test_collectives[collectives_are_arithmetic]",
        ),
        Mutant(
            "a broadcast comes from the rank that was named",
            "megatron/mpu/collectives.py",
            "dist.broadcast(dense, src=group.ranks[source], group=group.handle)",
            "dist.broadcast(dense, src=group.ranks[0], group=group.handle)",
            "tests/distributed/mpu/test_collectives.py::"
            "test_collectives[strided_and_empty_tensors_are_reduced_in_place]",
        ),
        Mutant(
            "the bias of a row-parallel layer is added once",
            "megatron/mpu/layers.py",
            "output = reduce(linear(hidden, self.weight, None, self.fp8), self._tp)",
            "output = reduce(linear(hidden, self.weight, self.bias, self.fp8), self._tp)",
            "tests/distributed/mpu/test_layers.py::test_layers_equal_the_whole_layers[False-2]",
        ),
        Mutant(
            "a stage waits for a message before it computes with it",
            "megatron/pipeline/executor.py",
            '                with step.timers("pipeline-exchange"):\n'
            "                    _land(step)\n"
            "            name =",
            "                pass\n            name =",
            "tests/unit/pipeline/test_executor.py::"
            "test_every_schedule_computes_what_a_plain_loop_does[True-3-1f1b-2-1]",
        ),
        Mutant(
            "stages compute while messages travel where the flag asks for it",
            "megatron/engine/native.py",
            "overlaps=config.parallel.overlap_p2p_communication",
            "overlaps=False",
            "tests/distributed/loop/test_profile.py::"
            "test_an_output_travels_while_the_next_one_is_computed",
        ),
        Mutant(
            "a message is posted after what makes it",
            "megatron/pipeline/exchange.py",
            " and not _makes_any(step[0], following):",
            ":",
            "tests/unit/pipeline/test_simulate.py::"
            "test_messages_posted_early_are_the_same_in_the_same_order[few]",
        ),
        Mutant(
            "a simulated stage waits for what it needs",
            "megatron/pipeline/simulate.py",
            " or needed(step[0]) in self._posted[stage]",
            "",
            "tests/unit/pipeline/test_simulate.py::test_messages_take_their_time[True]",
        ),
        Mutant(
            "a stage computes while its messages travel",
            "megatron/pipeline/executor.py",
            "        if not self._overlaps:\n",
            "        if True:\n",
            "tests/unit/pipeline/test_executor.py::"
            "test_a_message_travels_while_others_are_computed",
        ),
        Mutant(
            "parts on a ring are put where they belong",
            "megatron/mpu/collectives.py",
            "return [(rank - step) % size for step in range(size)]",
            "return [(rank + step) % size for step in range(size)]",
            "tests/distributed/mpu/test_layers.py::test_layers_equal_the_whole_layers[True-4]",
        ),
        Mutant(
            "a sum on a ring is waited for",
            "megatron/mpu/collectives.py",
            "        total += coming.wait()",
            "        total += coming.tensor",
            "tests/distributed/mpu/test_layers.py::"
            "test_parts_of_a_sequence_on_a_ring_give_the_same_bits_and_are_not_read_early[2]",
        ),
        Mutant(
            "the gradient of a weight has the gradients of all parts",
            "megatron/mpu/layers.py",
            "            gathered.chunk(tp.size)[at].copy_(part)",
            "            gathered.chunk(tp.size)[at].zero_()",
            "tests/distributed/mpu/test_layers.py::test_layers_equal_the_whole_layers[True-2]",
        ),
        Mutant(
            "matrices compute with parts where the flag asks for it",
            "megatron/model_build.py",
            "tp_comm_overlap=config.parallel.tp_comm_overlap",
            "tp_comm_overlap=False",
            "tests/unit/test_model_build.py::"
            "test_a_flag_puts_the_matrices_of_all_blocks_on_a_ring[True]",
        ),
        Mutant(
            "the gradient of a column-parallel layer's input is summed over ranks",
            "megatron/mpu/layers.py",
            "        reducing = start(grad_input, call.tp)",
            "        reducing = Pending(grad_input, None)\n"
            "        if call.sequence_parallel:\n"
            "            reducing = start(grad_input, call.tp)",
            "tests/distributed/mpu/test_layers.py::test_layers_equal_the_whole_layers[False-2]",
        ),
        Mutant(
            "a rank looks ids up in its own rows of the vocabulary",
            "megatron/mpu/layers.py",
            "local = ids - self._tp.rank * rows",
            "local = ids - (self._tp.size - 1 - self._tp.rank) * rows",
            "tests/distributed/mpu/test_layers.py::test_layers_equal_the_whole_layers[True-2]",
        ),
        Mutant(
            "a rank adds nothing for ids of other ranks",
            "megatron/mpu/layers.py",
            "return reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._tp)",
            "return reduce(found, self._tp)",
            "tests/distributed/mpu/test_layers.py::test_layers_equal_the_whole_layers[True-2]",
        ),
        Mutant(
            "a token id beyond the vocabulary is refused",
            "megatron/mpu/layers.py",
            "if highest >= true_size:",
            "if highest > true_size:",
            "tests/unit/mpu/test_layers.py::test_ids_beyond_the_true_vocabulary_are_refused",
        ),
        Mutant(
            "padded columns of the vocabulary have no probability",
            "megatron/mpu/cross_entropy.py",
            "return min(max(true_vocab_size - tp.rank * columns, 0), columns)",
            "return columns",
            "tests/unit/mpu/test_cross_entropy.py::test_losses_and_gradients_equal_torchs",
        ),
        Mutant(
            "the normaliser of a softmax counts every rank's part",
            "megatron/mpu/cross_entropy.py",
            "* everyone[:, 1]).sum(dim=0)",
            "* everyone[:, 1]).amax(dim=0)",
            "tests/distributed/mpu/test_cross_entropy.py::"
            "test_losses_and_gradients_equal_torchs[2]",
        ),
        Mutant(
            "sums of ranks are added up relative to one largest logit",
            "megatron/mpu/cross_entropy.py",
            "(everyone[:, 0] - largest).exp_()",
            "torch.ones_like(everyone[:, 0])",
            "tests/distributed/mpu/test_cross_entropy.py::"
            "test_losses_and_gradients_equal_torchs[2]",
        ),
        Mutant(
            "an ignored label has no gradient",
            "megatron/mpu/cross_entropy.py",
            "grad = grad.masked_fill(self.ignored, 0.0)",
            "pass",
            "tests/unit/mpu/test_cross_entropy.py::"
            "test_a_negative_label_has_no_loss_and_no_gradient",
        ),
        Mutant(
            "every chunk of tokens adds to the gradient of the projection",
            "megatron/mpu/weight_gradients.py",
            "beta = 0 if is_first else 1",
            "beta = 0",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_loss_and_gradients_equal_those_of_separate_operations[13-10]",
        ),
        Mutant(
            "logits do not lie where the gradient of the head is added",
            "megatron/optimizer/grad_buffer.py",
            "arrivals.sum.is_empty and arrivals.sum is not besides",
            "arrivals.sum.is_empty",
            "tests/unit/engine/test_native.py::test_logits_lie_where_gradients_come_later",
        ),
        Mutant(
            "logits do not lie on gradients that are there",
            "megatron/optimizer/grad_buffer.py",
            "arrivals.sum.is_empty and arrivals.sum is not besides",
            "arrivals.sum is not besides",
            "tests/unit/optimizer/test_grad_buffer.py::"
            "test_memory_is_lent_until_a_gradient_comes_there",
        ),
        Mutant(
            "what an evaluation or another dtype needs is not added into",
            "megatron/model/dropout.py",
            "self.training and hidden.dtype == residual.dtype and hidden",
            "hidden",
            "tests/unit/model/test_dropout.py::test_a_residual_is_added_in_the_memory_of_a_branch",
        ),
        Mutant(
            "a chunk of tokens has labels of its own",
            "megatron/mpu/linear_cross_entropy.py",
            "logits, row_labels[chunk],",
            "logits, row_labels[: inputs.shape[0]],",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_loss_and_gradients_equal_those_of_separate_operations[13-10]",
        ),
        Mutant(
            "the gradient of a token has the token's weight",
            "megatron/mpu/linear_cross_entropy.py",
            "gradient.replace(logits, factors[chunk], true_width, grad_log_z)",
            "gradient.replace(logits, torch.ones_like(factors[chunk]), true_width, grad_log_z)",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_loss_and_gradients_equal_those_of_separate_operations[13-10]",
        ),
        Mutant(
            "the z loss of a token has the token's weight",
            "megatron/mpu/linear_cross_entropy.py",
            "log_z.mul_(2 * state.z_loss_coeff).mul_(factors)",
            "log_z.mul_(2 * state.z_loss_coeff)",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_a_z_loss_changes_the_gradients_alone",
        ),
        Mutant(
            "the gradient of log Z is the softmax over all ranks' columns",
            "megatron/mpu/cross_entropy.py",
            "scale=of_softmax / self.total",
            "scale=grad / self.total",
            "tests/unit/mpu/test_cross_entropy.py::"
            "test_log_z_is_the_log_sum_exp_of_the_true_vocabulary",
        ),
        Mutant(
            "an ignored label has no z loss",
            "megatron/mpu/cross_entropy.py",
            "of_softmax = grad + grad_log_z.masked_fill(self.ignored, 0.0)",
            "of_softmax = grad + grad_log_z",
            "tests/unit/mpu/test_cross_entropy.py::"
            "test_a_negative_label_has_no_loss_and_no_gradient",
        ),
        Mutant(
            "a masked token has no z loss",
            "megatron/mpu/linear_cross_entropy.py",
            "total = (log_z.square() * weights).sum()",
            "total = log_z.square().sum()",
            "tests/unit/model/test_losses.py::test_a_z_loss_enters_by_its_gradient_alone",
        ),
        Mutant(
            "the reported loss is the cross entropy without the z loss",
            "megatron/model/losses.py",
            "total = total + (z_loss - z_loss.detach())",
            "total = total + z_loss",
            "tests/unit/model/test_losses.py::test_a_z_loss_enters_by_its_gradient_alone",
        ),
        Mutant(
            "the reported z loss counts each token once over tensor-parallel ranks",
            "megatron/engine/tally.py",
            "torch.zeros((), device=device.current()) if squares is None else squares,\n"
            "            contributes=ctx.tp.is_first,",
            "torch.zeros((), device=device.current()) if squares is None else squares,",
            "tests/laws/layouts/test_z_loss.py::test_every_layout_trains_the_same_model[4]",
        ),
        Mutant(
            "--z-loss-coeff reaches the loss",
            "megatron/model_build.py",
            "z_loss_coeff=config.training.z_loss_coeff, soft_cap",
            "soft_cap",
            "tests/unit/test_model_build.py::test_a_flag_is_the_weight_of_the_z_loss",
        ),
        Mutant(
            "the masked words of a BERT have a z loss",
            "megatron/model/bert_model.py",
            "state=build.loss_state,",
            "state=None,",
            "tests/laws/layouts/test_z_loss.py::test_the_masked_words_of_a_bert_have_it_too",
        ),
        Mutant(
            "half-precision products of chunks are added up in fp32",
            "megatron/mpu/linear_cross_entropy.py",
            "dtype=wide if size < rows.shape[0] else weight.dtype",
            "dtype=weight.dtype",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_half_precision_is_as_accurate_as_separate_operations",
        ),
        Mutant(
            "the gradient of the projection's input is summed over ranks",
            "megatron/mpu/linear_cross_entropy.py",
            "reducing = start(whole, ctx.head.tp)",
            "reducing = Pending(whole, None)",
            "tests/distributed/mpu/test_linear_cross_entropy.py::"
            "test_loss_and_gradients_equal_those_of_one_rank[2]",
        ),
        Mutant(
            "a fused loss waits for a weight that is being gathered",
            "megatron/model/heads.py",
            "return (hidden, self(hidden, multiply=False), *carry[1:])",
            "return (hidden, alias_of(self.weight), *carry[1:])",
            "tests/unit/model/test_heads.py::"
            "test_the_weight_for_a_fused_loss_passes_the_hooks_of_the_head",
        ),
        Mutant(
            "scores are computed from logits",
            "megatron/engine/scoring.py",
            "build = replace(build, fuse_loss=False)",
            "build = replace(build)",
            "tests/unit/engine/test_scoring.py::test_batches_and_padding_change_nothing",
        ),
        Mutant(
            "gradients of norms are summed over ranks under sequence parallelism",
            "megatron/optimizer/replicated_grads.py",
            "if is_sequence_parallel(parameter) and parameter.requires_grad:",
            "if is_sequence_parallel(parameter) and not parameter.requires_grad:",
            "tests/unit/optimizer/test_replicated_grads.py::"
            "test_only_summands_are_summed_in_one_collective_per_dtype",
        ),
        Mutant(
            "gradients are summed over replicas",
            "megatron/optimizer/grad_buffer.py",
            "return start_all_reduce(whole, group)",
            "return Pending(whole, None)",
            "tests/distributed/optimizer/test_grad_buffer.py::"
            "test_overlap_and_sharding_change_no_bit_of_the_sums[2]",
        ),
        Mutant(
            "shares of gradients are summed over replicas",
            "megatron/optimizer/grad_buffer.py",
            "return start_reduce_scatter(whole, group, out=cut(flat.data, share))",
            "return Pending(share and whole, None)",
            "tests/distributed/optimizer/test_grad_buffer.py::"
            "test_overlap_and_sharding_change_no_bit_of_the_sums[2]",
        ),
        Mutant(
            "tied gradients wait for the sum over stages",
            "megatron/optimizer/grad_buffer.py",
            "return ReductionTime.ALONE",
            "return ReductionTime.PROMPT",
            "tests/unit/optimizer/test_grad_buffer.py::"
            "test_what_is_summed_elsewhere_first_is_held_back_in_buckets_of_its_own",
        ),
        Mutant(
            "gradients of the step before are cleared",
            "megatron/optimizer/grad_buffer.py",
            "            arrivals.sum.is_empty = True\n",
            "",
            "tests/unit/optimizer/test_grad_buffer.py::"
            "test_a_step_begins_without_the_gradients_of_the_one_before",
        ),
        Mutant(
            "half-precision gradients accumulate over micro-batches",
            "megatron/mpu/weight_gradients.py",
            "else self.total.add_(gradient)",
            "else self.total.copy_(gradient)",
            "tests/unit/optimizer/test_grad_buffer.py::"
            "test_gradients_of_micro_batches_add_up_in_the_wider_dtype",
        ),
        Mutant(
            "an overlapped sum waits for the last micro-batch",
            "megatron/optimizer/grad_buffer.py",
            "if arrivals.count == self._num_passes:",
            "if arrivals.count == 1:",
            "tests/unit/optimizer/test_grad_buffer.py::"
            "test_nothing_is_reduced_before_the_end_without_overlap_or_a_number_of_passes",
        ),
        Mutant(
            "a parameter without a gradient is named",
            "megatron/optimizer/grad_buffer.py",
            "        self._check_all_arrived()\n",
            "",
            "tests/unit/optimizer/test_grad_buffer.py::"
            "test_a_parameter_without_gradient_is_an_error_that_names_it",
        ),
        Mutant(
            "gradients of tied weights are summed over stages",
            "megatron/pipeline/tied.py",
            "total = total + part",
            "total = part",
            "tests/distributed/pipeline/test_tied.py::"
            "test_gradients_are_summed_over_those_that_hold_the_weight",
        ),
        Mutant(
            "tied weights that differ are named",
            "megatron/pipeline/tied.py",
            "if not all(_equal_bits(part, parts[0]) for part in parts)",
            "if not all(part.shape == parts[0].shape for part in parts)",
            "tests/distributed/pipeline/test_tied.py::"
            "test_gradients_are_summed_over_those_that_hold_the_weight",
        ),
        Mutant(
            "weights that differ between replicas are named",
            "megatron/optimizer/agreement.py",
            "any(len(other) != len(own) or other[index] != everyone[0][index] for other in "
            "everyone)",
            "any(len(other) != len(own) for other in everyone)",
            "tests/distributed/optimizer/test_agreement.py::"
            "test_one_bit_is_found_on_every_rank_and_at_most_five_names_are_given",
        ),
        Mutant(
            "a step sums the gradients of replicated parameters",
            "megatron/engine/native.py",
            "        reduce_replicated(self.stage.parameters(), self._context.tp)\n",
            "",
            "tests/distributed/engine/test_native.py::"
            "test_norms_of_split_sequences_stay_equal_over_ranks",
        ),
        Mutant(
            "a step sums the gradients of tied weights",
            "megatron/engine/native.py",
            "        self._tied.sum_gradients()\n",
            "        pass\n",
            "tests/distributed/engine/test_native.py::test_what_stages_share_stays_equal_over_them",
        ),
        Mutant(
            "a check of replicas compares replicas",
            "megatron/engine/native.py",
            "        self._replica.check_replicas_agree()\n",
            "",
            "tests/distributed/engine/test_native.py::test_replicas_act_as_one",
        ),
        Mutant(
            "a check of replicas compares unsplit weights over ranks",
            "megatron/engine/native.py",
            "        check_replicated_agree(named, self._context.tp, values)\n",
            "",
            "tests/distributed/engine/test_native.py::"
            "test_what_is_not_split_stays_equal_over_tensor_parallel_ranks",
        ),
        Mutant(
            "a check of replicas compares tied weights",
            "megatron/engine/native.py",
            "        self._tied.check_equal(values)\n",
            "",
            "tests/distributed/engine/test_native.py::test_what_stages_share_stays_equal_over_them",
        ),
    ),
    "layouts": (
        Mutant(
            "each rank holds its part of every block of a stacked matrix",
            "megatron/mpu/partition.py",
            "(block * parts + index % parts) * part",
            "(index % parts * blocks + block) * part",
            "tests/unit/mpu/test_partition.py::test_a_rank_holds_its_part_of_every_block",
        ),
        Mutant(
            "a replicated parameter keeps its shape over ranks",
            "megatron/mpu/partition.py",
            "shape[dim] *= parts",
            "shape[0] *= parts",
            "tests/unit/mpu/test_partition.py::test_joining_the_slices_gives_the_whole",
        ),
        Mutant(
            "tensor-parallel ranks are neighbours",
            "megatron/mpu/topology.py",
            "    dp: int\n    cp: int\n    tp: int\n",
            "    tp: int\n    dp: int\n    cp: int\n",
            "tests/unit/mpu/test_topology.py::test_tp_varies_fastest_then_cp_then_dp_then_pp",
        ),
        Mutant(
            "stages are nearer than replicas where that is asked for",
            "megatron/mpu/topology.py",
            '("dp", "pp", "cp", "tp") if self.pp_before_dp',
            '("dp", "pp", "cp", "tp") if False',
            "tests/unit/mpu/test_topology.py::test_stages_can_be_nearer_than_replicas",
        ),
        Mutant(
            "random states go to ranks of the same order alone",
            "megatron/checkpoint/rng.py",
            "if manifest.pp_before_dp != topology.pp_before_dp:",
            "if False:",
            "tests/unit/checkpoint/test_rng.py::test_states_go_back_only_into_the_same_grid",
        ),
        Mutant(
            "ranks that do not divide into replicas are refused",
            "megatron/mpu/topology.py",
            "if world_size < 1 or world_size % replica:",
            "if world_size < replica:",
            "tests/unit/mpu/test_topology.py::test_fill_refuses_ranks_that_do_not_divide",
        ),
        Mutant(
            "each rank begins with its own part of the whole weights",
            "megatron/model/init.py",
            "parameter.copy_(local_slice(whole, partition, index, size))",
            "parameter.copy_(local_slice(whole, partition, 0, size))",
            "tests/distributed/model/test_gpt_model.py::test_the_same_values_start_every_layout",
        ),
        Mutant(
            "padding rows are not drawn",
            "megatron/model/init.py",
            "true = whole[: init.true_rows]",
            "true = whole",
            "tests/unit/model/test_init.py::test_padding_rows_are_zero_and_do_not_move_the_others",
        ),
        Mutant(
            "residual outputs begin scaled by the number of layers",
            "megatron/config/model.py",
            "self.matrix_init_std / math.sqrt(2 * self.num_layers)",
            "self.matrix_init_std / math.sqrt(self.num_layers)",
            "tests/unit/model/test_init.py::test_spreads_are_those_of_the_config",
        ),
        Mutant(
            "seeds of different names differ",
            "megatron/mpu/random.py",
            'digest.update(len(text).to_bytes(8, "little") + text)',
            "digest.update(text)",
            "tests/unit/mpu/test_random.py::test_hash_seed_is_stable_and_tells_names_apart",
        ),
        Mutant(
            "rows have their numbers in the run",
            "megatron/mpu/random.py",
            "torch.arange(batch, device=device) + first * (batch // size)",
            "torch.arange(batch, device=device) + first",
            "tests/unit/mpu/test_random.py::"
            "test_rows_are_numbered_over_the_run_however_they_are_shared_out",
        ),
        Mutant(
            "queries of other heads have other numbers",
            "megatron/mpu/random.py",
            "self.rows(batch, device).view(-1, 1, 1) * of",
            "self.rows(batch, device).view(-1, 1, 1) * len(heads)",
            "tests/unit/mpu/test_random.py::"
            "test_queries_have_the_number_of_their_row_head_and_position",
        ),
        Mutant(
            "numbers of tokens are those of the present samples",
            "megatron/mpu/random.py",
            "if self._of != self.samples:",
            "if self._of is None:",
            "tests/unit/mpu/test_random.py::test_what_is_made_once_is_made_anew_for_other_samples",
        ),
        Mutant(
            "samples of a micro-batch are those that samplers share out",
            "megatron/engine/base.py",
            "microbatch * replicas.size + replicas.rank",
            "replicas.rank * self.num_microbatches + microbatch",
            "tests/unit/engine/test_base.py::"
            "test_samples_of_micro_batches_are_those_that_samplers_share_out",
        ),
        Mutant(
            "steps drop for other samples than those before",
            "megatron/loop/step_plan.py",
            "first_sample=seen,",
            "first_sample=0,",
            "tests/unit/loop/test_step_plan.py::test_a_plan_depends_on_the_progress_alone",
        ),
        Mutant(
            "each number of a row has a mask of its own",
            "megatron/ops/dropout.py",
            "(index, number & _MASK, number >> 32 & _MASK, none)",
            "(index, number & _MASK, none, none)",
            "tests/unit/ops/test_dropout.py::test_a_row_has_the_mask_of_its_number_wherever_it_stands",
        ),
        Mutant(
            "recomputation draws for the samples of the first call",
            "megatron/mpu/random.py",
            "                with self.of(samples):\n                    yield",
            "                with self.of(self.samples):\n                    yield",
            "tests/unit/mpu/test_recompute.py::test_results_gradients_and_states_are_bit_equal",
        ),
        Mutant(
            "recomputation draws from the generator as the first call found it",
            "megatron/mpu/random.py",
            "            _set_generator_states(states)\n",
            "            pass\n",
            "tests/unit/mpu/test_recompute.py::test_results_gradients_and_states_are_bit_equal",
        ),
        Mutant(
            "recomputation leaves the generator as it was",
            "megatron/mpu/random.py",
            "                _set_generator_states(outside)\n",
            "                pass\n",
            "tests/unit/mpu/test_recompute.py::test_results_gradients_and_states_are_bit_equal",
        ),
        Mutant(
            "captured passes ask for no state of a generator",
            "megatron/mpu/random.py",
            "        if self._origin is None:\n            generators",
            "        if True:\n            generators",
            "tests/unit/mpu/test_recompute.py::"
            "test_no_state_is_read_where_the_device_numbers_the_samples",
        ),
        Mutant(
            "a second call that saves other tensors is an error",
            "megatron/mpu/recompute.py",
            "if _kind(tensor) != kind:",
            "if False:",
            "tests/unit/mpu/test_recompute.py::"
            "test_a_second_call_that_saves_other_tensors_is_an_error",
        ),
        Mutant(
            "a second call ends once backward has what it needs",
            "megatron/mpu/recompute.py",
            "if left == 0:",
            "if left < 0:",
            "tests/unit/mpu/test_recompute.py::"
            "test_the_second_call_ends_with_the_last_tensor_that_is_needed",
        ),
        Mutant(
            "a graph that is kept is recomputed for each backward pass",
            "megatron/mpu/recompute.py",
            "tensor, place.tensor = place.tensor, None",
            "tensor = place.tensor",
            "tests/unit/mpu/test_recompute.py::"
            "test_what_was_recomputed_is_not_kept_beside_the_graph",
        ),
        Mutant(
            "what was recomputed goes with its backward pass",
            "megatron/mpu/recompute.py",
            "            return alone\n",
            "            return tensor\n",
            "tests/unit/mpu/test_recompute.py::"
            "test_no_circle_of_references_keeps_what_was_recomputed",
        ),
        Mutant(
            "split hidden states are dropped as in the whole sequence",
            "megatron/model/dropout.py",
            "        if self._split:\n            positions",
            "        if False:\n            positions",
            "tests/unit/model/test_dropout.py::"
            "test_a_part_of_a_sequence_is_dropped_as_in_the_whole",
        ),
        Mutant(
            "scores of a rank's heads are dropped as among all heads",
            "megatron/model/attention.py",
            "first = (self._tp.rank * shares",
            "first = (0 * shares",
            "tests/unit/model/test_attention.py::"
            "test_scores_are_dropped_by_sample_and_head_where_they_are_in_memory",
        ),
        Mutant(
            "replicated parameters count once in a norm",
            "megatron/optimizer/clip_grads.py",
            "name not in earlier and ctx.counts(partition_of(parameter))",
            "name not in earlier",
            "tests/distributed/optimizer/test_clip_grads.py::"
            "test_split_counts_everywhere_replicated_once_and_tied_on_the_first_stage",
        ),
        Mutant(
            "tied parameters count once in a norm",
            "megatron/optimizer/clip_grads.py",
            "name not in earlier and ctx.counts(partition_of(parameter))",
            "ctx.counts(partition_of(parameter))",
            "tests/distributed/optimizer/test_clip_grads.py::"
            "test_split_counts_everywhere_replicated_once_and_tied_on_the_first_stage",
        ),
        Mutant(
            "a norm of shares is summed over replicas",
            "megatron/optimizer/optimizer.py",
            "if replicas.counts_share if shared_out else replicas.all.is_first:",
            "if replicas.all.is_first:",
            "tests/distributed/optimizer/test_optimizer.py::"
            "test_every_grid_takes_the_step_of_one_process_and_counts_everything_once",
        ),
        Mutant(
            "a norm counts equal gradients of replicas once",
            "megatron/optimizer/optimizer.py",
            "if replicas.counts_share if shared_out else replicas.all.is_first:",
            "if True:",
            "tests/distributed/optimizer/test_optimizer.py::"
            "test_every_grid_takes_the_step_of_one_process_and_counts_everything_once",
        ),
        Mutant(
            "a norm of parameters is summed over the ranks of a model",
            "megatron/optimizer/clip_grads.py",
            "all_reduce(total, ctx.world)",
            "all_reduce(total, ctx.pp)",
            "tests/distributed/engine/test_native.py::"
            "test_a_norm_counts_replicated_parameters_once",
        ),
        Mutant(
            "a share of optimizer state is placed where it begins",
            "megatron/engine/state.py",
            "start, shape = owned[name].start, parameter.shape",
            "start, shape = 0, parameter.shape",
            "tests/laws/layouts/test_distributed_optimizer.py::"
            "test_a_resumed_run_is_the_uninterrupted_run[dp 2]",
        ),
        Mutant(
            "padding rows are left out of checkpoints",
            "megatron/engine/state.py",
            "true_rows=None if init is None else init.true_rows,",
            "true_rows=None,",
            "tests/unit/engine/test_state.py::test_padding_rows_are_no_part_of_a_checkpoint",
        ),
        Mutant(
            "a micro-batch's loss enters backward with its scale",
            "megatron/pipeline/executor.py",
            "torch.autograd.backward((done.loss * step.scale).sum())",
            "torch.autograd.backward(done.loss.sum())",
            "tests/unit/pipeline/test_executor.py::"
            "test_every_schedule_computes_what_a_plain_loop_does",
        ),
        Mutant(
            "weight gradients that were put off are added",
            "megatron/mpu/weight_gradients.py",
            "torch.autograd.backward([weight], [product(rows_in, rows_out)])",
            "torch.autograd.backward([weight], [0 * product(rows_in, rows_out)])",
            "tests/unit/mpu/test_weight_gradients.py::test_late_gradients_have_the_same_bits",
        ),
        Mutant(
            "an activation that is recomputed is not saved",
            "megatron/model/mlp.py",
            "if not (self.training and self._forgets_activation):",
            "if self._forgets_activation:",
            "tests/unit/model/test_mlp.py::test_an_activation_is_recomputed_once_in_training",
        ),
        Mutant(
            "an activation that is recomputed does not count as kept",
            "megatron/model/accounting.py",
            "        kept -= 1\n",
            "        pass\n",
            "tests/programs/benchmarks/test_memory_table.py::"
            "test_the_estimate_is_what_a_step_allocates",
        ),
        Mutant(
            "a product adds to those of the micro-batches before",
            "megatron/mpu/weight_gradients.py",
            "_rows(rows_in), is_first=self.is_empty)",
            "_rows(rows_in), is_first=True)",
            "tests/unit/mpu/test_weight_gradients.py::"
            "test_products_that_add_to_the_buffer_give_the_same_sums",
        ),
        Mutant(
            "a late product that adds to the buffer is counted there",
            "megatron/mpu/weight_gradients.py",
            "        self._arrived()\n",
            "",
            "tests/unit/mpu/test_weight_gradients.py::test_late_gradients_have_the_same_bits",
        ),
        Mutant(
            "gradients of the projection have the factor that is announced",
            "megatron/mpu/linear_cross_entropy.py",
            "row_weights * head.factor",
            "row_weights",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_a_factor_that_is_known_before_gives_the_same",
        ),
        Mutant(
            "the factor of the backward pass is the announced one",
            "megatron/mpu/linear_cross_entropy.py",
            "_check_factor(grad, ctx.head.factor)",
            "pass",
            "tests/unit/mpu/test_linear_cross_entropy.py::"
            "test_another_factor_than_the_announced_one_is_refused",
        ),
        Mutant(
            "gradients of rows that were looked up are added to the buffer",
            "megatron/optimizer/grad_buffer.py",
            "arrivals.rows.add_to(place.total)",
            "pass",
            "tests/unit/mpu/test_row_gradients.py::"
            "test_a_gradient_buffer_adds_rows_of_every_pass_to_other_gradients",
        ),
        Mutant(
            "rows are added once",
            "megatron/mpu/row_gradients.py",
            "self._waiting.clear()",
            "pass",
            "tests/unit/mpu/test_row_gradients.py::"
            "test_collected_rows_are_kept_from_autograd_and_added_once",
        ),
        Mutant(
            "rows come back from experts to their tokens",
            "megatron/model/experts/mixture.py",
            "rows = _TAKE(rows, sent.back, sent.order, 1)",
            "rows = _TAKE(rows, sent.order, sent.back, 1)",
            "tests/unit/model/experts/test_mixture.py::test_equal_experts_are_a_dense_mlp",
        ),
        Mutant(
            "gradients of a token's copies are summed",
            "megatron/model/experts/mixture.py",
            "rows = rows.view(-1, ctx.copies, rows.shape[-1]).sum(dim=1)",
            "rows = rows.view(-1, ctx.copies, rows.shape[-1])[:, 0]",
            "tests/unit/model/experts/test_mixture.py::test_values_and_gradients_are_those_of_a_loop",
        ),
        Mutant(
            "the gate of an MLP is activated, not its values",
            "megatron/ops/activation.py",
            "(activation_value(gate, kind) * up).to(x.dtype)",
            "(gate * activation_value(up, kind)).to(x.dtype)",
            "tests/unit/ops/test_activation.py::test_references_are_the_units_of_pytorch",
        ),
        Mutant(
            "an input that a gradient has replaced is not read by a second backward pass",
            "megatron/ops/activation.py",
            "        increment_version(x)  # so that a second backward pass raises\n",
            "",
            "tests/unit/ops/test_activation.py::"
            "test_a_gradient_takes_the_place_of_an_input_that_is_consumed",
        ),
        Mutant(
            "a gradient takes the place of no other tensor than its contiguous input",
            "megatron/ops/activation.py",
            "if not x.is_contiguous():",
            "if not x.is_floating_point():",
            "tests/unit/ops/test_activation.py::"
            "test_an_input_that_comes_back_with_other_strides_is_left_alone",
        ),
        Mutant(
            "the gradient of a rotation is the rotation by the opposite angle",
            "megatron/ops/rotary.py",
            "rotate(grad, cos, sin, not ctx.back)",
            "rotate(grad, cos, sin, ctx.back)",
            "tests/unit/model/test_positions.py::test_the_gradient_of_rotation_is_right_for_strided_input",
        ),
        Mutant(
            "gradients of rotated queries and keys are rotated back",
            "megatron/ops/rotary.py",
            "join_rotated(*grads, cos, sin, not ctx.back)",
            "join_rotated(*grads, cos, sin, ctx.back)",
            "tests/laws/kernels/test_rotations.py::test_gradients_are_those_of_finite_differences",
        ),
        Mutant(
            "keys are rotated, and values are not",
            "megatron/ops/rotary.py",
            "(grouped[..., :-2, :], grouped[..., -2:-1, :])",
            "(grouped[..., :-2, :], grouped[..., -1:, :])",
            "tests/unit/ops/test_rotary.py::"
            "test_references_of_groups_rotate_queries_and_keys_and_undo_each_other",
        ),
        Mutant(
            "backward drops what the forward pass dropped",
            "megatron/ops/dropout.py",
            "of_x, None, ctx.probability, *ctx.saved_tensors",
            "of_x, None, ctx.probability, ctx.saved_tensors[0] + 1, ctx.saved_tensors[1]",
            "tests/unit/ops/test_dropout.py::"
            "test_the_gradient_has_the_mask_of_the_forward_pass_and_nothing_but_names_is_saved",
        ),
        Mutant(
            "gates of experts and of MLPs come first",
            "megatron/model/mlp.py",
            "gate, up = middle.chunk(2, dim=-1)",
            "up, gate = middle.chunk(2, dim=-1)",
            "tests/unit/model/experts/test_mixture.py::test_values_and_gradients_are_those_of_a_loop",
        ),
        Mutant(
            "parallel branches read the same input",
            "megatron/model/transformer.py",
            "self._after_mlp(hidden if self._side_by_side else after, after, numbers)",
            "self._after_mlp(after, after, numbers)",
            "tests/unit/model/test_gpt_model.py::test_logits_equal_those_of_the_naive_gpt",
        ),
        Mutant(
            "the residual stream may follow the norm",
            "megatron/model/transformer.py",
            "normed if self._residual_after_norm else stream",
            "stream",
            "tests/unit/model/test_gpt_model.py::test_logits_equal_those_of_the_naive_gpt",
        ),
    ),
    "loss normalisation": (
        Mutant(
            "gradients are divided by the counted tokens",
            "megatron/engine/native.py",
            "grad_multiplier=_nominal_tokens(plan) / reduced[COUNTS][0],",
            "grad_multiplier=1.0,",
            "tests/unit/engine/test_native.py::"
            "test_a_step_is_the_gradient_of_the_mean_over_all_counted_tokens",
        ),
        Mutant(
            "a loss is multiplied by the loss scale",
            "megatron/engine/native.py",
            "factor = loss_scale / _nominal_tokens(plan)",
            "factor = 1.0 / _nominal_tokens(plan)",
            "tests/unit/engine/test_native.py::"
            "test_an_overflow_under_loss_scaling_is_said_to_be_one",
        ),
        Mutant(
            "a router's loss counts sequences",
            "megatron/engine/native.py",
            "self._build.router_loss.value = factor * counts[0] / plan.global_batch_size",
            "self._build.router_loss.value = factor * counts[0]",
            "tests/unit/engine/test_native.py::"
            "test_the_losses_of_a_router_are_means_over_sequences",
        ),
        Mutant(
            "each of several losses is divided by its own count",
            "megatron/engine/native.py",
            "scale = factor * counts[0] / counts if several else factor",
            "scale = factor",
            "tests/unit/engine/test_native.py::"
            "test_each_of_several_losses_is_divided_by_what_it_counts_itself",
        ),
        Mutant(
            "dropout is on while training",
            "megatron/model/evaluation_mode.py",
            "each.training = True",
            "each.training = False",
            "tests/unit/engine/test_native.py::test_evaluation_draws_nothing_and_changes_nothing",
        ),
        Mutant(
            "dropout is off in an evaluation",
            "megatron/engine/native.py",
            "        with evaluation_mode(self.stage):\n            sums =",
            "        if True:\n            sums =",
            "tests/unit/engine/test_native.py::test_evaluation_draws_nothing_and_changes_nothing",
        ),
        Mutant(
            "reported losses are summed over replicas",
            "megatron/engine/tally.py",
            "found.add(_TOTALS, own_sums[0], contributes=ctx.tp.is_first)",
            "found.add(_TOTALS, own_sums[0], contributes=ctx.tp.is_first and ctx.dp.is_first)",
            "tests/distributed/engine/test_native.py::"
            "test_a_loss_is_summed_over_replicas_and_counted_once_for_a_replica",
        ),
        Mutant(
            "a loss counts once for all tensor-parallel ranks",
            "megatron/engine/tally.py",
            "found.add(COUNTS, own_sums[1], contributes=ctx.tp.is_first)",
            "found.add(COUNTS, own_sums[1])",
            "tests/distributed/engine/test_native.py::"
            "test_a_loss_is_summed_over_replicas_and_counted_once_for_a_replica",
        ),
        Mutant(
            "a batch that counts nothing is refused",
            "megatron/engine/tally.py",
            "    if all(counts):\n",
            "    if any(counts) or not counts[0]:\n",
            "tests/unit/engine/test_tally.py::test_a_step_that_counts_nothing_is_an_error",
        ),
        Mutant(
            "a balance of experts is a mean over layers",
            "megatron/engine/tally.py",
            "/ (plan.global_batch_size * sum(config.expert_layers))",
            "/ plan.global_batch_size",
            "tests/unit/engine/test_tally.py::"
            "test_the_balance_of_experts_is_a_mean_over_sequences_and_layers",
        ),
        Mutant(
            "ignored labels are not counted",
            "megatron/model/losses.py",
            "weights = (labels >= 0).to(dtype)",
            "weights = torch.ones_like(labels, dtype=dtype)",
            "tests/unit/model/test_losses.py::test_negative_labels_are_left_out_of_both",
        ),
        Mutant(
            "masked tokens are not counted",
            "megatron/model/losses.py",
            "return weights if loss_mask is None else weights * loss_mask",
            "return weights",
            "tests/unit/model/test_losses.py::"
            "test_masked_tokens_count_neither_in_the_sum_nor_in_the_count",
        ),
        Mutant(
            "masked tokens do not enter the loss",
            "megatron/model/losses.py",
            "total = torch.sum(losses if loss_mask is None else losses * weights)",
            "total = torch.sum(losses)",
            "tests/unit/model/test_losses.py::"
            "test_masked_tokens_count_neither_in_the_sum_nor_in_the_count",
        ),
        Mutant(
            "shares of the chosen experts sum to one",
            "megatron/model/experts/router.py",
            "else torch.softmax(best, dim=-1)",
            "else torch.softmax(scores, dim=-1).gather(-1, chosen)",
            "tests/unit/model/experts/test_router.py::"
            "test_shares_of_the_best_are_their_probabilities_scaled_or_not",
        ),
        Mutant(
            "shares of sigmoids do not underflow",
            "megatron/model/experts/router.py",
            "F.logsigmoid(scores) if",
            "torch.sigmoid(scores).log() if",
            "tests/unit/model/experts/test_router.py::test_sigmoids_far_below_zero_still_give_shares",
        ),
        Mutant(
            "a router of sigmoids is balanced by them",
            "megatron/model/experts/router.py",
            "balance = balance_loss(logits, self",
            "balance = balance_loss(scores, self",
            "tests/unit/model/experts/test_router.py::"
            "test_the_balance_has_shares_of_sigmoids_where_the_router_has",
        ),
        Mutant(
            "the share of one expert is its own sigmoid",
            "megatron/model/experts/router.py",
            "shares = best.exp()",
            "shares = torch.ones_like(best)",
            "tests/unit/model/experts/test_mixture.py::test_values_and_gradients_are_those_of_a_loop",
        ),
        Mutant(
            "shares are scaled",
            "megatron/model/experts/router.py",
            "shares = shares * self._scaling",
            "shares = shares * 1.0",
            "tests/unit/model/experts/test_mixture.py::test_values_and_gradients_are_those_of_a_loop",
        ),
        Mutant(
            "a balanced router has a loss of one",
            "megatron/model/experts/balance.py",
            "often = busy * (scores.shape[-1] / (taken * length))",
            "often = busy * (scores.shape[-1] / length)",
            "tests/unit/model/experts/test_balance.py::"
            "test_the_balance_is_one_where_experts_are_alike_and_more_where_one_takes_all",
        ),
        Mutant(
            "the z-loss is a mean over a sequence's tokens",
            "megatron/model/experts/balance.py",
            "torch.logsumexp(scores, dim=-1).square().sum() / length",
            "torch.logsumexp(scores, dim=-1).square().sum()",
            "tests/unit/model/experts/test_balance.py::"
            "test_the_z_loss_is_the_mean_square_of_log_sum_exp",
        ),
        Mutant(
            "only scored tokens decide whether a row is greedy",
            "megatron/engine/scoring.py",
            "missed = (best != targets) & (targets >= 0)",
            "missed = best != targets",
            "tests/unit/engine/test_scoring.py::test_what_greedy_choice_would_say_is_known_as_such",
        ),
        Mutant(
            "a row counts the tokens that are scored",
            "megatron/engine/scoring.py",
            "len(row.tokens) - row.first)",
            "len(row.tokens))",
            "tests/unit/engine/test_scoring.py::test_batches_and_padding_change_nothing",
        ),
    ),
}
