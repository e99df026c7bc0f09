"""Errors in what ranks that share sequences do."""

from tests.mutants.mutant import Mutant

_SHARES = "megatron/mpu/context_parallel/shares.py"
_SHARES_TEST = "tests/unit/mpu/context_parallel/test_shares.py::"
_LAW = "tests/laws/layouts/test_context_parallel.py::"
_MIXTRAL = f"{_LAW}test_ranks_that_share_sequences_train_the_same_model[mixtral]"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "context parallelism": (
        Mutant(
            "what a sink takes of a row is no key's",
            "megatron/ops/attention_blocks.py",
            "return -(shares * means)",
            "return (shares * means)",
            "tests/unit/ops/test_attention_blocks.py::test_a_sink_is_a_key_whose_value_is_zero",
        ),
        Mutant(
            "ranks that exchange tokens for heads have the sinks of their heads",
            "megatron/model/attention.py",
            "first = heads.start - self._tp.rank * len(self.sinks)",
            "first = 0",
            f"{_LAW}test_ranks_that_share_sequences_train_the_same_model[neox, qwen, mistral]",
        ),
        Mutant(
            "ranks hold an early and a late chunk",
            _SHARES,
            "chunks = (self.rank, self.parts - 1 - self.rank)",
            "chunks = (self.rank, self.rank + self.size)",
            f"{_SHARES_TEST}test_every_query_meets_every_key_that_it_may_see_once",
        ),
        Mutant(
            "keys of earlier ranks are their early chunk",
            _SHARES,
            "yield KeyBlock(source, every, slice(0, half), False)",
            "yield KeyBlock(source, every, slice(half, tokens), False)",
            f"{_SHARES_TEST}test_every_query_meets_every_key_that_it_may_see_once",
        ),
        Mutant(
            "parts of attention are merged by their log-sum-exp",
            "megatron/ops/attention_blocks.py",
            "logsigmoid(-further)",
            "logsigmoid(further)",
            "tests/unit/ops/test_attention_blocks.py::test_parts_add_up_to_the_whole",
        ),
        Mutant(
            "a row that sees no key of a block has no weight there",
            "megatron/ops/attention_blocks.py",
            "sums.masked_fill(sees_none, -torch.inf)",
            "sums",
            "tests/unit/ops/test_attention_blocks.py::test_a_row_without_keys_has_no_weight",
        ),
        Mutant(
            "keys go to the next rank of the ring",
            "megatron/mpu/collectives.py",
            "following, preceding = (group.rank + 1) % group.size, (group.rank - 1) % group.size",
            "preceding, following = (group.rank + 1) % group.size, (group.rank - 1) % group.size",
            "tests/distributed/mpu/test_collectives.py::test_collectives",
        ),
        Mutant(
            "copies of keys divide over the ranks",
            "megatron/mpu/context_parallel/heads.py",
            "copies = ranks // math.gcd(groups, ranks)",
            "copies = 1",
            "tests/distributed/mpu/context_parallel/test_heads.py::"
            "test_keys_are_repeated_as_little_as_ranks_need",
        ),
        Mutant(
            "gradients are summed over ranks that share sequences",
            "megatron/mpu/context.py",
            'dense, experts = topology.groups("dp", "cp")',
            'dense, experts = topology.groups("dp")',
            _MIXTRAL,
        ),
        Mutant(
            "the balance of experts is that of whole sequences",
            "megatron/model/experts/router.py",
            "            busy = reduce_from_tp(busy, self._cp)\n",
            "",
            _MIXTRAL,
        ),
        Mutant(
            "a share's angles are those of its tokens",
            "megatron/model/geometry.py",
            "own_indexes = self._share.positions(length, device)",
            "own_indexes = torch.arange(length // self._share.size, device=device)",
            "tests/unit/model/test_geometry.py::"
            "test_a_share_of_a_sequence_has_its_own_rows_and_the_keys_in_the_order_of_ranks",
        ),
        Mutant(
            "the order of segments counts where the first token is",
            "megatron/model/bert_model.py",
            "counts = build.ctx.cp.is_first",
            "counts = True",
            "tests/laws/layouts/test_bert.py::test_every_layout_trains_the_same_model",
        ),
        Mutant(
            "shares of tensor-parallel ranks divide the share of a context-parallel rank",
            "megatron/preflight/context_parallel.py",
            "    if parallel.sequence_parallel:\n",
            "    if False:\n",
            "tests/unit/preflight/test_context_parallel.py::"
            "test_sequences_that_do_not_divide_are_refused",
        ),
    ),
}
