"""Fine-tuning of a retriever: it learns its questions, on every layout the same."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.errors import ConfigError, MegatronError, PreflightError
from megatron.initialize import shutdown_megatron
from megatron.model.retrieval.biencoder import QUERY
from tasks.main import main
from tasks.retrieval.finetune import read_retriever_training, with_length
from tests.programs.tools.retrieval.models import TrainedRetriever, trained_retriever
from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import tiny_retrieval_run
from tools.retrieval.encoder import load_retriever

# Of float64 sums in another order, rounded to fp32 vectors.
SAME = {"rel": 1e-5, "abs": 1e-6}
TASK = "RET-FINETUNE-NQ"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRetriever:
    return trained_retriever(Path(tmp_path_factory.mktemp("retriever")))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sixteen questions, each answered by one block, with one that seems to."""
    words = [f"w{at}" for at in range(50) if at % 3]
    records = [
        {
            "question": f"{words[at]} {words[at + 16]}",
            "positive_ctxs": [{"title": words[at], "text": f"{words[at + 16]} w1 w2"}],
            "hard_negative_ctxs": [{"title": words[at], "text": "w4 w5 w7"}],
        }
        for at in range(16)
    ]
    path = tmp_path_factory.mktemp("questions") / "dpr.json"
    path.write_text(json.dumps(records))
    return str(path)


def flags(trained: TrainedRetriever, questions: str, *more: object) -> list[str]:
    given = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 24 --fp64 "
    given += "--hidden-dropout 0 --attention-dropout 0 --make-vocab-size-divisible-by 4 --lr 0.01 "
    given += "--biencoder-projection-dim 12 --device cpu --num-workers 0 --optimizer sgd "
    given += "--global-batch-size 8 --log-level warning --retriever-report-topk-accuracies 1 "
    files = ["--vocab-file", trained.blocks.sentences.vocab_file]
    files += ["--train-data", questions, "--valid-data", questions]
    return [*given.split(), *files, *map(str, more)]


def tune(argvs: Sequence[Sequence[str]]) -> list[str]:
    """A body for `run_on_ranks`: fine-tune one after the other; how each one ended."""
    ended = []
    for argv in argvs:
        try:
            main(["--task", TASK, *argv])
        except MegatronError as error:
            ended.append(f"{type(error).__name__}: {error}")
        else:
            ended.append("tuned")
    return ended


def vectors_of(folder: str) -> list[float]:
    """A body for `run_on_ranks`: a vector of the tower of questions."""
    loaded = load_retriever(folder, given={}, texts=(QUERY,))
    found: list[float] = loaded.towers[QUERY].vectors([[2, 7, 8, 3]]).flatten().tolist()
    shutdown_megatron()
    return found


def test_every_layout_learns_the_same(
    trained: TrainedRetriever, questions: str, tmp_path: Path
) -> None:
    hard = ("--train-with-neg", "--train-hard-neg", 1)
    begins = ("--ict-load", trained.checkpoint, *hard, "--epochs", 1)

    def saved(name: str, *more: object) -> list[str]:
        return flags(trained, questions, *begins, "--save", tmp_path / name, *more)

    alone = saved("alone", "--micro-batch-size", 8)
    assert run_on_ranks(1, tune, [alone]) == [["tuned"]]
    split = saved("split", "--micro-batch-size", 4, "--sequence-parallel")
    split += ["--tensor-model-parallel-size", "2"]
    assert run_on_ranks(4, tune, [split]) == [["tuned"]] * 4
    before, after, other = (
        run_on_ranks(1, vectors_of, str(folder))[0]
        for folder in (trained.checkpoint, tmp_path / "alone", tmp_path / "split")
    )
    assert before != pytest.approx(after, **SAME)
    assert other == pytest.approx(after, **SAME)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ("--pretrained-checkpoint c --train-iters 3", "means nothing for fine-tuning"),
        ("--pretrained-checkpoint c --epochs -1", "a number is negative"),
        ("--pretrained-checkpoint c --train-hard-neg 2", "asked for and not used"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    trained: TrainedRetriever, questions: str, more: str, problem: str
) -> None:
    given = flags(trained, questions, "--micro-batch-size", 8, *more.split())
    with pytest.raises(PreflightError, match=problem):
        read_retriever_training(TASK, given)


def test_a_start_from_nothing_is_refused(trained: TrainedRetriever, questions: str) -> None:
    with pytest.raises(ConfigError, match="begins with a model that was trained"):
        read_retriever_training(TASK, flags(trained, questions, "--micro-batch-size", 8))


def test_an_epoch_is_as_long_as_its_questions(trained: TrainedRetriever) -> None:
    config = tiny_retrieval_run(trained.blocks)
    training = with_length(config, 3, 21, 17).training
    assert (training.train_iters, training.eval_interval, training.eval_iters) == (6, 2, 2)
    assert not training.eval_only
    assert with_length(config, 0, 21, 17).training.eval_only
    with pytest.raises(ConfigError, match="fewer questions than a global batch has"):
        with_length(config, 3, 21, 7)


def test_rows_may_be_shorter_than_those_of_pretraining(
    trained: TrainedRetriever, questions: str
) -> None:
    given = flags(trained, questions, "--micro-batch-size", 8, "--ict-load", "c")
    read = read_retriever_training(TASK, [*given, "--retriever-seq-length", "20"])
    assert (read.config.data.seq_length, read.hard) == (20, 0)
