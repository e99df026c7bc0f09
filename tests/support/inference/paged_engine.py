"""An engine without a model for tests of scheduling: it checks every position that a step reads.

A block remembers, for each of its places, the text up to there. A step that reads a position whose
text is not that of its sequence fails, as a model would compute wrong scores from it. The token
that follows a text is a hash of it, so a run has the same output in whatever steps it is computed.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestEnd, RequestState
from megatron.scheduling.scheduler import Scheduler

Propose = Callable[[Mapping[int, Sequence[int]]], ForwardPlan]
MOST_STEPS = 100_000  # a run that needs more does not end


def next_token(text: Sequence[int], sample: int, vocab_size: int) -> int:
    """Return the token that sample number `sample` draws after `text`."""
    content = f"{sample}:{','.join(map(str, text))}".encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=4).digest(), "big") % vocab_size


def expected_output(request: Request, sample: int, vocab_size: int) -> list[int]:
    """Return the tokens of a sample as they would be drawn without any scheduling."""
    text = list(request.prompt)
    for drawn in range(1, request.max_new_tokens + 1):
        text.append(next_token(text, sample, vocab_size))
        if text[-1] in request.stop_tokens and drawn >= request.min_new_tokens:
            break
    return text[len(request.prompt) :]


@dataclass
class PagedEngine:
    """The memory of blocks, and the texts of all sequences that were ever submitted.

    Attributes:
        right_drafts: the share of the tokens proposed after right ones that are right.
        accepted: proposed tokens that were right.
    """

    limits: SchedulerLimits
    right_drafts: float = 0.0
    memory: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    texts: dict[int, list[int]] = field(default_factory=dict)
    sample_of: dict[int, int] = field(default_factory=dict)
    request_of: dict[int, Request] = field(default_factory=dict)
    accepted: int = 0
    prompts: dict[int, int] = field(default_factory=dict)  # lengths, by sequence
    scored: dict[int, set[int]] = field(default_factory=dict)  # positions of targets, by sequence

    def add(self, request: Request, sequences: Sequence[int]) -> None:
        """Tell the engine of a request that a scheduler has queued."""
        for sample, sequence in enumerate(sequences):
            self.texts[sequence] = list(request.prompt)
            self.prompts[sequence] = len(request.prompt)
            self.sample_of[sequence] = sample
            self.request_of[sequence] = request

    def proposed(self, plan: ForwardPlan, propose: Propose) -> ForwardPlan:
        """Return a plan with proposed tokens, by the `propose` of a scheduler."""
        return propose(
            {part.sequence: self.drafts(part) for part in plan.slices if part.draft_room}
        )

    def compute(self, plan: ForwardPlan) -> dict[int, list[int]]:
        """Do what a plan says; return the drawn tokens by sequence."""
        assert plan.token_count <= self.limits.max_tokens_per_step
        assert len({part.sequence for part in plan.slices}) == len(plan.slices)
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        for source, target in plan.copies:
            for place in range(self.limits.block_size):
                if (source, place) in self.memory:
                    self.memory[target, place] = self.memory[source, place]
        for part in plan.slices if self.limits.prompt_is_prefix else ():
            prompt = self.prompts[part.sequence]
            assert part.prefix == (prompt if part.start == 0 else 0)
            assert part.start >= prompt - 1 or (part.start == 0 and part.end >= prompt)
        for part in plan.slices:  # all writes of a layer come before its reads
            text = self.text_with_drafts(part)
            for position, token in enumerate(part.tokens, start=part.start):
                assert text[position] == token, "a slice has other tokens than its sequence"
                self.memory[self.place(part.blocks, position)] = tuple(text[: position + 1])
        drawn = {}
        for part in plan.slices:
            text = self.text_with_drafts(part)
            for position, target in enumerate(part.targets, start=part.start + 1):
                assert text[position] == target, "a target is not the token that follows"
                self.scored.setdefault(part.sequence, set()).add(position)
            for position in range(part.end):
                stored = self.memory.get(self.place(part.blocks, position))
                assert stored == tuple(text[: position + 1]), "keys of another text are read"
            if part.samples:
                assert part.end == len(text)
                drawn[part.sequence] = self.drawn(part)
        return drawn

    def text_with_drafts(self, part: SequenceSlice) -> list[int]:
        """Return the text of a sequence, and the tokens that a slice has proposed behind it."""
        return [*self.texts[part.sequence], *part.tokens[len(part.tokens) - part.drafts :]]

    def drafts(self, part: SequenceSlice) -> list[int]:
        """Return proposed tokens, some of which are wrong; all that follow those are."""
        text = list(self.texts[part.sequence])
        sample, size = self.sample_of[part.sequence], self.limits.vocab_size
        count = next_token(text, -1, part.draft_room + 1)
        for place in range(count):
            is_right = next_token(text, -2 - place, 100) < 100 * self.right_drafts
            text.append((next_token(text, sample, size) + (not is_right)) % size)
        return text[len(text) - count :]

    def drawn(self, part: SequenceSlice) -> list[int]:
        """Add the tokens that follow a text to it, as far as proposals are right, and return them.

        Tokens behind one that ends a sample are returned, and are no part of its text.
        """
        text = list(self.texts[part.sequence])
        proposed = part.tokens[len(part.tokens) - part.drafts :]
        tokens: list[int] = []
        while not tokens or proposed[: len(tokens)] == tuple(tokens):
            token = next_token(text, self.sample_of[part.sequence], self.limits.vocab_size)
            tokens.append(token)
            text.append(token)
            if len(tokens) > len(proposed):
                break
        self.accepted += len(tokens) - 1
        request, kept = self.request_of[part.sequence], self.texts[part.sequence]
        for token in tokens:
            kept.append(token)
            count = len(kept) - len(request.prompt)
            if token in request.stop_tokens and count >= request.min_new_tokens:
                break
        return tokens

    def place(self, blocks: Sequence[int], position: int) -> tuple[int, int]:
        """Return the block and the place in it that hold a position."""
        block, place = divmod(position, self.limits.block_size)
        return blocks[block], place


def check_blocks(scheduler: Scheduler) -> None:
    """Check that every block is in one state, and that references are those of the sequences."""
    counts = scheduler.counts
    blocks = counts.blocks
    assert blocks.referenced + blocks.cached + blocks.free == scheduler.limits.blocks
    assert 0 <= counts.reserved <= blocks.available
    tables = [
        block
        for record in scheduler._running.values()
        for sample in record.samples
        for block in sample.blocks
    ]
    for block in range(scheduler.limits.blocks):
        assert scheduler.pool.references(block) == tables.count(block)


@dataclass
class SimulatedRun:
    """Requests that arrive at their times, served by a scheduler and a `PagedEngine`.

    Attributes:
        right_drafts: see `PagedEngine`.
        step_ns: what a step takes on the simulated clock.
        ends: how each request ended.
    """

    scheduler: Scheduler
    requests: Sequence[Request]
    aborts: Mapping[int, str] = field(default_factory=dict)  # by step
    stops: Mapping[int, int] = field(default_factory=dict)  # sequences by step
    right_drafts: float = 0.5
    step_ns: int = 1_000_000
    steps: int = 0
    ends: dict[str, RequestEnd] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = PagedEngine(self.scheduler.limits, self.right_drafts)
        self.sequences: dict[str, tuple[int, ...]] = {}
        self.in_flight: deque[ForwardPlan] = deque()
        self.most_in_flight = 0
        self.stopped: dict[int, int] = {}  # lengths of the texts of samples that were stopped

    def run(self) -> None:
        """Serve all requests; fails if a step makes no progress while one is unfinished."""
        coming = sorted(self.requests, key=lambda request: request.arrival_ns)
        for step in count():
            assert step < MOST_STEPS
            now_ns = step * self.step_ns
            while coming and coming[0].arrival_ns <= now_ns:
                request = coming.pop(0)
                self.sequences[request.id] = self.scheduler.submit(request)
                self.engine.add(request, self.sequences[request.id])
            self._plan(now_ns)
            if step in self.aborts:
                self.scheduler.abort(self.aborts[step])
            if step in self.stops and self.scheduler.stop_sample(self.stops[step]):
                self.stopped[self.stops[step]] = len(self.engine.texts[self.stops[step]])
            if self.in_flight:
                self.steps += 1
                self.scheduler.complete(self.engine.compute(self.in_flight.popleft()))
                check_blocks(self.scheduler)
            for end in self.scheduler.take_ended():
                assert end.request not in self.ends, "a request has two ends"
                self.ends[end.request] = end
            if not coming and not any(self.scheduler.counts[:2]) and not self.in_flight:
                return

    def _plan(self, now_ns: int) -> None:
        """Plan as many steps as may be in flight, of requests of which none is in two of them."""
        while len(self.in_flight) < self.scheduler.limits.steps_in_flight:
            may_plan = self.scheduler.may_plan
            plan = self.scheduler.plan(now_ns)
            check_blocks(self.scheduler)
            if not plan.slices:
                assert self.in_flight or not any(self.scheduler.counts[:2]), "no progress"
                return
            assert may_plan
            planned = {self.owner(part.sequence) for part in plan.slices}
            for other in self.in_flight:
                assert planned.isdisjoint(self.owner(part.sequence) for part in other.slices)
            self.in_flight.append(self.engine.proposed(plan, self.scheduler.propose))
            self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def owner(self, sequence: int) -> str:
        """Return the request of a sequence."""
        return self.engine.request_of[sequence].id

    def check_outputs(self) -> None:
        """Check that every completed sample has the text that it has without any scheduling."""
        vocab_size = self.scheduler.limits.vocab_size
        for request in self.requests:
            if self.ends[request.id].state is RequestState.COMPLETED:
                for sample, sequence in enumerate(self.sequences[request.id]):
                    text = self.engine.texts[sequence][len(request.prompt) :]
                    expected = expected_output(request, sample, vocab_size)
                    if sequence in self.stopped:
                        kept = self.stopped[sequence] - len(request.prompt)
                        assert self.ends[request.id].new_tokens[sample] == kept
                        text, expected = text[:kept], expected[:kept]
                    assert text == expected
                sequences = self.sequences[request.id]
                scored = set().union(*(self.engine.scored.get(one, set()) for one in sequences))
                if request.prompt_logprobs is None:
                    assert not scored
                elif self.stopped.keys().isdisjoint(sequences):
                    assert scored == set(range(1, len(request.prompt)))
