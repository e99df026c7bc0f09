"""Indexes of one retriever by several layouts, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from megatron.errors import MegatronError
from megatron.model.retrieval.biencoder import CONTEXT
from tests.programs.tools.retrieval.models import PASSAGES, TrainedRetriever, trained_retriever
from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import (
    tiny_bert_run,
    train_bert_all,
)
from tools.other_programs.table import PROGRAMS
from tools.other_programs.words import translated
from tools.retrieval import create_doc_index
from tools.retrieval.block_index import BlockIndex, _read_list
from tools.retrieval.encoder import load_retriever
from tools.retrieval.evidence import EvidenceTable, RowMaker

# Of float32 vectors whose float64 sums are in another order.
SAME = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> TrainedRetriever:
    return trained_retriever(Path(tmp_path_factory.mktemp("retriever")))


def create(argvs: Sequence[Sequence[object]]) -> list[str]:
    """A body for `run_on_ranks`: make indexes one after the other; what each one ended with."""
    ended = []
    for argv in argvs:
        try:
            create_doc_index.main([str(word) for word in argv])
        except MegatronError as error:
            ended.append(f"{type(error).__name__}: {error}")
        else:
            ended.append("made")
    return ended


def by_hand(checkpoint: str, table: str) -> torch.Tensor:
    """A body for `run_on_ranks`: the vector of one passage at a time."""
    loaded = load_retriever(checkpoint, given={}, texts=(CONTEXT,))
    rows = EvidenceTable(Path(table), RowMaker(loaded.tokenizer, 24))
    tower = loaded.towers[CONTEXT]
    return torch.cat([tower.vectors([rows.tokens(at)]) for at in range(len(rows))])


def flags(trained: TrainedRetriever, folder: Path, *more: object) -> list[object]:
    given = ["--ict-load", trained.checkpoint, "--embedding-path", folder]
    return [*given, "--evidence-data-path", trained.table, *more]


def read(folder: Path) -> tuple[list[int], torch.Tensor, int]:
    key, parts = _read_list(folder)
    index = BlockIndex(folder, key)
    return index.ids.tolist(), torch.cat([*index.vectors()]), len(parts)


def test_every_layout_makes_the_same_index(trained: TrainedRetriever, tmp_path: Path) -> None:
    (expected,) = run_on_ranks(1, by_hand, trained.checkpoint, trained.table)
    alone = flags(trained, tmp_path / "alone", "--indexer-batch-size", 4)
    assert run_on_ranks(1, create, [alone]) == [["made"]]
    shared = flags(trained, tmp_path / "dp", "--indexer-batch-size", 2, "--indexer-log-interval", 1)
    split = flags(trained, tmp_path / "tp", "--tensor-model-parallel-size", 2)
    assert run_on_ranks(2, create, [shared, split]) == [["made"] * 2] * 2
    for name, files in (("alone", 1), ("dp", 2), ("tp", 1)):
        ids, vectors, found = read(tmp_path / name)
        assert (ids, found) == (list(range(100, 100 + PASSAGES)), files)
        torch.testing.assert_close(vectors, expected, **SAME)


def test_an_index_is_made_once(
    trained: TrainedRetriever, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "index"
    argv = flags(trained, folder, "--indexer-batch-size", 3)
    assert run_on_ranks(1, create, [argv, argv]) == [["made", "made"]]
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    other = Path(trained.table).with_name("other.tsv")
    other.write_text("5\tw1 w2\tw4\n")
    argv[argv.index(trained.table)] = other
    (((ended),),) = run_on_ranks(1, create, [argv])
    assert "DataError: the index of blocks is of another checkpoint or of other blocks" in ended
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == times


def test_blocks_may_be_those_of_the_corpus(trained: TrainedRetriever, tmp_path: Path) -> None:
    argv = ["--load", trained.checkpoint, "--block-data-path", tmp_path / "index"]
    argv += ["--data-path", trained.blocks.sentences.prefix]
    argv += ["--titles-data-path", trained.blocks.titles]
    assert run_on_ranks(1, create, [argv]) == [["made"]]
    ids, vectors, _ = read(tmp_path / "index")
    assert ids == list(range(len(ids)))
    assert vectors.shape == (len(ids), 12)


def test_what_no_index_can_be_made_of_is_refused(trained: TrainedRetriever, tmp_path: Path) -> None:
    folder = tmp_path / "index"
    sentences = trained.blocks.sentences
    bert = tiny_bert_run(sentences, save=str(tmp_path / "bert"))
    run_on_ranks(1, train_bert_all, [bert])
    wrong_kind = flags(trained, folder)
    wrong_kind[1] = tmp_path / "bert"
    corpus = ["--ict-load", trained.checkpoint, "--embedding-path", folder]
    tries = {
        "CheckpointError: the checkpoint is of another kind": wrong_kind,
        "ConfigError: there are no blocks to search": corpus,
        "ConfigError: blocks are those of one corpus": [*corpus, "--data-path", 1, "a", 1, "b"],
        "ConfigError: the towers cannot read rows of that length": flags(
            trained, folder, "--retriever-seq-length", 25
        ),
        "ConfigError: a tower maps at least one row at a time": flags(
            trained, folder, "--pipeline-model-parallel-size", 2
        ),
    }
    for expected, argv in tries.items():
        ((ended,),) = run_on_ranks(1, create, [argv])
        assert ended.startswith(expected), ended
    assert not folder.exists()


def test_the_path_of_other_megatrons_is_a_call_of_this_program() -> None:
    program = PROGRAMS["tools/create_doc_index.py"]
    words = ["--block-data-path", "b", "--faiss-use-gpu", "--indexer-batch-size", "8"]
    assert translated(program, words).words == words
    assert create_doc_index.parser().parse_args([*words, "--ict-load", "c"]).faiss_use_gpu
