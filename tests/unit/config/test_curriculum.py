"""Lengths by iteration equal DeepSpeed's own class; what is no curriculum is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.curriculum import (
    Curriculum,
    CurriculumSchedule,
    curriculum_of_block,
    curriculum_of_flags,
    flags_of_block,
    one_curriculum,
)
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError
from tests.support.examples import examples

LINEAR = {"total_curriculum_step": 10, "difficulty_step": 8}
ROOT = LINEAR | {"root_degree": 2}
DISCRETE = {"difficulty": [8, 16, 32], "max_step": [2, 5]}


def block(schedule: str, inner: dict[str, Any], *, shortest: int = 8, longest: int = 64) -> Any:
    return {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": shortest,
        "max_difficulty": longest,
        "schedule_type": schedule,
        "schedule_config": inner,
    }


def read(values: Any) -> Curriculum:
    found = curriculum_of_block(values)
    assert found is not None
    return found


def lengths_of_deepspeed(values: Any, iterations: int) -> list[int]:
    """Return the lengths of its scheduler step by step, as Megatron-DeepSpeed reads them."""
    # Imports of seconds, which a collection of tests need not wait for.
    from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler

    scheduler = CurriculumScheduler(values)
    return [scheduler.update_difficulty(at + 1) for at in range(iterations)]


@st.composite
def blocks(draw: st.DrawFn) -> Any:
    """Any block of small numbers."""
    shortest = draw(st.integers(1, 40))
    longest = draw(st.integers(shortest, 90))
    schedule = draw(st.sampled_from(CurriculumSchedule))
    if schedule is CurriculumSchedule.FIXED_DISCRETE:
        count = draw(st.integers(2, 4))
        pick = st.lists(st.integers(shortest, longest), min_size=count, max_size=count)
        until = st.lists(st.integers(1, 40), min_size=count - 1, max_size=count - 1, unique=True)
        inner: Any = {"difficulty": sorted(draw(pick)), "max_step": sorted(draw(until))}
    else:
        inner = {
            "total_curriculum_step": draw(st.integers(1, 60)),
            "difficulty_step": draw(st.integers(1, 17)),
        }
        if schedule is CurriculumSchedule.FIXED_ROOT:
            inner["root_degree"] = draw(st.one_of(st.integers(1, 4), st.floats(0.5, 4.0)))
    return block(schedule.value, inner, shortest=shortest, longest=longest)


@examples(100)
@given(blocks())
def test_every_length_is_that_of_deepspeed(values: Any) -> None:
    ours, expected = read(values), lengths_of_deepspeed(values, 150)
    assert [ours.length_at(at) for at in range(150)] == expected
    assert expected == sorted(expected)
    assert set(expected) <= set(ours.all_lengths)
    assert all(length == expected[-1] for length in expected[ours.settled_at :])
    if 0 < ours.settled_at < 150:
        before = expected[ours.settled_at - 1]
        assert before < expected[-1] or ours.schedule is CurriculumSchedule.FIXED_DISCRETE


def test_some_lengths_by_hand() -> None:
    linear = read(block("fixed_linear", LINEAR))
    assert [linear.length_at(at) for at in range(11)] == [8, 16, 24, 24, 32, 40, 40, 48, 56, 64, 64]
    root = read(block("fixed_root", ROOT))
    assert [root.length_at(at) for at in (0, 3, 9)] == [24, 40, 64]
    discrete = read(block("fixed_discrete", DISCRETE, longest=32))
    assert [discrete.length_at(at) for at in range(6)] == [8, 8, 16, 16, 16, 32]
    assert (linear.settled_at, discrete.settled_at) == (9, 5)


def test_a_maximum_that_is_no_multiple_is_reached_later() -> None:
    late = read(block("fixed_linear", LINEAR, longest=60))
    assert [late.length_at(at) for at in (8, 9, 10)] == [48, 56, 60]
    assert late.settled_at == 10
    assert late.all_lengths == (8, 16, 24, 32, 40, 48, 56, 60)


def test_flags_and_block_come_to_the_same_value() -> None:
    common: dict[str, Any] = {"curriculum_seqlen_min": 8, "curriculum_seqlen_step": 8}
    common |= {"curriculum_iters": 10}
    for schedule, more, values in (
        ("fixed_linear", common, block("fixed_linear", LINEAR)),
        ("fixed_root", common | {"curriculum_root_degree": 2.0}, block("fixed_root", ROOT)),
        (
            "fixed_discrete",
            {"curriculum_seqlens": (8, 16, 32), "curriculum_seqlens_until": (2, 5)},
            block("fixed_discrete", DISCRETE, longest=32),
        ),
    ):
        flags = training(curriculum_schedule=CurriculumSchedule(schedule), **more)
        ours = curriculum_of_flags(flags, seq_length=64)
        assert ours == read(values)
        again = training(**flags_of_block(values))
        assert curriculum_of_flags(again, seq_length=64) == ours
        assert one_curriculum(ours, read(values)) == one_curriculum(None, ours) == ours
    shorter = training(
        curriculum_schedule=CurriculumSchedule.FIXED_LINEAR, curriculum_seqlen_max=32, **common
    )
    found = curriculum_of_flags(shorter, seq_length=64)
    assert found is not None
    assert found.length_at(1000) == 32


def test_no_curriculum_is_none() -> None:
    assert curriculum_of_flags(training(), seq_length=64) is None
    assert curriculum_of_block({}) is None
    assert flags_of_block({}) == {}
    assert curriculum_of_block(block("fixed_linear", LINEAR) | {"enabled": False}) is None
    assert one_curriculum(None, None) is None


def test_a_curriculum_says_what_it_is() -> None:
    assert str(read(block("fixed_root", ROOT))) == (
        "fixed_root, degree 2: 8 to 64 tokens over 10 iterations, in multiples of 8"
    )
    assert str(read(block("fixed_discrete", DISCRETE, longest=32))) == (
        "fixed_discrete: 8 tokens to iteration 2, 16 tokens to iteration 5, 32 tokens then"
    )


def test_two_curricula_are_one_too_many() -> None:
    one, other = read(block("fixed_linear", LINEAR)), read(block("fixed_root", ROOT))
    with pytest.raises(ConfigError, match="give two curricula") as raised:
        one_curriculum(one, other)
    assert "flags: fixed_linear" in str(raised.value)
    assert "JSON: fixed_root, degree 2" in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "problem", "found"),
    [
        (
            {"curriculum_iters": 10},
            "no schedule for it",
            "--curriculum-iters",
        ),
        (
            {"curriculum_schedule": CurriculumSchedule.FIXED_LINEAR, "curriculum_seqlen_min": 8},
            "lacks what its schedule is made of",
            "without --curriculum-iters, --curriculum-seqlen-step",
        ),
        (
            {
                "curriculum_schedule": CurriculumSchedule.FIXED_DISCRETE,
                "curriculum_seqlens": (8, 16),
                "curriculum_seqlens_until": (3,),
                "curriculum_root_degree": 2.0,
                "curriculum_seqlen_max": 16,
            },
            "what its schedule does not read",
            "--curriculum-seqlen-max, --curriculum-root-degree",
        ),
        (
            {
                "curriculum_schedule": CurriculumSchedule.FIXED_DISCRETE,
                "curriculum_seqlens": (8, 16),
                "curriculum_seqlens_until": (3, 4),
            },
            "the last iteration of each of its lengths but the last",
            "--curriculum-seqlens 8 16, --curriculum-seqlens-until 3 4",
        ),
    ],
)
def test_flags_that_make_no_curriculum_are_refused(
    flags: dict[str, Any], problem: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        training(**flags)
    assert found in str(raised.value)


@pytest.mark.parametrize(
    ("values", "problem", "found"),
    [
        (
            block("fixed_linear", LINEAR | {"total_curriculum_step": 0}),
            "made of positive numbers",
            "total_curriculum_step 0",
        ),
        (block("fixed_linear", LINEAR, shortest=True), "made of positive numbers", "True"),
        (block("fixed_root", ROOT | {"root_degree": "2"}), "positive numbers", "root_degree '2'"),
        (block("fixed_root", LINEAR), "lacks what", "without root_degree"),
        (block("fixed_linear", LINEAR, shortest=65), "starts above its end", "min_difficulty 65"),
        (
            block("fixed_discrete", {"difficulty": [8, 16, 12], "max_step": [1, 2]}),
            "does not go upwards",
            "difficulty 8 16 12, max_step 1 2",
        ),
        (
            block("fixed_discrete", {"difficulty": [8, 16, 65], "max_step": [1, 2]}),
            "outside of its ends",
            "max_difficulty 64",
        ),
        (block("custom", {}) | {"enabled": "yes"}, "switched on by true", "enabled 'yes'"),
        (
            block("fixed_linear", {}) | {"schedule_config": [8]},
            "an object in braces",
            "schedule_config [8]",
        ),
        (block("custom", {}), "no schedule that is known", "schedule_type 'custom'"),
        (
            block("fixed_linear", LINEAR) | {"curriculum_type": "vocab"},
            "something else than the sequence length",
            "curriculum_type 'vocab'",
        ),
        (
            block("fixed_linear", LINEAR) | {"max_dificulty": 3},
            "a key of a curriculum that has no effect",
            "did you mean max_difficulty?",
        ),
        (
            block("fixed_linear", LINEAR | {"root_degre": 3}),
            "a key of a curriculum that has no effect",
            "did you mean root_degree?",
        ),
    ],
)
def test_blocks_that_make_no_curriculum_are_refused(values: Any, problem: str, found: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        curriculum_of_block(values)
    assert found in str(raised.value)


def training(**flags: Any) -> TrainingConfig:
    return TrainingConfig(micro_batch_size=1, train_iters=10, **flags)
