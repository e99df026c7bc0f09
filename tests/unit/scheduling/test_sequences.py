"""Tests of megatron.scheduling.sequences."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.blocks import BlockPool
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.prefix_index import PrefixIndex
from megatron.scheduling.requests import FinishReason, Request, RequestState
from megatron.scheduling.sequences import RequestRecord, SampleSequence
from tests.support.examples import examples


def record(prompt: int, samples: int = 1, new: int = 5) -> RequestRecord:
    request = Request(
        id="a", prompt=(1,) * prompt, samples=samples, max_new_tokens=new, arrival_ns=0
    )
    sequences = (SampleSequence(number, list(request.prompt)) for number in range(samples))
    return RequestRecord(request, 0, tuple(sequences))


@examples(200)
@given(
    prompt=st.integers(1, 12),
    samples=st.integers(1, 4),
    new=st.integers(1, 9),
    size=st.integers(1, 5),
)
def test_the_worst_case_of_a_request_is_that_of_the_limits(
    prompt: int, samples: int, new: int, size: int
) -> None:
    limits = SchedulerLimits(blocks=9, block_size=size, max_length=99, vocab_size=9)
    needed = record(prompt, samples, new).blocks_needed(limits, worst_case=True)
    assert needed.total == limits.worst_case_blocks(prompt, new, samples)


def test_samples_share_all_of_the_prompt_but_its_last_token() -> None:
    for prompt, count, reserved in ((4, 2, 1), (5, 2, 0)):
        one = record(prompt, samples=3)
        pool = BlockPool(9, PrefixIndex(2))
        first, *others = one.samples
        first.blocks = [pool.allocate() for _ in range(3)]
        first.computed = prompt - 2
        one.fork_samples(pool, 2)
        assert not any(other.is_forked for other in others)
        first.computed = prompt
        one.fork_samples(pool, 2)
        one.fork_samples(pool, 2)  # once only
        assert [(other.computed, other.blocks) for other in others] == (
            [(prompt - 1, first.blocks[:count])] * 2
        )
        assert [pool.references(block) for block in first.blocks] == [3] * count + [1]
        limits = SchedulerLimits(blocks=9, block_size=2, max_length=99, vocab_size=9)
        assert one.blocks_needed(limits, worst_case=False).copies == 2 * reserved


def test_released_sequences_have_nothing_left_and_tell_what_is_lost() -> None:
    one = record(3)
    pool = BlockPool(2, PrefixIndex(2))
    (sample,) = one.samples
    sample.blocks, sample.computed, sample.reserved = [pool.allocate()], 2, 1
    one.reserved_copies = 1
    assert one.reserved == 2
    assert one.release(pool) == 2
    assert (sample.computed, sample.blocks, one.reserved) == (0, [], 0)
    assert pool.counts == (0, 0, 2)


def test_an_end_tells_why_and_how_long_each_sample_is() -> None:
    one = record(3, samples=2)
    one.samples[0].tokens += [7, 8]
    one.samples[0].finish = FinishReason.STOP
    end = one.end(RequestState.ABORTED, "no reader")
    assert (end.request, end.state, end.detail) == ("a", RequestState.ABORTED, "no reader")
    assert (end.finishes, end.new_tokens) == ((FinishReason.STOP, None), (2, 0))


def test_of_several_drawn_tokens_those_behind_the_end_are_dropped() -> None:
    one = record(3, new=4)
    one.request = dataclasses.replace(
        one.request, stop_tokens=frozenset({9}), min_new_tokens=2, max_new_tokens=4
    )
    (sample,) = one.samples
    assert one.tokens_left(sample) == 4
    assert one.kept_tokens(sample, (9, 5, 9, 6)) == (9, 5, 9)  # the first one is too early
    assert one.kept_tokens(sample, (5, 6)) == (5, 6)
    assert one.kept_tokens(sample, (5, 6, 7, 8, 9)) == (5, 6, 7, 8)
    assert one.finish_of(6, 9) is FinishReason.STOP
    assert one.finish_of(7, 5) is FinishReason.LENGTH
    assert one.finish_of(6, 5) is None
    assert one.finish_of(6, 5, is_stopped=True) is FinishReason.STOP
