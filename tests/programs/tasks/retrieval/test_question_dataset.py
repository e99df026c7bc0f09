"""Samples of questions: an order for each epoch, and as many wrong blocks as are asked for."""

from collections import Counter
from pathlib import Path

import pytest

from megatron.initialize import tokenizer_of
from tasks.retrieval.question_dataset import QuestionDataset
from tasks.retrieval.questions import LabelledQuestion, Passage
from tests.support.tiny_bert import tiny_retrieval_run, write_tiny_blocks
from tools.retrieval.evidence import RowMaker

LENGTH = 12
QUESTIONS = [
    LabelledQuestion(
        f"w{1 + 3 * at}",
        Passage(f"w{2 + 3 * at}", "w1"),
        tuple(Passage(f"w{2 + 3 * at} w{hard}", "w2") for hard in (1, 2, 4)[: at % 4]),
    )
    for at in range(8)
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> RowMaker:
    blocks = write_tiny_blocks(Path(tmp_path_factory.mktemp("blocks")))
    return RowMaker(tokenizer_of(tiny_retrieval_run(blocks)), LENGTH)


def test_each_epoch_has_every_question_in_an_order_of_its_own(rows: RowMaker) -> None:
    dataset = QuestionDataset(QUESTIONS, rows, hard=0, seed=3, num_samples=20)
    places = [dataset.place_of(at) for at in range(20)]
    assert sorted(places[:8]) == sorted(places[8:16]) == list(range(8))
    assert places[:8] != places[8:16]
    assert places[16:] == [dataset.place_of(at) for at in range(16, 20)]
    in_order = QuestionDataset(QUESTIONS, rows, hard=0, seed=3)
    assert [in_order.place_of(at) for at in range(len(in_order))] == list(range(8))


def test_a_sample_has_the_right_block_first_and_then_wrong_ones(rows: RowMaker) -> None:
    dataset = QuestionDataset(QUESTIONS, rows, hard=2, seed=3)
    for at, question in enumerate(QUESTIONS):
        sample = dataset[at]
        assert sample["query_tokens"].shape == (LENGTH,)
        assert sample["context_tokens"].shape == sample["context_pad_mask"].shape == (3, LENGTH)
        found = [
            tuple(tokens[: int(mask.sum())].tolist())
            for tokens, mask in zip(sample["context_tokens"], sample["context_pad_mask"])
        ]

        def row(block: Passage) -> tuple[int, ...]:
            return tuple(rows.row(block.text, block.title))

        assert found[0] == row(question.right)
        own = Counter(found[1:]) & Counter(map(row, question.hard))
        assert own.total() == min(2, len(question.hard))
        rest = Counter(found[1:]) - own
        assert set(rest) <= {row(one.right) for one in QUESTIONS}
        again = dataset[at]
        assert (sample["context_tokens"] == again["context_tokens"]).all()


def test_what_a_sample_depends_on_changes_the_fingerprint(rows: RowMaker) -> None:
    made = [
        QuestionDataset(QUESTIONS, rows, hard=1, seed=3),
        QuestionDataset(QUESTIONS[:-1], rows, hard=1, seed=3),
        QuestionDataset(QUESTIONS, rows, hard=2, seed=3),
        QuestionDataset(QUESTIONS, rows, hard=1, seed=4),
    ]
    assert len({dataset.fingerprint() for dataset in made}) == len(made)
    made[0].check_unchanged()


def test_there_is_no_sample_beyond_the_end(rows: RowMaker) -> None:
    dataset = QuestionDataset(QUESTIONS, rows, hard=0, seed=3)
    for at in (-1, 8):
        with pytest.raises(IndexError, match="of 8"):
            dataset[at]
