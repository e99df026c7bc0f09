"""Whether a sequence gets the same bits in any company: computed with the model, not assumed.

Which shapes of products share bits belongs to the libraries and the CPU. The probe runs before the
first request, on blocks of the pool that nothing else uses yet, and takes a few small steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import NumericsError
from megatron.inference.attention_plan import KEY_MULTIPLE
from megatron.inference.forward import ForwardExecutor
from megatron.inference.paged_cache import blocks_for
from megatron.model.geometry import CachedHeads
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice

_LENGTH = 44  # of the sequence that is compared
_NEW = 3  # of them that are computed one by one
_OTHERS = (9, 1, 3, 18, 5)
_LONG = KEY_MULTIPLE + 90


@dataclass(frozen=True, slots=True)
class BatchInvariance:
    """What the probe found: ways of computing a sequence that change its bits."""

    differences: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether none does."""
        return not self.differences


_WAYS = ("in a batch", "in parts", "computed again", "attention to many keys")


@torch.no_grad()
def probe_batch_invariance(
    executor: ForwardExecutor, model: GPTModel, ctx: ParallelContext
) -> BatchInvariance:
    """Return which ways of computing give a sequence other bits; equal on all ranks.

    All ranks that share the model call it together. Sequences are as long as the pool and the
    model allow.
    """
    probe = _Probe(executor, model)
    alone = probe.alone()
    found = [
        torch.equal(alone, probe.in_batch()),
        torch.equal(alone, probe.in_parts()),
        torch.equal(alone[-1:], probe.again()),
        probe.attention_is_equal(),
    ]
    equal = torch.tensor(found, dtype=torch.int64, device=alone.device)
    everywhere = all_reduce(equal, ctx.whole_model, op="min").tolist()
    return BatchInvariance(tuple(way for way, same in zip(_WAYS, everywhere) if not same))


def require_batch_invariance(invariance: BatchInvariance) -> None:
    """Check that a sequence gets the same bits in any company.

    Raises:
        NumericsError: it does not, with the ways that change them.
    """
    if invariance.differences:
        raise NumericsError(
            "the same request would get other scores beside other requests",
            found=f"other bits {', '.join(invariance.differences)}; torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads",
            fix="leave out deterministic, or use a model without experts, one GPU or CPU, and "
            "batch_invariant=True",
        )


class _Probe:
    """One sequence, computed in several ways beside others."""

    def __init__(self, executor: ForwardExecutor, model: GPTModel) -> None:
        self._executor, self._model = executor, model
        limits = executor.limits
        size = limits.block_size
        most = min(limits.positions or _LENGTH, (limits.blocks - 1) * size, _LENGTH)
        self._length = max(1, most)
        others: list[int] = []
        free = limits.blocks - blocks_for(self._length, size)
        for length in _OTHERS:
            length = min(length, self._length)
            if sum(blocks_for(each, size) for each in (*others, length)) <= free:
                others.append(length)
        lengths = (self._length, *others)
        first = 0
        self._tables: list[tuple[int, ...]] = []
        for length in lengths:
            count = blocks_for(length, size)
            self._tables.append(tuple(range(first, first + count)))
            first += count
        self._tokens = [
            tuple((at * 7919 + name * 104729) % limits.vocabulary for at in range(length))
            for name, length in enumerate(lengths)
        ]

    def alone(self) -> Tensor:
        """Return scores [new tokens + 1, v] after the prompt and each further token."""
        return torch.cat([self._scores([part]) for part in self._parts(self._prompt)])

    def in_batch(self) -> Tensor:
        """Return the same beside other sequences, whose tokens come with it."""
        rows = []
        for step, part in enumerate(self._parts(self._prompt)):
            beside = [
                self._slice(name, 0 if step == 0 else len(tokens) - 1, len(tokens))
                for name, tokens in enumerate(self._tokens[1:], 1)
            ]
            rows.append(self._scores([*beside[:2], part, *beside[2:]])[min(2, len(beside))])
        return torch.stack(rows)

    def in_parts(self) -> Tensor:
        """Return the same with the prompt computed a few tokens at a time."""
        first = max(1, self._prompt // 3)
        rows = [self._scores([self._slice(0, 0, first)])]
        start = first
        while start < self._prompt:
            end = min(self._prompt, start + 5)
            rows[:] = [self._scores([self._slice(0, start, end)])]
            start = end
        rows += [self._scores([part]) for part in list(self._parts(self._prompt))[1:]]
        return torch.cat(rows)

    def again(self) -> Tensor:
        """Return the last scores [1, v], with everything computed at once."""
        return self._scores([self._slice(0, 0, self._length)])

    def attention_is_equal(self) -> bool:
        """Return whether attention to more keys than one split of the kernel has equal bits."""
        limits, config = self._executor.limits, self._model.config
        most = (limits.blocks - 1) * limits.block_size
        length = min(_LONG, most, limits.positions or _LONG)
        if length < 2:
            return True
        groups, width = self._executor.cache.pool.shape[4:]
        each = config.num_attention_heads // config.query_groups
        generator = torch.Generator().manual_seed(0)
        shape = (length, groups, each + 2, width)
        values = torch.randn(shape, generator=generator).to(self._executor.cache.pool)
        table = tuple(range(blocks_for(length, limits.block_size)))
        other = SequenceSlice(1, (0,), 0, (limits.blocks - 1,), False)
        whole = self._attention(values, [SequenceSlice(0, (0,) * length, 0, table, False)])[-1]
        split = length // 2
        for start, end in ((0, split), (split, length - 1)):
            used = table[: blocks_for(end, limits.block_size)]
            part = SequenceSlice(0, (0,) * (end - start), start, used, False)
            self._attention(values[start:end], [part])
        last = SequenceSlice(0, (0,), length - 1, table, False)
        both = self._attention(torch.cat([values[:1], values[-1:]]), [other, last])
        return torch.equal(whole, both[1])

    def _attention(self, values: Tensor, slices: Sequence[SequenceSlice]) -> Tensor:
        positions = [at for each in slices for at in range(each.start, each.end)]
        attention = self._executor.attention(
            slices, self._executor.groups(slices), torch.tensor(positions, device=values.device)
        )
        heads = CachedHeads(values[:, :, :-2], values[:, :, -2], values[:, :, -1])
        return attention.attend(
            self._model.blocks.start,
            heads,
            is_wide=False,
            soft_cap=self._model.config.attention_soft_cap,
        )

    @property
    def _prompt(self) -> int:
        return max(1, self._length - _NEW)

    def _parts(self, prompt: int) -> Iterator[SequenceSlice]:
        yield self._slice(0, 0, prompt)
        for at in range(prompt, self._length):
            yield self._slice(0, at, at + 1)

    def _slice(self, name: int, start: int, end: int) -> SequenceSlice:
        used = blocks_for(end, self._executor.limits.block_size)
        return SequenceSlice(
            name, self._tokens[name][start:end], start, self._tables[name][:used], True
        )

    def _scores(self, slices: Sequence[SequenceSlice]) -> Tensor:
        return self._executor.scores(ForwardPlan((), tuple(slices)))
