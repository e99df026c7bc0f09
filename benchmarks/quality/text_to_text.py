"""A T5 pretrained for minutes on books, then fine-tuned on generated text-to-text tasks.

`python benchmarks/quality/text_to_text.py --books BOOK.txt ... --out FOLDER`: one model learns all
tasks together, each named by the first word of its input, and answers pairs whose words or dates it
has not been fine-tuned on. Beside the pretrained model stands the same fine-tuning of initial
values. Text is read byte by byte.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.machine import machine
from benchmarks.quality.judging import Judgement, judge
from benchmarks.quality.material import write_documents, write_lines
from benchmarks.quality.steps import Steps, module, on_ranks
from megatron.errors import DataError
from megatron.program import run_program
from tasks.text_files import read_text

PRETRAINED, INITIAL = "pretrained", "initial values"
_BYTES = 258  # pieces of the vocabulary: bytes, and special tokens of the trainer
_SENTINELS = 32
_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_NO_WORDS = "use whole books in English, such as those of Project Gutenberg"


class Pair(NamedTuple):
    """What a model reads, and what it has to write."""

    inputs: str
    targets: str


def reverse(draw: random.Random, words: Sequence[str]) -> Pair:
    """Return a word, to be written from its end."""
    word = draw.choice(words)
    return Pair(f"reverse: {word}", word[::-1])


def past(draw: random.Random, words: Sequence[str]) -> Pair:
    """Return a word, to be written with the ending of a regular verb in the past."""
    word = draw.choice(words)
    return Pair(f"past: {word}", past_of(word))


def date(draw: random.Random, words: Sequence[str]) -> Pair:
    """Return a date in one of three forms, to be written as in ISO 8601."""
    year, month, day = draw.randrange(1600, 2100), draw.randrange(1, 13), draw.randrange(1, 29)
    name = _MONTHS[month - 1]
    forms = (f"{day} {name} {year}", f"{name} {day}, {year}", f"{day}.{month}.{year}")
    return Pair(f"date: {draw.choice(forms)}", f"{year}-{month:02}-{day:02}")


TASKS: Mapping[str, Callable[[random.Random, Sequence[str]], Pair]] = {
    "reverse": reverse,
    "past": past,
    "date": date,
}


def past_of(word: str) -> str:
    """Return a word with -ed: -e loses one, -y behind a consonant is -ied, short vowels double."""
    if word.endswith("e"):
        return f"{word}d"
    if re.search("[^aeiou]y$", word):
        return f"{word[:-1]}ied"
    if re.fullmatch("[^aeiou]*[aeiou][^aeiouwxy]", word):
        return f"{word}{word[-1]}ed"
    return f"{word}ed"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The shape of the model, and how it is pretrained and fine-tuned."""

    layers: int = 3
    hidden: int = 96
    heads: int = 4
    seq_length: int = 128  # of pretraining
    input_length: int = 32  # of fine-tuning; targets have half
    pretraining: int = 200
    fine_tuning: int = 800
    pretraining_batch: int = 16
    batch: int = 32
    lr: float = 3e-3
    fine_tuning_lr: float = 2e-3
    train_pairs: int = 24_000
    test_pairs: int = 200  # of each task
    seeds: tuple[int, ...] = (1,)


def words_of(books: Sequence[Path]) -> list[str]:
    """Return the words of 3 to 9 small letters in books, each once, in an order of their own."""
    found = {word for path in books for word in re.findall(r"\b[a-z]{3,9}\b", read_text(path))}
    if len(found) < 100:
        raise DataError(
            "there are too few words to learn from",
            found=f"{len(found)} words in {len(books)} books",
            fix=_NO_WORDS,
        )
    words = sorted(found)
    random.Random(0).shuffle(words)
    return words


def pairs_of(task: str, words: Sequence[str], count: int, *, seed: int) -> list[Pair]:
    """Return `count` pairs of a task; other seeds have others."""
    draw = random.Random(f"{task} {seed}")
    return [TASKS[task](draw, words) for _ in range(count)]


def parts_of(words: Sequence[str], recipe: Recipe) -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Return the pairs to train on, and those to answer by task, which share no word or date."""
    border = len(words) // 10
    train = [
        pair
        for task in TASKS
        for pair in pairs_of(task, words[border:], recipe.train_pairs // len(TASKS), seed=0)
    ]
    known = {pair.targets for pair in train}
    held_out = {
        task: [
            pair
            for pair in pairs_of(task, words[:border], 2 * recipe.test_pairs, seed=1)
            if pair.targets not in known
        ][: recipe.test_pairs]
        for task in TASKS
    }
    return train, held_out


def answered(
    steps: Steps, books: Sequence[Path], recipe: Recipe, models: Sequence[str]
) -> dict[str, Judgement]:
    """Pretrain and fine-tune, and judge what `models` write for pairs that are held out."""
    folder = steps.folder
    train, held_out = parts_of(words_of(books), recipe)
    write_documents(books, folder / "books.jsonl")
    write_lines(folder / "pairs.jsonl", (pair._asdict() for pair in train))
    asked = [pair for pairs in held_out.values() for pair in pairs]
    (folder / "prompts.txt").write_text("".join(f"{pair.inputs}\n" for pair in asked))
    _prepare(steps)
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


def _prepare(steps: Steps) -> None:
    folder = steps.folder
    steps.run(
        "a vocabulary of bytes",
        module(
            "tools.train_tokenizer",
            *("--input", folder / "books.jsonl", "--output", folder / "bytes"),
            *("--vocab-size", _BYTES),
        ),
    )
    for name, words in (
        ("books", ("--append-eod",)),
        ("pairs", ("--json-keys", "inputs", "targets", "--append-eod")),
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
            *("--decoder-seq-length", recipe.input_length // 2),
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
            *("--num-tokens", recipe.input_length // 2, "--batch-size", 100, "--output", written),
        ),
    )
    return [str(json.loads(line)["text"]) for line in written.read_text().splitlines()]


def _tokenizer(folder: Path) -> Iterator[object]:
    files = folder / "bytes"
    yield from ("--tokenizer-type", "GPT2BPETokenizer", "--vocab-extra-ids", _SENTINELS)
    yield from ("--vocab-file", files / "vocab.json", "--merge-file", files / "merges.txt")


def _model(recipe: Recipe) -> Iterator[object]:
    yield from ("--num-layers", recipe.layers, "--hidden-size", recipe.hidden)
    yield from ("--num-attention-heads", recipe.heads, "--position-embedding-type", "relative")
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
    if flags.json is not None:
        report = {
            "quality": "text_to_text",
            "machine": machine(),
            "recipe": asdict(recipe),
            "steps": steps.seconds(),
            "found": {task: one._asdict() for task, one in found.items()},
        }
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    run_program(main)
