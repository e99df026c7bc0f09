"""A BERT pretrained for minutes on books, then fine-tuned: does it beat chance, and by how much?

`python benchmarks/quality/bert_pairs.py --books BOOK.txt ... --snli DEV.jsonl --out FOLDER`: every
step is a command of this project, and one that was stopped goes on with the same words. Beside the
pretrained model stand the same fine-tuning of initial values, a bag of words, and the largest
class. Nothing is chosen by the part that is judged by; the best epoch is chosen by another one.
"""

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.judging import Judgement, bag_of_words, judge, judgement_lines
from benchmarks.quality.material import (
    Parts,
    image_of,
    mixed,
    novel_parts,
    polarity_parts,
    snli_parts,
    write_documents,
    write_lines,
    write_sst2,
)
from benchmarks.quality.steps import Steps, module, on_ranks
from megatron.program import run_program

PRETRAINED, INITIAL, WORDS = "pretrained", "initial values", "bag of words"
_NOTHING = 1e-30  # a learning rate that changes no weight


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """The shape of a BERT, and the recipe of its pretraining."""

    vocab_size: int = 8192
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq_length: int = 128
    mask_prob: float = 0.3  # twice the usual, so that little text is guessed at more often
    iterations: int = 3000
    batch: int = 16
    lr: float = 2e-3
    split: str = "96,2,2"
    seed: int = 1
    bf16: bool = True
    init: float = 0.02  # standard deviation of the first weights


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """The recipe of one task's fine-tuning, and its seeds.

    Attributes:
        task: of `tasks.main`, whose files the examples are written as.
        name: of the examples here, where it is not that of the task.
        labels: examples to train on, and half as many to choose the best epoch by; None: all.
    """

    task: str
    name: str | None = None
    epochs: int
    lr: float
    seq_length: int
    batch: int = 16
    seeds: tuple[int, ...] = (1, 2, 3)
    labels: int | None = None

    @property
    def title(self) -> str:
        """The name of the task here, by which files and steps are called."""
        name = self.name or self.task
        return name if self.labels is None else f"{name} with {self.labels} labels"


class Sides(NamedTuple):
    """The files of one task, as `tasks.main` reads them."""

    train: Path
    valid: Path
    test: Path


# Usual for models this small, chosen before anything was fine-tuned, and not tuned.
SNLI = FineTuning(task="SNLI", epochs=10, lr=5e-4, seq_length=64)
REVIEWS = FineTuning(task="SST-2", epochs=3, lr=5e-4, seq_length=64, seeds=(1,))
FEW_REVIEWS = FineTuning(task="SST-2", epochs=10, lr=5e-4, seq_length=64, labels=512)
NOVELS = replace(FEW_REVIEWS, name="novels")
TASKS = {recipe.title: recipe for recipe in (SNLI, REVIEWS, FEW_REVIEWS, NOVELS)}


def pretrain(steps: Steps, documents: Path, recipe: Pretraining, *, ranks: int) -> None:
    """Make WordPiece, corpus and BERT from JSON lines, and a BERT with random weights."""
    vocab, prefix = steps.folder / "wordpiece" / "vocab.txt", steps.folder / "books"
    steps.run(
        "a WordPiece vocabulary",
        module(
            "tools.train_tokenizer",
            *("--type", "wordpiece", "--input", documents, "--output", vocab.parent),
            *("--vocab-size", recipe.vocab_size),
        ),
    )
    steps.run(
        "sentences as tokens",
        module(
            "tools.preprocess_data",
            *("--input", documents, "--output-prefix", prefix, "--split-sentences"),
            *("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-file", vocab),
        ),
    )
    for name, iterations, lr in (
        (INITIAL, 1, _NOTHING),
        (PRETRAINED, recipe.iterations, recipe.lr),
    ):
        save = folder_of(steps, name)
        steps.run(
            f"a BERT: {name}",
            on_ranks(
                ranks,
                "pretrain_bert.py",
                *_model_flags(recipe),
                *("--seq-length", recipe.seq_length, "--vocab-file", vocab),
                *(["--bf16"] if recipe.bf16 else []),
                *("--init-method-std", recipe.init),
                *("--mask-prob", recipe.mask_prob),
                *("--data-path", f"{prefix}_text_sentence", "--split", recipe.split),
                *("--micro-batch-size", recipe.batch // ranks),
                *("--global-batch-size", recipe.batch, "--train-iters", iterations),
                *("--lr", lr, "--min-lr", 0, "--lr-decay-style", "linear"),
                *("--lr-warmup-fraction", 0.05 if iterations > 1 else 0),
                *("--weight-decay", 0.01, "--num-workers", 0, "--seed", recipe.seed),
                *("--eval-iters", 8, "--eval-interval", max(1, iterations // 5)),
                *("--log-interval", max(1, iterations // 60), "--save", save, "--load", save),
                *("--save-interval", max(1, iterations // 5), "--keep-last", 1),
            ),
        )


def finetune(
    steps: Steps, start: str, sides: Sides, recipe: FineTuning, model: Pretraining
) -> list[Path]:
    """Fine-tune one of the two BERTs on one rank; return the predictions of each seed.

    The best epoch is chosen by `sides.valid`; its model then answers `sides.test`, once.
    """
    predictions = []
    for seed in recipe.seeds:
        name = f"{recipe.title} from {start}, seed {seed}"
        save = steps.folder / name.replace(", ", "-").replace(" ", "-")
        flags = [
            *("--task", recipe.task, "--vocab-file", steps.folder / "wordpiece" / "vocab.txt"),
            *_model_flags(model),
            *("--seq-length", recipe.seq_length, "--micro-batch-size", recipe.batch),
            *("--num-workers", 0, "--seed", seed),
            *("--lr", recipe.lr, "--min-lr", 0, "--lr-decay-style", "linear"),
            *("--lr-warmup-fraction", 0.1, "--weight-decay", 0.01),
        ]
        learning = ("--epochs", recipe.epochs, "--train-data", sides.train, "--valid-data")
        begins = ("--pretrained-checkpoint", folder_of(steps, start), "--save", save)
        steps.run(name, module("tasks.main", *flags, *learning, sides.valid, *begins))
        target = save.with_suffix(".tsv")
        judging = ("--epochs", 0, "--load", save, "--valid-data", sides.test)
        command = module("tasks.main", *flags, *judging, "--predictions", target)
        steps.run(f"{name}: answers", command)
        predictions.append(target)
    return predictions


def answers_of(
    steps: Steps, sides: Sides, recipe: FineTuning, model: Pretraining
) -> dict[str, list[list[str]]]:
    """Return the answers of both BERTs after fine-tuning, by seed."""
    return {
        start: [predicted(path) for path in finetune(steps, start, sides, recipe, model)]
        for start in (PRETRAINED, INITIAL)
    }


def predicted(path: Path) -> list[str]:
    """Return the decisions in a file of `--predictions`, in the order of the examples."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row["prediction"] for row in rows]


def folder_of(steps: Steps, start: str) -> Path:
    """Return the checkpoint folder from which one of the two models starts."""
    return steps.folder / start.replace(" ", "-")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, then print the results."""
    parser = _parser()
    flags = parser.parse_args(argv)
    needs = {
        "--snli": flags.snli is None and SNLI.title in flags.tasks,
        "--reviews": flags.reviews is None
        and (flags.read_reviews or not {REVIEWS.title, FEW_REVIEWS.title}.isdisjoint(flags.tasks)),
        "--novels": flags.novels is None and NOVELS.title in flags.tasks,
    }
    if lacking := [flag for flag, is_lacking in needs.items() if is_lacking]:
        parser.error(f"a task of --tasks, or --read-reviews, lacks its file: {lacking[0]}")
    steps, model = (
        Steps(flags.out),
        Pretraining(iterations=flags.iterations, bf16=not flags.fp32, init=flags.init),
    )
    documents = flags.out / "books.jsonl"
    read = [*flags.books]
    if flags.read_reviews:
        read.insert(0, _unjudged(steps, flags.reviews))
    novels = novel_parts(*flags.novels) if NOVELS.title in flags.tasks else None
    judged_by = {document for _, _, document in novels.test} if novels else set()
    count = write_documents(read, documents, without=judged_by)
    print(f"{count} documents of {len(read)} texts")
    pretrain(steps, documents, model, ranks=flags.ranks)
    judged: dict[str, Judgement] = {}
    for title in flags.tasks:
        if title == SNLI.title:
            judged[title] = _snli(steps, flags.snli, model)
        elif novels is not None and title == NOVELS.title:
            sources = [document for _, _, document in novels.test]
            rows = Parts(*([row[:2] for row in part] for part in novels))
            judged[title] = _sentences(steps, rows, NOVELS, model, sources)
        else:
            parts = polarity_parts(*flags.reviews)
            sources = [sentence for sentence, _ in parts.test]
            judged[title] = _sentences(steps, parts, TASKS[title], model, sources)
    lines = [line for name, found in judged.items() for line in judgement_lines(name, found)]
    print("\n".join(["", *lines]))
    steps.write_report(
        flags.json,
        "bert_pairs",
        pretraining=asdict(model),
        fine_tuning={title: asdict(TASKS[title]) for title in judged},
        ranks=flags.ranks,
        judged={name: found._asdict() for name, found in judged.items()},
    )


def _snli(steps: Steps, source: Path, model: Pretraining) -> Judgement:
    parts = snli_parts(source)
    sides = Sides(*(steps.folder / f"snli-{name}.jsonl" for name in parts._fields))
    for path, rows in zip(sides, parts):
        write_lines(path, rows)
    answers = answers_of(steps, sides, SNLI, model)
    seen_rows = [*parts.train, *parts.valid]
    hypotheses, labels = (
        [str(row[key]) for row in seen_rows] for key in ("sentence2", "gold_label")
    )
    unseen = [str(row["sentence2"]) for row in parts.test]
    answers[f"{WORDS} of the hypothesis"] = [bag_of_words(hypotheses, labels, unseen)]
    images = [image_of(row) for row in parts.test]
    return judge([str(row["gold_label"]) for row in parts.test], answers, images)


def _sentences(
    steps: Steps,
    parts: Parts[tuple[str, str]],
    recipe: FineTuning,
    model: Pretraining,
    sources: Sequence[str],
) -> Judgement:
    """Judge sentences of two classes; `sources` says of each of `parts.test` where it is from."""
    if recipe.labels is not None:
        train, valid = ([*mixed(rows)] for rows in (parts.train, parts.valid))
        parts = parts._replace(train=train[: recipe.labels], valid=valid[: recipe.labels // 2])
    name = recipe.title.replace(" ", "-")
    sides = Sides(*(steps.folder / f"{name}-{part}.tsv" for part in parts._fields))
    for path, rows in zip(sides, parts):
        write_sst2(path, rows)
    answers = answers_of(steps, sides, recipe, model)
    texts, labels = zip(*parts.train, *parts.valid)
    unseen, true = zip(*parts.test)
    answers[WORDS] = [bag_of_words(texts, labels, unseen)]
    return judge(true, answers, sources)


def _unjudged(steps: Steps, sources: Sequence[Path]) -> Path:
    """Write the sentences of reviews that nothing is judged by, a paragraph each, as a text.

    They are in lower case; a capital letter is what a splitter knows the next sentence by.
    """
    parts = polarity_parts(*sources)
    target = steps.folder / "reviews.txt"
    sentences = (sentence.capitalize() for sentence, _ in mixed([*parts.train, *parts.valid]))
    target.write_text("\n\n".join(sentences), encoding="utf-8")
    return target


def _model_flags(model: Pretraining) -> list[Any]:
    return [
        *("--num-layers", model.layers, "--hidden-size", model.hidden),
        *("--num-attention-heads", model.heads, "--position-embedding-type", "rope"),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bert_pairs", description=__doc__)
    add = parser.add_argument
    add("--books", type=Path, nargs="+", required=True, metavar="FILE", help="to pretrain on")
    add("--snli", type=Path, metavar="FILE", help="a part of SNLI, as JSON lines")
    add(
        "--reviews",
        type=Path,
        nargs=2,
        metavar=("FAVOURABLE", "UNFAVOURABLE"),
        help="sentences of reviews, one a line (the sentence polarity data of Pang and Lee 2005)",
    )
    add(
        "--novels",
        type=Path,
        nargs=2,
        metavar=("ONE", "OTHER"),
        help="two of --books, whose sentences are told apart; those judged by are not read before",
    )
    add("--read-reviews", action="store_true", help="pretrain on those not judged by, too")
    add("--tasks", nargs="+", choices=TASKS, default=["SNLI"], help="[%(default)s]")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--iterations", type=int, default=Pretraining.iterations, help="[%(default)s]")
    add("--fp32", action="store_true", help="pretrain in float32, where bf16 is slower")
    add("--init", type=float, default=Pretraining.init, help="of weights [%(default)s]")
    add("--ranks", type=int, default=2, help="processes that pretrain, of one thread each [2]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
