"""Fine-tuning from a pretrained BERT: it learns, alike on every grid, and judges each row once."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from megatron.errors import CheckpointError, ConfigError, DataError, MegatronError
from tasks.main import main
from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import tiny_bert_run, train_bert_all, write_tiny_sentences

MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 24 "
    "--max-position-embeddings 24 --make-vocab-size-divisible-by 4 --init-method-std 0.2 "
    "--hidden-dropout 0 --attention-dropout 0 --fp64 --device cpu --num-workers 0 --seed 3"
)
# Seven of eight rows in the last batch are missing: nothing may be counted twice or left out.
EXAMPLES, BATCH = 41, 8
# Of float64 sums in another order, after a few steps.
SAME = 1e-7


class Prepared(NamedTuple):
    """A pretrained BERT, its vocabulary, and files of a task that is easy to learn."""

    pretrained: Path
    vocab: str
    train: Path
    valid: Path
    test: Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("bert")
    corpus = write_tiny_sentences(folder)
    run = tiny_bert_run(corpus, train_iters=2, save=str(folder / "pretrained"))
    run_on_ranks(1, train_bert_all, [run])
    files = [write_task(folder / f"{name}.tsv", seed) for seed, name in enumerate(("t", "v"))]
    test = folder / "test.tsv"
    test.write_text("index\tsentence1\tsentence2\n7\tw1 w2\tw4\n9\tw5\tw7 w8\n")
    return Prepared(folder / "pretrained", corpus.vocab_file, *files, test)


def write_task(path: Path, seed: int) -> Path:
    """RTE's columns; the last word of the second sentence says which it is."""
    random, lines = np.random.RandomState(seed), ["index\tsentence1\tsentence2\tlabel"]
    for at in range(EXAMPLES):
        first, second = random.choice(range(1, 50, 3), 2)
        follows = random.rand() < 0.5
        label, last = ("entailment", "w5") if follows else ("not_entailment", "w8")
        lines.append(f"{at}\tw{first} w2\tw{second} {last}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def finetune(argv: Sequence[str]) -> None:
    main(argv)


def outcome(ranks: int, output: Path, *words: object) -> dict[str, Any]:
    run_on_ranks(ranks, finetune, [*map(str, words), "--output", str(output)])
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def words_of(prepared: Prepared, **flags: object) -> list[object]:
    given: dict[str, object] = {
        "task": "RTE",
        "train_data": prepared.train,
        "valid_data": prepared.valid,
        "pretrained_checkpoint": prepared.pretrained,
        "vocab_file": prepared.vocab,
        "epochs": 2,
        "lr": 0.01,
        "micro_batch_size": 2,
        "global_batch_size": BATCH,
        **flags,
    }
    named = [
        word
        for name, value in given.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    return [*named, *MODEL.split()]


def scores_of(file: Path) -> list[tuple[str, str, list[float]]]:
    lines = [line.split("\t") for line in file.read_text().splitlines()[1:]]
    return [(uid, said, [float(x) for x in scores.split()]) for uid, said, scores in lines]


GRIDS: list[tuple[int, dict[str, object]]] = [
    (2, {}),
    (2, {"tensor_model_parallel_size": 2}),
    (2, {"pipeline_model_parallel_size": 2, "micro_batch_size": 4}),
]


@pytest.mark.slow
def test_every_grid_learns_and_judges_the_same(prepared: Prepared, tmp_path: Path) -> None:
    alone = outcome(1, tmp_path / "a.json", *words_of(prepared, predictions=tmp_path / "a.tsv"))
    assert alone["examples"] == EXAMPLES
    expected = scores_of(tmp_path / "a.tsv")
    assert [uid for uid, _, _ in expected] == [str(at) for at in range(EXAMPLES)]
    for ranks, grid in GRIDS:
        found = outcome(
            ranks, tmp_path / "b.json", *words_of(prepared, predictions=tmp_path / "b.tsv", **grid)
        )
        assert found == alone
        for mine, theirs in zip(scores_of(tmp_path / "b.tsv"), expected):
            assert mine[:2] == theirs[:2]
            assert mine[2] == pytest.approx(theirs[2], rel=1e-5)  # as many digits as are written


@pytest.mark.slow
def test_it_learns_keeps_the_best_and_judges_it_again(prepared: Prepared, tmp_path: Path) -> None:
    save = tmp_path / "save"
    flags = {"epochs": 8, "lr": 0.02, "save": save, "valid_data": prepared.train}
    outcome(1, tmp_path / "a.json", *words_of(prepared, **flags))
    again = {"epochs": 0, "train_data": None, "pretrained_checkpoint": None, "load": save}
    kept = outcome(
        1, tmp_path / "b.json", *words_of(prepared, **(again | {"valid_data": prepared.train}))
    )
    assert kept["accuracy"] > 0.8
    unseen = outcome(
        2,
        tmp_path / "c.json",
        *words_of(
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
        1, tmp_path / "a.json", *words_of(prepared, **flags, predictions=tmp_path / "a.tsv")
    )
    assert found["examples"] == 12
    assert all(len(scores) == 4 for _, _, scores in scores_of(tmp_path / "a.tsv"))


def test_grades_are_learned_as_numbers(prepared: Prepared, tmp_path: Path) -> None:
    rows = [f"{at}\tw{at} w2\tw{at + 1}\t{at % 5}.5" for at in range(1, 12, 3)]
    file = tmp_path / "sts.tsv"
    file.write_text("\n".join(["index\tsentence1\tsentence2\tscore", *rows]) + "\n")
    flags = {"task": "STS-B", "train_data": file, "valid_data": file, "epochs": 1}
    found = outcome(1, tmp_path / "a.json", *words_of(prepared, **flags))
    assert set(found) == {"task", "examples", "pearson", "spearman"}


def finetune_and_fail(argv: Sequence[str]) -> str:
    try:
        main(argv)
    except (ConfigError, DataError, CheckpointError, MegatronError) as error:
        return str(error)
    return "nothing was raised"


def said_of(words: Sequence[object]) -> str:
    return run_on_ranks(1, finetune_and_fail, [str(word) for word in words])[0]


def test_wrong_flags_are_said_before_anything_is_built(prepared: Prepared) -> None:
    cases = [
        ({"epochs": -1}, "epochs are negative"),
        ({"train_data": None}, "there is nothing to train on"),
        ({"pretrained_checkpoint": None}, "fine-tuning begins with a model that was trained"),
        ({"load": "x"}, "two models are given to begin with"),
        ({"valid_data": "nowhere.tsv"}, "a file of the task's data does not exist"),
    ]
    for flags, words in cases:
        assert words in said_of(words_of(prepared, **flags))


def test_a_model_of_another_shape_is_refused(prepared: Prepared) -> None:
    said = said_of([*words_of(prepared), "--num-layers", "3"])
    assert "the checkpoint is of another model or optimizer than this run" in said
    assert "missing: model/layers.2.input_norm.weight" in said
