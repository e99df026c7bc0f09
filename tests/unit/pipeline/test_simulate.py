"""Every schedule, simulated on all its stages: it ends, in the time and memory it should."""

from functools import cache
from itertools import product

import pytest

from megatron.pipeline import orders
from megatron.pipeline.action import (
    COMMUNICATION,
    Action,
    ActionKind,
    Schedule,
    UnsoundScheduleError,
    batches,
    needed,
)
from megatron.pipeline.exchange import posted_early
from megatron.pipeline.schedule import (
    ScheduleName,
    build_evaluation_schedule,
    build_schedule,
)
from megatron.pipeline.simulate import Durations, Simulation, simulate
from megatron.pipeline.theory import bubble_share, peak_activations
from tests.support.stages import with_exchanges

NONE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE = ScheduleName
STAGES, MICROBATCHES, CHUNKS = range(1, 9), range(1, 17), range(1, 4)
ROUNDING = 1e-9  # sums of durations in another order; theory holds exactly here, not to some %

Case = tuple[str, int, int, int]


def is_possible(name: str, stages: int, chunks: int) -> bool:
    if name == INTERLEAVED:
        return stages > 1 and chunks > 1
    return chunks == 1 and (name != NONE or stages == 1)


CASES: list[Case] = [
    (name, p, m, v)
    for name, p, m, v in product(ScheduleName, STAGES, MICROBATCHES, CHUNKS)
    if is_possible(name, p, v)
]


# Odd and even stages, and fewer, as many, more and a multiple of them of micro-batches.
FEW = [case for case in CASES if case[1] in (1, 2, 3, 4, 7) and case[2] in (1, 2, 3, 5, 8, 12)]
GRIDS = pytest.mark.parametrize(
    "cases", [FEW, pytest.param(CASES, marks=pytest.mark.wide)], ids=["few", "all"]
)


@cache
def schedules(case: Case) -> tuple[Schedule, ...]:
    name, p, m, v = case
    return tuple(
        build_schedule(name, stage=s, num_stages=p, num_microbatches=m, num_chunks=v)
        for s in range(p)
    )


@cache
def run(case: Case) -> Simulation:
    """A step in which forward, input gradient and weight gradient take equally long."""
    return simulate(schedules(case), num_microbatches=case[2], num_chunks=case[3])


def theory(case: Case) -> float:
    name, p, m, v = case
    return bubble_share(name, num_stages=p, num_microbatches=m, num_chunks=v)


def test_all_of_the_grid_is_there() -> None:
    assert len(CASES) == 16 + 3 * 8 * 16 + 7 * 16 * 2
    assert len(FEW) == 6 + 3 * 5 * 6 + 4 * 6 * 2


@GRIDS
def test_every_schedule_completes_and_waits_as_long_as_theory_says(cases: list[Case]) -> None:
    # simulate() itself raises for a deadlock, messages out of order, and work missing or doubled.
    off = {case: run(case).bubble_share - theory(case) for case in cases}
    assert {case: by for case, by in off.items() if abs(by) > ROUNDING} == {}


@GRIDS
def test_every_schedule_holds_as_many_activations_as_theory_says(cases: list[Case]) -> None:
    for case in cases:
        name, p, m, v = case
        expected = peak_activations(name, num_stages=p, num_microbatches=m, num_chunks=v)
        assert tuple(stage.peak_activations for stage in run(case).stages) == expected, case


def test_zero_bubble_waits_less_than_1f1b_and_holds_no_more() -> None:
    for p, m in product((2, 3, 4, 7), (1, 2, 3, 5, 8, 12)):
        zero, plain = run((ZERO_BUBBLE, p, m, 1)), run((ONE_F_ONE_B, p, m, 1))
        assert zero.bubble_share < plain.bubble_share
        most = max(stage.peak_activations for stage in plain.stages)
        for own, same in zip(zero.stages, plain.stages):
            assert own.peak_activations <= most
            # What only the input gradient needs goes as early as in 1F1B, stage by stage.
            assert own.peak_before_input_gradient == same.peak_activations


@pytest.mark.parametrize("backward", [0.3, 1.0, 3.7])
def test_the_bubbles_of_undivided_backwards_do_not_depend_on_durations(backward: float) -> None:
    times = Durations(forward=1.3, backward_input=backward / 2, backward_weight=backward / 2)
    for name, p, m in product((GPIPE, ONE_F_ONE_B, INTERLEAVED), (2, 4, 7), (7, 9, 14)):
        case = (name, p, m, 2 if name == INTERLEAVED else 1)
        result = simulate(schedules(case), num_microbatches=m, num_chunks=case[3], durations=times)
        assert result.bubble_share == pytest.approx(theory(case), abs=ROUNDING), case


def test_microbatches_need_not_be_a_multiple_of_the_stages() -> None:
    for m in range(4, 17):
        assert run((INTERLEAVED, 4, m, 2)).bubble_share == pytest.approx(3 / (2 * m + 3))


def test_evaluation_completes_for_every_cut_and_waits_only_at_its_ends() -> None:
    for p, m, v in product((1, 2, 3, 4, 7), (1, 2, 3, 5, 8, 12), CHUNKS):
        if v > 1 and p == 1:
            continue
        found = [
            build_evaluation_schedule(stage=s, num_stages=p, num_microbatches=m, num_chunks=v)
            for s in range(p)
        ]
        result = simulate(found, num_microbatches=m, num_chunks=v)
        slots = (v - 1) * max(m, p) + m + p - 1
        assert result.makespan == slots, (p, m, v)


def test_stages_that_compute_while_messages_travel_are_never_later() -> None:
    for case in FEW:
        name, p, m, v = case
        waiting, overlapping, at_once = (
            simulate(
                schedules(case),
                num_microbatches=m,
                num_chunks=v,
                durations=Durations(communication=seconds),
                overlaps=overlaps,
            ).makespan
            for seconds, overlaps in ((0.25, False), (0.25, True), (0.0, True))
        )
        assert at_once <= overlapping <= waiting, case
        if p > 1 and m > 2 and (name == ZERO_BUBBLE or (name, p) == (GPIPE, 2)):
            assert overlapping < waiting, case


@GRIDS
def test_messages_posted_early_are_the_same_in_the_same_order(cases: list[Case]) -> None:
    for case in cases:
        for schedule in schedules(case):
            plan = tuple(batches(schedule))
            early = posted_early(plan)
            for communicates in (False, True):
                assert [s for s in early if (s[0].kind in COMMUNICATION) == communicates] == [
                    s for s in plan if (s[0].kind in COMMUNICATION) == communicates
                ]
            at = {action: place for place, step in enumerate(early) for action in step}
            for action, place in at.items():
                # What a computation needs is posted before it, and what it makes after it.
                assert at.get(needed(action) or action, -1) <= place
                if action.kind is ActionKind.SEND_FORWARD:
                    assert at[action._replace(kind=ActionKind.FORWARD)] < place
                if action.kind is ActionKind.SEND_BACKWARD:
                    kinds = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
                    (made,) = (at[m] for k in kinds if (m := action._replace(kind=k)) in at)
                    assert made < place


def test_an_output_travels_while_the_next_one_is_computed() -> None:
    case = (GPIPE, 2, 3, 1)
    times = Durations(communication=0.5)
    starts = {
        overlaps: [
            [work.start for work in stage.work if work.action.kind is ActionKind.FORWARD]
            for stage in simulate(
                schedules(case), num_microbatches=3, durations=times, overlaps=overlaps
            ).stages
        ]
        for overlaps in (False, True)
    }
    assert starts[False] == [[0, 1.5, 3], [1.5, 3, 4.5]]
    assert starts[True] == [[0, 1, 2], [1.5, 2.5, 3.5]]


@pytest.mark.parametrize("overlaps", [False, True])
def test_messages_take_their_time(overlaps: bool) -> None:
    case = (ONE_F_ONE_B, 2, 1, 1)
    durations = Durations(forward=1, backward_input=2, backward_weight=3, communication=0.5)
    result = simulate(schedules(case), num_microbatches=1, durations=durations, overlaps=overlaps)
    assert [(w.action.kind, w.start, w.stop) for w in result.stages[1].work] == [
        (ActionKind.FORWARD, 1.5, 2.5),
        (ActionKind.BACKWARD, 2.5, 7.5),
    ]
    assert result.makespan == 13.0
    assert result.bubble_share == pytest.approx(1 - 12 / 26)


def test_interleaving_that_exchanges_after_every_computation_waits_round_the_ring() -> None:
    together = [orders.interleaved(stage, 4, 32, 2) for stage in range(4)]
    apart = [[(action,) for actions in order for action in actions] for order in together]
    bubbles = [
        simulate(
            with_exchanges(rounds, num_chunks=2), num_microbatches=32, num_chunks=2
        ).bubble_share
        for rounds in (together, apart)
    ]
    assert bubbles == pytest.approx([3 / 67, 0.21], abs=0.001)


# Negative controls: what is wrong is found.


@pytest.mark.parametrize("name", [ONE_F_ONE_B, ZERO_BUBBLE])
def test_messages_posted_one_by_one_wait_for_each_other(name: str) -> None:
    case = (name, 2, 4, 1)
    assert run(case).bubble_share == pytest.approx(theory(case))
    with pytest.raises(UnsoundScheduleError, match="wait for each other forever") as caught:
        simulate(schedules(case), num_microbatches=4, batched=False)
    assert "stage 0 in send_forward(1, chunk 0)" in str(caught.value)
    assert "stage 1 in send_backward(0, chunk 0)" in str(caught.value)


@pytest.mark.parametrize(("name", "chunks"), [(GPIPE, 1), (ZERO_BUBBLE, 1), (INTERLEAVED, 2)])
def test_a_dropped_action_is_found_wherever_it_is(name: str, chunks: int) -> None:
    whole = schedules((name, 3, 4, chunks))
    for stage, schedule in enumerate(whole):
        for at in range(len(schedule)):
            less = [*whole]
            less[stage] = schedule[:at] + schedule[at + 1 :]
            with pytest.raises(UnsoundScheduleError, match=f"stage {stage}, micro-batch"):
                simulate(less, num_microbatches=4, num_chunks=chunks)


def test_a_doubled_action_is_found() -> None:
    whole = schedules((ONE_F_ONE_B, 2, 3, 1))
    with pytest.raises(UnsoundScheduleError, match="stage 0, micro-batch 2, chunk 0: forward"):
        simulate([(*whole[0], Action(ActionKind.FORWARD, 2, 0)), whole[1]], num_microbatches=3)


def test_work_of_no_microbatch_of_the_step_is_found() -> None:
    whole = schedules((ONE_F_ONE_B, 2, 3, 1))
    with pytest.raises(UnsoundScheduleError, match=r"has no \w+\(2, chunk 0\)"):
        simulate(whole, num_microbatches=2)


@pytest.mark.parametrize("kind", [ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD])
def test_two_messages_that_change_places_are_found(kind: ActionKind) -> None:
    # In the interleaved schedule on two stages, both directions share each pair of ranks.
    for name, p, chunks in ((GPIPE, 2, 1), (INTERLEAVED, 2, 2)):
        whole = schedules((name, p, 4, chunks))
        stage = 0 if kind is ActionKind.SEND_FORWARD else 1
        sends = [i for i, action in enumerate(whole[stage]) if action.kind is kind]
        swapped = list(whole[stage])
        first, second = sends[0], sends[1]
        swapped[first], swapped[second] = swapped[second], swapped[first]
        both = [*whole]
        both[stage] = tuple(swapped)
        with pytest.raises(UnsoundScheduleError, match=r"micro-batch|expects"):
            simulate(both, num_microbatches=4, num_chunks=chunks)


def test_receives_in_another_order_than_the_sends_are_found() -> None:
    # Each stage alone is sound here: all is received before anything is computed.
    whole = schedules((GPIPE, 2, 2, 1))
    one = Action(ActionKind.RECV_FORWARD, 0, 0), Action(ActionKind.RECV_FORWARD, 1, 0)
    rest = tuple(action for action in whole[1] if action not in one)
    simulate([whole[0], (*one, *rest)], num_microbatches=2)
    with pytest.raises(
        UnsoundScheduleError,
        match=r"stage 0 sends send_forward\(0, chunk 0\) where stage 1 expects recv_forward\(1,",
    ):
        simulate([whole[0], (*one[::-1], *rest)], num_microbatches=2)


def test_a_weight_gradient_before_its_input_gradient_is_found() -> None:
    (schedule,) = schedules((ZERO_BUBBLE, 1, 1, 1))
    assert [action.kind for action in schedule] == [
        ActionKind.FORWARD,
        ActionKind.BACKWARD_INPUT,
        ActionKind.BACKWARD_WEIGHT,
    ]
    with pytest.raises(UnsoundScheduleError, match="in an order that works"):
        simulate([(schedule[0], schedule[2], schedule[1])], num_microbatches=1)


def test_what_comes_round_on_two_stages_is_received_in_the_order_of_sending() -> None:
    # Between the same two ranks forward and backward messages flow in one direction: their order
    # is their only difference.
    def sent_and_received(m: int) -> tuple[list[bool], list[bool]]:
        whole = schedules((INTERLEAVED, 2, m, 3))
        names = (
            (ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD),
            (ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD),
        )
        sent, received = (
            [action.kind is kinds[0] for action in whole[stage] if action.kind in kinds]
            for stage, kinds in enumerate(names)
        )
        return sent, received

    for m in MICROBATCHES:
        sent, received = sent_and_received(m)
        assert sent == received
        assert len(set(sent)) == 2


@GRIDS
def test_a_batch_exchanges_with_both_neighbours_at_most_once_each_way(cases: list[Case]) -> None:
    for case in cases:
        most = 4 if case[0] == INTERLEAVED else 2
        for schedule in schedules(case):
            assert max(len(batch) for batch in batches(schedule)) <= most, case
