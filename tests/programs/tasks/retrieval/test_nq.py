"""The whole way from a checkpoint to scores of questions, on one rank and on two."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron.errors import MegatronError
from tasks.main import main
from tasks.retrieval.nq import score_hits
from tests.programs.tools.retrieval.models import TrainedRetriever, trained_retriever
from tests.support.ranks import run_on_ranks
from tools.retrieval import create_doc_index


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRetriever:
    return trained_retriever(Path(tmp_path_factory.mktemp("retriever")))


def index_and_ask(index: Sequence[str], questions: Sequence[Sequence[str]]) -> list[str]:
    """A body for `run_on_ranks`: make an index, then ask several times; how each one ended."""
    if index:
        create_doc_index.main(index)
    ended = []
    for argv in questions:
        try:
            main(["--task", "ICT-ZEROSHOT-NQ", *argv])
        except MegatronError as error:
            ended.append(f"{type(error).__name__}: {error}")
        else:
            ended.append("asked")
    return ended


def test_questions_are_scored_alike_on_any_number_of_ranks(
    trained: TrainedRetriever, tmp_path: Path
) -> None:
    lines = Path(trained.table).read_text().splitlines()[1:]
    asked = tmp_path / "qa.tsv"
    texts = [line.split("\t")[1] for line in lines]
    asked.write_text("".join(f"{text}\t['{text.split()[0]}']\n" for text in texts))
    given = ["--load", trained.checkpoint, "--embedding-path", str(tmp_path / "index")]
    given += ["--evidence-data-path", trained.table]
    results = []
    for ranks in (1, 2):
        out = tmp_path / f"{ranks}.json"
        argv = [*given, "--qa-data-dev", str(asked), "--faiss-topk-retrievals", "11"]
        argv += ["--retriever-report-topk-accuracies", "1", "3", "50", "--output", str(out)]
        index = given if ranks == 1 else []
        assert run_on_ranks(ranks, index_and_ask, index, [argv]) == [["asked"]] * ranks
        results.append(json.loads(out.read_text()))
    assert results[0] == results[1]
    dev = results[0]["dev"]
    assert list(dev) == ["questions", "mean_reciprocal_rank", "top1", "top3", "top11"]
    assert (dev["questions"], dev["top11"]) == (len(texts), 1.0), "all blocks were looked at"
    assert 0 < dev["mean_reciprocal_rank"] <= 1


def test_what_cannot_be_asked_is_refused(trained: TrainedRetriever, tmp_path: Path) -> None:
    asked = tmp_path / "qa.tsv"
    asked.write_text("who\t['w1']\n")
    bad = tmp_path / "bad.tsv"
    bad.write_text("who\t['']\n")
    given = ["--load", trained.checkpoint, "--embedding-path", str(tmp_path / "nothing")]
    given += ["--evidence-data-path", trained.table]
    tries = {
        "ConfigError: there are no questions": given,
        "DataError: a question has no answer": [*given, "--qa-data-dev", str(bad)],
        "ConfigError: there is no index of blocks": [*given, "--qa-data-test", str(asked)],
    }
    (ended,) = run_on_ranks(1, index_and_ask, [], list(tries.values())[:2])
    ended += run_on_ranks(1, index_and_ask, [], list(tries.values())[2:])[0]
    for expected, found in zip(tries, ended, strict=True):
        assert found.startswith(expected), found


def test_recalls_that_the_search_does_not_reach_are_left_out() -> None:
    scores = score_hits([[True, False], [False, False]], 2, (1, 5))
    assert scores.recalls == {1: 0.5, 2: 0.5}
    assert scores.describe() == (
        "2 questions | top-1: 50.00 % | top-2: 50.00 % | mean reciprocal rank: 0.5000"
    )
