"""ICT-ZEROSHOT-NQ: how often the blocks that a retriever finds hold an answer to the question.

The index is one of tools/create_doc_index.py, of the same checkpoint and the same blocks. All ranks
of a grid call it together: they share out the questions, and rank 0 searches.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron import log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.errors import ConfigError
from megatron.initialize import shutdown_megatron
from megatron.model.retrieval.biencoder import QUERY
from tasks.results import check_output, write_result
from tasks.retrieval.answers import AnswerMatch, matcher
from tasks.retrieval.metrics import Hits, mean_reciprocal_rank, recall_at
from tasks.retrieval.questions import Question, read_table
from tools.retrieval.block_index import BlockIndex, IndexKey
from tools.retrieval.encoder import LoadedRetriever
from tools.retrieval.evidence import Evidence, RowMaker, block_shares
from tools.retrieval.flags import (
    add_retriever_flags,
    evidence_of,
    load_chosen_retriever,
    read_retriever_flags,
    row_maker,
)
from tools.retrieval.search import search_blocks, way_of_search

RANKS = (1, 5, 20, 100)  # whose recalls are reported without --retriever-report-topk-accuracies


class RetrievalScores(NamedTuple):
    """The result of one file of questions."""

    questions: int
    recalls: dict[int, float]
    mean_reciprocal_rank: float

    def describe(self) -> str:
        """Return one line for the log."""
        recalls = " | ".join(f"top-{k}: {100 * share:.2f} %" for k, share in self.recalls.items())
        mean = f"mean reciprocal rank: {self.mean_reciprocal_rank:.4f}"
        return f"{self.questions} questions | {recalls} | {mean}"


def main(name: str, argv: Sequence[str]) -> None:
    """Read the flags, find blocks for all questions, and print the scores on rank 0."""
    own, choice = read_retriever_flags(parser(), argv)
    check_output(own.output)
    # Files are read before the model: what is wrong with them is known within a second.
    parts = {
        part: read_table(path)
        for part, path in (("dev", own.qa_data_dev), ("test", own.qa_data_test))
        if path is not None
    }
    if not parts:
        raise ConfigError(
            "there are no questions",
            found="neither --qa-data-dev nor --qa-data-test",
            fix="add --qa-data-dev FILE",
        )
    match = AnswerMatch(own.faiss_match)
    for questions in parts.values():
        for question in questions:
            matcher(question.answers, match)
    loaded = load_chosen_retriever(choice, QUERY)
    try:
        rows = row_maker(choice, loaded)
        blocks = evidence_of(choice, loaded, rows)
        index = IndexKey(loaded.checkpoint, blocks.fingerprint())
        found = {
            part: score_hits(
                find_answers(
                    questions,
                    blocks,
                    loaded,
                    question_vectors([one.text for one in questions], loaded, rows),
                    AnswerSearch(own.embedding_path, index, own.faiss_topk_retrievals, match),
                ),
                own.faiss_topk_retrievals,
                choice.ranks or RANKS,
            )
            for part, questions in parts.items()
        }
        for part, scores in found.items():
            log.info(f" {name} | {part} | {scores.describe()} |")
        if loaded.ctx.rank == 0:
            write_result(own.output, _result(name, found))
    finally:
        shutdown_megatron()


class AnswerSearch(NamedTuple):
    """Where blocks are looked for, how many of them, and what counts as an answer."""

    folder: Path
    key: IndexKey
    limit: int
    match: AnswerMatch


def find_answers(
    questions: Sequence[Question],
    blocks: Evidence,
    loaded: LoadedRetriever,
    vectors: torch.Tensor,
    search: AnswerSearch,
) -> Hits:
    """Return which of the best blocks of each question hold an answer; all ranks call it together.

    Args:
        vectors: of the questions, fp32 [q, e].

    Raises:
        ConfigError: there is no index, or no block is asked for. The same on every rank.
        DataError: the index is stale or damaged.
    """

    def find() -> Hits:
        if loaded.ctx.rank:
            return []
        index = BlockIndex(search.folder, search.key)
        log.info(way_of_search())
        places = search_blocks(vectors, index.vectors(), count=search.limit).places.tolist()
        found = []
        for question, at in zip(questions, places, strict=True):
            holds = matcher(question.answers, search.match)
            found.append([holds(blocks.block(place).text) for place in at])
        return found

    return run_on_all_ranks(loaded.ctx, "searching the index", find)[0]


def question_vectors(texts: Sequence[str], loaded: LoadedRetriever, rows: RowMaker) -> torch.Tensor:
    """Return the vectors of questions, fp32 [q, e] on every rank; ranks share the work."""
    ctx = loaded.ctx
    share = block_shares(len(texts), ctx.dp.size)[ctx.dp.rank]
    own = [rows.row(text) for text in texts[share.start : share.stop]]
    tower = loaded.towers[QUERY]
    found = tower.vectors(own) if own else torch.empty((0, tower.width))
    part = (ctx.dp.rank, found) if ctx.tp.is_first else None
    parts = run_on_all_ranks(ctx, "reading the questions", lambda: part)
    return torch.cat(
        [vectors for _, vectors in sorted(filter(None, parts), key=lambda one: one[0])]
    )


def score_hits(hits: Hits, count: int, ranks: Sequence[int]) -> RetrievalScores:
    """Return the recalls at those `ranks` that `count` blocks reach, and at `count`."""
    reached = sorted({*(rank for rank in ranks if rank < count), count})
    recalls = {rank: recall_at(hits, rank) for rank in reached}
    return RetrievalScores(len(hits), recalls, mean_reciprocal_rank(hits))


def parser() -> argparse.ArgumentParser:
    """Return the flags of the task."""
    made = argparse.ArgumentParser(prog="tasks.main --task ICT-ZEROSHOT-NQ", allow_abbrev=False)
    add_retriever_flags(made)
    add = made.add_argument
    add("--qa-data-dev", type=Path, metavar="FILE", help="lines of a question, a tab, and answers")
    add("--qa-data-test", type=Path, metavar="FILE", help="the same, to test by")
    add(
        "--faiss-match",
        choices=[one.value for one in AnswerMatch],
        default=AnswerMatch.STRING.value,
        help="answers are words, or regular expressions [%(default)s]",
    )
    add(
        "--faiss-topk-retrievals",
        type=int,
        default=100,
        metavar="K",
        help="blocks that are looked at for each question [%(default)s]",
    )
    add("--output", metavar="FILE", help="also write the scores there, as JSON")
    return made


def _result(name: str, found: dict[str, RetrievalScores]) -> dict[str, Any]:
    return {
        "task": name,
        **{
            part: {
                "questions": scores.questions,
                "mean_reciprocal_rank": scores.mean_reciprocal_rank,
                **{f"top{k}": share for k, share in scores.recalls.items()},
            }
            for part, scores in found.items()
        },
    }
