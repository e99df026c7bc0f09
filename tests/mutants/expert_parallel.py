"""Errors in what ranks do that share experts out."""

from tests.mutants.mutant import Mutant

_TOPOLOGY = "tests/unit/mpu/test_topology.py::"
_ROWS = "tests/unit/model/experts/test_mixture.py::test_every_row_meets_its_expert_and_comes_back"
_LAW = "tests/laws/layouts/test_experts.py::"
_FOUR = f"{_LAW}test_every_layout_trains_the_same_experts[4]"

_ROUTER = "tests/unit/model/experts/test_router.py::"
_BIASES = f"{_LAW}test_biases_follow_the_loads_of_the_whole_batch"
_MOVED = (
    "tests/unit/engine/test_expert_load.py::"
    "test_busy_experts_are_moved_down_and_idle_ones_up_if_the_step_counts"
)

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "choice of experts": (
        Mutant(
            "a group is as good as the sum of its best experts",
            "megatron/model/experts/router.py",
            "by_group.topk(taken // groups.chosen, dim=-1).values.sum(-1)",
            "by_group.sum(-1)",
            f"{_ROUTER}test_experts_are_the_best_of_the_best_groups",
        ),
        Mutant(
            "a bias has a say in the choice",
            "megatron/model/experts/router.py",
            "return logits.detach().exp() + self.expert_bias",
            "return logits.detach().exp()",
            f"{_ROUTER}test_a_bias_has_a_say_in_the_choice_and_none_in_the_shares",
        ),
        Mutant(
            "the loss of balance looks at the best experts of all",
            "megatron/model/experts/router.py",
            "is_best = self._groups.number == 1 and self.expert_bias is None",
            "is_best = True",
            f"{_ROUTER}test_the_balance_is_of_the_best_experts_of_all[flags1]",
        ),
        Mutant(
            "tokens that tensor-parallel ranks split are all counted",
            "megatron/engine/expert_load.py",
            "contributes=sequence_parallel or self._ctx.tp.is_first",
            "contributes=self._ctx.tp.is_first",
            f"{_BIASES}[2]",
        ),
        Mutant(
            "a step that is void moves no bias",
            "megatron/engine/expert_load.py",
            " * self._rate * applied",
            " * self._rate",
            _MOVED,
        ),
        Mutant(
            "busy experts are moved down",
            "megatron/engine/expert_load.py",
            "means[row] - loads[row]",
            "loads[row] - means[row]",
            _MOVED,
        ),
        Mutant(
            "loads are of one step",
            "megatron/model/experts/router.py",
            "        load, self._load = self._load, None\n",
            "        load = self._load\n",
            "tests/unit/engine/test_expert_load.py::test_what_was_counted_is_counted_once",
        ),
        Mutant(
            "the norm counts what is not trained once, where replicas share parameters out",
            "megatron/optimizer/clip_grads.py",
            "is_shared_out = share is not None and parameter.requires_grad",
            "is_shared_out = share is not None",
            "tests/distributed/optimizer/test_clip_grads.py::"
            "test_the_norm_of_parameters_counts_each_once",
        ),
    ),
    "expert parallelism": (
        Mutant(
            "ranks that share experts out are neighbours",
            "megatron/mpu/topology.py",
            "stage[first : first + self.expert_ranks]",
            "stage[first // self.expert_ranks :: len(stage) // self.expert_ranks]",
            f"{_TOPOLOGY}test_expert_groups_are_neighbours",
        ),
        Mutant(
            "ranks that are ep x etp apart hold the same experts",
            "megatron/mpu/topology.py",
            "stage[first :: self.expert_ranks]",
            "stage[first * len(stage) // self.expert_ranks :][: len(stage) // self.expert_ranks]",
            f"{_TOPOLOGY}test_expert_groups_are_neighbours",
        ),
        Mutant(
            "a choice goes to all parts of its expert",
            "megatron/model/experts/mixture.py",
            "(owner.unsqueeze(-1) * etp + parts)",
            "(owner.unsqueeze(-1) * etp + parts * 0)",
            "tests/unit/model/experts/test_mixture.py::"
            "test_a_choice_goes_to_all_parts_of_its_expert",
        ),
        Mutant(
            "each part of an expert is multiplied by the share",
            "megatron/model/experts/mixture.py",
            "shares = shares.repeat_interleave(self._etp, dim=-1)",
            "shares = shares.repeat(1, 1, self._etp)",
            _FOUR,
        ),
        Mutant(
            "neighbours hold the parts of the same experts",
            "megatron/mpu/partition.py",
            "start = index // parts * length",
            "start = index % (size // parts) * length",
            "tests/unit/mpu/test_partition.py::"
            "test_parts_that_are_cut_again_are_held_by_neighbours",
        ),
        Mutant(
            "rows are read once they have arrived",
            "megatron/model/experts/mixture.py",
            "arrived, self.pending = self.pending.wait(), None",
            "arrived, self.pending = torch.zeros_like(self.pending.wait()), None",
            "tests/unit/model/experts/test_mixture.py::"
            "test_values_and_gradients_are_those_of_a_loop",
        ),
        Mutant(
            "a rank adds those features of the last bias that it holds",
            "megatron/model/experts/mixture.py",
            "around = (features.start, local[1] - features.stop)",
            "around = (0, local[1] - held[1])",
            f"{_LAW}test_other_ways_of_choosing_are_split_as_well[residual, biases]",
        ),
        Mutant(
            "rows are computed in the order of experts",
            "megatron/model/experts/mixture.py",
            "order = experts_of_rows.argsort(stable=True)",
            "order = torch.arange(len(experts_of_rows))",
            _ROWS,
        ),
        Mutant(
            "rows go back to where they came from",
            "megatron/model/experts/mixture.py",
            "_Traffic(plan.receives, plan.sends, ",
            "_Traffic(plan.sends, plan.receives, ",
            _FOUR,
        ),
        Mutant(
            "gradients of rows go back to where the rows came from",
            "megatron/model/experts/mixture.py",
            "(self.receives, self.sends) if back else",
            "(self.sends, self.receives) if back else",
            _FOUR,
        ),
        Mutant(
            "gradients of experts are summed over the ranks that hold them",
            "megatron/mpu/context.py",
            "return self.experts if is_shared_out(parameter) else self.dense",
            "return self.dense",
            f"{_LAW}test_every_layout_trains_the_same_experts[2]",
        ),
        Mutant(
            "a norm counts the experts of every rank",
            "megatron/mpu/context.py",
            "return partition is not None or self.tp.is_first",
            "return self.tp.is_first",
            _FOUR,
        ),
        Mutant(
            "tensor-parallel ranks that would send the same tokens are refused",
            "megatron/model/experts/mixture.py",
            "if grid.tp > 1 and not splits_tokens:",
            "if False:",
            "tests/unit/preflight/test_experts.py::"
            "test_experts_that_cannot_be_shared_out_are_refused",
        ),
        Mutant(
            "tensor-parallel ranks compare what they both hold, and no experts of their own",
            "megatron/optimizer/replicated_grads.py",
            "if partition_of(parameter) is None",
            "if True",
            f"{_LAW}test_any_layout_loads_any_other",
        ),
        Mutant(
            "memory counts a rank's share of the experts",
            "megatron/preflight/memory.py",
            "experts // grid.expert_ranks",
            "experts",
            "tests/unit/preflight/test_memory.py::test_a_rank_holds_its_share_of_the_experts",
        ),
    ),
}
