"""Map all blocks to vectors and write an index: `torchrun .. -m tools.retrieval.create_doc_index`.

Each data-parallel rank maps its share of the blocks and writes its own file; rank 0 lists them. An
index of the same checkpoint and the same blocks is left as it is.
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from megatron import log
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.initialize import shutdown_megatron
from megatron.model.retrieval.biencoder import CONTEXT
from megatron.program import run_program
from tools.retrieval.block_index import IndexKey, has_index, write_list, write_part
from tools.retrieval.encoder import LoadedRetriever
from tools.retrieval.evidence import Evidence, RowMaker, block_shares
from tools.retrieval.flags import (
    add_retriever_flags,
    evidence_of,
    load_chosen_retriever,
    read_retriever_flags,
    row_maker,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, map the blocks, and write the index."""
    own, choice = read_retriever_flags(parser(), argv)
    loaded = load_chosen_retriever(choice, CONTEXT)
    try:
        rows = row_maker(choice, loaded)
        blocks = evidence_of(choice, loaded, rows)
        key = IndexKey(loaded.checkpoint, blocks.fingerprint())
        folder = own.embedding_path
        there = run_on_all_ranks(
            loaded.ctx, "looking for the index", lambda: has_index(folder, key)
        )
        if all(there):
            log.info(f"{folder} holds the index of this checkpoint and these blocks already")
            return
        index_blocks(folder, key, blocks, loaded, log_interval=own.indexer_log_interval)
        _warn_of_cuts(rows, len(blocks))
    finally:
        shutdown_megatron()


def index_blocks(
    folder: Path,
    key: IndexKey,
    blocks: Evidence,
    loaded: LoadedRetriever,
    *,
    log_interval: int = 1000,
) -> None:
    """Write the index of `blocks`; all ranks call this together.

    Args:
        log_interval: batches between two lines of the log; 0: there are none.

    Raises:
        MachineError: a file cannot be written. The same on every rank.
    """
    ctx, tower = loaded.ctx, loaded.towers[CONTEXT]
    share, began = block_shares(len(blocks), ctx.dp.size)[ctx.dp.rank], time.perf_counter()
    size, found = tower.batch_size, []
    for number, start in enumerate(range(share.start, share.stop, size), 1):
        places = range(start, min(start + size, share.stop))
        found.append(tower.vectors([blocks.tokens(place) for place in places]))
        if log_interval and number % log_interval == 0:
            speed = (places.stop - share.start) / (time.perf_counter() - began)
            log.info(
                f"mapped {places.stop - share.start} of {len(share)} blocks of this rank, "
                f"{speed:.0f} a second"
            )
    vectors = torch.cat(found) if found else torch.empty((0, tower.width))
    ids = torch.tensor([blocks.id_of(place) for place in share], dtype=torch.int64)
    writes = ctx.tp.is_first
    parts = run_on_all_ranks(
        ctx,
        "writing the index",
        lambda: write_part(folder, ctx.dp.rank, ctx.dp.size, ids, vectors) if writes else None,
    )
    written = sorted(part for part in parts if part is not None)
    run_on_all_ranks(
        ctx,
        "writing the list of the index",
        lambda: write_list(folder, key, written) if ctx.rank == 0 else None,
    )
    log.info(f"{folder}: {len(blocks)} blocks in {len(written)} files")


def parser() -> argparse.ArgumentParser:
    """Return the program's flags."""
    made = argparse.ArgumentParser(prog="create_doc_index", description=__doc__, allow_abbrev=False)
    add_retriever_flags(made)
    made.add_argument(
        "--indexer-log-interval",
        type=int,
        default=1000,
        metavar="N",
        help="batches between two lines of the log; 0: none [%(default)s]",
    )
    return made


def _warn_of_cuts(rows: RowMaker, blocks: int) -> None:
    if rows.cut:
        log.warning(
            f"{rows.cut} of {blocks} blocks are longer than {rows.seq_length} tokens and were cut "
            "at the end"
        )


if __name__ == "__main__":
    run_program(main)
