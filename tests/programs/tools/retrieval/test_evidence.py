"""Blocks of tables and of corpora: their rows, and what of a table is refused."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.samples.ict_dataset import ICTDataset, ICTRecipe
from megatron.errors import DataError
from megatron.initialize import tokenizer_of
from megatron.tokenizer.tokenizer import Tokenizer
from tests.support.examples import examples
from tests.support.tiny_bert import TinyBlocks, tiny_retrieval_run, write_tiny_blocks
from tests.unit.data.corpora import cache_in
from tools.retrieval.evidence import (
    CorpusBlocks,
    EvidenceBlock,
    EvidenceTable,
    RowMaker,
    block_shares,
)

LENGTH = 24


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> TinyBlocks:
    return write_tiny_blocks(Path(tmp_path_factory.mktemp("blocks")))


@pytest.fixture(scope="module")
def tokenizer(blocks: TinyBlocks) -> Tokenizer:
    return tokenizer_of(tiny_retrieval_run(blocks))


def table(folder: Path, *lines: str) -> Path:
    path = folder / "evidence.tsv"
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_a_row_has_the_title_and_as_much_of_the_text_as_fits(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = table(
        tmp_path, "id\ttext\ttitle", "7\tw1 w2\tw4", '9\t"w5 ""w7"""\t', f"11\t{'w8 ' * 40}"
    )
    rows = RowMaker(tokenizer, LENGTH)
    found = EvidenceTable(path, rows)
    cls, sep = tokenizer.cls, tokenizer.sep
    words = {word: tokenizer.tokenize(word)[0] for word in ("w1", "w2", "w4", "w8")}
    assert [found.id_of(at) for at in range(len(found))] == [7, 9, 11]
    assert found.block(1) == EvidenceBlock(9, 'w5 "w7"', "")
    assert found.tokens(0) == [cls, words["w4"], sep, words["w1"], words["w2"], sep]
    assert found.tokens(2) == [cls, *[words["w8"]] * (LENGTH - 2), sep]
    assert (rows.cut, found.block(2).title) == (1, None)


def test_a_table_has_another_digest_with_other_content_or_length(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    def digest(line: str, length: int = LENGTH) -> str:
        return EvidenceTable(table(tmp_path, line), RowMaker(tokenizer, length)).fingerprint()

    assert digest("1\tw1\tw2") == digest("1\tw1\tw2")
    assert len({digest("1\tw1\tw2"), digest("1\tw1\tw4"), digest("1\tw1\tw2", 20)}) == 3


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["1\tw1\tw2", "x\tw1\tw2"], "is not an id, a text and a title"),
        (["1"], "is not an id, a text and a title"),
        (["1\tw1\tw2", "1\tw3\tw4"], "two blocks have the same id"),
        (["id\ttext\ttitle"], "there are no blocks to search"),
    ],
)
def test_a_damaged_table_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, lines: list[str], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        EvidenceTable(table(tmp_path, *lines), RowMaker(tokenizer, LENGTH))


def test_a_table_that_is_not_there_or_no_text_is_refused(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    rows = RowMaker(tokenizer, LENGTH)
    with pytest.raises(DataError, match="the table of evidence cannot be read"):
        EvidenceTable(tmp_path / "nothing.tsv", rows)
    (tmp_path / "bytes.tsv").write_bytes(b"1\t\xff\tw")
    with pytest.raises(DataError, match="the table of evidence is damaged"):
        EvidenceTable(tmp_path / "bytes.tsv", rows)


def test_the_blocks_of_a_corpus_are_those_of_the_inverse_cloze_task(
    blocks: TinyBlocks, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    corpus, titles = MMapIndexedDataset(blocks.sentences.prefix), MMapIndexedDataset(blocks.titles)
    recipe = ICTRecipe(
        vocabulary=RowMaker(tokenizer, LENGTH).vocabulary,
        seq_length=LENGTH,
        seed=3,
        query_in_block_prob=1.0,
    )
    found = CorpusBlocks(corpus, titles, recipe, tokenizer)
    samples = ICTDataset(
        corpus,
        DocumentSlice(name="all", start=0, stop=len(corpus.doc_idx) - 1),
        titles=titles,
        recipe=recipe,
        num_samples=1,
        cache=cache_in(tmp_path),
    )
    assert [found.id_of(at) for at in range(len(found))] == list(range(len(samples)))
    for at in range(len(samples)):
        sample = samples[at]
        number, length = int(sample["block_data"][3]), int(sample["context_pad_mask"].sum())
        assert found.tokens(number) == sample["context_tokens"][:length].tolist()
    block = found.block(0)
    words = [*tokenizer.tokenize(block.title or ""), *tokenizer.tokenize(block.text)]
    assert len(words) >= 2
    without = CorpusBlocks(corpus, None, recipe, tokenizer)
    assert without.block(0).title is None
    assert without.fingerprint() != found.fingerprint()


@given(count=st.integers(0, 50), ranks=st.integers(1, 9))
@examples(50)
def test_every_block_is_on_one_rank_and_ranks_have_equally_many(count: int, ranks: int) -> None:
    parts = block_shares(count, ranks)
    assert [at for part in parts for at in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
