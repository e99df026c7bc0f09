"""The laws under a curriculum of sequence lengths: layout, resume, tokens, evaluation as before.

The length is a function of the iteration, so there is nothing to store, and nothing that two
layouts could disagree about but how they exchange tensors whose shape changes.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.run import RunConfig
from tests.laws.checkpoints.test_resume import check_joined
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    FP32,
    FP64,
    MODELS,
    TOKENS_PER_SAMPLE,
    Record,
    assert_all_close,
    assert_close,
    tiny_run,
    train_all,
    whole,
    write_tiny_corpus,
)

LINEAR: dict[str, Any] = {
    "curriculum_schedule": "fixed_linear",
    "curriculum_seqlen_min": 4,
    "curriculum_seqlen_step": 4,
    "curriculum_iters": 4,
}
DISCRETE: dict[str, Any] = {
    "curriculum_schedule": "fixed_discrete",
    "curriculum_seqlens": (6, 12, 16),
    "curriculum_seqlens_until": (2, 4),
}
LENGTHS = {"linear": [4, 8, 12, 16, 16], "discrete": [6, 6, 12, 12, 16]}
RUNS: dict[str, dict[str, Any]] = {
    "gpt2, linear": {**MODELS["gpt2"], **LINEAR, "weight_decay": 0.1},
    "llama, discrete": {**MODELS["llama"], **DISCRETE, "weight_decay": 0.1},
    "bloom, linear": {**MODELS["bloom"], **LINEAR, "optimizer": "sgd", "lr": 0.05},
    "ragged, discrete": {**MODELS["ragged"], **DISCRETE, "optimizer": "sgd", "lr": 0.05},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp 2": (2, {"micro_batch_size": 2}),
    "tp 2, sequence parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 4},
    ),
    "pp 2": (
        2,
        {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "micro_batch_size": 2,
        },
    ),
    "pp 2 interleaved, dp 2": (
        4,
        {
            "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2,
            "pipeline_schedule": "interleaved",
            "use_distributed_optimizer": True,
            "micro_batch_size": 2,
        },
    ),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))


@pytest.fixture(scope="module")
def alone(corpus: str) -> dict[str, Record]:
    """Every run in one process."""
    return dict(zip(RUNS, run_on_ranks(1, train_all, [run_of(corpus, name) for name in RUNS])[0]))


def run_of(corpus: str, name: str, **flags: Any) -> RunConfig:
    common = {"num_layers": 4, "train_iters": 5, "eval_iters": 1, "eval_interval": 3}
    return tiny_run(corpus, **{**RUNS[name], **common, **flags})


@pytest.mark.parametrize("name", RUNS)
def test_samples_have_the_length_of_their_iteration(alone: dict[str, Record], name: str) -> None:
    record, lengths = alone[name], LENGTHS[name.split(", ")[1]]
    assert [plan.seq_length for plan in record.plans] == lengths
    assert record.progress.consumed_tokens == 8 * sum(lengths)
    assert record.progress.consumed_samples == 8 * len(lengths)
    # One more token in each row, which the last one predicts.
    read = [{len(row) for row in rows} for rows in record.trained_on]
    assert read == [{length + 1} for length in lengths for _ in range(8)]
    evaluated = {len(row) for rows in record.evaluated_on for row in rows}
    assert evaluated == {TOKENS_PER_SAMPLE + 1}, "evaluation is at full length"


def test_it_makes_a_difference(alone: dict[str, Record], corpus: str) -> None:
    """What is compared above would be equal as well if nothing were cut anywhere."""
    flags = {**MODELS["gpt2"], "num_layers": 4, "train_iters": 5, "weight_decay": 0.1}
    (full,) = run_on_ranks(1, train_all, [tiny_run(corpus, **flags)])[0]
    assert abs(full.losses[0] - alone["gpt2, linear"].losses[0]) > 1e-3
    assert full.trained_on != alone["gpt2, linear"].trained_on
    # The same samples, of which a curriculum reads the beginning.
    for row, short in zip(full.trained_on, alone["gpt2, linear"].trained_on, strict=True):
        assert [tokens[: len(cut)] for tokens, cut in zip(row, short)] == short


# Each layout with two of the four runs, of both schedules, and with the others in the wide suite.
TURNS = ([*RUNS][:2], [*RUNS][2:])


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_the_same_model(
    alone: dict[str, Record], corpus: str, layout: str, turn: int
) -> None:
    world_size, flags = LAYOUTS[layout]
    names = TURNS[([*LAYOUTS].index(layout) + turn) % 2]
    by_rank = run_on_ranks(world_size, train_all, [run_of(corpus, name, **flags) for name in names])
    for at, name in enumerate(names):
        records, expected = [of_rank[at] for of_rank in by_rank], alone[name]
        assert max(expected.grad_norms) > 0.5, "clipping is meant to be active"
        assert_close(records[0].losses, expected.losses, FP64)
        assert_close(records[0].grad_norms, expected.grad_norms, FP64)
        assert_all_close(whole(records), whole([expected]), FP64)
        means = [evaluation.mean for evaluation in records[-1].evaluations]
        assert_close(means, [evaluation.mean for evaluation in expected.evaluations], FP64)
        assert {record.progress for record in records} == {expected.progress}


DEEPSPEED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp 2": (2, "2", {"micro_batch_size": 2}),
    "tp 2": (
        2,
        "3",
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 4},
    ),
    "pp 2": (2, "1", {"pipeline_model_parallel_size": 2, "micro_batch_size": 2}),
}


@pytest.mark.parametrize("layout", DEEPSPEED)
def test_deepspeed_trains_the_same_model_by_a_block_of_its_json(
    corpus: str, tmp_path: Path, layout: str
) -> None:
    """SGD shows a factor, and rounding in fp32 does not become a step of full length."""
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 4,
        "max_difficulty": TOKENS_PER_SAMPLE,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 4, "difficulty_step": 4},
    }
    json_file = tmp_path / "ds.json"
    json_file.write_text(json.dumps({"curriculum_learning": block}))
    world_size, stage, flags = DEEPSPEED[layout]
    common = {"fp64": False, "optimizer": "sgd", "lr": 0.05, **flags}
    unasked = dict.fromkeys(LINEAR)
    through = {"deepspeed": True, "deepspeed_config": str(json_file), "zero_stage": stage}
    configs = [
        run_of(corpus, "gpt2, linear", **common),
        run_of(corpus, "gpt2, linear", **common, **unasked, **through),
    ]
    by_rank = run_on_ranks(world_size, train_all, configs, timeout_s=120, deepspeed=True)
    native, found = ([of_rank[at] for of_rank in by_rank] for at in range(2))
    assert [plan.seq_length for plan in found[0].plans] == LENGTHS["linear"]
    assert found[0].progress == native[0].progress
    assert_close(found[0].losses, native[0].losses, FP32)
    assert_close(found[0].grad_norms, native[0].grad_norms, FP32)
    assert_all_close(whole(found), whole(native), FP32)
    means, expected = (
        [evaluation.mean for evaluation in records[-1].evaluations] for records in (found, native)
    )
    assert_close(means, expected, FP32)


@pytest.mark.parametrize("deepspeed", [False, True], ids=["native", "deepspeed"])
@pytest.mark.parametrize("pp", [1, 2])
def test_a_resumed_run_is_the_uninterrupted_run(
    corpus: str, tmp_path: Path, pp: int, deepspeed: bool
) -> None:
    """It is stopped after 4 of 8 iterations, between two lengths."""
    slow: dict[str, Any] = {"curriculum_iters": 8, "train_iters": 8, "hidden_dropout": 0.1}
    slow |= {"micro_batch_size": 2, "fp64": False, "pipeline_model_parallel_size": pp}
    slow |= {"deepspeed": True, "zero_stage": "1"} if deepspeed else {}
    plain = run_of(corpus, "gpt2, linear", **slow)
    folder = str(tmp_path / "saved")
    saving, loading = (
        dataclasses.replace(
            plain,
            checkpoint=dataclasses.replace(plain.checkpoint, **places),
            training=dataclasses.replace(plain.training, exit_interval=at),
        )
        for places, at in (({"save": folder}, 4), ({"load": folder}, None))
    )
    before = run_on_ranks(pp, train_all, [plain, saving], deepspeed=deepspeed)
    after = run_on_ranks(pp, train_all, [loading], deepspeed=deepspeed)
    for (straight, first), (second,) in zip(before, after):
        lengths = [plan.seq_length for plan in straight.plans]
        assert lengths == [4, 4, 8, 8, 8, 12, 12, 16]
        check_joined(straight, first, second, where=f"pp {pp}", steps=(4, 8))
