"""The quality runs, made short: a small BERT learns what its task needs, loops agree with tasks."""

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.quality import (
    bert_pairs,
    book_retrieval,
    gpt_text,
    prefix_tasks,
    text_to_text,
)
from benchmarks.quality.judging import bag_of_words, judge, judgement_lines
from benchmarks.quality.material import (
    documents_of_book,
    mixed,
    novel_parts,
    parts_by,
    polarity_parts,
    snli_parts,
    write_documents,
    write_lines,
    write_sst2,
)
from benchmarks.quality.plain_scores import plain_endings, plain_loss
from benchmarks.quality.steps import Steps, on_ranks
from megatron.errors import ConfigError, DataError, NumericsError
from megatron.tokenizer.sentences import split_sentences
from tests.support.launch import write_text
from tests.support.ranks import run_on_ranks
from tests.support.warm_python import python_that_forks

SYLLABLES = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
WORDS = 24  # of a topic
PAIRS = 200
# Of 200 pairs about two topics half are right by chance, 57 % in one of forty tries.
LEARNED, CHANCE = 0.85, 0.65
# Sums of float64 in another order.
SAME = 1e-12


def topics() -> list[list[str]]:
    """Return two sets of words that cannot be distinguished by their letters."""
    words = [first + second for first in SYLLABLES for second in SYLLABLES]
    np.random.RandomState(0).shuffle(words)
    return [words[:WORDS], words[WORDS : 2 * WORDS]]


def write_topics(path: Path) -> Path:
    """Documents of sentences, each document about one topic."""
    random = np.random.RandomState(1)

    def sentence(topic: list[str]) -> str:
        return " ".join(random.choice(topic, 6)).capitalize() + "."

    rows = [
        {"text": " ".join(sentence(topics()[number % 2]) for _ in range(6))}
        for number in range(300)
    ]
    write_lines(path, rows)
    return path


def write_pairs(path: Path, *, first: int, last: int, seed: int) -> list[str]:
    """RTE's columns: whether two texts are about one topic, in words `first` to `last` of each."""
    random, labels = np.random.RandomState(seed), []
    lines = ["index\tsentence1\tsentence2\tlabel"]
    for number in range(PAIRS):
        one, same = random.randint(2), number % 2 == 0
        chosen = [topics()[topic][first:last] for topic in (one, one if same else 1 - one)]
        texts = [" ".join(random.choice(words, 3)) for words in chosen]
        labels.append("entailment" if same else "not_entailment")
        lines.append("\t".join([str(number), *texts, labels[-1]]))
    path.write_text("\n".join(lines) + "\n")
    return labels


@pytest.fixture
def _steps_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are programs of their own, which would each import torch."""
    monkeypatch.setattr(sys, "executable", python_that_forks()["PYTHON"])


@pytest.mark.usefixtures("_steps_are_forked")
@pytest.mark.slow
@pytest.mark.wide  # a minute of training, for a quality of models and no law
def test_what_pretraining_taught_about_words_decides_pairs_of_words_never_fine_tuned_on(
    tmp_path: Path,
) -> None:
    model = bert_pairs.Pretraining(
        vocab_size=200, layers=2, hidden=64, heads=2, seq_length=32, iterations=400, split="90,5,5"
    )
    recipe = bert_pairs.FineTuning(task="RTE", epochs=12, lr=1e-3, seq_length=16, seeds=(1,))
    sides = bert_pairs.Sides(*(tmp_path / f"{name}.tsv" for name in ("train", "valid", "test")))
    for seed, (path, first, last) in enumerate(zip(sides, (0, 8, 16), (8, 16, 24))):
        labels = write_pairs(path, first=first, last=last, seed=seed)
    steps = Steps(tmp_path / "run")
    bert_pairs.pretrain(steps, write_topics(tmp_path / "topics.jsonl"), model, ranks=1)
    answers = bert_pairs.answers_of(steps, sides, recipe, model)
    found = judge(labels, answers, [str(number) for number in range(PAIRS)])
    assert found.majority == 0.5
    assert found.answers[bert_pairs.PRETRAINED].mean > LEARNED
    assert found.answers[bert_pairs.INITIAL].mean < CHANCE


@pytest.mark.usefixtures("_steps_are_forked")
@pytest.mark.slow
def test_a_task_a_plain_loop_and_transformers_score_one_model_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = write_text(tmp_path / "text.txt", 400)
    recipe = gpt_text.Pretraining(
        vocab_size=300, layers=2, hidden=32, heads=2, seq_length=32, iterations=30
    )
    wikitext, lambada = tmp_path / "wiki.tokens", tmp_path / "lambada.jsonl"
    wikitext.write_text(" = Cats = \n the cat , a dog and 1 @,@ 000 mice sat . \n" * 12)
    passages = ["the cat sat on a mat", "two dogs run over green hills far away", "rain fell"]
    write_lines(lambada, [{"text": passage} for passage in passages])
    steps, documents = Steps(tmp_path / "run"), tmp_path / "text.jsonl"
    write_documents([text], documents, keep_lines=True)
    gpt_text.pretrain(steps, documents, recipe, ranks=1)
    found = gpt_text.scored(steps, wikitext, lambada, recipe, step=8)
    assert [*found] == [gpt_text.OURS, gpt_text.PLAIN, gpt_text.TRANSFORMERS]
    gpt_text.check_equal(found)
    ours = found[gpt_text.OURS]
    assert ours.passages == 3
    assert 1 < ours.perplexity < recipe.vocab_size
    assert sum("relatively" in line for line in gpt_text.table(found)) == 2
    assert "a byte-level BPE" in capsys.readouterr().out


def result(**changed: float) -> gpt_text.Found:
    values = {"loss": 5.0, "tokens": 9, "perplexity": 150.0, "adjusted_perplexity": 900.0}
    return gpt_text.Found(**(values | {"endings": 1, "strict_endings": 0, "passages": 3} | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"perplexity": 150.02},
        {"adjusted_perplexity": 900.1},
        {"adjusted_perplexity": math.nan},
        {"tokens": 8},
        {"endings": 2},
        {"strict_endings": 1},
        {"passages": 4},
    ],
)
def test_a_loop_that_says_something_else_ends_the_run(changed: dict[str, float]) -> None:
    gpt_text.check_equal({"tasks": result(), "loop": result(perplexity=150.001)})
    with pytest.raises(NumericsError, match="do not score the same model alike"):
        gpt_text.check_equal({"tasks": result(), "loop": result(**changed)})


def counting_logits(size: int) -> Callable[[Tensor], Tensor]:
    """A model that looks at every token before, and at nothing behind."""

    def logits(tokens: Tensor) -> Tensor:
        sums = tokens.cumsum(dim=1)[..., None].double()
        return torch.sin(sums * torch.arange(1, size + 1, dtype=torch.float64))

    return logits


@pytest.mark.parametrize(
    ("count", "length", "step"), [(30, 8, 3), (30, 8, 8), (9, 8, 2), (5, 8, 1)]
)
def test_the_plain_loop_scores_each_token_once_with_all_the_context_that_its_window_has(
    count: int, length: int, step: int
) -> None:
    tokens, logits = torch.randint(7, (count,), generator=torch.Generator().manual_seed(0)), 7
    model = counting_logits(logits)
    losses = []
    for at in range(1, count):
        start = 0 if at <= length else math.ceil((at - length) / step) * step
        scores = model(tokens[None, start:at])[0, -1].log_softmax(-1)
        losses.append(-float(scores[tokens[at]]))
    found = plain_loss(model, tokens.tolist(), length=length, step=step, batch=2)
    assert found.tokens == count - 1
    assert found.loss == pytest.approx(math.fsum(losses) / len(losses), rel=SAME)
    assert found.perplexity == math.exp(found.loss)


def test_an_ending_is_right_when_greedy_choice_says_all_of_it() -> None:
    follows = torch.arange(1, 129) % 128  # after each letter the next one, but ". a"
    follows[ord(".")], follows[ord(" ")] = ord(" "), ord("a")

    def logits(tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(follows[tokens], 128).double()

    def right(passages: list[str], *, length: int = 8, strict: bool = False) -> int:
        def encode(text: str) -> list[int]:
            return [ord(letter) for letter in text]

        return plain_endings(logits, encode, passages, length=length, strict=strict)

    assert right(["abc", "az", "x. a", "x. abd"]) == 2
    assert right(["x. abc", "x abc", "x. abd"], strict=True) == 1
    assert right(["zzzzzzabc", "zzzzzzacb"], length=2) == 1  # as much as the model can read


def test_parts_share_no_source_and_do_not_depend_on_the_order(tmp_path: Path) -> None:
    rows = [
        {"captionID": f"{image}.jpg#{caption}", "gold_label": label, "pairID": f"{image}{caption}"}
        for image in range(40)
        for caption, label in enumerate(("entailment", "neutral", "-"))
    ]
    write_lines(tmp_path / "a.jsonl", rows)
    write_lines(tmp_path / "b.jsonl", rows[::-1])
    parts, others = snli_parts(tmp_path / "a.jsonl"), snli_parts(tmp_path / "b.jsonl")
    images = [{row["captionID"].partition("#")[0] for row in part} for part in parts]
    assert sum(map(len, images)) == len(set.union(*images)) == 40
    assert sum(map(len, parts)) == 80  # those without agreement are left out
    assert all(len(part) > 0 for part in parts)
    for part, other in zip(parts, others):
        assert sorted(row["pairID"] for row in part) == sorted(row["pairID"] for row in other)


def test_a_part_without_examples_is_refused() -> None:
    with pytest.raises(DataError, match="a part of the examples is empty"):
        parts_by(["a", "a"], str)


def test_reviews_become_sentences_with_labels(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        lines = [f"{name}   film {number}\n" for number in range(30)]
        (tmp_path / name).write_text("".join(lines), encoding="latin-1")
    parts = polarity_parts(tmp_path / "good", tmp_path / "bad")
    assert {label for sentence, label in parts.test if sentence.startswith("good film")} == {"1"}
    write_sst2(tmp_path / "out.tsv", parts.test)
    lines = (tmp_path / "out.tsv").read_text().splitlines()
    assert lines[0] == "sentence\tlabel"
    assert len(lines) == 1 + len(parts.test)


def test_a_book_is_cut_into_stretches_without_the_words_around_it() -> None:
    body = "".join(f"Chapter {number}\nwith  two lines.\n\n" for number in range(400))
    book = (
        f"Licence.\n*** START OF THIS PROJECT X ***\n\n{body}*** END OF THIS PROJECT X ***\nMore."
    )
    documents = list(documents_of_book(book))
    assert len(documents) > 2
    assert max(map(len, documents)) < 4200
    text = " ".join(documents)
    assert text.startswith("Chapter 0 with two lines. Chapter 1")
    assert "Licence" not in text
    assert "More" not in text
    kept = next(documents_of_book(book, keep_lines=True))
    assert kept.startswith("Chapter 0\nwith  two lines.\n\nChapter 1\n")


def test_a_judgement_counts_what_is_right_and_draws_whole_sources() -> None:
    true = ["a", "b"] * 50
    better = [label if number >= 20 else "c" for number, label in enumerate(true)]
    answers = {"better": [true, better], "worse": [["a"] * 100]}
    found = judge(true, answers, [str(number // 2) for number in range(100)])
    assert (found.examples, found.sources, found.majority) == (100, 50, 0.5)
    assert found.answers["better"].accuracies == [1.0, 0.8]
    assert found.answers["better"].mean == pytest.approx(0.9)
    low, high = found.answers["better"].interval
    assert 0.83 < low < 0.9 < high < 0.96
    # In every source one of two is right: drawn again they give the same.
    assert found.answers["worse"].interval == (0.5, 0.5)
    difference, (low, high) = found.differences["better - worse"]
    assert difference == pytest.approx(0.4)
    assert 0.33 < low < 0.4 < high < 0.46
    lines = list(judgement_lines("PAIRS", found))
    assert "| better | 90.0 % |" in lines[4]
    assert lines[4].endswith("| 100.0, 80.0 |")


def test_a_bag_of_words_finds_the_word_that_decides() -> None:
    texts = [f"{'nobody' if number % 2 else 'somebody'} number {number}" for number in range(20)]
    labels = ["no" if number % 2 else "yes" for number in range(20)]
    assert bag_of_words(texts, labels, ["nobody else", "somebody else"]) == ["no", "yes"]


@pytest.fixture
def steps(tmp_path: Path) -> Steps:
    return Steps(tmp_path / "run")


def test_a_step_is_run_once_and_leaves_what_it_took(steps: Steps) -> None:
    code = f"open({str(steps.folder / 'log')!r}, 'a').write('x')"
    for _ in range(2):
        steps.run("write", [sys.executable, "-c", code])
    assert (steps.folder / "log").read_text() == "x"
    taken = json.loads(steps.record.read_text())["write"]
    assert taken["command"].startswith("python -c")
    assert taken.keys() == {"command", *steps.seconds()["write"]}


def test_a_step_of_another_command_is_refused(steps: Steps) -> None:
    steps.run("a", [sys.executable, "-c", "0"])
    with pytest.raises(ConfigError, match="the folder holds what another command made"):
        steps.run("a", [sys.executable, "-c", "1"])


def test_a_step_that_fails_ends_the_run_with_its_status_and_is_done_again(steps: Steps) -> None:
    with pytest.raises(SystemExit) as left:
        steps.run("a", [sys.executable, "-c", "raise SystemExit(66)"])
    assert left.value.code == 66
    assert steps.taken() == {}


def test_one_rank_needs_no_launcher() -> None:
    assert on_ranks(1, "pretrain_bert.py", "--seed", 1) == [
        sys.executable,
        "pretrain_bert.py",
        "--seed",
        1,
    ]
    assert "torch.distributed.run" in on_ranks(2, "pretrain_bert.py")


RULE_TASK = "look a rule up behind cells, and apply it"


@pytest.mark.parametrize("task", prefix_tasks.TASKS)
def test_pairs_of_a_task_can_be_answered_and_are_the_same_each_time(task: str) -> None:
    pairs = prefix_tasks.pairs_of(task, 50, seed=3)
    assert pairs == prefix_tasks.pairs_of(task, 50, seed=3)
    assert pairs != prefix_tasks.pairs_of(task, 50, seed=4)
    for inputs, targets in pairs:
        length, recipe = len(inputs) + len(targets), prefix_tasks.TASKS[task].recipe
        has_positions = recipe.positions == "learned_absolute"
        # A place is told by its position, so that pairs must not share a row.
        assert length == recipe.seq_length if has_positions else 2 * length <= recipe.seq_length
        assert targets[-1] == prefix_tasks.END
        assert max(inputs) < prefix_tasks.VOCABULARY - 1
        if task == "copy":
            assert inputs == [*targets[:-1], prefix_tasks.ASK]
        elif "name" in task:
            *texts, ask, name = inputs
            assert ask == prefix_tasks.ASK
            at = texts.index(name)
            assert targets[:-1] == texts[at - 5 : at]
        elif "pointers" in task:
            kind, *places, _ = inputs
            ends = [_followed(places, at, kind - 32) for at in range(len(places))]
            assert targets[:-1] == ends
        else:
            assert len(targets) == len(inputs) - 2


def _followed(places: list[int], at: int, steps: int) -> int:
    return at if steps == 0 else _followed(places, places[at], steps - 1)


def test_pointers_are_learned_for_all_steps_and_judged_for_three() -> None:
    task = "follow pointers for three steps"
    learned, judged = (
        {pair.inputs[0] - 32 for pair in prefix_tasks.pairs_of(task, 50, seed=3, asked=asked)}
        for asked in (False, True)
    )
    assert learned == {1, 2, 3}
    assert judged == {3}


def test_cells_follow_a_rule() -> None:
    rule = prefix_tasks.RULES[0]
    (*cells, _, _, _), targets = next(
        pair
        for pair in prefix_tasks.pairs_of(RULE_TASK, 100, seed=3)
        if pair.inputs[-2] == 32  # the first rule
    )
    for _ in range(2):
        bits = "".join(map(str, [0, *cells, 0]))
        cells = [(rule >> int(bits[at : at + 3], 2)) & 1 for at in range(len(cells))]
    assert targets[:-1] == cells


@pytest.mark.wide  # six starts of programs
def test_both_models_answer_what_they_were_not_trained_on(tmp_path: Path) -> None:
    recipe = prefix_tasks.Recipe(iterations=120, train_pairs=8000, test_pairs=40)
    found = prefix_tasks.answered(Steps(tmp_path), "copy", recipe)
    assert found.examples == 40
    assert [*found.answers] == [prefix_tasks.PREFIX, prefix_tasks.CAUSAL]
    lines = list(prefix_tasks.table({"copy": found}))
    assert len(lines) == 3
    assert lines[-1].startswith("| copy | ")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (721, "seven hundred twenty one"),
        (1000, "one thousand"),
        (9008, "nine thousand eight"),
    ],
)
def test_numbers_are_read_in_words_and_written_so(number: int, words: str) -> None:
    digits, back = (pair(number) for pair in text_to_text.TASKS.values())
    assert digits == (f"digits: {words}", " ".join(str(number)))
    assert back == (f"words: {digits.targets}", words)


def test_pairs_to_answer_share_no_number_with_those_to_learn() -> None:
    train, held_out = text_to_text.parts_of(text_to_text.Recipe(test_pairs=20))
    assert [*held_out] == [*text_to_text.TASKS]
    assert [len(pairs) for pairs in held_out.values()] == [20, 20]
    asked = {pair for pairs in held_out.values() for pair in pairs}
    assert len(train) == len(set(train)) == 2 * (10_000 - 20)
    assert not asked & set(train)


def test_a_table_has_a_line_for_each_task_and_model() -> None:
    found = judge(["a", "b"], {text_to_text.PRETRAINED: [["a", "a"]]}, ["1", "2"])
    _, _, line = text_to_text.table({"digits": found})
    assert line == "| digits | 2 | pretrained | 50.0% (0.0 to 100.0) |"


def test_a_report_has_the_machine_the_steps_and_what_was_found(tmp_path: Path) -> None:
    steps, target = Steps(tmp_path / "run"), tmp_path / "kept" / "report.json"
    steps.write_report(None, "nothing")
    steps.write_report(target, "a_program", found={"share": 0.5})
    report = json.loads(target.read_text())
    assert report.pop("machine")
    assert report == {"quality": "a_program", "found": {"share": 0.5}, "steps": {}}


def test_reviews_that_are_few_are_the_same_whatever_their_order_was() -> None:
    rows = [(f"sentence {n}", str(n % 2)) for n in range(20)]
    assert mixed(rows) == mixed(rows[::-1]) != rows
    assert sorted(mixed(rows)) == sorted(rows)
    assert bert_pairs.REVIEWS.title == "SST-2"
    assert bert_pairs.FEW_REVIEWS.title == "SST-2 with 512 labels"


def test_documents_whose_sentences_are_judged_by_are_not_read_before(tmp_path: Path) -> None:
    files = []
    for name in ("one", "other"):
        pages = [
            " ".join(f"The {name} book has page {page} and line {line}." for line in range(120))
            for page in range(24)
        ]
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text("\n\n".join([*pages, "Both of the books end with this."]))
    parts = novel_parts(*files)
    trained, chosen_by, judged = ({document for _, _, document in part} for part in parts)
    assert not judged & (trained | chosen_by)
    rows = [row for part in parts for row in part]
    assert all((" one " in sentence) == (label == "1") for sentence, label, _ in rows)
    assert not any("Both" in sentence for sentence, _, _ in rows)
    count = write_documents(files, tmp_path / "read.jsonl", without=judged)
    left = [json.loads(line)["text"] for line in (tmp_path / "read.jsonl").open()]
    assert len(left) == count
    assert (trained | chosen_by).issubset(left)
    assert judged.isdisjoint(left)


@pytest.mark.parametrize(
    ("task", "lacking"),
    [("SNLI", "--snli"), ("SST-2", "--reviews"), ("novels with 512 labels", "--novels")],
)
def test_a_file_is_asked_for_where_a_task_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str, lacking: str
) -> None:
    words = ["--books", "a.txt", "--out", str(tmp_path), "--tasks", task]
    with pytest.raises(SystemExit):
        bert_pairs.main(words)
    assert f"lacks its file: {lacking}" in capsys.readouterr().err


def test_blocks_of_books_have_titles_and_lose_a_sentence() -> None:
    text = " ".join(f"Sentence {n} has some words about it here." for n in range(60))
    contents = "CHAPTER I. First\nCHAPTER II. Second\n\n"
    body = f"{contents}CHAPTER I. First\n\n{text}\n\nCHAPTER II. Second\n{text}"
    chapters = [*book_retrieval.chapters_of(body)]
    assert [title for title, _ in chapters] == ["CHAPTER I. First", "CHAPTER II. Second"]
    sentences = split_sentences(chapters[0][1])
    blocks = [*book_retrieval.blocks_of(sentences, 30)]
    assert [one for block in blocks for one in block] == sentences[: sum(map(len, blocks))]
    assert min(map(len, blocks)) >= 3
    assert min(sum(len(one.split()) for one in block) for block in blocks) >= 30


def test_a_sentence_is_taken_out_of_two_blocks_in_five_and_one_of_them_is_trained_on(
    tmp_path: Path,
) -> None:
    sentences = [f"Sentence {n} has some words about it here." for n in range(100)]
    book = tmp_path / "a_book.txt"
    book.write_text("CHAPTER I. First\n\n" + " ".join(sentences))
    blocks = book_retrieval.blocks_of_books([book], 30)
    kinds = [one.kind for one in blocks]
    assert kinds[:5] == kinds[5:10] == [book_retrieval.NEW, book_retrieval.READ, None, None, None]
    for one in blocks:
        assert (one.question is None) == (one.kind is None)
        if one.question is not None:
            assert one.question not in one.text
            assert (one.question in one.trained_on) == (one.kind == book_retrieval.READ)


def test_bm25_finds_the_text_with_the_rare_words() -> None:
    texts = ["the cat sat on the mat", "the dog sat on the log", "a whale swam"]
    search = book_retrieval.BM25(texts)
    assert search.best("where is the whale", 3)[0] == 2
    assert search.best("the dog on the log", 1) == [1]
    assert search.best("nothing known", 3) == []


def compare_on_books(argv: list[str], python: str) -> None:
    """A body for `run_on_ranks`: the whole comparison with a tiny recipe."""
    tiny = book_retrieval.Recipe(vocab_size=300, words=20, hidden=16, seq_length=64, batch=8)
    sys.executable = python
    book_retrieval.main(argv, tiny)


@pytest.mark.slow
def test_a_retriever_of_books_is_trained_asked_and_compared(tmp_path: Path) -> None:
    book = tmp_path / "a_book.txt"
    known = ["".join(two) for two in itertools.product(SYLLABLES, SYLLABLES)]
    words = np.random.RandomState(0).choice(known, (420, 9))
    sentences = [" ".join(row).capitalize() + "." for row in words]
    chapters = [
        f"CHAPTER {n + 1}. {sentences[n]}\n\n" + " ".join(sentences[60 * n : 60 * n + 60])
        for n in range(7)
    ]
    book.write_text("\n\n".join(chapters))
    report = tmp_path / "report.json"
    argv = ["--books", str(book), "--out", str(tmp_path / "out"), "--iterations", "2"]
    argv += ["--json", str(report)]
    run_on_ranks(1, compare_on_books, argv, python_that_forks()["PYTHON"])
    found = json.loads(report.read_text())["results"]
    kinds = (book_retrieval.NEW, book_retrieval.READ)
    ways = {f"{way}, {kind}" for way in ("retriever", "BM25") for kind in kinds}
    assert set(found) == ways | {"chance"}
    for numbers in found.values():
        assert 0 <= numbers["top-1"] <= numbers["top-5"] <= numbers["top-20"] <= 1
