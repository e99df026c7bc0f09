"""A GPT pretrained for minutes on Shakespeare, and its scores by the tasks beside plain loops.

`python benchmarks/quality/gpt_text.py --text FILE --wikitext TOKENS --lambada LINES --out FOLDER`:
every step is a command of this project, and one that was stopped goes on with the same words. The
loops read the same weights into a plain PyTorch GPT, and into `transformers` after an export.
What has to be equal is compared at the end, and a difference ends the program.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import tokenizers

from benchmarks.quality.material import write_documents
from benchmarks.quality.plain_scores import (
    Encode,
    Logits,
    plain_endings,
    plain_gpt,
    plain_loss,
    transformers_logits,
)
from benchmarks.quality.steps import Steps, module, on_ranks
from megatron import log
from megatron.errors import NumericsError
from megatron.program import run_program
from tasks.text_files import read_text
from tasks.zeroshot.detokenize import wikitext
from tasks.zeroshot.lambada import read_passages

# Relative, of perplexities: single precision, summed in another order, over many tokens.
TOLERANCE = 1e-4
OURS, PLAIN, TRANSFORMERS = "tasks.main", "plain loop", "plain loop, transformers"


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """The shape of a GPT, and the recipe of its pretraining."""

    vocab_size: int = 2000  # no multiple of anything: the padding must not be counted
    layers: int = 4
    hidden: int = 128
    heads: int = 4
    seq_length: int = 256
    iterations: int = 800
    batch: int = 8
    lr: float = 3e-3
    split: str = "90,5,5"
    seed: int = 1


class Found(NamedTuple):
    """The scores of the model by one method."""

    loss: float  # nats per token of the text
    tokens: int
    perplexity: float
    adjusted_perplexity: float
    endings: int  # passages whose last token is guessed
    strict_endings: int  # whose last word is guessed
    passages: int


def pretrain(steps: Steps, documents: Path, recipe: Pretraining, *, ranks: int) -> None:
    """Make byte-level BPE, corpus, GPT and a Hugging Face folder from JSON lines."""
    bpe, prefix = steps.folder / "bpe", steps.folder / "text"
    files = ("--vocab-file", bpe / "vocab.json", "--merge-file", bpe / "merges.txt")
    steps.run(
        "a byte-level BPE",
        module(
            "tools.train_tokenizer",
            *("--input", documents, "--output", bpe, "--vocab-size", recipe.vocab_size),
        ),
    )
    steps.run(
        "text as tokens",
        module(
            "tools.preprocess_data",
            *("--input", documents, "--output-prefix", prefix, "--append-eod"),
            *("--tokenizer-type", "GPT2BPETokenizer", *files),
        ),
    )
    save = steps.folder / "gpt"
    steps.run(
        "a GPT",
        on_ranks(
            ranks,
            "pretrain_gpt.py",
            *("--num-layers", recipe.layers, "--hidden-size", recipe.hidden),
            *("--num-attention-heads", recipe.heads, "--seq-length", recipe.seq_length),
            *("--hidden-dropout", 0, "--attention-dropout", 0),
            *("--data-path", f"{prefix}_text_document", "--split", recipe.split),
            *("--tokenizer-type", "GPT2BPETokenizer", *files),
            *("--micro-batch-size", recipe.batch // ranks),
            *("--global-batch-size", recipe.batch, "--train-iters", recipe.iterations),
            *("--lr", recipe.lr, "--min-lr", recipe.lr / 10, "--lr-decay-style", "cosine"),
            *("--lr-warmup-fraction", 0.05, "--weight-decay", 0.1, "--adam-beta2", 0.95),
            *("--num-workers", 0, "--seed", recipe.seed, "--eval-iters", 8),
            *("--eval-interval", max(1, recipe.iterations // 5)),
            *("--log-interval", max(1, recipe.iterations // 40)),
            *("--save", save, "--load", save, "--keep-last", 1),
            *("--save-interval", max(1, recipe.iterations // 5)),
        ),
    )
    steps.run(
        "the same for transformers",
        module(
            "tools.convert_checkpoint",
            *("--load", save, "--save", steps.folder / "huggingface", "--format", "huggingface"),
        ),
    )


def by_tasks(steps: Steps, text: Path, passages: Path, *, step: int) -> Found:
    """Return the scores of the WIKITEXT103 and LAMBADA commands."""
    results: dict[str, dict[str, Any]] = {}
    jobs = {
        "WIKITEXT103": ("WIKITEXT103", "--valid-data", text, "--overlapping-eval", step),
        "LAMBADA": ("LAMBADA", "--valid-data", passages),
        "strict LAMBADA": ("LAMBADA", "--valid-data", passages, "--strict-lambada"),
    }
    for name, words in jobs.items():
        output = steps.folder / f"{name.replace(' ', '-')}.json"
        steps.run(
            name,
            module(
                "tasks.main", "--task", *words, "--load", steps.folder / "gpt", "--output", output
            ),
        )
        results[name] = json.loads(output.read_text())
    wiki, loose, strict = results.values()
    return Found(
        loss=wiki["loss"],
        tokens=wiki["tokens"],
        perplexity=math.exp(wiki["loss"]),
        adjusted_perplexity=math.exp(wiki["loss"] * wiki["token_ratio"]),
        endings=loose["correct"],
        strict_endings=strict["correct"],
        passages=loose["total"],
    )


def by_loops(
    logits: Logits, encode: Encode, text: Path, passages: Path, *, length: int, step: int
) -> Found:
    """Return the same scores by plain loops over a model's logits."""
    raw, endings = read_text(text), read_passages([str(passages)])
    tokens = encode(wikitext(raw))
    found = plain_loss(logits, tokens, length=length, step=step)
    per_word = (len(tokens) - 1) / (len(raw.strip().split(" ")) - 1)
    right = [
        plain_endings(logits, encode, endings, length=length, strict=strict)
        for strict in (False, True)
    ]
    return Found(
        loss=found.loss,
        tokens=found.tokens,
        perplexity=found.perplexity,
        adjusted_perplexity=math.exp(found.loss * per_word),
        endings=right[0],
        strict_endings=right[1],
        passages=len(endings),
    )


def encoder(folder: Path) -> Encode:
    """Return the encoder of `tokenizers` itself, by the trained tokenizer.json."""
    trained = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(trained.encode(text).ids)


def check_equal(found: dict[str, Found]) -> None:
    """Raise NumericsError unless all methods agree with the first one."""
    (first, ours), *others = found.items()
    for name, other in others:
        same = ours.tokens == other.tokens and ours.passages == other.passages
        for what in ("perplexity", "adjusted_perplexity"):
            one, two = getattr(ours, what), getattr(other, what)
            same = same and abs(one - two) <= TOLERANCE * two
        # Greedy choice may differ where two tokens are as likely as each other to the last bit.
        same = same and ours.endings == other.endings
        if not (same and ours.strict_endings == other.strict_endings):
            raise NumericsError(
                "a task and a plain loop do not score the same model alike",
                found=f"{first}: {ours}; {name}: {other}",
                fix="use neither before it is clear which of them is wrong",
            )


def table(found: dict[str, Found]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield "| scored by | tokens | perplexity | per word (adjusted) | last token | last word |"
    yield "|---|---|---|---|---|---|"
    for name, one in found.items():
        yield (
            f"| {name} | {one.tokens} | {one.perplexity:.6f} | {one.adjusted_perplexity:.4f} | "
            f"{one.endings} of {one.passages} | {one.strict_endings} of {one.passages} |"
        )
    ours, *others = found.values()
    for name, other in zip([*found][1:], others):
        apart = abs(ours.perplexity - other.perplexity) / other.perplexity
        yield f"perplexities of {OURS} and the {name} are {apart:.1e} apart, relatively"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the steps that are not done yet, score by every method, and compare."""
    flags = _parser().parse_args(argv)
    steps, recipe = Steps(flags.out), Pretraining(iterations=flags.iterations)
    documents = flags.out / "text.jsonl"
    count = write_documents([flags.text], documents, keep_lines=True)
    print(f"{count} documents of {flags.text.name}")
    pretrain(steps, documents, recipe, ranks=flags.ranks)
    found = scored(steps, flags.wikitext, flags.lambada, recipe, step=flags.overlapping_eval)
    print("\n".join(["", *table(found)]))
    steps.write_report(
        flags.json,
        "gpt_text",
        pretraining=asdict(recipe),
        overlapping_eval=flags.overlapping_eval,
        tolerance=TOLERANCE,
        ranks=flags.ranks,
        found={name: one._asdict() for name, one in found.items()},
    )
    check_equal(found)


def scored(
    steps: Steps, text: Path, passages: Path, recipe: Pretraining, *, step: int
) -> dict[str, Found]:
    """Return the scores of the trained model by every method, tasks first."""
    found = {OURS: by_tasks(steps, text, passages, step=step)}
    models: dict[str, Callable[[], Logits]] = {
        PLAIN: lambda: plain_gpt(steps.folder / "gpt", seq_length=recipe.seq_length)
    }
    if find_spec("transformers") is None:
        log.warning("transformers is not installed: the exported model is not scored by it")
    else:
        models[TRANSFORMERS] = lambda: transformers_logits(steps.folder / "huggingface")
    for name, model in models.items():
        # Kept, as what commands make is; those of the tasks refuse a folder of other flags.
        kept = steps.folder / f"{name.replace(', ', '-').replace(' ', '-')}.json"
        if not kept.exists():
            result = by_loops(
                model(),
                encoder(steps.folder / "bpe"),
                text,
                passages,
                length=recipe.seq_length,
                step=step,
            )
            kept.write_text(json.dumps(result._asdict()))
        found[name] = Found(**json.loads(kept.read_text()))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpt_text", description=__doc__)
    add = parser.add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="to pretrain on")
    add("--wikitext", type=Path, required=True, metavar="FILE", help="a text in WikiText's form")
    add("--lambada", type=Path, required=True, metavar="FILE", help="JSON lines with a text each")
    add("--out", type=Path, required=True, metavar="FOLDER", help="where everything goes")
    add("--iterations", type=int, default=Pretraining.iterations, help="[%(default)s]")
    add("--ranks", type=int, default=2, help="data-parallel processes of one thread [2]")
    add("--overlapping-eval", type=int, default=128, help="tokens between two windows [128]")
    add("--json", type=Path, metavar="FILE", help="write everything there")
    return parser


if __name__ == "__main__":
    run_program(main)
