"""Tests of megatron.scheduling.replay."""

import contextlib
import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.forward_plan import ForwardPlan
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.prefix_index import PrefixIndex
from megatron.scheduling.replay import (
    FollowingScheduler,
    LeadingScheduler,
    ReplayError,
    RoundRecord,
)
from megatron.scheduling.requests import DuplicateRequestError, QueueFullError, Request
from megatron.scheduling.scheduler import Scheduler
from tests.support.examples import examples

LIMITS = SchedulerLimits(
    blocks=6,
    block_size=2,
    max_length=20,
    vocab_size=5,
    max_tokens_per_step=6,
    max_sequences=3,
    max_queued=3,
    speculative_tokens=2,
)


def scheduler_of(rank: int, steps_in_flight: int = 1) -> Scheduler:
    """Return a scheduler with a secret of its own, as every process has one."""
    limits = dataclasses.replace(LIMITS, steps_in_flight=steps_in_flight)
    return Scheduler(limits, index=PrefixIndex(limits.block_size, secret=bytes((rank,))))


def request(name: str, prompt: int = 2, **others: int | None) -> Request:
    return Request(id=name, prompt=(1,) * prompt, max_new_tokens=3, arrival_ns=0, **others)


def proposed(plan: ForwardPlan, data: st.DataObject) -> dict[int, list[int]]:
    """Return tokens for some sequences of a plan."""
    tokens = st.integers(0, 4)
    return {
        part.sequence: data.draw(st.lists(tokens, max_size=part.draft_room))
        for part in plan.slices
        if part.draft_room and data.draw(st.booleans())
    }


@examples(200)
@given(data=st.data())
def test_a_second_scheduler_makes_the_same_plans_from_the_records(data: st.DataObject) -> None:
    most = data.draw(st.integers(1, 3))
    leader = LeadingScheduler(scheduler_of(0, most))
    follower = FollowingScheduler(scheduler_of(1, most))
    in_flight: list[ForwardPlan] = []
    for now_ns in range(data.draw(st.integers(1, 12))):
        for _ in range(data.draw(st.integers(0, 2))):
            name = data.draw(st.sampled_from("abcdef"))
            if data.draw(st.booleans()):
                leader.abort(name)
                continue
            deadline = data.draw(st.none() | st.integers(1, 9))
            prompt, samples = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
            with contextlib.suppress(DuplicateRequestError, QueueFullError):
                leader.submit(request(name, prompt, samples=samples, deadline_ns=deadline))
        if data.draw(st.booleans()):
            leader.stop_sample(data.draw(st.integers(0, 9)))
        if not in_flight and data.draw(st.integers(0, 5)) == 0:
            leader.drop_cache(data.draw(st.none() | st.integers(0, 1)))
        plan, record = leader.plan(now_ns, lambda plan: proposed(plan, data))
        assert sum(part.drafts for part in plan.slices) == sum(map(len, record.drafts.values()))
        # What arrives elsewhere is a copy.
        assert follower.follow(pickle.loads(pickle.dumps(record))) == plan
        if plan.slices:
            in_flight.append(plan)
        if len(in_flight) < most and (not in_flight or data.draw(st.booleans())):
            continue
        plan = in_flight.pop(0)
        drawn = [part.sequence for part in plan.slices if part.samples]
        if data.draw(st.integers(0, 5)) == 0:
            leader.fail_step("it failed")
            continue
        if data.draw(st.integers(0, 5)) == 0:
            failed = data.draw(st.sampled_from([part.sequence for part in plan.slices]))
            leader.fail_sequences({failed: "not finite"})
            drawn = [sequence for sequence in drawn if sequence != failed]
        tokens = {
            part.sequence: data.draw(
                st.lists(st.integers(0, 4), min_size=1, max_size=1 + part.drafts)
            )
            for part in plan.slices
            if part.sequence in drawn
        }
        stopped = [sequence for sequence in drawn if data.draw(st.booleans())]
        leader.complete(tokens, stopped)
    assert follower.round == leader.round


def first_rounds(count: int) -> list[RoundRecord]:
    leader = LeadingScheduler(scheduler_of(0))
    leader.submit(request("a"))
    records = []
    for now_ns in range(count):
        plan, record = leader.plan(now_ns)
        records.append(record)
        leader.complete({part.sequence: [1] for part in plan.slices})
    return records


@pytest.mark.parametrize(("order", "last", "bad"), [((0, 2), 1, 3), ((0, 0), 1, 1), ((1,), 0, 2)])
def test_a_record_that_is_missing_or_comes_twice_is_named_with_both_numbers(
    order: tuple[int, ...], last: int, bad: int
) -> None:
    records, follower = first_rounds(3), FollowingScheduler(scheduler_of(1))
    for place in order[:-1]:
        follower.follow(records[place])
    with pytest.raises(ReplayError, match="a record of the scheduler is missing") as refused:
        follower.follow(records[order[-1]])
    assert refused.value.found == f"round {bad} after round {last}"


def test_a_plan_that_differs_is_noticed_before_it_is_computed() -> None:
    (record,) = first_rounds(1)
    other = Scheduler(dataclasses.replace(LIMITS, max_tokens_per_step=3, max_sequences=1))
    FollowingScheduler(other).follow(record)  # the first plan is the same by chance
    smaller = Scheduler(dataclasses.replace(LIMITS, max_tokens_per_step=1, max_sequences=1))
    with pytest.raises(ReplayError, match="two ranks plan different steps"):
        FollowingScheduler(smaller).follow(record)


def test_a_command_that_is_refused_is_not_recorded() -> None:
    leader = LeadingScheduler(scheduler_of(0))
    for name in "abc":
        leader.submit(request(name))
    with pytest.raises(QueueFullError, match="the queue of requests is full"):
        leader.submit(request("d"))
    _, record = leader.plan(0)
    assert len(record.commands) == 3
