"""Tests of megatron.scheduling.scheduler."""

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.prefix_index import PrefixIndex
from megatron.scheduling.requests import (
    DuplicateRequestError,
    FinishReason,
    QueueFullError,
    Request,
    RequestError,
    RequestState,
)
from megatron.scheduling.scheduler import Scheduler, SchedulerError
from tests.support.examples import examples
from tests.support.inference.paged_engine import SimulatedRun, check_blocks

VOCABULARY = 5
LIMITS = SchedulerLimits(
    blocks=8,
    block_size=2,
    max_length=60,
    vocab_size=VOCABULARY,
    max_tokens_per_step=8,
    max_sequences=4,
    max_queued=3,
    watermark_blocks=0,
)
TWO = dataclasses.replace(LIMITS, steps_in_flight=2)


def request(name: str = "a", prompt: int = 3, new: int = 4, **others: object) -> Request:
    salt = name.encode()  # no request finds the blocks of another one
    values = {"prompt": (1,) * prompt, "max_new_tokens": new, "arrival_ns": 0, "salt": salt}
    return Request(id=name, **values | others)  # type: ignore[arg-type]


def step(scheduler: Scheduler, now_ns: int = 0, token: int = 0) -> ForwardPlan:
    """Plan a step, and complete it with the same token for each sequence."""
    plan = scheduler.plan(now_ns)
    if plan.slices:
        scheduler.complete({part.sequence: [token] for part in plan.slices if part.samples})
    check_blocks(scheduler)
    return plan


def sizes(plan: ForwardPlan) -> dict[int, int]:
    """Return how many tokens of each sequence a plan computes."""
    return {part.sequence: len(part.tokens) for part in plan.slices}


Load = tuple[SchedulerLimits, list[Request], dict[int, str], dict[int, int]]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """Limits so small that requests get in each other's way, requests, aborts and stops by step."""
    is_prefix = draw(st.integers(0, 3)) == 0
    limits = SchedulerLimits(
        prompt_is_prefix=is_prefix,
        blocks=draw(st.integers(4, 14)),
        block_size=draw(st.integers(1, 4)),
        max_length=40,
        vocab_size=VOCABULARY,
        max_tokens_per_step=draw(st.integers(12, 16) if is_prefix else st.integers(4, 9)),
        max_sequences=4,
        watermark_blocks=draw(st.integers(0, 2)),
        max_passes=draw(st.integers(0, 3)),
        max_preemptions=draw(st.integers(0, 3)),
        speculative_tokens=draw(st.integers(0, 4)),
        steps_in_flight=draw(st.integers(1, 3)),
    )
    requests = []
    for number in range(draw(st.integers(1, 12))):
        prompt = draw(st.lists(st.integers(0, 1), min_size=1, max_size=12))
        samples = draw(st.integers(1, 3))
        longest = limits.longest_answer(len(prompt), samples)
        if longest == 0:
            continue
        arrival_ns = draw(st.integers(0, 10)) * 1_000_000
        ends_ns = draw(st.none() | st.integers(1, 30))
        requests.append(
            Request(
                id=str(number),
                prompt=tuple(prompt),
                max_new_tokens=(new := draw(st.integers(int(samples > 1), longest))),
                samples=samples,
                arrival_ns=arrival_ns,
                deadline_ns=None if ends_ns is None else arrival_ns + ends_ns * 1_000_000,
                priority=draw(st.integers(0, 1)),
                stop_tokens=frozenset(draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=1))),
                min_new_tokens=draw(st.integers(0, min(1, new))),
                salt=draw(st.sampled_from((b"", b"x"))),
                prompt_logprobs=draw(st.none() if is_prefix else st.none() | st.integers(0, 2)),
            )
        )
    aborts = draw(st.dictionaries(st.integers(0, 20), st.integers(0, 11).map(str), max_size=3))
    stops = draw(st.dictionaries(st.integers(0, 20), st.integers(0, 15), max_size=4))
    return limits, requests, aborts, stops


class TestEveryLoad:
    @examples(400)
    @given(load=loads(), collide=st.booleans())
    def test_every_request_ends_once_with_the_text_that_it_has_alone(
        self, load: Load, collide: bool
    ) -> None:
        limits, requests, aborts, stops = load
        hash_function = (lambda content: bytes((sum(content) % 3,))) if collide else None
        index = PrefixIndex(limits.block_size, hash_function=hash_function)
        run = SimulatedRun(Scheduler(limits, index=index), requests, aborts, stops)
        run.run()  # checks after each step that no block is lost and that something is computed
        event(f"some proposed tokens were accepted: {run.engine.accepted > 0}")
        event(f"steps in flight: {run.most_in_flight}")
        run.check_outputs()
        assert run.ends.keys() == {one.id for one in requests}
        assert run.scheduler.counts.blocks.referenced == 0
        for one in requests:
            may_end = {RequestState.COMPLETED}
            may_end |= {RequestState.EXPIRED} if one.deadline_ns is not None else set()
            may_end |= {RequestState.ABORTED} if one.id in aborts.values() else set()
            assert run.ends[one.id].state in may_end

    @examples(200)
    @given(load=loads())
    def test_waiting_and_computing_again_are_bounded(self, load: Load) -> None:
        limits, requests, *_ = load
        scheduler = Scheduler(limits)
        run = SimulatedRun(scheduler, requests)
        passed: list[int] = []
        start = scheduler._start

        def observed_start(record: object, fit: object) -> None:
            start(record, fit)  # type: ignore[arg-type]
            passed.extend(one.passes for one in scheduler._waiting.values())

        scheduler._start = observed_start  # type: ignore[assignment, method-assign]
        run.run()
        assert max(passed, default=0) <= limits.max_passes
        counts = [one.times for one in scheduler.take_preemptions()]
        assert max(counts, default=0) <= limits.max_preemptions
        tokens = sum(one.samples * (len(one.prompt) + one.max_new_tokens) for one in requests)
        assert run.steps <= (1 + limits.max_preemptions) * tokens


class TestSteps:
    def test_decodes_come_first_and_the_oldest_prefill_has_the_rest_of_the_tokens(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, blocks=40))
        scheduler.submit(request("a", prompt=3))
        assert sizes(step(scheduler)) == {0: 3}
        scheduler.submit(request("b", prompt=12))
        scheduler.submit(request("c", prompt=2))
        assert sizes(step(scheduler)) == {0: 1, 1: 7}
        assert sizes(step(scheduler)) == {0: 1, 1: 5, 2: 2}
        assert sizes(step(scheduler)) == {0: 1, 1: 1, 2: 1}

    def test_proposed_tokens_get_what_the_step_the_pool_and_the_request_have_left(self) -> None:
        limits = dataclasses.replace(LIMITS, speculative_tokens=3, max_tokens_per_step=8)
        scheduler = Scheduler(limits)  # of 8 blocks of 2 tokens
        scheduler.submit(request("a", prompt=3, new=9))
        assert [part.draft_room for part in step(scheduler).slices] == [0]
        scheduler.submit(request("b", prompt=5, new=2))
        plan = step(scheduler)
        assert sizes(plan) == {0: 1, 1: 5}
        assert [part.draft_room for part in plan.slices] == [2, 0]  # of 8 tokens 2 are left
        assert len(plan.slices[0].blocks) == 3
        plan = scheduler.plan(0)
        assert [part.draft_room for part in plan.slices] == [3, 0]  # b draws its last one anyway
        assert plan.token_count == 5
        scheduler.complete({0: [1, 1, 1], 1: [1]})  # two of three were right
        assert scheduler.plan(0).slices[0].start == 7
        scheduler.complete({0: [1]})
        plan = scheduler.plan(0)
        assert (plan.slices[0].start, plan.slices[0].draft_room) == (8, 2)  # three tokens are left
        check_blocks(scheduler)

    def test_proposed_tokens_take_no_block_that_a_request_would_lose_for_them(self) -> None:
        limits = dataclasses.replace(LIMITS, speculative_tokens=3, blocks=4, max_passes=0)
        scheduler = Scheduler(limits)
        scheduler.submit(request("a", prompt=3, new=3))
        scheduler.submit(request("b", prompt=2, new=3))
        step(scheduler)
        plan = step(scheduler)
        assert sizes(plan) == {0: 1, 1: 1}
        assert [part.draft_room for part in plan.slices] == [0, 1]  # in the block that b has begun
        assert scheduler.take_preemptions() == []

    def test_where_proposed_tokens_are_wrong_a_sequence_gets_ever_less_room_for_them(self) -> None:
        limits = dataclasses.replace(LIMITS, speculative_tokens=4, blocks=64, max_length=256)
        rooms = {"right": [], "wrong": [], "unknown": []}  # type: dict[str, list[int]]
        for kind, found in rooms.items():
            scheduler = Scheduler(limits)
            scheduler.submit(request(new=60))
            step(scheduler)
            while scheduler.counts.running:
                room = scheduler.plan(0).slices[0].draft_room
                found.append(room)
                if kind != "unknown":
                    scheduler.propose({0: [1] * room})
                scheduler.complete({0: [1] * (1 + room * (kind == "right"))})
        assert set(rooms["right"][:-1]) == {4}
        assert rooms["unknown"][:50] == [4] * 50
        assert rooms["wrong"][:12] == [4, 2, 1, 0, 1, 0, 0, 1, 0, 0, 0, 0]
        assert sum(rooms["wrong"]) == 4 + 2 + 6

    def test_tokens_are_proposed_for_a_step_that_is_planned(self) -> None:
        scheduler = Scheduler(LIMITS)
        with pytest.raises(SchedulerError, match="a step ends that was not planned"):
            scheduler.propose({})

    def test_tokens_behind_a_stop_token_are_dropped(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, speculative_tokens=3))
        scheduler.submit(request(stop_tokens=frozenset({4})))
        step(scheduler)
        assert scheduler.plan(0).slices[0].draft_room == 2
        scheduler.complete({0: [4, 1, 1]})
        (end,) = scheduler.take_ended()
        assert (end.finishes, end.new_tokens) == ((FinishReason.STOP,), (2,))

    def test_a_prompt_that_is_a_prefix_waits_for_a_step_that_has_room_for_all_of_it(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, blocks=40, prompt_is_prefix=True))
        scheduler.submit(request("a", prompt=5))
        scheduler.submit(request("b", prompt=4))
        assert sizes(step(scheduler)) == {0: 5}
        plan = step(scheduler)
        assert sizes(plan) == {0: 1, 1: 4}
        assert [part.prefix for part in plan.slices] == [0, 4]

    def test_only_the_last_chunk_of_a_prompt_samples(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request(prompt=9))
        parts = [step(scheduler).slices[0] for _ in range(3)]
        assert [(part.start, len(part.tokens), part.samples) for part in parts] == [
            (0, 8, False),
            (8, 1, True),
            (9, 1, True),
        ]
        assert [len(part.blocks) for part in parts] == [4, 5, 5]

    def test_a_sample_ends_at_any_of_its_stop_tokens_or_at_its_length(self) -> None:
        scheduler = Scheduler(LIMITS)
        for name, stop in (("a", {3}), ("b", {2, 4}), ("c", set())):
            scheduler.submit(request(name, 1, 2, stop_tokens=frozenset(stop)))
        step(scheduler, token=4)
        step(scheduler, token=3)
        ends = {end.request: (end.finishes, end.new_tokens) for end in scheduler.take_ended()}
        assert ends == {
            "a": ((FinishReason.STOP,), (2,)),
            "b": ((FinishReason.STOP,), (1,)),
            "c": ((FinishReason.LENGTH,), (2,)),
        }
        assert scheduler.take_ended() == []

    def test_a_stop_string_ends_a_sample_unless_it_is_too_short(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request(min_new_tokens=2))
        for _ in range(2):
            scheduler.plan(0)
            scheduler.complete({0: [1]}, stopped={0})
        (end,) = scheduler.take_ended()
        assert (end.finishes, end.new_tokens) == ((FinishReason.STOP,), (2,))

    def test_a_sample_is_ended_between_steps_and_its_request_with_the_last_one(self) -> None:
        scheduler = Scheduler(LIMITS)
        first, second = scheduler.submit(request(prompt=10, new=2, samples=2))
        scheduler.plan(0)
        assert scheduler.stop_sample(first)  # while it computes the prompt, which the other needs
        assert not scheduler.stop_sample(first)
        assert not scheduler.stop_sample(99)
        scheduler.complete({})
        assert sizes(step(scheduler)) == {second: 8}
        assert sizes(step(scheduler)) == {second: 2}
        assert scheduler.stop_sample(second)
        (end,) = scheduler.take_ended()
        assert (end.state, end.new_tokens) == (RequestState.COMPLETED, (0, 1))
        assert end.finishes == (FinishReason.STOP,) * 2
        assert scheduler.counts.blocks.referenced == scheduler.counts.reserved == 0

    def test_steps_in_flight_share_the_decodes_out(self) -> None:
        scheduler = Scheduler(dataclasses.replace(TWO, blocks=40, max_sequences=5))
        for name in "abc":
            scheduler.submit(request(name, prompt=2))
        step(scheduler)
        assert scheduler.may_plan
        first, second = scheduler.plan(0), scheduler.plan(0)
        assert (sizes(first), sizes(second)) == ({0: 1, 1: 1}, {2: 1})
        assert not scheduler.may_plan
        with pytest.raises(SchedulerError, match="before the last one is complete") as refused:
            scheduler.plan(0)
        assert refused.value.found == "2 in flight, the oldest of 2 sequences"
        scheduler.complete({sequence: [1] for sequence in sizes(first)})
        assert sizes(scheduler.plan(0)) == sizes(first)
        scheduler.complete({sequence: [1] for sequence in sizes(second)})

    def test_a_request_has_all_of_its_samples_in_one_step(self) -> None:
        scheduler = Scheduler(dataclasses.replace(TWO, blocks=40))
        scheduler.submit(request("a", prompt=2, samples=3))
        scheduler.submit(request("b", prompt=2))
        step(scheduler)
        assert sizes(scheduler.plan(0)) == {0: 1, 1: 1, 2: 1}, "more than its share"
        assert sizes(scheduler.plan(0)) == {3: 1}

    def test_alone_a_request_is_in_one_step_at_a_time(self) -> None:
        scheduler = Scheduler(TWO)
        scheduler.submit(request())
        plan = scheduler.plan(0)
        assert not scheduler.may_plan
        assert not scheduler.plan(0).slices
        assert scheduler.propose({}).slices == (), "of the newest plan, which is not in flight"
        assert scheduler.counting() == {0}
        assert scheduler.abort("a")
        assert scheduler.counting() == frozenset()
        scheduler.complete({part.sequence: [1] for part in plan.slices})
        assert scheduler.take_ended()[0].new_tokens == (0,)

    def test_a_request_in_flight_loses_its_blocks_after_its_step(self) -> None:
        scheduler = Scheduler(dataclasses.replace(TWO, blocks=5))
        scheduler.submit(request("a", prompt=3))
        scheduler.submit(request("b", prompt=4))
        assert sizes(step(scheduler)) == {0: 3, 1: 4}
        assert sizes(scheduler.plan(0)) == {0: 1}
        assert sizes(scheduler.plan(0)) == {1: 1}, "it takes the last block"
        scheduler.complete({0: [1]})
        assert not scheduler.plan(0).slices, "the older one needs another"
        assert scheduler.take_preemptions() == []
        scheduler.complete({1: [1]})
        assert sizes(scheduler.plan(0)) == {0: 1}
        assert [each.request for each in scheduler.take_preemptions()] == ["b"]

    def test_samples_share_the_prompt_and_copy_the_block_that_they_write(self) -> None:
        scheduler = Scheduler(LIMITS)
        assert scheduler.submit(request(prompt=4, new=2, samples=3)) == (0, 1, 2)
        assert step(scheduler).copies == ()
        plan = step(scheduler)
        # Each other sample computes the last token of the prompt, at position 3, in its own block.
        assert [(part.start, len(part.tokens)) for part in plan.slices] == [(4, 1), (3, 1), (3, 1)]
        tables = [part.blocks for part in plan.slices]
        assert len({table[0] for table in tables}) == 1
        assert len({table[1] for table in tables}) == 3
        assert [source for source, _ in plan.copies] == [tables[0][1]] * 2

    def test_a_prompt_that_was_computed_is_computed_only_at_its_end(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request("a", prompt=4, new=1))
        step(scheduler)
        for name, others, computed in (
            ("b", {"salt": b"a"}, 2),
            ("c", {"salt": b"a", "prompt_logprobs": 0}, 4),
            ("d", {"salt": b"other"}, 4),
        ):
            (sequence,) = scheduler.submit(request(name, prompt=4, new=1, **others))
            assert sizes(step(scheduler)) == {sequence: computed}

    def test_a_prompt_alone_is_computed_in_parts_and_scored_in_each(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, max_tokens_per_step=4))
        scheduler.submit(request("a", prompt=6, new=0, prompt_logprobs=3))
        first, second = (step(scheduler).slices[0] for _ in range(2))
        assert [len(part.targets) for part in (first, second)] == [4, 1]
        assert (first.targets[-1], second.top_targets) == (second.tokens[0], 3)
        assert (first.samples, second.samples) == (False, False)
        (end,) = scheduler.take_ended()
        assert (end.state, end.new_tokens) == (RequestState.COMPLETED, (0,))

    def test_a_sequence_that_fails_ends_its_request_alone_and_leaves_the_cache(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request("a", prompt=4, samples=2))
        scheduler.submit(request("b", prompt=3, salt=b"other"))
        step(scheduler)
        plan = scheduler.plan(0)
        scheduler.fail_sequences({0: "not finite"})
        scheduler.complete({part.sequence: [1] for part in plan.slices if part.sequence != 0})
        (end,) = scheduler.take_ended()
        assert (end.request, end.state, end.detail) == ("a", RequestState.FAILED, "not finite")
        check_blocks(scheduler)
        (again,) = scheduler.submit(request("c", prompt=4, salt=b"a"))
        assert sizes(step(scheduler)) == {2: 1, again: 4}

    def test_a_step_that_failed_is_not_in_the_cache_and_ends_its_requests(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, max_tokens_per_step=4))
        scheduler.submit(request("a", prompt=4))
        scheduler.submit(request("b", prompt=4))
        scheduler.plan(0)
        scheduler.fail_step("the kernel failed")
        (end,) = scheduler.take_ended()
        assert (end.request, end.state, end.detail) == (
            "a",
            RequestState.FAILED,
            "the kernel failed",
        )
        assert scheduler.counts.blocks == (0, 0, 8)
        assert sizes(step(scheduler)) == {1: 4}

    def test_the_result_of_a_request_that_was_aborted_meanwhile_is_dropped(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request("a", prompt=4))
        scheduler.plan(0)
        assert scheduler.abort("a")
        assert not scheduler.abort("a")
        assert not scheduler.abort("unknown")
        scheduler.complete({0: [1]})
        (end,) = scheduler.take_ended()
        assert (end.state, end.new_tokens) == (RequestState.ABORTED, (0,))
        assert scheduler.counts.blocks == (0, 0, 8)

    def test_a_request_expires_at_its_deadline_wherever_it_is(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, max_sequences=1))
        scheduler.submit(request("a", deadline_ns=10))
        scheduler.submit(request("b", deadline_ns=11))
        assert step(scheduler, now_ns=9).slices
        assert scheduler.take_ended() == []
        assert sizes(step(scheduler, now_ns=10)) == {1: 3}
        assert not step(scheduler, now_ns=11).slices
        ends = scheduler.take_ended()
        assert [(end.request, end.state) for end in ends] == [
            ("a", RequestState.EXPIRED),
            ("b", RequestState.EXPIRED),
        ]
        assert ends[0].detail == "decode at its deadline, 0 ms after its arrival"
        assert scheduler.counts.blocks.referenced == 0


class TestMemory:
    def test_the_youngest_loses_its_blocks_which_are_used_in_the_same_step(self) -> None:
        scheduler = Scheduler(dataclasses.replace(LIMITS, blocks=5))
        scheduler.submit(request("a", prompt=4, new=5))
        scheduler.submit(request("b", prompt=3, new=5))
        assert sizes(step(scheduler)) == {0: 4, 1: 3}
        assert sizes(step(scheduler)) == {0: 1, 1: 1}
        assert sizes(step(scheduler)) == {0: 1}  # b needs a block, and nobody is younger
        assert scheduler.take_preemptions() == []
        assert sizes(step(scheduler)) == {0: 1}
        assert scheduler.take_preemptions() == [("b", 4, 1)]

    def test_a_request_is_admitted_only_with_blocks_to_go_on(self) -> None:
        for watermark, admitted in ((0, {0: 1, 1: 4}), (1, {0: 1})):
            limits = dataclasses.replace(LIMITS, blocks=6, watermark_blocks=watermark)
            scheduler = Scheduler(limits)
            scheduler.submit(request("a", prompt=5, new=2))
            step(scheduler)
            scheduler.submit(request("b", prompt=4, new=2))
            assert sizes(step(scheduler)) == admitted

    def test_a_large_head_is_passed_so_often_and_no_more(self) -> None:
        limits = dataclasses.replace(LIMITS, max_passes=2, max_queued=9)
        scheduler = Scheduler(limits)
        scheduler.submit(request("a", prompt=7, new=9))
        step(scheduler)
        (large,) = scheduler.submit(request("large", prompt=12, new=1))
        small = [scheduler.submit(request(f"s{i}", prompt=1, new=1))[0] for i in range(3)]
        started = [sizes(step(scheduler)).keys() - {0} for _ in range(8)]
        assert started[0] == set(small[:2])
        assert started[1:7] == [set()] * 6
        assert scheduler.counts.running == 0
        assert sizes(step(scheduler)).keys() == {large}

    def test_an_urgent_request_is_served_first_and_passes_others_so_often_only(self) -> None:
        limits = dataclasses.replace(LIMITS, max_sequences=1, max_passes=2, max_queued=9)
        scheduler = Scheduler(limits)
        (patient,) = scheduler.submit(request("patient", 1, 1, priority=1))
        urgent = [scheduler.submit(request(f"u{i}", 1, 1))[0] for i in range(4)]
        served = [next(iter(sizes(step(scheduler)))) for _ in range(5)]
        assert served == [*urgent[:2], patient, *urgent[2:]]

    def test_what_was_preempted_too_often_has_all_its_blocks_and_keeps_them(self) -> None:
        limits = dataclasses.replace(LIMITS, blocks=6, max_preemptions=0)
        scheduler = Scheduler(limits)
        scheduler.submit(request("a", prompt=2, new=5))  # 3 blocks to its end
        scheduler.submit(request("b", prompt=2, new=3))  # 2
        assert sizes(step(scheduler)) == {0: 2, 1: 2}
        assert scheduler.counts.reserved == 3
        while any(scheduler.counts[:2]):
            step(scheduler)
        assert scheduler.take_preemptions() == []

    def test_a_dropped_cache_is_computed_again_and_is_no_preemption(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request("a", prompt=4))
        step(scheduler, token=3)
        scheduler.drop_cache(weights_version=7)
        assert scheduler.weights_version == 7
        assert scheduler.counts.blocks == (0, 0, 8)
        (part,) = step(scheduler).slices
        assert (part.tokens, part.start) == ((1, 1, 1, 1, 3), 0)
        assert scheduler.take_preemptions() == []


class TestRefusals:
    def test_what_never_fits_is_refused_at_once(self) -> None:
        with pytest.raises(RequestError, match="longer than the model"):
            Scheduler(LIMITS).submit(request(prompt=20))

    def test_two_requests_of_one_id_are_refused(self) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request("a"))
        for state in ("queued", "decode"):
            with pytest.raises(DuplicateRequestError, match="two requests have the same id") as no:
                scheduler.submit(request("a"))
            assert no.value.found == f"'a', which is {state}"
            step(scheduler)
        scheduler.abort("a")
        scheduler.submit(request("a"))

    def test_a_full_queue_refuses_and_says_that_it_is_worth_trying_again(self) -> None:
        scheduler = Scheduler(LIMITS)
        for number in range(3):
            scheduler.submit(request(str(number)))
        with pytest.raises(QueueFullError, match="the queue of requests is full") as full:
            scheduler.submit(request("d"))
        assert full.value.found == "3 waiting, 0 running"
        assert full.value.retryable

    @pytest.mark.parametrize(
        ("misuse", "message"),
        [
            (lambda one: one.plan(5), "planned before the last one is complete"),
            (lambda one: one.drop_cache(), "dropped while a step uses it"),
            (lambda one: one.complete({}), "not those of the planned sequences"),
            (lambda one: one.complete({0: [1], 1: [1]}), "not those of the planned sequences"),
            (lambda one: one.fail_sequences({7: "x"}), "fails that the step does not compute"),
            (lambda one: one.complete({0: [1]}, {1}), "not those of the planned sequences"),
            (lambda one: one.complete({0: []}), "not those of the planned sequences"),
            (lambda one: one.complete({0: [1, 1]}), "not those of the planned sequences"),
            (lambda one: one.complete({0: [VOCABULARY]}), "a drawn token is not in the vocabulary"),
        ],
    )
    def test_a_planned_step_has_to_be_completed_as_planned(
        self, misuse: Callable[[Scheduler], object], message: str
    ) -> None:
        scheduler = Scheduler(LIMITS)
        scheduler.submit(request())
        scheduler.plan(0)
        with pytest.raises(SchedulerError, match=message):
            misuse(scheduler)
        scheduler.complete({0: [1]})  # the refused call has changed nothing

    @pytest.mark.parametrize(
        ("misuse", "message"),
        [
            (lambda one: one.complete({}), "a step ends that was not planned"),
            (lambda one: one.fail_step("x"), "a step ends that was not planned"),
            (lambda one: one.fail_sequences({0: "x"}), "a step ends that was not planned"),
            (lambda one: one.plan(4), "that does not go back"),
            (lambda one: one.plan(5.0), "not an integer of nanoseconds"),
        ],
    )
    def test_steps_alternate_and_their_time_does_not_go_back(
        self, misuse: Callable[[Scheduler], object], message: str
    ) -> None:
        scheduler = Scheduler(LIMITS)
        step(scheduler, now_ns=5)
        with pytest.raises(SchedulerError, match=message):
            misuse(scheduler)
