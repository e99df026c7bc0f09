"""A trained GPT for tests of tasks."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron.arguments import parse_args
from megatron.errors import MegatronError
from megatron.initialize import shutdown_megatron
from tasks.main import main
from tests.support.launch import ROOT, byte_corpus, run_program, small_run, write_text
from tests.support.ranks import run_on_ranks
from tests.support.tiny import train
from tests.unit.tokenizer.vocabularies import write_gpt2
from tools import preprocess_data

# Of float64 sums in another order.
SAME = 1e-9


def tiny_gpt_checkpoint(folder: Path) -> str:
    """The folder of a GPT on bytes, in float64, in which no two tokens are a tie."""
    save = folder / "save"
    flags = ["--fp64", "--train-iters", "20", "--save", str(save), "--eval-iters", "0"]
    run_on_ranks(1, _train_one, small_run(byte_corpus(folder), *flags))
    return str(save)


SENTENCES = ("the cat sat on a mat", "two dogs run over hills", "rain fell far away")


def sentences_gpt_checkpoint(folder: Path) -> str:
    """The folder of a GPT on bytes, in float64, that completes most of `SENTENCES`."""
    text, prefix, save = folder / "sentences.jsonl", folder / "sentences", folder / "save"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in SENTENCES * 100))
    words = f"--input {text} --tokenizer-type ByteTokenizer --append-eod --output-prefix {prefix}"
    preprocess_data.main(words.split())
    flags = f"--fp64 --train-iters 120 --save {save} --eval-iters 0 --log-interval 120"
    flags += " --micro-batch-size 8 --global-batch-size 8 --init-method-std 0.2"
    flags += " --hidden-dropout 0 --attention-dropout 0"
    run_on_ranks(1, _train_one, small_run(f"{prefix}_text_document", *flags.split()))
    return str(save)


def _train_one(argv: Sequence[str]) -> None:
    train(parse_args(argv))


class Exported(NamedTuple):
    """One GPT on a BPE in float32, as three programs keep it."""

    ours: Path
    megatron: Path
    huggingface: Path
    vocabulary: dict[str, str]  # flags of the tokenizer's files


def exported_gpt(folder: Path) -> Exported:
    """A GPT that was trained for a moment, and is rough enough that every value counts."""
    vocabulary = write_gpt2(folder / "vocabulary")
    files = [word for name, path in vocabulary.items() for word in (_flag(name), path)]
    flags = ["--tokenizer-type", "GPT2BPETokenizer", *files]
    text = write_text(folder / "corpus.jsonl")
    prefix = folder / "corpus"
    words = ["--input", str(text), "--append-eod", "--output-prefix", str(prefix)]
    preprocess_data.main([*words, *flags])
    ours, megatron, huggingface = (folder / name for name in ("ours", "megatron", "huggingface"))
    flags += ["--init-method-std", "0.2", "--train-iters", "20", "--save", str(ours)]
    run_on_ranks(1, _train_one, small_run(f"{prefix}_text_document", *flags))
    convert("--load", ours, "--save", megatron, "--format", "megatron", *_TWO)
    convert("--load", ours, "--save", huggingface, "--format", "huggingface", "--no-check-logits")
    return Exported(ours, megatron, huggingface, vocabulary)


def evaluated(
    ranks: int, each: Mapping[Path, Sequence[object]], *, output_flag: str = "--output"
) -> list[dict[str, Any]]:
    """Evaluate several times in the same processes; what each wrote with --output."""
    runs = [[*words, output_flag, output] for output, words in each.items()]
    for said in run_on_ranks(ranks, evaluate_all, [list(map(str, words)) for words in runs]):
        assert said == [""] * len(runs)
    return [json.loads(output.read_text()) for output in each]


def refusals(*each: Sequence[object]) -> list[str]:
    """What several evaluations on one rank say instead of a result."""
    return run_on_ranks(1, evaluate_all, [list(map(str, words)) for words in each])[0]


def evaluate_all(each: Sequence[Sequence[str]]) -> list[str]:
    """A body for `run_on_ranks`: the errors of several evaluations, empty where there is none.

    It stands here, and not where a test is, so that ranks import nothing that only tests compare
    with.
    """
    return [_evaluate(argv) for argv in each]


def _evaluate(argv: Sequence[str]) -> str:
    try:
        main([*argv, "--device", "cpu"])
    except MegatronError as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    finally:
        shutdown_megatron()
    return ""


_TWO = ("--tensor-model-parallel-size", "2")


def convert(*words: object) -> None:
    """Run tools/convert_checkpoint.py, which has to end well."""
    ended = run_program(
        [sys.executable, str(ROOT / "tools/convert_checkpoint.py"), *map(str, words)], cwd=ROOT
    )
    assert ended.status == 0, ended.text


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
