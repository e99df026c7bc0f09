"""A retriever that was trained for a moment, and passages of its words."""

import dataclasses
from pathlib import Path
from typing import NamedTuple

from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import (
    TinyBlocks,
    tiny_retrieval_run,
    train_retrieval_all,
    write_tiny_blocks,
)

PASSAGES = 11


class TrainedRetriever(NamedTuple):
    """A checkpoint, the corpus that it was trained on, and a table of passages."""

    checkpoint: str
    blocks: TinyBlocks
    table: str


def trained_retriever(folder: Path) -> TrainedRetriever:
    """Two towers in float64, in which no two passages are a tie."""
    blocks, save = write_tiny_blocks(folder), str(folder / "save")
    config = tiny_retrieval_run(blocks, micro_batch_size=8, biencoder_projection_dim=12)
    checkpoint = dataclasses.replace(config.checkpoint, save=save)
    run_on_ranks(1, train_retrieval_all, [dataclasses.replace(config, checkpoint=checkpoint)])
    words = [f"w{at}" for at in range(50) if at % 3]
    table = folder / "evidence.tsv"
    lines = [
        f"{100 + at}\t{' '.join(words[at : at + 6])}\t{words[-at - 1]}" for at in range(PASSAGES)
    ]
    table.write_text("\n".join(["id\ttext\ttitle", *lines]) + "\n")
    return TrainedRetriever(save, blocks, str(table))
