"""The sequences of a request while an engine knows it: their tokens, and the blocks they hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron.scheduling.blocks import BlockPool
from megatron.scheduling.draft_window import DraftWindow
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.prefix_index import PrefixEntry, PrefixRoot
from megatron.scheduling.requests import (
    FinishReason,
    Request,
    RequestEnd,
    RequestState,
    require_transition,
)


@dataclass(eq=False, slots=True)
class SampleSequence:
    """One sample of a request.

    Attributes:
        id: unique in the life of a scheduler.
        tokens: prompt and drawn tokens.
        computed: positions whose keys and values are in the blocks.
        blocks: block table.
        entries: the index's entries of the first full blocks, as far as they were entered.
        is_forked: whether it may run: it is the first, or shares the prompt of the first.
        reserved: blocks that are kept for it, beside those that it holds.
        finish: why it ended; None while it has not.
        drafting: how many tokens are proposed for it.
    """

    id: int
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    entries: list[PrefixEntry] = field(default_factory=list)
    is_forked: bool = False
    reserved: int = 0
    finish: FinishReason | None = None
    drafting: DraftWindow = DraftWindow(0)

    @property
    def remaining(self) -> int:
        """Tokens that have to be computed before the next one is drawn."""
        return len(self.tokens) - self.computed

    def release(self, pool: BlockPool) -> None:
        """Give all blocks back."""
        pool.release(self.blocks)
        self.blocks, self.entries = [], []
        self.computed, self.reserved, self.is_forked = 0, 0, False


class BlocksNeeded(NamedTuple):
    """The blocks of a request that are not shared with other requests.

    Attributes:
        of_samples: blocks of the first unfinished sample, and those that each other one has beside
            the blocks that it shares with the first.
        copies: copies of the last shared block, into which each sample writes its own tokens.
    """

    of_samples: tuple[int, ...]
    copies: int

    @property
    def total(self) -> int:
        """Blocks of all samples."""
        return sum(self.of_samples) + self.copies


@dataclass(eq=False, slots=True)
class RequestRecord:
    """A request that has not ended.

    Attributes:
        request: what is asked.
        order: its place among all requests, by the time of their coming.
        samples: its sequences.
        state: where it is in its life.
        reserved_copies: blocks that are kept for copies of the block that its samples share, and
            into which each of them writes.
        passes: how often later requests were admitted before it.
        preemptions: how often its blocks were taken.
        scored: tokens of the prompt, after the first, whose log-probabilities were computed.
    """

    request: Request
    order: int
    samples: tuple[SampleSequence, ...]
    state: RequestState = RequestState.QUEUED
    reserved_copies: int = 0
    passes: int = 0
    preemptions: int = 0
    scored: int = 0

    @property
    def seniority(self) -> tuple[int, int]:
        """Sorts requests: the first in order is served first and loses its blocks last."""
        return self.request.priority, self.order

    @property
    def unfinished(self) -> list[SampleSequence]:
        """The sequences that have not ended; the first of them computes the prompt."""
        return [sample for sample in self.samples if sample.finish is None]

    @property
    def runnable(self) -> Iterator[SampleSequence]:
        """The sequences that a step may compute."""
        return (sample for sample in self.samples if sample.is_forked and sample.finish is None)

    @property
    def reserved(self) -> int:
        """Available blocks that are kept for this request."""
        return self.reserved_copies + sum(sample.reserved for sample in self.samples)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    def tokens_left(self, sample: SampleSequence) -> int:
        """Return how many tokens a sample may still draw."""
        return self.prompt_length + self.request.max_new_tokens - len(sample.tokens)

    def kept_tokens(self, sample: SampleSequence, tokens: Sequence[int]) -> Sequence[int]:
        """Return drawn tokens up to the first that ends the sample."""
        for count, token in enumerate(tokens, start=1):
            if self.finish_of(len(sample.tokens) + count, token) is not None:
                return tokens[:count]
        return tokens

    def finish_of(self, length: int, last: int, is_stopped: bool = False) -> FinishReason | None:
        """Return why a sample of so many tokens ends with the last of them; None if it does not.

        Args:
            length: tokens with the prompt.
            is_stopped: its text has a stop string.
        """
        new_tokens = length - self.prompt_length
        is_stopped = is_stopped or last in self.request.stop_tokens
        if is_stopped and new_tokens >= self.request.min_new_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if new_tokens == self.request.max_new_tokens else None

    def root(self, weights_version: int) -> PrefixRoot:
        """Return what cached keys and values must have in common with this request."""
        return PrefixRoot(weights_version, self.request.salt)

    def move(self, state: RequestState) -> None:
        """Change the state.

        Raises:
            RequestTransitionError: the states do not follow each other.
        """
        require_transition(self.request.id, self.state, state)
        self.state = state

    def blocks_needed(self, limits: SchedulerLimits, *, worst_case: bool) -> "BlocksNeeded":
        """Return the blocks that hold all tokens known so far, or all that there may come to be."""
        first, *others = (
            limits.blocks_for(self.request.longest if worst_case else len(sample.tokens))
            for sample in self.unfinished
        )
        shared = limits.blocks_for(self.prompt_length - 1)
        is_copied = shared > limits.shared_blocks(self.prompt_length)
        return BlocksNeeded((first, *(count - shared for count in others)), is_copied * len(others))

    def targets(self, start: int, end: int) -> tuple[int, ...]:
        """Return the tokens of the prompt whose log-probabilities a pass over positions gives.

        None if they are not wanted, or were computed before a preemption.
        """
        last = min(end, self.prompt_length - 1)
        if self.request.prompt_logprobs is None or last <= self.scored:
            return ()
        return self.request.prompt[start + 1 : last + 1]

    def fork_samples(self, pool: BlockPool, block_size: int) -> None:
        """Let the other samples share the prompt, once the first one has computed it.

        They share all but the prompt's last token, which each computes to draw its own first one.
        """
        first, *others = self.unfinished
        shared = self.prompt_length - 1
        if first.computed < shared or all(other.is_forked for other in others):
            return
        count = -(-shared // block_size)
        for other in others:
            other.is_forked, other.computed = True, shared
            other.blocks = first.blocks[:count]
            other.entries = first.entries[: shared // block_size]
            for block in other.blocks:
                pool.share(block)

    def release(self, pool: BlockPool) -> int:
        """Give all blocks back; return how many computed positions that loses."""
        lost = sum(sample.computed for sample in self.unfinished)
        for sample in self.samples:
            sample.release(pool)
        self.reserved_copies = 0
        return lost

    def end(self, state: RequestState, detail: str) -> RequestEnd:
        """Change to a last state, and return what is said of it."""
        self.move(state)
        return RequestEnd(
            self.request.id,
            state,
            tuple(sample.finish for sample in self.samples),
            tuple(len(sample.tokens) - self.prompt_length for sample in self.samples),
            detail,
        )
