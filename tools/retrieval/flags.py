"""The flags of programs that use a trained retriever and an index of blocks."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.data_utils import corpus_opener, named_prefixes
from megatron.data.samples.ict_dataset import ICTRecipe
from megatron.errors import ConfigError
from tools.flags.model import EPILOG, ModelChoice, read_model_flags
from tools.retrieval.encoder import BATCH_SIZE, LoadedRetriever, load_retriever
from tools.retrieval.evidence import CorpusBlocks, Evidence, EvidenceTable, RowMaker

# Flags of a training that name blocks here, and what is reported of them.
_OF_BLOCKS = ("data_path", "titles_data_path", "use_one_sent_docs")
_RANKS = "retriever_report_topk_accuracies"


class RetrieverChoice(NamedTuple):
    """The retriever that a program uses, and the blocks that it searches."""

    model: ModelChoice
    table: Path | None  # of --evidence-data-path
    corpus: DataConfig | None  # of --data-path, where there is no table
    titles: str | None
    one_sentence_documents: bool
    batch_size: int
    seq_length: int | None  # of --retriever-seq-length; None: as in training
    ranks: tuple[int, ...] = ()  # of --retriever-report-topk-accuracies


def add_retriever_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of every program that uses a retriever."""
    add = parser.add_argument
    add("--load", "--ict-load", required=True, metavar="FOLDER", help="checkpoint of a retriever")
    add("--iteration", type=int, help="which of them; the newest when not given")
    add("--tensor-model-parallel-size", type=int, metavar="N", help="ranks that share a layer [1]")
    add("--device", choices=("cpu", "cuda"), help="where to compute; as in training when not given")
    add("--fp32", action="store_true", help="compute in float32, whatever it was trained in")
    add(
        "--embedding-path",
        "--block-data-path",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="the index of blocks",
    )
    add(
        "--evidence-data-path",
        type=Path,
        metavar="FILE",
        help="blocks as lines of id, text and title between tabs; without it those of --data-path "
        "and --titles-data-path, a corpus split into sentences",
    )
    add(
        "--indexer-batch-size",
        type=int,
        default=BATCH_SIZE,
        metavar="N",
        help="rows that a replica reads together [%(default)s]",
    )
    add(
        "--retriever-seq-length",
        type=int,
        metavar="N",
        help="the most tokens of a block or a question; as in training when not given",
    )
    add("--faiss-use-gpu", action="store_true", help="accepted, has no effect: see --device")
    parser.set_defaults(inference=False, weight_quantization=None)
    parser.epilog = EPILOG


def read_retriever_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, RetrieverChoice]:
    """Return the program's own flags, and its choice of a retriever and of blocks.

    Raises:
        CommandLineError: a flag that no program has, or a value that cannot be read.
        ConfigError: flags that contradict each other, or no blocks.
    """
    own, model = read_model_flags(parser, argv)
    if own.faiss_use_gpu:
        log.info(
            "--faiss-use-gpu: accepted, has no effect here because the index is searched in the "
            "memory of the host"
        )
    named = {name: model.given.pop(name) for name in _OF_BLOCKS if name in model.given}
    ranks = model.given.pop(_RANKS, ())
    corpus = None
    if own.evidence_data_path is None:
        if "data_path" not in named:
            raise ConfigError(
                "there are no blocks to search",
                found="neither --evidence-data-path nor --data-path",
                fix="add --evidence-data-path FILE, a table of id, text and title",
            )
        corpus = DataConfig(seq_length=own.retriever_seq_length or 1, data_path=named["data_path"])
        if len(named_prefixes(corpus)) > 1:
            raise ConfigError(
                "blocks are those of one corpus, and several are named",
                found=f"--data-path {' '.join(named['data_path'])}",
                fix="merge the corpora with tools/merge_datasets.py",
            )
    return own, RetrieverChoice(
        model,
        own.evidence_data_path,
        corpus,
        named.get("titles_data_path"),
        named.get("use_one_sent_docs", False),
        own.indexer_batch_size,
        own.retriever_seq_length,
        ranks,
    )


def load_chosen_retriever(choice: RetrieverChoice, text: int) -> LoadedRetriever:
    """Return the tower of `text` that the flags choose; see `load_retriever`."""
    return load_retriever(
        choice.model.folder,
        choice.model.iteration,
        given=choice.model.given,
        texts=(text,),
        batch_size=choice.batch_size,
    )


def row_maker(choice: RetrieverChoice, loaded: LoadedRetriever) -> RowMaker:
    """Return what makes rows of the length of the flags.

    Raises:
        ConfigError: the tower cannot read rows of that length.
    """
    longest = loaded.config.model.max_position_embeddings or loaded.config.data.seq_length
    length = loaded.config.data.seq_length if choice.seq_length is None else choice.seq_length
    if not 3 <= length <= longest:
        raise ConfigError(
            "the towers cannot read rows of that length",
            found=f"--retriever-seq-length {length}, towers of {longest} positions",
            fix=f"use a number from 3 to {longest}",
        )
    return RowMaker(loaded.tokenizer, length)


def evidence_of(choice: RetrieverChoice, loaded: LoadedRetriever, rows: RowMaker) -> Evidence:
    """Open the blocks of the flags.

    Raises:
        DataError: they cannot be read.
    """
    if choice.table is not None:
        return EvidenceTable(choice.table, rows)
    assert choice.corpus is not None  # noqa: S101  # invariant: `read_retriever_flags` looked
    opened = corpus_opener(choice.corpus, is_builder=True)
    (prefix,) = named_prefixes(choice.corpus)
    recipe = ICTRecipe(
        vocabulary=rows.vocabulary,
        seq_length=rows.seq_length,
        seed=loaded.config.training.seed,
        one_sentence_documents=choice.one_sentence_documents,
    )
    titles = None if choice.titles is None else opened(choice.titles)
    return CorpusBlocks(opened(prefix), titles, recipe, loaded.tokenizer)
