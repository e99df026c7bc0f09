"""Errors in what a layer with experts computes and counts."""

from tests.mutants.mutant import Mutant

_VALUES = "tests/unit/model/experts/test_mixture.py::test_values_and_gradients_are_those_of_a_loop"
_UPCYCLE = "tests/unit/checkpoint/test_upcycle.py::"
_QWEN = "tests/unit/checkpoint/formats/huggingface/families/test_qwen_moe.py::"
_ACCOUNTING = "tests/unit/model/test_accounting.py::"

_CAPACITY = "tests/unit/model/experts/test_capacity.py::"
_DROPS = "tests/laws/layouts/test_experts.py::test_a_capacity_drops_the_same_tokens_in_every_layout"

_BALANCE = "tests/unit/model/experts/test_balance.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "capacity of experts": (
        Mutant(
            "an expert takes as many tokens as its capacity",
            "megatron/model/experts/capacity.py",
            "before.gather(1, in_order) < capacity",
            "before.gather(1, in_order) <= capacity",
            f"{_CAPACITY}test_what_is_dropped_is_what_a_slow_reference_drops",
        ),
        Mutant(
            "of equal shares the first in the sequence is taken",
            "megatron/model/experts/capacity.py",
            "order = worth.argsort(dim=1, descending=True, stable=True)",
            "order = worth.flip(1).argsort(dim=1, descending=True).neg() + worth.shape[1] - 1",
            f"{_CAPACITY}test_what_is_dropped_is_what_a_slow_reference_drops",
        ),
        Mutant(
            "a capacity is rounded up",
            "megatron/model/experts/capacity.py",
            "math.ceil(length * taken / experts * factor)",
            "int(length * taken / experts * factor)",
            f"{_CAPACITY}test_a_capacity_is_rounded_up_and_has_a_least_value",
        ),
        Mutant(
            "tokens of one sequence compete wherever they are",
            "megatron/model/experts/capacity.py",
            "return whole.index_select(0, positions.argsort())",
            "return whole",
            f"{_DROPS}[position]",
        ),
        Mutant(
            "a dropped choice adds nothing to its token",
            "megatron/model/experts/mixture.py",
            "rows = F.pad(rows, (0, 0, 0, dropped))",
            "rows = F.pad(rows, (0, 0, 0, dropped), value=1.0)",
            "tests/unit/model/experts/test_mixture.py::test_a_dropped_choice_adds_nothing",
        ),
        Mutant(
            "a model in use drops nothing",
            "megatron/checkpoint/load/inference_config.py",
            "moe_expert_capacity_factor=None, moe_eval_capacity_factor=None)",
            "moe_min_capacity=1)",
            "tests/unit/checkpoint/load/test_inference_config.py::"
            "test_experts_of_a_model_in_use_take_all_tokens",
        ),
    ),
    "balance of experts": (
        Mutant(
            "a loss of a micro-batch counts in all of its sequences",
            "megatron/model/experts/balance.py",
            "return (mixed / batch).expand_as(counts)",
            "return counts",
            f"{_BALANCE}test_a_loss_counts_in_its_sequence_its_micro_batch_or_all_so_far",
        ),
        Mutant(
            "a loss of all sequences counts those of other replicas",
            "megatron/model/experts/balance.py",
            "mixed = all_reduce(mixed, self._replicas)",
            "mixed = mixed * self._replicas.size",
            "tests/laws/layouts/test_experts.py::test_other_balances_look_at_what_their_names_say",
        ),
        Mutant(
            "a step begins with no count",
            "megatron/model/experts/router.py",
            "self._busy.forget()",
            "pass",
            "tests/laws/layouts/test_experts.py::test_other_balances_look_at_what_their_names_say",
        ),
        Mutant(
            "Sinkhorn's columns sum up alike",
            "megatron/model/experts/balance.py",
            "return of_tokens[:, None] * cost * of_experts",
            "return of_tokens[:, None] * cost * before",
            f"{_BALANCE}test_sinkhorn_gives_tokens_and_experts_equal_sums",
        ),
        Mutant(
            "outside of training each token chooses by itself",
            "megatron/model/experts/router.py",
            "if self._sinkhorn and self.training:",
            "if self._sinkhorn:",
            "tests/unit/model/experts/test_router.py::"
            "test_tokens_are_assigned_together_in_training_alone",
        ),
    ),
    "layers with experts": (
        Mutant(
            "groups of rows end one after the other",
            "megatron/ops/grouped_product.py",
            "ends = counts.cumsum(0).to(torch.int32)",
            "ends = counts.flip(0).cumsum(0).to(torch.int32)",
            "tests/unit/ops/test_grouped_product.py::"
            "test_values_and_gradients_are_those_of_a_loop_to_the_bit",
        ),
        Mutant(
            "the host waits for no sizes where nothing needs them",
            "megatron/model/experts/mixture.py",
            "sum(groups.sizes) if self._drops else len(order)",
            "sum(groups.sizes)",
            "tests/laws/layouts/test_host_reads.py::"
            "test_experts_that_are_one_product_wait_for_nothing",
        ),
        Mutant(
            "the shared expert has a width of its own",
            "megatron/model/mlp.py",
            "width = config.ffn_width if width is None else width",
            "width = config.ffn_width",
            "tests/unit/checkpoint/test_gpt_tensors.py::"
            "test_names_shapes_and_order_are_those_of_the_model",
        ),
        Mutant(
            "the gate of the shared expert is a sigmoid",
            "megatron/model/experts/mixture.py",
            "(output * torch.sigmoid(scores))",
            "(output * torch.tanh(scores))",
            _VALUES,
        ),
        Mutant(
            "the first share of a residual layer is that of the others",
            "megatron/model/experts/mixture.py",
            "of_others, own = torch.split",
            "own, of_others = torch.split",
            _VALUES,
        ),
        Mutant(
            "the gradient of the gate is summed over the ranks that split sequences",
            "megatron/model/experts/mixture.py",
            "set_parameter_metadata(self.gate, init=weight_init(config), sequence_parallel=split)",
            "set_parameter_metadata(self.gate, init=weight_init(config))",
            "tests/laws/layouts/test_experts.py::test_every_layout_trains_the_same_experts[2]",
        ),
        Mutant(
            "the shared expert is counted once, whatever a token takes",
            "megatron/model/accounting.py",
            "_mlp_weights(config, config.expert_width) + shared",
            "(_mlp_weights(config, config.expert_width) + shared)",
            f"{_ACCOUNTING}test_parameters_are_counted_exactly",
        ),
        Mutant(
            "the biases of every expert are counted",
            "megatron/model/accounting.py",
            "return met * _mlp_biases(config, config.expert_width) + of_shared",
            "return _mlp_biases(config, config.expert_width) + of_shared",
            f"{_ACCOUNTING}test_parameters_are_counted_exactly",
        ),
        Mutant(
            "the gate of the shared expert is counted",
            "megatron/model/accounting.py",
            "gates = scored + config.moe_shared_expert_gate",
            "gates = scored",
            f"{_ACCOUNTING}test_parameters_are_counted_exactly",
        ),
        Mutant(
            "the shared expert splits over tensor-parallel ranks",
            "megatron/config/model.py",
            'widths[f"--{flag}"] = shared',
            "pass",
            "tests/unit/preflight/test_config.py::test_each_expert_is_shared_out_evenly",
        ),
        Mutant(
            "the first of every N layers has experts",
            "megatron/config/layer_pattern.py",
            "tuple((layer + last) % value == 0 for layer in range(layers))",
            "tuple((layer + 1) % value == 0 for layer in range(layers))",
            "tests/unit/config/test_layer_pattern.py::test_a_pattern_is_what_megatron_makes_of_it",
        ),
        Mutant(
            "a pattern is of all layers",
            "megatron/config/layer_pattern.py",
            "if len(value) != layers:",
            "if len(value) > layers:",
            "tests/unit/config/test_layer_pattern.py::test_other_steps_and_lengths_are_refused",
        ),
        Mutant(
            "Megatron-DeepSpeed counts layers from 1",
            "megatron/config/model.py",
            "number % interval == 0 for number in range(1, layers + 1)",
            "number % interval == 0 for number in range(layers)",
            "tests/unit/config/test_experts.py::test_what_makes_another_network_is_named",
        ),
        Mutant(
            "the balance of experts is a mean over layers that have them",
            "megatron/engine/tally.py",
            "plan.global_batch_size * sum(config.expert_layers)",
            "plan.global_batch_size * config.num_layers",
            "tests/unit/engine/test_tally.py::"
            "test_the_balance_of_experts_is_a_mean_over_sequences_and_layers",
        ),
        Mutant(
            "shares of copies of an MLP sum to 1",
            "megatron/checkpoint/upcycle.py",
            '"moe_router_topk_scaling_factor": 1.0,',
            "",
            f"{_UPCYCLE}test_it_computes_what_the_dense_model_does",
        ),
        Mutant(
            "a part of an expert is that part of the MLP",
            "megatron/checkpoint/upcycle.py",
            "Box(box.offset[1:], box.shape[1:])",
            "Box((0,) * (len(box.offset) - 1), box.shape[1:])",
            f"{_UPCYCLE}test_every_expert_is_the_mlp_and_all_else_stays",
        ),
        Mutant(
            "Qwen counts layers with experts from 1",
            "megatron/checkpoint/formats/huggingface/families/qwen_moe.py",
            "(at + 1) % step == 0",
            "at % step == 0",
            f"{_QWEN}test_families_have_experts_in_some_layers",
        ),
        Mutant(
            "shares of Qwen's experts sum to 1 only where its config says so",
            "megatron/checkpoint/formats/huggingface/families/qwen_moe.py",
            '"moe_router_pre_softmax": not fields.boolean("norm_topk_prob", False)',
            '"moe_router_pre_softmax": fields.boolean("norm_topk_prob", False)',
            f"{_QWEN}test_the_first_release",
        ),
        Mutant(
            "memory is that of the fullest stage",
            "megatron/model/accounting.py",
            "for stage in range(share.pp))",
            "for stage in {0, share.pp - 1})",
            f"{_ACCOUNTING}test_ranks_that_share_sequences_or_experts_divide_what_they_share",
        ),
    ),
}
