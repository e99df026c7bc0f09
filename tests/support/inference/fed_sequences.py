"""Sequences fed to a `ForwardExecutor` in parts, with block tables in no particular order."""

import random
from collections.abc import Mapping, Sequence

from torch import Tensor

from megatron.inference.forward import ForwardExecutor
from megatron.inference.paged_cache import blocks_for
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice


class FedSequences:
    """Token rows that are computed in parts, by one executor."""

    def __init__(
        self,
        model: GPTModel,
        rows: Sequence[Sequence[int]],
        *,
        block_size: int = 4,
        seed: int = 0,
        batch_invariant: bool = True,
        ctx: ParallelContext | None = None,
    ) -> None:
        needed = [blocks_for(len(row), block_size) for row in rows]
        ids = list(range(sum(needed)))
        random.Random(seed).shuffle(ids)
        self.rows = rows
        self.tables = [tuple(ids.pop() for _ in range(count)) for count in needed]
        self.done = [0] * len(rows)
        self.executor = ForwardExecutor(
            model,
            ctx or ParallelContext.single(),
            blocks=sum(needed),
            block_size=block_size,
            batch_invariant=batch_invariant,
        )

    def plan(self, parts: Mapping[int, int]) -> ForwardPlan:
        """Return the step that computes so many further tokens of each row, and count them."""
        slices = []
        for row, count in parts.items():
            start = self.done[row]
            tokens = tuple(self.rows[row][start : start + count])
            self.done[row] += len(tokens)
            used = blocks_for(self.done[row], self.executor.cache.block_size)
            slices.append(SequenceSlice(row, tokens, start, self.tables[row][:used], True))
        return ForwardPlan((), tuple(slices))

    def step(self, parts: Mapping[int, int]) -> dict[int, Tensor]:
        """Compute so many further tokens of each row; return scores [v] after the last ones."""
        return dict(zip(parts, self.executor.scores(self.plan(parts))))

    def whole(self, row: int, part: int | None = None) -> Tensor:
        """Compute what is left of a row, `part` tokens at a time; return the scores at its end."""
        scores = None
        while scores is None or self.done[row] < len(self.rows[row]):
            scores = self.step({row: part or len(self.rows[row])})[row]
        return scores
