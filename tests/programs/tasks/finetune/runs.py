"""Fine-tunings small enough for a test: a pretrained BERT, files of a task, and how to run it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.errors import MegatronError
from megatron.initialize import shutdown_megatron
from tasks.main import main
from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import tiny_bert_run, train_bert_all, write_tiny_sentences

_MODEL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --seq-length 24 "
    "--max-position-embeddings 24 --make-vocab-size-divisible-by 4 --init-method-std 0.2 "
    "--device cpu --num-workers 0 --seed 3"
)
EXACT = {"fp64": True, "hidden_dropout": 0, "attention_dropout": 0}
# Seven of eight rows in the last batch are missing: nothing may be counted twice or left out.
EXAMPLES, BATCH = 17, 8
PER_EPOCH = 3  # batches
# The last batch has one example: of two replicas the second has none of it.


class Prepared(NamedTuple):
    """A pretrained BERT, its vocabulary, and files of a task that is easy to learn."""

    pretrained: Path
    vocab: str
    train: Path
    valid: Path
    test: Path


def prepare(folder: Path) -> Prepared:
    """Pretrain a BERT for two steps in float64, and write the files of a task."""
    corpus = write_tiny_sentences(folder)
    run = tiny_bert_run(corpus, train_iters=2, save=str(folder / "pretrained"))
    run_on_ranks(1, train_bert_all, [run])
    files = [write_task(folder / f"{name}.tsv", seed) for seed, name in enumerate(("t", "v"))]
    test = folder / "test.tsv"
    test.write_text("index\tsentence1\tsentence2\n7\tw1 w2\tw4\n9\tw5\tw7 w8\n")
    return Prepared(folder / "pretrained", corpus.vocab_file, *files, test)


def write_task(path: Path, seed: int, examples: int = EXAMPLES) -> Path:
    """RTE's columns; the last word of the second sentence is the label."""
    random, lines = np.random.RandomState(seed), ["index\tsentence1\tsentence2\tlabel"]
    for at in range(examples):
        first, second = random.choice(range(1, 50, 3), 2)
        follows = random.rand() < 0.5
        label, last = ("entailment", "w5") if follows else ("not_entailment", "w8")
        lines.append(f"{at}\tw{first} w2\tw{second} {last}\t{label}")
    path.write_text("\n".join(lines) + "\n")
    return path


def words_of(prepared: Prepared, **flags: object) -> list[str]:
    """The command line of a fine-tuning; True stands for a flag alone, None and False for none."""
    given: dict[str, object] = {
        "task": "RTE",
        "train_data": prepared.train,
        "valid_data": prepared.valid,
        "pretrained_checkpoint": prepared.pretrained,
        "vocab_file": prepared.vocab,
        "epochs": 2,
        "lr": 0.01,
        "micro_batch_size": 2,
        "global_batch_size": BATCH,
        **EXACT,
        **flags,
    }
    words = _MODEL.split()
    for name, value in given.items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        words += [f"--{name.replace('_', '-')}", *(str(v) for v in values if v is not True)]
    return words


def finetune_all(each: Sequence[Sequence[str]]) -> None:
    """A body for `run_on_ranks`: several runs one after the other in the same processes."""
    for argv in each:
        main(argv)


def outcome(ranks: int, output: Path, words: Sequence[str]) -> dict[str, Any]:
    """Run it, and read what it wrote with --output."""
    (found,) = outcomes(ranks, {output: words})
    return found


def outcomes(ranks: int, each: Mapping[Path, Sequence[str]]) -> list[dict[str, Any]]:
    """Run several in the same processes: starting one, and its first scores, take seconds."""
    runs = [[*words, "--output", str(output)] for output, words in each.items()]
    run_on_ranks(ranks, finetune_all, runs)
    return [read(output) for output in each]


def read(output: Path) -> dict[str, Any]:
    """What a run wrote with --output."""
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def scores_of(file: Path) -> list[tuple[str, str, list[float]]]:
    """uid, prediction and scores of each line of predictions."""
    lines = [line.split("\t") for line in file.read_text().splitlines()[1:]]
    return [
        (uid, decision, [float(x) for x in scores.split()]) for uid, decision, scores, *_ in lines
    ]


def refusal(words: Sequence[str]) -> str:
    """What a run on one rank says instead of running."""
    return refusals([words])[0]


def refusals(each: Sequence[Sequence[str]]) -> list[str]:
    """What several runs say instead of running, one after the other in one process."""
    return run_on_ranks(1, _all_that_fail, [list(words) for words in each])[0]


def _all_that_fail(each: Sequence[Sequence[str]]) -> list[str]:
    return [_that_fails(words) for words in each]


def _that_fails(argv: Sequence[str]) -> str:
    try:
        main(argv)
    except MegatronError as error:
        return str(error)
    finally:
        shutdown_megatron()
    return "nothing was raised"
