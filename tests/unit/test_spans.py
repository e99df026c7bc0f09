"""Names in a trace: what they say can be read again, and nothing is named where nothing records."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from megatron import spans
from megatron.spans import Communication
from tests.support.examples import examples

WORDS = st.from_regex(r"[a-z_]+", fullmatch=True)


@given(WORDS, WORDS, st.integers(0, 10**15))
@examples(100)
def test_the_name_of_a_communication_says_what_it_is(group: str, operation: str, size: int) -> None:
    call = Communication(group, operation, size)
    assert Communication.read(str(call)) == call


def test_other_names_are_no_communication() -> None:
    for name in ("step 12", "gloo:all_reduce", spans.WAIT, "forward, micro-batch 1, stage 0 of 2"):
        assert Communication.read(name) is None


def test_nothing_is_named_without_a_profiler() -> None:
    def unasked() -> str:
        raise AssertionError("a name was made")

    assert not spans.is_recording()
    with spans.span(unasked) as one, spans.communication("tp", "all_reduce", torch.ones(2)) as two:
        assert one is None
        assert two is None
    spans.last_until(two, torch.futures.Future())


def test_a_range_can_last_longer_than_its_block() -> None:
    end: torch.futures.Future[object] = torch.futures.Future()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        assert spans.is_recording()
        with spans.communication("dp", "all_reduce(sum)", torch.ones(2), torch.ones(3)) as begun:
            spans.last_until(begun, end)
        with spans.span("work"):
            torch.ones(2).add(1)
        end.set_result(None)
        with spans.span(lambda: "afterwards"):
            pass
    times = {event.name: event.time_range for event in seen.events() or ()}
    call = times["dp all_reduce, 20 bytes"]
    assert call.start <= times["work"].start <= times["work"].end <= call.end
    assert call.end <= times["afterwards"].start
