"""Fine-tuning from a pretrained BERT: it learns, alike on every grid, and judges each row once."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.programs.tasks.finetune.runs import (
    EXAMPLES,
    Prepared,
    outcome,
    outcomes,
    refusal,
    refusals,
    scores_of,
    words_of,
    write_task,
)

# Of float64 scores, in as many digits as are written.
WRITTEN = 1e-8


# Each on two ranks.
GRIDS: dict[str, dict[str, object]] = {
    "dp": {},
    "tp": {"tensor_model_parallel_size": 2},
    "sequence": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "shards": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
    "pp": {"pipeline_model_parallel_size": 2, "micro_batch_size": 4},
}


@pytest.mark.slow
def test_every_grid_learns_and_judges_the_same(prepared: Prepared, tmp_path: Path) -> None:
    alone = outcome(1, tmp_path / "a.json", words_of(prepared, predictions=tmp_path / "a.tsv"))
    assert alone["examples"] == EXAMPLES
    expected = scores_of(tmp_path / "a.tsv")
    assert [uid for uid, _, _ in expected] == [str(at) for at in range(EXAMPLES)]
    runs = {
        tmp_path / f"{name}.json": words_of(prepared, predictions=tmp_path / f"{name}.tsv", **grid)
        for name, grid in GRIDS.items()
    }
    assert outcomes(2, runs) == [alone] * len(GRIDS)
    for name in GRIDS:
        for mine, theirs in zip(scores_of(tmp_path / f"{name}.tsv"), expected, strict=True):
            assert mine[:2] == theirs[:2]
            assert mine[2] == pytest.approx(theirs[2], rel=WRITTEN)


@pytest.mark.slow
def test_it_learns_keeps_the_best_and_judges_it_again(prepared: Prepared, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = {"epochs": 16, "lr": 0.02, "save": save, "valid_data": prepared.train}
    again = {"epochs": 0, "train_data": None, "pretrained_checkpoint": None, "load": save}
    runs = {
        tmp_path / "a.json": words_of(prepared, **flags),
        tmp_path / "b.json": words_of(prepared, **(again | {"valid_data": prepared.train})),
    }
    _, kept = outcomes(1, runs)
    assert kept["accuracy"] > 0.8
    unseen = outcome(
        2,
        tmp_path / "c.json",
        words_of(
            prepared,
            **(again | {"valid_data": prepared.test, "tensor_model_parallel_size": 2}),
            predictions=tmp_path / "c.tsv",
        ),
    )
    assert unseen == {"task": "RTE", "examples": 2}  # nothing to compare with
    assert [uid for uid, _, _ in scores_of(tmp_path / "c.tsv")] == ["7", "9"]


def test_one_of_four_answers_is_learned(prepared: Prepared, tmp_path: Path) -> None:
    random, lines = np.random.RandomState(0), []
    for _ in range(12):
        words = [f"w{at}" for at in random.choice(range(1, 50, 3), 4, replace=False)]
        right = random.randint(4)
        lines.append(
            {
                "article": f"{words[right]} w2",
                "questions": ["_"],
                "options": [words],
                "answers": ["ABCD"[right]],
            }
        )
    file = tmp_path / "race.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    flags = {"task": "RACE", "train_data": file, "valid_data": file, "epochs": 1}
    found = outcome(
        1, tmp_path / "a.json", words_of(prepared, **flags, predictions=tmp_path / "a.tsv")
    )
    assert found["examples"] == 12
    assert all(len(scores) == 4 for _, _, scores in scores_of(tmp_path / "a.tsv"))


def test_grades_are_learned_as_numbers(prepared: Prepared, tmp_path: Path) -> None:
    rows = [f"{at}\tw{at} w2\tw{at + 1}\t{at % 5}.5" for at in range(1, 12, 3)]
    file = tmp_path / "sts.tsv"
    file.write_text("\n".join(["index\tsentence1\tsentence2\tscore", *rows]) + "\n")
    flags = {"task": "STS-B", "train_data": file, "valid_data": file, "epochs": 1}
    found = outcome(1, tmp_path / "a.json", words_of(prepared, **flags))
    assert set(found) == {"task", "examples", "pearson", "spearman", "best_epoch"}


def test_several_files_are_judged_together_and_each_by_itself(
    prepared: Prepared, tmp_path: Path
) -> None:
    other = write_task(tmp_path / "mismatched.tsv", 7, examples=13)
    flags = {"epochs": 1, "valid_data": [prepared.valid, other]}
    table = tmp_path / "a.tsv"
    found = outcome(1, tmp_path / "a.json", words_of(prepared, **flags, predictions=table))
    assert found["examples"] == EXAMPLES + 13
    files = found["files"]
    assert {name: part["examples"] for name, part in files.items()} == {
        "v": EXAMPLES,
        "mismatched": 13,
    }
    right = sum(part["examples"] * part["accuracy"] for part in files.values())
    assert right == pytest.approx(found["examples"] * found["accuracy"])
    lines = [line.split("\t") for line in table.read_text().splitlines()[1:]]
    places = [line[5] for line in lines]
    assert places == ["v"] * EXAMPLES + ["mismatched"] * 13
    for name, part in files.items():
        correct = [line[1] == line[3] for line in lines if line[5] == name]
        assert part["accuracy"] == pytest.approx(sum(correct) / len(correct))


def test_weights_may_be_in_another_precision_than_they_were_pretrained(
    prepared: Prepared, tmp_path: Path
) -> None:
    found = outcome(1, tmp_path / "a.json", words_of(prepared, epochs=1, fp64=False, bf16=True))
    assert found["examples"] == EXAMPLES


def test_examples_that_training_needs_have_labels(prepared: Prepared) -> None:
    cases = ({"train_data": prepared.test}, {"valid_data": prepared.test})
    for said in refusals([words_of(prepared, **flags) for flags in cases]):
        assert "a file lacks a column of its task" in said
        assert "wanted label; nearest" in said


def test_a_new_head_is_never_judged(prepared: Prepared) -> None:
    message = refusal(words_of(prepared, epochs=0, train_data=None))
    assert "another kind of model" in message


def test_wrong_flags_are_said_before_anything_is_built(prepared: Prepared) -> None:
    cases = [
        ({"epochs": -1}, "epochs are negative"),
        ({"train_data": None}, "there is nothing to train on"),
        ({"valid_data": None}, "there is nothing to judge by"),
        ({"pretrained_checkpoint": None}, "fine-tuning begins with a model that was trained"),
        ({"load": "x"}, "two models are given to begin with"),
        ({"valid_data": "nowhere.tsv"}, "a file of the task's data does not exist"),
        ({"predictions": "no/such/folder/a.tsv"}, "results cannot be written there"),
        ({"output": "no/such/folder/a.json"}, "results cannot be written there"),
        ({"max_position_embeddings": 8}, "samples are longer than the table of positions"),
    ]
    found = refusals([words_of(prepared, **flags) for flags, _ in cases])
    for (_, words), said in zip(cases, found, strict=True):
        assert words in said


def test_a_model_of_another_shape_is_refused(prepared: Prepared) -> None:
    message = refusal([*words_of(prepared), "--num-layers", "3"])
    assert "the checkpoint is of another model than the flags describe" in message
    assert "--num-layers 2 in the checkpoint, 3 here" in message
