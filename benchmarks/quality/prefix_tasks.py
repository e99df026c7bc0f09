"""A prefix LM beside a causal GPT of the same size, trained on the same pairs for as long.

`python benchmarks/quality/prefix_tasks.py --out FOLDER`: each task is generated, each model starts
from the same initial values, and answers pairs that it has not seen. Only the direction of
attention within inputs differs. In three of the tasks what an input means depends on what stands
behind it; in a plain copy it does not.
"""

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.judging import Judgement, judge
from benchmarks.quality.steps import Steps, module, on_ranks
from megatron.program import run_program

VOCABULARY = 64  # with the marks below; one more token ends documents
ASK, END = 62, 63  # between an input and its question or target; behind a target
_NAMES = 32  # the token of the first name, rule or number of steps
_PLACES, _STEPS = 12, 3  # of a list of pointers, and how often they are followed
# Wolfram's numbers of rules, drawn once: the new cell for each of eight neighbourhoods.
RULES = random.Random(7).sample(range(256), 16)
PREFIX, CAUSAL = "prefix LM", "causal GPT"
PROGRAMS = {PREFIX: ("finetune_t0_non_causal_decoder.py",), CAUSAL: ("pretrain_gpt.py", "--mtf")}


class Pair(NamedTuple):
    """What a model reads, and what it has to write."""

    inputs: list[int]
    targets: list[int]


def copy(draw: random.Random) -> Pair:
    """Return 12 tokens, to be written again."""
    tokens = [draw.randrange(32) for _ in range(12)]
    return Pair([*tokens, ASK], [*tokens, END])


def text_with_its_name_behind(draw: random.Random) -> Pair:
    """Return four texts, each with a name behind it, and a name whose text is to be written."""
    # Few different tokens, so that what follows one in the input does not tell the text.
    texts = [[draw.randrange(12) for _ in range(5)] for _ in range(4)]
    names = draw.sample(range(_NAMES, _NAMES + 8), 4)
    asked = draw.randrange(4)
    inputs = [token for text, name in zip(texts, names) for token in (*text, name)]
    return Pair([*inputs, ASK, names[asked]], [*texts[asked], END])


def rule_behind_cells(draw: random.Random) -> Pair:
    """Return cells and a rule; what becomes of them in two steps is to be written."""
    rule, cells = draw.randrange(len(RULES)), [draw.randrange(2) for _ in range(12)]
    return Pair([*cells, ASK, _NAMES + rule, ASK], [*_stepped(_stepped(cells, rule), rule), END])


def pointers(draw: random.Random, steps: int | None = None) -> Pair:
    """Return a permutation of places, and where so many steps along it lead from each of them.

    A layer follows one step: a place looks up what is at the place that it points to. While a
    target looks up its own place, those of a prefix LM look up theirs, so that two layers are
    enough for three steps. In a causal model a place sees those before it alone, and half of the
    pointers lead to later ones.

    Args:
        steps: None draws one, two or three, which makes three learnable.
    """
    steps = draw.randint(1, _STEPS) if steps is None else steps
    places = draw.sample(range(_PLACES), _PLACES)
    found = [*range(_PLACES)]
    for _ in range(steps):
        found = [places[at] for at in found]
    return Pair([_NAMES + steps, *places, ASK], [*found, END])


def _stepped(cells: Sequence[int], rule: int) -> list[int]:
    """Return each cell as its neighbours and itself decide (a cellular automaton; 0 outside)."""
    wide = [0, *cells, 0]
    return [RULES[rule] >> (4 * a + 2 * b + c) & 1 for a, b, c in zip(wide, wide[1:], wide[2:])]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The shape of both models of a task, and how they are trained."""

    layers: int = 3
    hidden: int = 64
    heads: int = 4
    positions: str = "rope"
    init: float = 0.02  # standard deviation of the first weights
    seq_length: int = 64  # two or three pairs, none of which sees another
    iterations: int = 1000
    batch: int = 32
    lr: float = 3e-3
    train_pairs: int = 40_000
    test_pairs: int = 500
    seeds: tuple[int, ...] = (1,)


class Task(NamedTuple):
    """How pairs are drawn, and what learns them.

    Attributes:
        asked: draws those that are judged by, where they are not as those trained on.
    """

    draw: Callable[[random.Random], Pair]
    recipe: Recipe = Recipe()
    asked: Callable[[random.Random], Pair] | None = None


# One pair a row, so that the position of a token is its place in the list.
_POINTERS = Recipe(
    layers=2,
    positions="learned_absolute",
    init=0.1,
    seq_length=_PLACES + 2 + _PLACES + 1,
    iterations=6000,
    batch=64,
    lr=4e-3,
    train_pairs=200_000,
)
TASKS: Mapping[str, Task] = {
    "copy": Task(copy),
    "look a text up by the name behind it": Task(text_with_its_name_behind),
    "look a rule up behind cells, and apply it": Task(rule_behind_cells),
    "follow pointers for three steps": Task(pointers, _POINTERS, partial(pointers, steps=_STEPS)),
}


def pairs_of(task: str, count: int, *, seed: int, asked: bool = False) -> list[Pair]:
    """Return `count` pairs of a task; other seeds have others.

    Args:
        asked: those that are judged by.
    """
    random_numbers, (draw, _, to_judge) = random.Random(f"{task} {seed}"), TASKS[task]
    if asked and to_judge is not None:
        draw = to_judge
    return [draw(random_numbers) for _ in range(count)]


def answered(steps: Steps, task: str, recipe: Recipe) -> Judgement:
    """Train both models on a task, and judge what they write for pairs that are held out."""
    folder = steps.folder / task.replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    trained_on = pairs_of(task, recipe.train_pairs, seed=0)
    known = {tuple(pair.inputs) for pair in trained_on}
    held_out = pairs_of(task, 2 * recipe.test_pairs, seed=1, asked=True)
    new = [pair for pair in held_out if tuple(pair.inputs) not in known][: recipe.test_pairs]
    (folder / "pairs.jsonl").write_text("".join(map(_json, trained_on)))
    (folder / "prompts.txt").write_text("".join(f"{_text(pair.inputs)}\n" for pair in new))
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", VOCABULARY)
    steps.run(
        f"{task}: pairs",
        module(
            "tools.preprocess_data",
            *("--input", folder / "pairs.jsonl", "--json-keys", "inputs", "targets"),
            *("--output-prefix", folder / "pairs", *words),
        ),
    )
    answers: dict[str, list[list[str]]] = {}
    for model, (program, *flags) in PROGRAMS.items():
        for seed in recipe.seeds:
            save = folder / f"{model.replace(' ', '-')}-{seed}"
            steps.run(
                f"{task}: {model}, seed {seed}",
                on_ranks(1, program, *flags, *_training(recipe, folder / "pairs", save, seed)),
            )
            written = save / "written.jsonl"
            longest = max(len(pair.targets) for pair in new)
            steps.run(
                f"{task}: what the {model} of seed {seed} writes",
                module(
                    "tools.generate_text",
                    *("--load", save, "--prompt-file", folder / "prompts.txt", "--greedy"),
                    *("--num-tokens", longest, "--json", "--output", written),
                    *("--batch-size", 100),
                ),
            )
            lines = written.read_text().splitlines()
            answers.setdefault(model, []).append([_up_to_end(json.loads(line)) for line in lines])
    true = [_text(pair.targets) for pair in new]
    return judge(true, answers, [str(number) for number in range(len(new))])


def _training(recipe: Recipe, pairs: Path, save: Path, seed: int) -> Iterator[object]:
    yield from ("--num-layers", recipe.layers, "--hidden-size", recipe.hidden)
    yield from ("--num-attention-heads", recipe.heads, "--seq-length", recipe.seq_length)
    yield from ("--position-embedding-type", recipe.positions, "--hidden-dropout", 0)
    yield from ("--init-method-std", recipe.init)
    yield from ("--attention-dropout", 0, "--data-path", pairs, "--split", "100,0,0")
    yield from ("--tokenizer-type", "NullTokenizer", "--vocab-size", VOCABULARY)
    yield from ("--micro-batch-size", recipe.batch, "--global-batch-size", recipe.batch)
    yield from ("--train-iters", recipe.iterations, "--seed", seed, "--lr", recipe.lr)
    yield from ("--lr-decay-style", "cosine", "--lr-warmup-fraction", 0.05)
    yield from ("--weight-decay", 0.1, "--adam-beta2", 0.98, "--num-workers", 0)
    yield from ("--log-interval", max(1, recipe.iterations // 10), "--save", save)


def _json(pair: Pair) -> str:
    return json.dumps({"inputs": _text(pair.inputs), "targets": _text(pair.targets)}) + "\n"


def _text(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def _up_to_end(continuation: Mapping[str, Sequence[int]]) -> str:
    """Return what was written up to the first END, with it."""
    tokens = list(continuation["tokens"])
    return _text(tokens[: tokens.index(END) + 1] if END in tokens else tokens)


def table(found: Mapping[str, Judgement]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: shares of whole answers that are right."""
    yield f"| task | {PREFIX} | {CAUSAL} | difference, 95 % interval |"
    yield "|---|---|---|---|"
    for task, one in found.items():
        shares = " | ".join(f"{one.answers[name].mean:.1%}" for name in (PREFIX, CAUSAL))
        ((mean, (low, high)),) = one.differences.values()
        points = f"{100 * mean:+.1f} points ({100 * low:.1f} to {100 * high:.1f})"
        yield f"| {task} | {shares} | {points} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, and print shares of right answers."""
    parser = argparse.ArgumentParser(prog="prefix_tasks", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--iterations", type=int, metavar="N", help="of the training [those of each task]")
    add("--seeds", type=int, nargs="+", default=[*Recipe.seeds], help="of the training [1]")
    add("--tasks", nargs="+", choices=TASKS, default=[*TASKS], help="[all]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    flags = parser.parse_args(argv)
    recipes = {
        task: replace(
            TASKS[task].recipe,
            iterations=flags.iterations or TASKS[task].recipe.iterations,
            seeds=tuple(flags.seeds),
        )
        for task in flags.tasks
    }
    steps = Steps(flags.out)
    found = {task: answered(steps, task, recipe) for task, recipe in recipes.items()}
    print("\n".join(["", *table(found)]))
    steps.write_report(
        flags.json,
        "prefix_tasks",
        recipes={task: asdict(recipe) for task, recipe in recipes.items()},
        found={task: one._asdict() for task, one in found.items()},
    )


if __name__ == "__main__":
    run_program(main)
