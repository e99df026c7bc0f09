"""Which requests an engine serves in its next step, decided from commands alone.

The same commands in the same order with the same times give the same plans: no clock is read, and
nothing is drawn at random. Each step computes decodes first, then prefills, the oldest first. The
oldest running request is never preempted, so every step with an unfinished request makes progress.
Several steps may be in flight, of disjoint requests; they are computed and end in their order.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron.errors import MegatronError
from megatron.scheduling.blocks import BlockCounts, BlockPool
from megatron.scheduling.draft_window import DraftWindow, window_after
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice, with_drafts
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.prefix_index import PrefixEntry, PrefixIndex
from megatron.scheduling.requests import (
    DuplicateRequestError,
    FinishReason,
    QueueFullError,
    Request,
    RequestEnd,
    RequestState,
)
from megatron.scheduling.sequences import BlocksNeeded, RequestRecord, SampleSequence


class SchedulerError(MegatronError):
    """A scheduler was called against its rules: a bug of the caller."""


class Preemption(NamedTuple):
    """A request that lost its blocks to an older one."""

    request: str
    tokens_lost: int
    times: int  # how often that has happened to it


class SchedulerCounts(NamedTuple):
    """The state of a scheduler in numbers.

    Attributes:
        running: requests that hold blocks.
        waiting: requests in the queue.
        reserved: available blocks that are kept for running requests.
        blocks: the pool.
    """

    running: int
    waiting: int
    reserved: int
    blocks: BlockCounts


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    copies: list[tuple[int, int]] = field(default_factory=list)
    slices: list[SequenceSlice] = field(default_factory=list)
    preempted: bool = False


@dataclass(slots=True)
class _PlannedStep:
    """A step that has not ended, with the number of proposed tokens by sequence."""

    plan: ForwardPlan
    proposed: Mapping[int, int] = field(default_factory=dict)


class _Fit(NamedTuple):
    """A waiting request that can be admitted: blocks found in the index, and all that it needs."""

    entries: list[PrefixEntry]
    needed: BlocksNeeded


class Scheduler:
    """Requests, their sequences and their blocks.

    Each `plan` with slices is followed by `complete` or `fail_step`, which concern the oldest step
    in flight. `limits.steps_in_flight` plans may come before that; with 1 they alternate. `submit`,
    `abort` and `stop_sample` may come at any time.
    """

    def __init__(
        self, limits: SchedulerLimits, *, weights_version: int = 0, index: PrefixIndex | None = None
    ) -> None:
        self.limits, self.weights_version = limits, weights_version
        self.pool = BlockPool(limits.blocks, index or PrefixIndex(limits.block_size))
        self.now_ns: int | None = None
        self._in_flight: deque[_PlannedStep] = deque()  # the oldest first
        self._newest: _PlannedStep | None = None  # which tokens may still be proposed for
        self._waiting: dict[str, RequestRecord] = {}
        self._running: dict[str, RequestRecord] = {}
        self._order = self._sequences = 0
        self._ended: list[RequestEnd] = []
        self._preemptions: list[Preemption] = []

    @property
    def counts(self) -> SchedulerCounts:
        """Requests and blocks as they are."""
        reserved = sum(record.reserved for record in self._running.values())
        return SchedulerCounts(len(self._running), len(self._waiting), reserved, self.pool.counts)

    @property
    def may_plan(self) -> bool:
        """Whether a further step could compute something beside those in flight."""
        if len(self._in_flight) >= self.limits.steps_in_flight:
            return False
        return bool(self._waiting) or bool(self._idle())

    def submit(self, request: Request) -> tuple[int, ...]:
        """Queue a request; return the ids of its sequences.

        Raises:
            RequestError: even an idle engine could not serve it; a number of its message could be.
            DuplicateRequestError: a request of the same id has not ended.
            QueueFullError: too many wait.
        """
        if (same := self._record(request.id)) is not None:
            raise DuplicateRequestError(
                "two requests have the same id",
                found=f"{request.id!r}, which is {same.state}",
                fix="give every request an id of its own",
            )
        self.limits.check_request(request)
        if len(self._waiting) >= self.limits.max_queued:
            raise QueueFullError(
                "the queue of requests is full",
                found=f"{len(self._waiting)} waiting, {len(self._running)} running",
                fix="send the request again after one has ended",
            )
        samples = tuple(
            SampleSequence(
                self._sequences + index,
                list(request.prompt),
                drafting=DraftWindow(self.limits.speculative_tokens),
            )
            for index in range(request.samples)
        )
        self._waiting[request.id] = RequestRecord(request, self._order, samples)
        self._order, self._sequences = self._order + 1, self._sequences + len(samples)
        return tuple(sample.id for sample in samples)

    def abort(self, request: str, detail: str = "the caller no longer wants it") -> bool:
        """End a request; return whether there was one to end."""
        record = self._record(request)
        if record is not None:
            self._end(record, RequestState.ABORTED, detail)
        return record is not None

    def stop_sample(self, sequence: int) -> bool:
        """End one sample, whose text the caller found complete; return whether it had not ended.

        Its request is completed with its last sample. A token that a planned step draws for it is
        dropped.
        """
        for record in [*self._running.values(), *self._waiting.values()]:
            for sample in record.unfinished:
                if sample.id == sequence:
                    self._stop(record, sample)
                    return True
        return False

    def plan(self, now_ns: int) -> ForwardPlan:
        """Return what the next step computes, of requests that no step in flight computes.

        A plan without slices is not in flight. There is one if no request is left, or none that can
        go on before another step has ended.

        Args:
            now_ns: the leader's monotonic time in nanoseconds, the same on every rank.

        Raises:
            SchedulerError: too many steps are in flight, or the time goes back.
        """
        self._start_step(now_ns)
        self._expire(now_ns)
        step = _Step(self.limits.max_tokens_per_step)
        records = self._share_of_step()
        for record in records:
            for sample in record.runnable:  # none if it was preempted by one before it
                if sample.remaining == 1:
                    self._plan_decode(step, record, sample)
        planned = {part.sequence for part in step.slices}
        for record in records:
            for sample in record.runnable:
                if sample.remaining > 1 and sample.id not in planned:
                    self._plan_prefill(step, record, sample)
        if not step.preempted:
            self._admit(step)
        self._plan_drafts(step)
        self._newest = _PlannedStep(ForwardPlan(tuple(step.copies), tuple(step.slices)))
        if step.slices:
            self._in_flight.append(self._newest)
        return self._newest.plan

    def propose(self, drafts: Mapping[int, Sequence[int]]) -> ForwardPlan:
        """Return the step that was planned last, with proposed tokens by sequence.

        How many of them are drawn decides how many the next steps of a sequence have room for.

        Raises:
            SchedulerError: no step is planned.
            MegatronError: it has no room for the tokens.
        """
        step = self._required(self._newest)
        plan = with_drafts(step.plan, drafts)
        step.proposed = {sequence: len(tokens) for sequence, tokens in drafts.items()}
        return plan

    def counting(self) -> frozenset[int]:
        """Return the sequences of the oldest step in flight that have not ended meanwhile.

        Raises:
            SchedulerError: no step is planned.
        """
        planned = {part.sequence for part in self._oldest().plan.slices}
        return frozenset(sample.id for _, sample in self._runnable() if sample.id in planned)

    def complete(self, drawn: Mapping[int, Sequence[int]], stopped: Collection[int] = ()) -> None:
        """Take the result of the oldest step in flight.

        Args:
            drawn: the drawn tokens of every slice that samples, by sequence: those that were
                proposed and are right, and one more. Those of requests that have ended meanwhile
                are dropped, and so are those behind a token that ends a sample.
            stopped: sequences whose text has a stop string; judged by the caller.

        Raises:
            SchedulerError: no step is planned, or the tokens are not those of its sequences.
        """
        step = self._oldest()
        plan = step.plan
        self._check_drawn(plan, drawn, stopped)
        self._end_oldest()
        by_sequence = {sample.id: (record, sample) for record, sample in self._runnable()}
        for part in plan.slices:
            if part.sequence in by_sequence:
                record, sample = by_sequence[part.sequence]
                tokens = record.kept_tokens(sample, drawn.get(part.sequence, ()))
                sample.tokens += tokens
                sample.computed = part.end + max(0, len(tokens) - 1)  # the last one is not
                record.scored = max(record.scored, part.start + len(part.targets))
                self._enter_full_blocks(record, sample)
        for record in self._running.values():
            record.fork_samples(self.pool, self.limits.block_size)
        for part in plan.slices:
            if part.sequence not in by_sequence:
                continue
            record, sample = by_sequence[part.sequence]
            if part.samples:
                sample.drafting = window_after(
                    sample.drafting,
                    proposed=step.proposed.get(part.sequence, 0),
                    accepted=len(drawn[part.sequence]) - 1,
                    most=self.limits.speculative_tokens,
                )
                length, last = len(sample.tokens), sample.tokens[-1]
                sample.finish = record.finish_of(length, last, part.sequence in stopped)
            elif record.request.max_new_tokens == 0 and sample.remaining == 0:
                sample.finish = FinishReason.LENGTH
            if sample.finish is not None:
                sample.release(self.pool)
        for record in self._by_seniority():
            self._settle(record)

    def fail_step(self, detail: str) -> None:
        """End all requests of the oldest step in flight, because it could not be computed.

        Raises:
            SchedulerError: no step is planned.
        """
        failed = {part.sequence for part in self._oldest().plan.slices}
        self._end_oldest()
        for record in self._by_seniority():
            if any(sample.id in failed for sample in record.samples):
                self._end(record, RequestState.FAILED, detail)

    def fail_sequences(self, failed: Mapping[int, str]) -> None:
        """End the requests of some sequences of the oldest step in flight: no scores can be used.

        Call it before `complete`, which takes the tokens of the others. Their blocks leave the
        index, so that no other request reads them.

        Args:
            failed: what is wrong, by sequence.

        Raises:
            SchedulerError: no step is planned, or one of the sequences is not in it.
        """
        step = self._oldest()
        plan = step.plan
        if outside := failed.keys() - {part.sequence for part in plan.slices}:
            raise SchedulerError(
                "a sequence fails that the step does not compute",
                found=f"sequence {min(outside)}, a step of {len(plan.slices)} sequences",
                fix="name sequences of the planned step",
            )
        for record in self._by_seniority():
            details = [failed[one.id] for one in record.samples if one.id in failed]
            if details:
                for block in {block for one in record.samples for block in one.blocks}:
                    if block in self.pool.index:
                        self.pool.forget(block)
                self._end(record, RequestState.FAILED, details[0])
        rest = tuple(part for part in plan.slices if part.sequence not in failed)
        step.plan = replace(plan, slices=rest)

    def drop_cache(self, weights_version: int | None = None) -> None:
        """Forget all keys and values, such as those of former weights; all are computed again.

        Running requests go back into the queue, which does not count as a preemption.

        Raises:
            SchedulerError: a step is planned.
        """
        if self._in_flight:
            raise SchedulerError(
                "the cache is dropped while a step uses it",
                found=f"a step of {len(self._in_flight[0].plan.slices)} sequences",
                fix="complete the step first",
            )
        for record in self._by_seniority():
            self._requeue(record)
        self.pool.drop_cached()
        if weights_version is not None:
            self.weights_version = weights_version

    def take_ended(self) -> list[RequestEnd]:
        """Return the requests that ended since the last call, in their order; each only once."""
        ended, self._ended = self._ended, []
        return ended

    def take_preemptions(self) -> list[Preemption]:
        """Return the preemptions since the last call."""
        preemptions, self._preemptions = self._preemptions, []
        return preemptions

    def _start_step(self, now_ns: int) -> None:
        if len(self._in_flight) >= self.limits.steps_in_flight:
            raise SchedulerError(
                "a step is planned before the last one is complete",
                found=f"{len(self._in_flight)} in flight, the oldest of "
                f"{len(self._in_flight[0].plan.slices)} sequences",
                fix="call complete() or fail_step() after every plan() that has slices",
            )
        if type(now_ns) is not int or (self.now_ns is not None and now_ns < self.now_ns):
            raise SchedulerError(
                "the time of a step is not an integer of nanoseconds that does not go back",
                found=f"{now_ns!r} after {self.now_ns!r}",
                fix="give time.monotonic_ns() of the leader",
            )
        self.now_ns = now_ns

    def _oldest(self) -> _PlannedStep:
        return self._required(self._in_flight[0] if self._in_flight else None)

    def _required(self, step: _PlannedStep | None) -> _PlannedStep:
        if step is None:
            raise SchedulerError(
                "a step ends that was not planned",
                found="no plan since the last step",
                fix="call plan() before complete() or fail_step()",
            )
        return step

    def _end_oldest(self) -> None:
        if self._in_flight.popleft() is self._newest:
            self._newest = None

    def _check_drawn(
        self, plan: ForwardPlan, drawn: Mapping[int, Sequence[int]], stopped: Collection[int]
    ) -> None:
        most = {part.sequence: 1 + part.draft_room for part in plan.slices if part.samples}
        expected = most.keys()
        wrong = (expected ^ drawn.keys()) or (set(stopped) - expected)
        if wrong := wrong or {each for each in drawn if not 0 < len(drawn[each]) <= most[each]}:
            raise SchedulerError(
                "the drawn tokens are not those of the planned sequences",
                found=f"sequence {min(wrong)}; tokens of {sorted(drawn)}, stops of "
                f"{sorted(stopped)}, planned {sorted(expected)}",
                fix="give one token for each slice that samples, and no more than it has room for",
            )
        for sequence, token in ((each, token) for each in drawn for token in drawn[each]):
            if not 0 <= token < self.limits.vocab_size:
                raise SchedulerError(
                    "a drawn token is not in the vocabulary",
                    found=f"{token} of sequence {sequence}, vocabulary {self.limits.vocab_size}",
                    fix="mask the padding of the vocabulary before drawing",
                )

    def _stop(self, record: RequestRecord, sample: SampleSequence) -> None:
        sample.finish = FinishReason.STOP
        sample.release(self.pool)
        if not record.unfinished:
            self._end(record, RequestState.COMPLETED, "")
        elif record.state.is_running and not any(record.runnable):
            self._requeue(record)  # it was to compute the prompt of the others

    def _record(self, request: str) -> RequestRecord | None:
        return self._running.get(request) or self._waiting.get(request)

    def _expire(self, now_ns: int) -> None:
        for record in [*self._running.values(), *self._waiting.values()]:
            deadline = record.request.deadline_ns
            if deadline is not None and deadline <= now_ns:
                waited_ms = (now_ns - record.request.arrival_ns) / 1e6
                detail = f"{record.state} at its deadline, {waited_ms:.0f} ms after its arrival"
                self._end(record, RequestState.EXPIRED, detail)

    def _by_seniority(self) -> list[RequestRecord]:
        return sorted(self._running.values(), key=lambda record: record.seniority)

    def _runnable(self) -> Iterator[tuple[RequestRecord, SampleSequence]]:
        for record in self._by_seniority():
            for sample in record.runnable:
                yield record, sample

    def _idle(self) -> list[RequestRecord]:
        """Return the running requests that no step in flight computes, by seniority."""
        computed = {part.sequence for step in self._in_flight for part in step.plan.slices}
        return [
            record
            for record in self._by_seniority()
            if computed.isdisjoint(sample.id for sample in record.unfinished)
        ]

    def _share_of_step(self) -> list[RequestRecord]:
        """Return the idle requests that a step takes: its share of all decodes, and all others.

        Steps in flight have equally many decodes, so that none waits for a longer one. A request is
        left out with all of its samples, and is before those of this step in the next one.
        """
        decodes = {
            record.request.id: sum(sample.remaining == 1 for sample in record.runnable)
            for record in self._running.values()
        }
        share = -(-sum(decodes.values()) // self.limits.steps_in_flight)
        records, taken = [], 0
        for record in self._idle():
            count = decodes[record.request.id]
            if count == 0 or taken < share:
                records.append(record)
                taken += count
        return records

    def _available(self) -> int:
        counts = self.counts
        return counts.blocks.available - counts.reserved

    def _plan_decode(self, step: _Step, record: RequestRecord, sample: SampleSequence) -> None:
        """Plan one token, unless it needs a block that only older requests could give."""
        needs_block = sample.computed == len(sample.blocks) * self.limits.block_size
        while needs_block and not sample.reserved and self._available() < 1:
            if not self._preempt_for(record):
                return  # it keeps its blocks and waits for the next step
            step.preempted = True
        self._plan_slice(step, record, sample, 1)

    def _plan_prefill(self, step: _Step, record: RequestRecord, sample: SampleSequence) -> None:
        """Plan as many tokens as are left of the step; their blocks are reserved."""
        if step.budget > 0:
            self._plan_slice(step, record, sample, min(sample.remaining, step.budget))

    def _plan_slice(
        self, step: _Step, record: RequestRecord, sample: SampleSequence, count: int
    ) -> None:
        start, end = sample.computed, sample.computed + count
        if start < len(sample.blocks) * self.limits.block_size:
            self._own_block(step, record, sample)
        blocks = self._blocks_up_to(sample, end)
        tokens = tuple(sample.tokens[start:end])
        samples = end == len(sample.tokens) and record.request.max_new_tokens > 0
        step.slices.append(
            SequenceSlice(
                sample.id,
                tokens,
                start,
                blocks,
                samples,
                # The last token of a prompt, alone, sees all of it as any other does.
                prefix=record.prompt_length if self.limits.prompt_is_prefix and start == 0 else 0,
                targets=record.targets(start, end),
                top_targets=record.request.prompt_logprobs or 0,
                embeds=record.request.embeds,
            )
        )
        step.budget -= count

    def _plan_drafts(self, step: _Step) -> None:
        """Let decodes have proposed tokens, as far as the step and the pool have something left."""
        if not self.limits.speculative_tokens:
            return
        runnable = {sample.id: (record, sample) for record, sample in self._runnable()}
        for place, part in enumerate(step.slices):
            record, sample = runnable[part.sequence]
            if not part.samples or len(part.tokens) > 1:
                continue
            spare = sample.reserved + max(0, self._available() - self.limits.watermark_blocks)
            room = min(
                sample.drafting.room,
                step.budget,
                record.tokens_left(sample) - 1,  # one is drawn anyway
                (len(sample.blocks) + spare) * self.limits.block_size - part.end,
            )
            if room > 0:
                blocks = self._blocks_up_to(sample, part.end + room)
                step.slices[place] = replace(part, blocks=blocks, draft_room=room)
                step.budget -= room

    def _blocks_up_to(self, sample: SampleSequence, end: int) -> tuple[int, ...]:
        """Return the block table of the positions before `end`, with new blocks where it needs."""
        needed = self.limits.blocks_for(end)
        while len(sample.blocks) < needed:
            sample.reserved = max(0, sample.reserved - 1)
            sample.blocks.append(self.pool.allocate())
        return tuple(sample.blocks[:needed])

    def _own_block(self, step: _Step, record: RequestRecord, sample: SampleSequence) -> None:
        """Let a sequence write into the block of its next position: a copy if others read it."""
        place = sample.computed // self.limits.block_size
        source = sample.blocks[place]
        if self.pool.references(source) > 1:
            record.reserved_copies -= 1
            sample.blocks[place] = self.pool.allocate()
            step.copies.append((source, sample.blocks[place]))
            self.pool.release([source])
        elif source in self.pool.index:
            self.pool.forget(source)

    def _preempt_for(self, record: RequestRecord) -> bool:
        """Take the blocks of the youngest request that may lose them; return whether one did.

        Not of one that a step in flight computes: its tokens would be dropped and told of. In the
        next step those are idle, and the request that needs a block is before them.
        """
        younger = [
            other
            for other in self._idle()
            if other.seniority > record.seniority
            and other.preemptions < self.limits.max_preemptions
        ]
        if not younger:
            return False
        victim = younger[-1]
        victim.preemptions += 1
        lost = self._requeue(victim)
        self._preemptions.append(Preemption(victim.request.id, lost, victim.preemptions))
        return True

    def _requeue(self, record: RequestRecord) -> int:
        """Put a running request back into the queue; return how many computed tokens that loses."""
        record.move(RequestState.QUEUED)
        self._waiting[record.request.id] = self._running.pop(record.request.id)
        return record.release(self.pool)

    def _queue(self) -> list[RequestRecord]:
        """Return the waiting requests: those that were passed too often, then by seniority."""
        return sorted(
            self._waiting.values(),
            key=lambda record: (
                (0, 0, record.order) if self._is_overdue(record) else (1, *record.seniority)
            ),
        )

    def _is_overdue(self, record: RequestRecord) -> bool:
        return record.passes >= self.limits.max_passes

    def _passes_overdue(self, record: RequestRecord) -> bool:
        """Return whether an older request waits that may not be passed once more."""
        return any(
            other.order < record.order and self._is_overdue(other)
            for other in self._waiting.values()
        )

    def _admit(self, step: _Step) -> None:
        """Start waiting requests while the step has tokens left for them."""
        sequences = sum(len(record.unfinished) for record in self._running.values())
        for record in self._queue():
            if step.budget <= 0:
                return
            is_cut = self.limits.prompt_is_prefix and record.prompt_length > step.budget
            fit = None if is_cut else self._fit(record, sequences)
            if fit is None or self._passes_overdue(record):
                continue
            self._start(record, fit)
            sequences += len(record.unfinished)
            for other in self._waiting.values():
                other.passes += other.order < record.order
            self._plan_prefill(step, record, record.unfinished[0])

    def _fit(self, record: RequestRecord, sequences: int) -> _Fit | None:
        """Return how a request fits beside `sequences` running ones; None if it does not."""
        if sequences + len(record.unfinished) > self.limits.max_sequences:
            return None
        spare = 1 + self.limits.watermark_blocks if sequences else 0
        available = self._available() - spare
        if available < 1:  # every request needs a block of its own
            return None
        is_last_try = record.preemptions >= self.limits.max_preemptions
        needed = record.blocks_needed(self.limits, worst_case=is_last_try)
        entries: list[PrefixEntry] = []
        if record.request.reuses_prefix:
            root = record.root(self.weights_version)
            entries = self.pool.index.match(root, record.unfinished[0].tokens)
        unread = sum(self.pool.references(entry.block) == 0 for entry in entries)
        taken = needed.total - len(entries) + unread
        return _Fit(entries, needed) if taken <= available else None

    def _start(self, record: RequestRecord, fit: _Fit) -> None:
        first = record.unfinished[0]
        for entry in fit.entries:
            self.pool.share(entry.block)
        first.blocks = [entry.block for entry in fit.entries]
        first.entries = list(fit.entries)
        first.computed = len(first.blocks) * self.limits.block_size
        first.is_forked = True
        for sample, count in zip(record.unfinished, fit.needed.of_samples):
            sample.reserved = count - len(sample.blocks)
        record.reserved_copies = fit.needed.copies
        record.move(RequestState.PREFILL)
        self._running[record.request.id] = self._waiting.pop(record.request.id)

    def _enter_full_blocks(self, record: RequestRecord, sample: SampleSequence) -> None:
        """Enter blocks into the index whose last position has been computed."""
        if self.limits.prompt_is_prefix:
            return  # they depend on tokens behind them as well
        size, root = self.limits.block_size, record.root(self.weights_version)
        for place in range(len(sample.entries), sample.computed // size):
            tokens = tuple(sample.tokens[place * size : (place + 1) * size])
            parent = sample.entries[-1] if sample.entries else None
            entry = self.pool.index.insert(root, parent, tokens, sample.blocks[place])
            if entry is None:
                return
            sample.entries.append(entry)

    def _settle(self, record: RequestRecord) -> None:
        """Bring the state of a request up to date with its sequences."""
        unfinished = record.unfinished
        is_decoding = all(one.is_forked and one.remaining == 1 for one in unfinished)
        if record.state is RequestState.PREFILL and is_decoding:
            record.move(RequestState.DECODE)
        if all(one.is_forked and one.computed >= record.prompt_length for one in unfinished):
            record.reserved_copies = 0
        if not unfinished:
            self._end(record, RequestState.COMPLETED, "")

    def _end(self, record: RequestRecord, state: RequestState, detail: str) -> None:
        record.release(self.pool)
        self._running.pop(record.request.id, None)
        self._waiting.pop(record.request.id, None)
        self._ended.append(record.end(state, detail))
