"""How large batches are, how long a run is, and how many samples it needs."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.lengths import (
    batch_schedule,
    curriculum,
    duration,
    num_samples,
    token_count,
    warmup_tokens,
)
from megatron.progress import Progress
from tests.support.tiny import tiny_run


def a_run(**flags: Any) -> RunConfig:
    return tiny_run("nowhere", **({"micro_batch_size": 2, "global_batch_size": None} | flags))


def test_without_a_global_batch_it_is_one_micro_batch_each() -> None:
    assert batch_schedule(a_run(), 3).global_batch_size == 6
    assert batch_schedule(a_run(global_batch_size=12), 3).global_batch_size == 12


def test_a_ramp_is_handed_on() -> None:
    config = tiny_run("nowhere", rampup_batch_size=(4, 4, 40), train_samples=80)
    batches = batch_schedule(config, 1)
    assert batches.sizes == (4, 8)
    assert duration(config, batches).total_samples == 80


def test_steps_of_the_batch_size_begin_at_their_tokens() -> None:
    config = tiny_run(
        "nowhere",
        step_batch_size_schedule="0:4 0.32K:8 400:2",  # at 16 tokens a sample: 20 and 25
        global_batch_size=8,
        train_samples=40,
    )
    batches = batch_schedule(config, 2)
    assert batches.sizes == (4, 8, 2)
    length = duration(config, batches)
    assert (length.total_iterations, length.total_samples) == (5 + 1 + 6, 40)
    assert num_samples(config.training, length, batches.global_batch_size)[0] == 40


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"eval_iters": 0}, (40, 0, 0)),
        # Validation after 4 and 8 iterations and at the end.
        ({"eval_iters": 2, "eval_interval": 4}, (40, 3 * 8, 8)),
        ({"eval_iters": 2, "eval_interval": 0}, (40, 8, 8)),
    ],
)
def test_samples_are_enough_for_every_evaluation(
    flags: dict[str, int], expected: tuple[int, int, int]
) -> None:
    config = tiny_run("nowhere", global_batch_size=4, train_iters=10, **flags)
    batches = batch_schedule(config, 2)
    assert num_samples(config.training, duration(config, batches), 4) == expected


def test_batches_and_lengths_that_do_not_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide into whole micro-batches"):
        batch_schedule(a_run(global_batch_size=7), 2)
    short = tiny_run("nowhere", train_samples=3, global_batch_size=4)
    with pytest.raises(ConfigError, match="shorter than one iteration"):
        duration(short, batch_schedule(short, 2))


GROWS: dict[str, Any] = {
    "curriculum_schedule": "fixed_linear",
    "curriculum_seqlen_min": 4,
    "curriculum_seqlen_step": 4,
    "curriculum_iters": 4,
}


def test_tokens_are_counted_at_the_length_of_their_iteration() -> None:
    ramp = {"global_batch_size": 8, "rampup_batch_size": (4, 4, 8), "train_samples": 80}
    plain, grown = tiny_run("nowhere"), tiny_run("nowhere", **ramp, **GROWS)
    assert curriculum(plain) is None
    assert token_count(plain, batch_schedule(plain, 1)).before(5) == 5 * 8 * 16
    count = token_count(grown, batch_schedule(grown, 1))
    by_iteration = [4 * 4, 4 * 8, 8 * 12, 8 * 16, 8 * 16, 8 * 16]
    assert [count.before(at) for at in range(7)] == [sum(by_iteration[:at]) for at in range(7)]


@pytest.mark.parametrize(
    ("flags", "iterations"),
    [
        ({}, 5),
        ({"train_tokens": 10**9}, 5),
        ({"train_tokens": 1}, 1),
        ({"train_tokens": 2 * 8 * 16}, 2),
        ({"train_tokens": 2 * 8 * 16 + 1}, 3),
        # 8 samples of 4, 8 and 12 tokens, then of 16.
        ({"train_tokens": 8 * (4 + 8), **GROWS}, 2),
        ({"train_tokens": 8 * (4 + 8 + 12) + 1, **GROWS}, 4),
    ],
)
def test_a_run_ends_with_the_iteration_that_reaches_its_tokens(
    flags: dict[str, Any], iterations: int
) -> None:
    config = tiny_run("nowhere", train_iters=5, **flags)
    batches = batch_schedule(config, 1)
    length = duration(config, batches)
    assert length.total_iterations == iterations
    count, done = token_count(config, batches), []
    for at in range(6):
        progress = Progress(at, consumed_samples=8 * at, consumed_tokens=count.before(at))
        done.append(length.is_done(progress))
    assert done == [at >= iterations for at in range(6)]


def test_the_json_of_deepspeed_speaks_of_lengths_too_and_must_not_contradict(
    tmp_path: Path,
) -> None:
    block = {
        "enabled": True,
        "min_difficulty": 4,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
    }
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"curriculum_learning": block}))
    through = {"deepspeed": True, "deepspeed_config": str(file), "fp64": False}
    asked = curriculum(tiny_run("nowhere", **through))
    assert asked == curriculum(tiny_run("nowhere", **GROWS))
    assert curriculum(tiny_run("nowhere", **through, **GROWS)) == asked
    with pytest.raises(ConfigError, match="give two curricula"):
        curriculum(tiny_run("nowhere", **through, **(GROWS | {"curriculum_iters": 5})))


def test_the_tokens_of_a_warmup_are_those_of_its_samples() -> None:
    grows = {"curriculum_schedule": "fixed_discrete", "curriculum_seqlens": (8, 32)}
    grows |= {"curriculum_seqlens_until": (2,)}
    config = tiny_run("nowhere", global_batch_size=4, train_iters=10, lr_warmup_iters=3, **grows)
    batches, length = batch_schedule(config, 1), config.data.seq_length
    each = [curriculum(config).length_at(at) for at in range(3)]  # type: ignore[union-attr]
    assert warmup_tokens(config.schedule, batches, None, length) == 12 * length
    assert warmup_tokens(config.schedule, batches, curriculum(config), length) == 4 * sum(each)
