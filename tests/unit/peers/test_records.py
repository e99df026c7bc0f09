"""Tests of megatron.peers.records: what is written comes back, and nonsense is no crash."""

import json

from hypothesis import given
from hypothesis import strategies as st

from megatron.peers.records import LONGEST_MESSAGE, NOBODY, Beat, Failure
from megatron.peers.stacks import ProcessName
from tests.support.examples import examples

PROCESS = ProcessName("here 1 2", 7, 9)
_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
_FIELDS = {name: _ANYTHING for name in ("rank", "message", "by", "process")}
RECORDS = (
    st.binary(max_size=200)
    | _ANYTHING.map(lambda value: json.dumps(value).encode())
    | st.fixed_dictionaries(_FIELDS).map(lambda value: json.dumps(value).encode())
)


def test_records_come_back_as_they_were_written() -> None:
    beat = Beat(5, "step", 12, 4.5, PROCESS)
    assert Beat.parse(beat.encode().encode()) == beat
    for failure in (Failure(1, "disk full", 1), Failure(2, "silent", 1, PROCESS)):
        assert Failure.parse(failure.encode().encode()) == failure


@examples(200)
@given(RECORDS)
def test_any_record_is_a_failure_that_can_be_shown(record: bytes) -> None:
    failure = Failure.parse(record)
    assert failure.rank >= NOBODY
    assert len(failure.message) <= LONGEST_MESSAGE
    assert all(c.isprintable() or c in "\n\t" for c in failure.message)
    beat = Beat.parse(record)
    assert beat is None or isinstance(beat.process, ProcessName)


def test_a_record_is_bounded_in_size_and_in_depth() -> None:
    assert Failure.parse(b"[" * 40_000).rank == NOBODY
    huge = json.dumps({"rank": 1, "message": "x" * 10**6, "by": 1, "process": None}).encode()
    assert Failure.parse(huge).message.startswith("its record cannot be read: ValueError: 1,000,")
    assert len(Failure.parse(huge).message) < 300
    assert Beat.parse(b"[" * 40_000) is None
    assert Beat.parse(b'[1, "step", 1e999, 0, ["a", 1, 1]]') is None


def test_the_longest_message_of_any_characters_is_read() -> None:
    written = Failure(1, "\U0001f600" * 5000, 1).encode().encode()
    assert Failure.parse(written).message == "\U0001f600" * LONGEST_MESSAGE


def test_nonsense_is_the_failure_of_nobody() -> None:
    failure = Failure.parse(b"\x00\x1b[2J nonsense")
    assert failure.name == "another rank"
    assert "its record cannot be read: JSONDecodeError" in failure.message
    assert "\x1b" not in failure.message
