"""A T5 pretrained for minutes on books, then fine-tuned on generated text-to-text tasks.

`python benchmarks/quality/text_to_text.py --books BOOK.txt ... --out FOLDER`: one model learns to
read numbers in words and to write them so, told which by the first word of its input, and answers
for numbers that it has not been fine-tuned on. Beside the pretrained model stands the same
fine-tuning of initial values.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.judging import Judgement, judge
from benchmarks.quality.material import write_documents, write_lines
from benchmarks.quality.steps import Steps, module, on_ranks
from megatron.program import run_program

PRETRAINED, INITIAL = "pretrained", "initial values"
_SENTINELS = 100
_NUMBERS = 10_000  # of four digits or fewer
_ONES = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen"),
    "nineteen",
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


class Pair(NamedTuple):
    """What a model reads, and what it has to write."""

    inputs: str
    targets: str


def words_of(number: int) -> str:
    """Return a number below 10,000 in English words."""
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = number % size
            behind = f" {words_of(rest)}" if rest else ""
            return f"{_ONES[number // size]} {name}{behind}"
    if number < len(_ONES):
        return _ONES[number]
    ten, one = divmod(number, 10)
    return f"{_TENS[ten - 2]} {_ONES[one]}" if one else _TENS[ten - 2]


def digits_of(number: int) -> str:
    """Return the digits of a number, apart."""
    return " ".join(str(number))


TASKS: Mapping[str, Callable[[int], Pair]] = {
    "digits": lambda number: Pair(f"digits: {words_of(number)}", digits_of(number)),
    "words": lambda number: Pair(f"words: {digits_of(number)}", words_of(number)),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The shape of the model, and how it is pretrained and fine-tuned."""

    layers: int = 2
    hidden: int = 96
    heads: int = 4
    init: float = 0.06  # of the usual 0.02, a model as narrow as this one learns nothing in minutes
    seq_length: int = 128  # of pretraining
    input_length: int = 16  # of fine-tuning, and that of targets
    vocab_size: int = 2000
    pretraining: int = 100
    fine_tuning: int = 400
    pretraining_batch: int = 16
    batch: int = 64
    lr: float = 3e-3
    fine_tuning_lr: float = 2e-3
    test_pairs: int = 200  # of each task
    seeds: tuple[int, ...] = (1,)


def parts_of(recipe: Recipe) -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Return the pairs to train on, and those to answer by task, which share no number."""
    numbers = random.Random(0).sample(range(_NUMBERS), _NUMBERS)
    held_out = numbers[: recipe.test_pairs]
    train = [pair(number) for pair in TASKS.values() for number in numbers[recipe.test_pairs :]]
    return train, {task: [pair(number) for number in held_out] for task, pair in TASKS.items()}


def answered(
    steps: Steps, books: Sequence[Path], recipe: Recipe, models: Sequence[str]
) -> dict[str, Judgement]:
    """Pretrain and fine-tune, and judge what `models` write for pairs that are held out."""
    folder = steps.folder
    train, held_out = parts_of(recipe)
    write_documents(books, folder / "books.jsonl")
    write_lines(folder / "pairs.jsonl", (pair._asdict() for pair in train))
    write_lines(folder / "numbers.jsonl", ({"text": text} for pair in train for text in pair))
    asked = [pair for pairs in held_out.values() for pair in pairs]
    (folder / "prompts.txt").write_text("".join(f"{pair.inputs}\n" for pair in asked))
    _prepare(steps, recipe)
    answers: dict[str, list[list[str]]] = {}
    for name in models:
        for seed in recipe.seeds:
            written = _fine_tuned(steps, name, recipe, seed)
            answers.setdefault(name, []).append(written)
    found = {}
    first = 0
    for task, pairs in held_out.items():
        part = slice(first, first + len(pairs))
        first += len(pairs)
        found[task] = judge(
            [pair.targets for pair in pairs],
            {name: [one[part] for one in seeds] for name, seeds in answers.items()},
            [pair.inputs for pair in pairs],
        )
    return found


def _prepare(steps: Steps, recipe: Recipe) -> None:
    folder = steps.folder
    steps.run(
        "a WordPiece vocabulary",
        module(
            "tools.train_tokenizer",
            *("--type", "wordpiece", "--output", folder / "wordpiece"),
            *("--input", folder / "books.jsonl", folder / "numbers.jsonl"),
            *("--vocab-size", recipe.vocab_size),
        ),
    )
    for name, words in (
        ("books", ()),
        ("pairs", ("--json-keys", "inputs", "targets")),
    ):
        steps.run(
            f"{name} as tokens",
            module(
                "tools.preprocess_data",
                *("--input", folder / f"{name}.jsonl", "--output-prefix", folder / name),
                *(*words, *_tokenizer(folder)),
            ),
        )


def _fine_tuned(steps: Steps, name: str, recipe: Recipe, seed: int) -> list[str]:
    """Return the answers of one model to all prompts."""
    folder = steps.folder
    begin: list[object] = []
    if name == PRETRAINED:
        save = folder / "pretrained"
        steps.run(
            "a T5 on books",
            on_ranks(
                1,
                "pretrain_t5.py",
                *(*_model(recipe), *_tokenizer(folder), *_schedule(recipe.pretraining, recipe.lr)),
                *("--data-path", folder / "books_text_document", "--split", "98,2,0"),
                *("--seq-length", recipe.seq_length, "--noise-density", 0.15),
                *("--micro-batch-size", recipe.pretraining_batch),
                *("--global-batch-size", recipe.pretraining_batch),
                *("--eval-iters", 10, "--eval-interval", recipe.pretraining, "--save", save),
            ),
        )
        begin = ["--load", save, "--finetune"]
    save = folder / f"{name.replace(' ', '-')}-{seed}"
    steps.run(
        f"{name} on pairs, seed {seed}",
        on_ranks(
            1,
            "pretrain_t5.py",
            *(*_model(recipe), *_tokenizer(folder), *begin),
            *_schedule(recipe.fine_tuning, recipe.fine_tuning_lr),
            *("--mtf", "--data-path", folder / "pairs", "--split", "100,0,0", "--seed", seed),
            *("--seq-length", recipe.input_length),
            *("--decoder-seq-length", recipe.input_length),
            *("--micro-batch-size", recipe.batch, "--global-batch-size", recipe.batch),
            *("--eval-iters", 0, "--save", save),
        ),
    )
    written = save / "written.jsonl"
    steps.run(
        f"answers of {name}, seed {seed}",
        module(
            "tools.generate_text",
            *("--load", save, "--prompt-file", folder / "prompts.txt", "--greedy", "--json"),
            *("--num-tokens", recipe.input_length, "--batch-size", 100, "--output", written),
        ),
    )
    return [str(json.loads(line)["text"]) for line in written.read_text().splitlines()]


def _tokenizer(folder: Path) -> Iterator[object]:
    yield from ("--tokenizer-type", "BertWordPieceLowerCase", "--vocab-extra-ids", _SENTINELS)
    yield from ("--vocab-file", folder / "wordpiece" / "vocab.txt")


def _model(recipe: Recipe) -> Iterator[object]:
    yield from ("--num-layers", recipe.layers, "--hidden-size", recipe.hidden)
    yield from ("--num-attention-heads", recipe.heads, "--position-embedding-type", "relative")
    yield from ("--init-method-std", recipe.init)
    yield from ("--normalization", "RMSNorm", "--disable-bias-linear")
    yield from ("--glu-activation", "geglu_tanh", "--untie-embeddings-and-output-weights")
    yield from ("--hidden-dropout", 0, "--attention-dropout", 0, "--num-workers", 0)


def _schedule(iterations: int, lr: float) -> Iterator[object]:
    yield from ("--train-iters", iterations, "--lr", lr, "--lr-decay-style", "cosine")
    yield from ("--lr-warmup-fraction", 0.05, "--weight-decay", 0.01, "--adam-beta2", 0.98)
    yield from ("--log-interval", max(1, iterations // 10))


def table(found: Mapping[str, Judgement]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: shares of answers that are right as a whole."""
    yield "| task | pairs | fine-tuned from | right answers, 95 % interval |"
    yield "|---|---|---|---|"
    for task, one in found.items():
        for name, answers in one.answers.items():
            low, high = (100 * share for share in answers.interval)
            share = f"{answers.mean:.1%} ({low:.1f} to {high:.1f})"
            yield f"| {task} | {one.examples} | {name} | {share} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, and print shares of right answers."""
    parser = argparse.ArgumentParser(prog="text_to_text", description=__doc__)
    add = parser.add_argument
    add("--books", type=Path, nargs="+", required=True, metavar="FILE", help="plain text")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--pretraining", type=int, default=Recipe.pretraining, help="iterations [%(default)s]")
    add("--fine-tuning", type=int, default=Recipe.fine_tuning, help="iterations [%(default)s]")
    add("--seeds", type=int, nargs="+", default=[*Recipe.seeds], help="of the fine-tuning [1]")
    add("--models", nargs="+", choices=(PRETRAINED, INITIAL), default=[PRETRAINED, INITIAL])
    add("--json", type=Path, metavar="FILE", help="write everything there")
    flags = parser.parse_args(argv)
    recipe = Recipe(
        pretraining=flags.pretraining, fine_tuning=flags.fine_tuning, seeds=tuple(flags.seeds)
    )
    steps = Steps(flags.out)
    found = answered(steps, flags.books, recipe, flags.models)
    print("\n".join(["", *table(found)]))
    steps.write_report(
        flags.json,
        "text_to_text",
        recipe=asdict(recipe),
        found={task: one._asdict() for task, one in found.items()},
    )


if __name__ == "__main__":
    run_program(main)
