"""Errors in what replicas share out: gradients, and parameters."""

from tests.mutants.mutant import Mutant

_GRADS = "tests/unit/optimizer/test_sharded_grads.py::"
_WEIGHTS = "tests/unit/optimizer/test_sharded_parameters.py::"
_FLATS = "tests/unit/optimizer/test_sharded_flats.py::"
_MEMORY = (
    "tests/distributed/optimizer/test_sharded_parameters.py::"
    "test_a_rank_keeps_its_share_and_has_a_few_layers_at_a_time"
)
_PARTS = (
    "tests/laws/layouts/test_distributed_optimizer.py::"
    "test_parts_of_the_replicas_share_out_by_themselves"
)
_LAYER = f"{_WEIGHTS}test_a_layer_is_whole_while_it_runs_and_while_its_gradients_are_computed"
_SUM = f"{_GRADS}test_what_is_kept_is_the_sum_over_micro_batches[False-dtype0]"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "sharding": (
        Mutant(
            "new state goes back to host memory",
            "megatron/device.py",
            "                tensor.copy_(new)\n",
            "                pass\n",
            "tests/unit/optimizer/test_host_state.py::test_parts_come_are_changed_and_go_back",
        ),
        Mutant(
            "parts fit into their room",
            "megatron/optimizer/host_state.py",
            "room -= -(-(stop - start) // _GRAIN) * _GRAIN",
            "room -= stop - start",
            "tests/unit/optimizer/test_host_state.py::"
            "test_parts_hold_every_element_once_in_order_and_fit",
        ),
        Mutant(
            "masters that wait on the host are updated",
            "megatron/optimizer/adamw.py",
            "return [*means, slot.weight] if slot.has_master else means",
            "return means",
            "tests/unit/optimizer/test_adamw.py::"
            "test_state_on_the_host_is_updated_to_the_same_bits",
        ),
        Mutant(
            "shares of sums of several micro-batches add up",
            "megatron/optimizer/sharded_grads.py",
            "reduction.flat.data.add_(share)",
            "reduction.flat.data.copy_(share)",
            _SUM,
        ),
        Mutant(
            "a step forgets the gradients of the one before",
            "megatron/optimizer/sharded_grads.py",
            "self._kept: set[int] = set()",
            "self._kept: set[int] = getattr(self, '_kept', set())",
            _SUM,
        ),
        Mutant(
            "sums over other ranks come after those over replicas",
            "megatron/optimizer/sharded_grads.py",
            "        self._check_all_arrived()\n        self._complete()\n",
            "        if before is not None:\n            before()\n        self._complete()\n"
            "        before = None\n",
            f"{_GRADS}test_held_gradients_are_summed_over_other_ranks_after_those_of_replicas",
        ),
        Mutant(
            "memory of gradients is given back",
            "megatron/optimizer/sharded_grads.py",
            "        _room(reduction.flat).release()\n",
            "",
            f"{_GRADS}test_gradients_of_a_unit_have_memory_for_a_part_of_a_backward_pass",
        ),
        Mutant(
            "a rank's elements of a parameter lie where its share begins",
            "megatron/optimizer/sharded_flats.py",
            "max(place.start - share.start, 0)",
            "place.start % share.size",
            f"{_FLATS}test_over_all_ranks_every_element_is_owned_once",
        ),
        Mutant(
            "a layer is gathered for its backward pass",
            "megatron/optimizer/sharded_parameters.py",
            "        self._gather(units, then=at - 1)\n",
            "",
            f"{_WEIGHTS}test_the_next_layer_is_gathered_meanwhile_if_that_is_asked_for",
        ),
        Mutant(
            "all replicas have the weights of masters that are loaded",
            "megatron/optimizer/optimizer.py",
            "self._shards.gather()  # weights that were not",
            "pass  # weights that were not",
            "tests/distributed/optimizer/test_optimizer.py::"
            "test_all_ranks_have_the_weights_of_masters_that_are_loaded",
        ),
        Mutant(
            "a recomputed layer stays until its gradients have been computed",
            "megatron/optimizer/sharded_parameters.py",
            "if not (unit.in_backward or stays)",
            "if not stays",
            f"{_WEIGHTS}test_recomputed_layers_are_gathered_again",
        ),
        Mutant(
            "a layer is given back after its forward pass",
            "megatron/optimizer/sharded_parameters.py",
            "stays = is_last or",
            "stays = True or is_last or",
            _LAYER,
        ),
        Mutant(
            "a layer is given back when it has its gradients",
            "megatron/optimizer/data_parallel.py",
            "            self.gradients.after_unit = parameters.after_gradients\n",
            "            pass\n",
            _LAYER,
        ),
        Mutant(
            "what was gathered before an update is not used after it",
            "megatron/optimizer/sharded_parameters.py",
            "        for unit in self._units:\n            unit.release()\n",
            "",
            f"{_WEIGHTS}test_what_was_gathered_is_forgotten_when_the_shares_change",
        ),
        Mutant(
            "the next layer is gathered while one runs",
            "megatron/optimizer/sharded_parameters.py",
            "if self._prefetch and then is not None",
            "if False",
            f"{_WEIGHTS}test_the_next_layer_is_gathered_meanwhile_if_that_is_asked_for",
        ),
        Mutant(
            "shares of gradients are summed over the parts of the replicas",
            "megatron/optimizer/sharded_grads.py",
            "            if flat.across is not None\n",
            "            if False\n",
            f"{_PARTS}[gpt2]",
        ),
        Mutant(
            "sums of shares are summed over the parts of the replicas",
            "megatron/optimizer/grad_buffer.py",
            "                if reduction.flat.across is not None:\n",
            "                if False:\n",
            f"{_PARTS}[gpt2]",
        ),
        Mutant(
            "a norm counts the shares of one part",
            "megatron/mpu/context.py",
            "return self.across is None or self.across.is_first",
            "return True",
            f"{_PARTS}[gpt2]",
        ),
        Mutant(
            "parts are neighbours, and equal shares far apart",
            "megatron/mpu/topology.py",
            "group[first::size] for group in replicas for first in range(size)",
            "group[first : first + self.instances] for group in replicas "
            "for first in range(0, len(group), self.instances)",
            "tests/unit/mpu/test_topology.py::"
            "test_parts_of_replicas_cross_the_sets_with_equal_shares",
        ),
        Mutant(
            "no rank keeps more than its share of the parameters",
            "megatron/engine/native.py",
            "                self._weights.add(module.parameters())\n",
            "                self._weights.add([])\n",
            _MEMORY,
        ),
    ),
}
