"""Tests of megatron.scheduling.requests."""

from collections.abc import Mapping
from itertools import product

import pytest

from megatron.scheduling.requests import (
    Request,
    RequestError,
    RequestState,
    RequestTransitionError,
    require_transition,
)

QUEUED, PREFILL, DECODE, COMPLETED, FAILED, ABORTED, EXPIRED = RequestState
POSSIBLE = {
    *product((QUEUED, PREFILL, DECODE), (COMPLETED, FAILED, ABORTED, EXPIRED)),
    (QUEUED, PREFILL),
    (PREFILL, DECODE),
    (PREFILL, QUEUED),
    (DECODE, QUEUED),
}


def test_every_transition_that_is_not_in_the_table_is_refused() -> None:
    for pair in product(RequestState, RequestState):
        if pair in POSSIBLE:
            require_transition("a", *pair)
        else:
            with pytest.raises(RequestTransitionError, match=f"from {pair[0]} to {pair[1]}"):
                require_transition("a", *pair)


def test_nothing_follows_an_end_and_only_running_requests_hold_blocks() -> None:
    assert [state for state in RequestState if state.is_end] == [
        *(COMPLETED, FAILED, ABORTED, EXPIRED)
    ]
    assert [state for state in RequestState if state.is_running] == [PREFILL, DECODE]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ()}, "a request has no prompt"),
        ({"max_new_tokens": -1}, "max_new_tokens is too small"),
        ({"samples": 0}, "samples is too small"),
        ({"prompt_logprobs": -1}, "prompt_logprobs is too small"),
        ({"embeds": True}, "an embedding is of a prompt alone"),
        ({"max_new_tokens": 0, "samples": 2}, "without new tokens all samples of a request are"),
        ({"min_new_tokens": 5}, "would have to be longer than it may become"),
        ({"min_new_tokens": -1}, "would have to be longer than it may become"),
        ({"arrival_ns": 1.5}, "not an integer of nanoseconds"),
        ({"deadline_ns": 2e9}, "not an integer of nanoseconds"),
    ],
)
def test_a_request_without_a_meaning_is_refused(
    changes: Mapping[str, object], message: str
) -> None:
    good: dict[str, object] = {"id": "a", "prompt": (1,), "max_new_tokens": 4, "arrival_ns": 0}
    Request(**good)
    with pytest.raises(RequestError, match=message):
        Request(**good | changes)
