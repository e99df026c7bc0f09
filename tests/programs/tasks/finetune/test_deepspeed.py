"""Fine-tuning through DeepSpeed: the native engine's scores, at every stage and on every grid."""

from pathlib import Path

import pytest

from tests.programs.tasks.finetune.runs import (
    EXAMPLES,
    Prepared,
    finetune_all,
    read,
    refusals,
    scores_of,
    words_of,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny import FP32

STAGES = (0, 1, 2, 3)
# SGD compares weights: AdamW makes steps of the learning rate out of gradients that are rounding.
FLAGS = {"fp64": False, "optimizer": "sgd", "lr": 0.05, "epochs": 2}
GRIDS: dict[str, dict[str, object]] = {
    "dp 2": {},
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2, "micro_batch_size": 4},
}
# A pipeline has no other stages.
EVERY = [("dp 2", STAGES), ("tp 2", STAGES), ("pp 2", (0, 1))]
# Every grid and every stage; stage 3 shards weights that are split by tensors, too.
IN_TURN = [("dp 2", STAGES), ("tp 2", (3,)), ("pp 2", (1,))]


@pytest.mark.slow
@pytest.mark.parametrize("pairs", [IN_TURN, pytest.param(EVERY, marks=pytest.mark.wide)])
def test_scores_are_those_of_the_native_engine(
    pairs: list[tuple[str, tuple[int, ...]]], prepared: Prepared, tmp_path: Path
) -> None:
    engines = {
        name: {
            "native": {},
            **{f"stage {at}": {"deepspeed": True, "zero_stage": at} for at in stages},
        }
        for name, stages in pairs
    }
    runs = [
        words_of(
            prepared,
            **FLAGS,
            **GRIDS[name],
            **engine,
            predictions=tmp_path / f"{name} {of}.tsv",
            output=tmp_path / f"{name} {of}.json",
        )
        for name, each in engines.items()
        for of, engine in each.items()
    ]
    run_on_ranks(2, finetune_all, runs, deepspeed=True, timeout_s=180)
    for name, each in engines.items():
        native = read(tmp_path / f"{name} native.json")
        expected = scores_of(tmp_path / f"{name} native.tsv")
        assert native["examples"] == len(expected) == EXAMPLES
        spread = max(scores[0] for _, _, scores in expected) - min(s[0] for _, _, s in expected)
        for of in each:
            assert read(tmp_path / f"{name} {of}.json") == native
            found = scores_of(tmp_path / f"{name} {of}.tsv")
            for mine, theirs in zip(found, expected, strict=True):
                assert mine[:2] == theirs[:2]
                assert mine[2] == pytest.approx(theirs[2], rel=FP32, abs=FP32 * spread)


@pytest.mark.slow
def test_the_best_epoch_is_judged_again_by_either_engine(
    prepared: Prepared, tmp_path: Path
) -> None:
    save = tmp_path / "save"
    trained = words_of(
        prepared,
        **FLAGS,
        deepspeed=True,
        zero_stage=2,
        save=save,
        output=tmp_path / "a.json",
        predictions=tmp_path / "a.tsv",
    )
    again = [
        words_of(
            prepared,
            **(FLAGS | {"epochs": 0}),
            **engine,
            train_data=None,
            pretrained_checkpoint=None,
            load=save,
            output=tmp_path / f"{of}.json",
            predictions=tmp_path / f"{of}.tsv",
        )
        for of, engine in {"b": {"deepspeed": True, "zero_stage": 1}, "c": {}}.items()
    ]
    run_on_ranks(2, finetune_all, [trained, *again], deepspeed=True, timeout_s=180)
    expected = scores_of(tmp_path / "a.tsv")
    for name in "bc":
        assert read(tmp_path / f"{name}.json")["accuracy"] == read(tmp_path / "a.json")["accuracy"]
        for actual, reference in zip(scores_of(tmp_path / f"{name}.tsv"), expected, strict=True):
            assert actual[2] == pytest.approx(reference[2], rel=FP32, abs=FP32)


def test_what_it_cannot_do_is_refused_by_name(prepared: Prepared) -> None:
    cases = [
        ({"deepspeed": True, "fp64": True}, "float64"),
        ({"deepspeed": True, "overlap_grad_reduce": True}, "overlap_grad_reduce"),
        (
            {"deepspeed": True, "pipeline_model_parallel_size": 2, "zero_stage": 2},
            "pipeline",
        ),
        ({"zero_stage": 1}, "without --deepspeed"),
        ({"deepspeed": True, "checkpoint_format": "deepspeed"}, "saves in our own format alone"),
    ]
    found = refusals([words_of(prepared, **(FLAGS | flags)) for flags, _ in cases])
    for (_, words), said in zip(cases, found, strict=True):
        assert words in said.replace("-", "_") or words in said, said
