"""A retriever that learned the inverse cloze task on books: does it find the block of a sentence?

`python benchmarks/quality/book_retrieval.py --books BOOK.txt ... --out FOLDER`: two blocks in five
lose a sentence, which has to find its block among all, beside BM25 over the same words. One of the
two sentences is in no file that is trained on, the other is. Nothing is chosen by what is judged.
"""

import argparse
import math
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.material import body_of_book, write_lines
from benchmarks.quality.steps import Steps, module
from megatron.initialize import shutdown_megatron
from megatron.model.retrieval.biencoder import QUERY
from megatron.program import run_program
from megatron.tokenizer.sentences import split_sentences
from tasks.retrieval.answers import words_of
from tasks.retrieval.metrics import mean_reciprocal_rank, recall_at
from tasks.text_files import read_text
from tools.retrieval.block_index import BlockIndex, IndexKey
from tools.retrieval.encoder import load_retriever
from tools.retrieval.evidence import EvidenceTable, RowMaker
from tools.retrieval.search import search_blocks

RANKS = (1, 5, 20)
_K1, _B = 1.2, 0.75  # of BM25, as Lucene has them
_CHAPTER = re.compile(
    r"^(?:CHAPTER [IVXLC\d]+\.?.*|Chapter \d+|Letter \d+|(?:ADVENTURE )?[IVX]+\. THE .*)$",
    re.MULTILINE,
)
_FEWEST_SENTENCES = 3  # of a block: two are left where one is taken out
# Of five blocks the first loses a sentence that is never read, the second one that is trained on.
_PERIOD, NEW, READ = 5, "new sentences", "sentences trained on"
_KINDS = {0: NEW, 1: READ}
_SHORTEST = 6  # words of a sentence that is asked


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The shape of the retriever, and the recipe of its training."""

    vocab_size: int = 8192
    words: int = 50  # of a block, before its last sentence
    layers: int = 1
    hidden: int = 128
    heads: int = 4
    seq_length: int = 96
    iterations: int = 2400
    batch: int = 128  # blocks that a question is compared with
    lr: float = 3e-3
    query_in_block_prob: float = 0.3
    seed: int = 1


class BookBlock(NamedTuple):
    """A block of a chapter, and the sentence that was taken out of it.

    Attributes:
        text: what is searched: the block without the sentence.
        trained_on: what the retriever learns from: as `text`, or the whole block.
        question: the sentence; None: the block is whole.
        kind: of the question, `NEW` or `READ`.
    """

    id: int
    title: str
    text: str
    trained_on: str
    question: str | None = None
    kind: str | None = None


def blocks_of_books(files: Sequence[Path], words: int) -> list[BookBlock]:
    """Return the blocks of all chapters of all books."""
    found: list[BookBlock] = []
    for path in files:
        book = path.stem.replace("_", " ").title()
        for chapter, text in chapters_of(body_of_book(read_text(path))):
            title = f"{book}: {' '.join(chapter.split())}"
            for sentences in blocks_of(split_sentences(text), words):
                found.append(_block(len(found), title, sentences))
    return found


def chapters_of(body: str) -> Iterator[tuple[str, str]]:
    """Yield the heading and the text of each chapter; what stands before the first is left out.

    A heading whose text is no page is a line of a table of contents.
    """
    headings = [*_CHAPTER.finditer(body)]
    stops = [heading.start() for heading in headings[1:]] + [len(body)]
    for heading, stop in zip(headings, stops):
        text = body[heading.end() : stop]
        if len(text.split()) > 150:
            yield heading.group().strip(), " ".join(text.split())


def blocks_of(sentences: Sequence[str], words: int) -> Iterator[list[str]]:
    """Yield runs of sentences that have so many words, and at least three sentences."""
    block: list[str] = []
    for sentence in sentences:
        block.append(sentence)
        if len(block) >= _FEWEST_SENTENCES and sum(len(one.split()) for one in block) >= words:
            yield block
            block = []


def _block(number: int, title: str, sentences: Sequence[str]) -> BookBlock:
    """Take a sentence out of two blocks in five, which is chosen by a checksum of the block."""
    whole = " ".join(sentences)
    kind = _KINDS.get(number % _PERIOD)
    asked = [at for at, one in enumerate(sentences) if len(one.split()) >= _SHORTEST]
    if kind is None or not asked:
        return BookBlock(number, title, whole, whole)
    taken = asked[zlib.crc32(whole.encode()) % len(asked)]
    left = " ".join(one for at, one in enumerate(sentences) if at != taken)
    return BookBlock(number, title, left, whole if kind == READ else left, sentences[taken], kind)


class BM25:
    """Scores of texts for a question (Robertson and Zaragoza 2009), Lucene's form of it."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._lengths = [len(words_of(text)) for text in texts]
        self._mean = sum(self._lengths) / len(texts)
        self._found: dict[str, list[tuple[int, int]]] = {}
        for at, text in enumerate(texts):
            for word, count in Counter(words_of(text)).items():
                self._found.setdefault(word, []).append((at, count))

    def best(self, question: str, count: int) -> list[int]:
        """Return the places of the best texts; of equal scores the first ones."""
        scores: Counter[int] = Counter()
        texts = len(self._lengths)
        for word in words_of(question):
            found = self._found.get(word, [])
            rarity = math.log(1 + (texts - len(found) + 0.5) / (len(found) + 0.5))
            for at, times in found:
                length = _K1 * (1 - _B + _B * self._lengths[at] / self._mean)
                scores[at] += rarity * times * (_K1 + 1) / (times + length)  # type: ignore[assignment]
        return sorted(scores, key=lambda at: (-scores[at], at))[:count]


def train(steps: Steps, blocks: Sequence[BookBlock], recipe: Recipe) -> Path:
    """Make WordPiece, corpora and a retriever from the blocks, and its index; return the table."""
    folder = steps.folder
    documents, table = folder / "blocks.jsonl", folder / "blocks.tsv"
    write_lines(documents, ({"text": one.trained_on, "title": one.title} for one in blocks))
    lines = [f"{one.id}\t{one.text}\t{one.title}" for one in blocks]
    table.write_text("\n".join(["id\ttext\ttitle", *lines]).replace('"', "'") + "\n")
    vocab = folder / "wordpiece" / "vocab.txt"
    steps.run(
        "a WordPiece vocabulary",
        module(
            "tools.train_tokenizer",
            *("--type", "wordpiece", "--input", documents, "--output", vocab.parent),
            *("--vocab-size", recipe.vocab_size),
        ),
    )
    tokenizer = ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab)
    for key, more in (("text", ("--split-sentences",)), ("title", ())):
        steps.run(
            f"the {key}s as tokens",
            module(
                "tools.preprocess_data",
                *("--input", documents, "--output-prefix", folder / "books", "--json-keys", key),
                *tokenizer,
                *more,
            ),
        )
    save = folder / "retriever"
    steps.run(
        "the inverse cloze task",
        [
            *(sys.executable, "pretrain_ict.py", *tokenizer, "--seq-length", recipe.seq_length),
            *("--num-layers", recipe.layers, "--hidden-size", recipe.hidden),
            *("--num-attention-heads", recipe.heads, "--position-embedding-type", "rope"),
            *("--init-method-std", 0.2, "--retriever-score-scaling"),
            *("--hidden-dropout", 0, "--attention-dropout", 0),
            "--biencoder-shared-query-context-model",
            *("--data-path", folder / "books_text_sentence", "--split", "98,2,0"),
            *("--titles-data-path", folder / "books_title_document"),
            *("--query-in-block-prob", recipe.query_in_block_prob),
            *("--micro-batch-size", recipe.batch, "--global-batch-size", recipe.batch),
            *("--train-iters", recipe.iterations, "--lr", recipe.lr, "--min-lr", 0),
            *("--lr-decay-style", "linear", "--lr-warmup-fraction", 0.05, "--weight-decay", 0.01),
            *("--retriever-report-topk-accuracies", 1, 5, "--eval-iters", 1),
            *("--eval-interval", max(1, recipe.iterations // 5), "--num-workers", 0),
            *("--log-interval", max(1, recipe.iterations // 30), "--seed", recipe.seed),
            *("--save", save, "--load", save, "--save-interval", max(1, recipe.iterations // 5)),
            *("--keep-last", 1),
        ],
    )
    steps.run(
        "the index",
        module(
            "tools.retrieval.create_doc_index",
            *("--load", save, "--embedding-path", folder / "index"),
            *("--evidence-data-path", table, "--indexer-log-interval", 0),
        ),
    )
    return table


def found_by_retriever(
    steps: Steps, table: Path, blocks: Sequence[BookBlock], recipe: Recipe
) -> list[list[int]]:
    """Return the ids of the best blocks for each sentence that was taken out."""
    loaded = load_retriever(steps.folder / "retriever", given={}, texts=(QUERY,))
    try:
        rows = RowMaker(loaded.tokenizer, recipe.seq_length)
        evidence = EvidenceTable(table, rows)
        index = BlockIndex(
            steps.folder / "index", IndexKey(loaded.checkpoint, evidence.fingerprint())
        )
        asked = [rows.row(one.question) for one in blocks if one.question is not None]
        vectors = loaded.towers[QUERY].vectors(asked)
        places = search_blocks(vectors, index.vectors(), count=max(RANKS)).places
        found: list[list[int]] = index.ids[places].tolist()
        return found
    finally:
        shutdown_megatron()


def judged(
    found: Sequence[Sequence[int]], blocks: Sequence[BookBlock], kind: str
) -> dict[str, float]:
    """Return recalls, and the mean reciprocal rank among the best blocks, for one kind of question.

    Args:
        found: the best blocks for each question, of all kinds.
    """
    asked = [one for one in blocks if one.question is not None]
    hits = [
        [at == one.id for at in ids]
        for ids, one in zip(found, asked, strict=True)
        if one.kind == kind
    ]
    recalls = {f"top-{rank}": recall_at(hits, rank) for rank in RANKS}
    return {**recalls, "mean reciprocal rank": mean_reciprocal_rank(hits)}


def main(argv: Sequence[str] | None = None, recipe: Recipe | None = None) -> None:
    """Run the steps that are not done yet, then print the results."""
    flags = _parser().parse_args(argv)
    steps, recipe = Steps(flags.out), replace(recipe or Recipe(), iterations=flags.iterations)
    blocks = blocks_of_books(flags.books, recipe.words)
    questions = [one.question for one in blocks if one.question is not None]
    print(f"{len(blocks)} blocks of {len(flags.books)} books, {len(questions)} sentences taken out")
    table = train(steps, blocks, recipe)
    bm25 = BM25([f"{one.title} {one.text}" for one in blocks])
    ways = {
        "retriever": found_by_retriever(steps, table, blocks, recipe),
        "BM25": [bm25.best(one, max(RANKS)) for one in questions],
    }
    results = {
        f"{way}, {kind}": judged(found, blocks, kind)
        for kind in _KINDS.values()
        for way, found in ways.items()
    }
    results["chance"] = {f"top-{rank}": rank / len(blocks) for rank in RANKS}
    for name, numbers in results.items():
        shown = " | ".join(f"{what} {100 * share:.2f} %" for what, share in numbers.items())
        print(f"{name}: {shown}")
    steps.write_report(
        flags.json,
        "book_retrieval",
        recipe=asdict(recipe),
        blocks=len(blocks),
        questions=len(questions),
        results=results,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="book_retrieval", description=__doc__)
    add = parser.add_argument
    add("--books", type=Path, nargs="+", required=True, metavar="FILE", help="novels as text")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--iterations", type=int, default=Recipe.iterations, help="[%(default)s]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
