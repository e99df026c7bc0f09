"""Continue prompts with a trained GPT: `python -m tools.generate_text --load FOLDER --prompt TEXT`.

A T5 answers them instead, and may search for answers with --num-beams.

The checkpoint holds the run's configuration, so model and tokenizer need no flags of their own;
those that are given are compared with it. Under torchrun with --tensor-model-parallel-size N the
model is split over N ranks, which need not be the number it was trained on; rank 0 prints.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import atomic
from megatron.checkpoint import model_kind
from megatron.checkpoint.load.stored_run import stored_run
from megatron.errors import ConfigError, DataError
from megatron.mpu.collectives import broadcast_object
from megatron.program import run_program
from tools.flags.device_map import add_placement_flags
from tools.flags.grammar import add_grammar_flags
from tools.flags.model import add_model_flags, read_model_flags
from tools.generation.continuations import (
    Continuation,
    add_beam_flags,
    decoder_writer,
    text_to_text_writer,
)

INTERACTIVE_PROMPT = "> "


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, load the model, and print a continuation of every prompt."""
    args, choice = read_model_flags(parser(), argv)
    prompts = _prompts(args)
    stored = stored_run(choice.folder, choice.iteration, choice.given)
    load = text_to_text_writer if stored.kind == model_kind.T5 else decoder_writer
    writer = load(args, choice)
    is_first = writer.ctx.rank == 0
    batches: Iterator[Sequence[str]]
    if args.interactive:
        batches = _questions(lambda text: broadcast_object(text, writer.ctx.whole_model), is_first)
    else:
        batches = (
            prompts[i : i + args.batch_size] for i in range(0, len(prompts), args.batch_size)
        )
    shown: list[str] = []
    for index, batch in enumerate(batches):
        for continuation in writer.continue_(batch, index):
            if is_first:
                shown.append(_text_of(continuation, args.json, alone=writer.answers))
                print(shown[-1], flush=True)
    if is_first and args.output is not None:
        _write(Path(args.output), "".join(f"{text}\n" for text in shown))


def parser() -> argparse.ArgumentParser:
    """Return the flags of this program."""
    made = argparse.ArgumentParser(
        prog="generate_text",
        description="Continue prompts with a trained GPT, or answer them with a T5.",
        allow_abbrev=False,
    )
    add_model_flags(made)
    add_placement_flags(made)
    add_grammar_flags(made)
    add = made.add_argument
    add("--prompt", action="append", default=[], metavar="TEXT", help=_PROMPT_HELP)
    add("--prompt-file", metavar="FILE", help="one prompt per line, blank lines left out")
    add("--interactive", action="store_true", help="ask for prompts until the end of input")
    add("--num-tokens", type=int, help=_NUM_TOKENS_HELP)
    add("--num-samples", type=int, default=1, help="samples per prompt [1]")
    add("--batch-size", type=int, default=8, help="prompts continued at a time [8]")
    add("--temperature", type=float, default=1.0, help="divides the scores [1.0]")
    add("--greedy", action="store_true", help="always the likeliest token")
    add("--top-k", type=int, default=0, help="only the k likeliest tokens; 0: all [0]")
    add("--top-p", type=float, default=0.0, help=_TOP_P_HELP)
    add_beam_flags(made)
    add("--seed", type=int, default=1234, help="seed of the draws [1234]")
    add("--json", action="store_true", help="one line of JSON per sample")
    add("--output", metavar="FILE", help="write the samples there too, and nothing else")
    return made


_PROMPT_HELP = "text to continue, repeatable; an empty one starts a new document"
_NUM_TOKENS_HELP = (
    "new tokens per sample, at most [as many as the model has positions for; T5: a row of the "
    "decoder]"
)
_TOP_P_HELP = "only the likeliest tokens that together have probability p; 0: all [0]"


def _prompts(args: argparse.Namespace) -> list[str]:
    sources = [bool(args.prompt), args.prompt_file is not None, args.interactive]
    if sum(sources) != 1:
        raise ConfigError(
            "prompts must come from exactly one place",
            found=f"{len(args.prompt)} --prompt, --prompt-file {args.prompt_file}"
            + (", --interactive" if args.interactive else ""),
            fix="give --prompt TEXT, or --prompt-file FILE, or --interactive",
        )
    for flag in ("num_samples", "batch_size"):
        if getattr(args, flag) < 1:
            raise ConfigError(
                "a count is not positive",
                found=f"--{flag.replace('_', '-')} {getattr(args, flag)}",
                fix="use 1 or more",
            )
    return args.prompt if args.prompt_file is None else _read_prompts(Path(args.prompt_file))


def _read_prompts(path: Path) -> list[str]:
    if not path.is_file():
        raise DataError(
            "the file of prompts is not there",
            found=f"--prompt-file {path}",
            fix="give the path of a text file with one prompt per line",
        )
    # Not splitlines(): it also breaks at characters that belong to a text, such as U+2028.
    prompts = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not prompts:
        raise DataError(
            "the file of prompts has none",
            found=f"--prompt-file {path}",
            fix="put one prompt on each line",
        )
    return prompts


def _questions(
    agree: Callable[[str | None], str | None], is_first: bool
) -> Iterator[Sequence[str]]:
    """Yield the user's lines on rank 0, sent to every rank, until the end of input."""
    while True:
        typed = None
        if is_first:
            try:
                typed = input(INTERACTIVE_PROMPT)
            except EOFError:
                typed = None
        typed = agree(typed)
        if typed is None:
            return
        yield [typed]


def _text_of(continuation: Continuation, as_json: bool, *, alone: bool) -> str:
    """Return what is printed; `alone`: without the prompt, which it does not continue."""
    if as_json:
        return continuation.as_json()
    end = f"--- {len(continuation.tokens)} tokens, ended by {continuation.finish_reason}"
    return f"{'' if alone else continuation.prompt}{continuation.text}\n{end}"


def _write(path: Path, text: str) -> None:
    unfinished = atomic.temporary_name(path)
    try:
        unfinished.write_text(text, encoding="utf-8")
        atomic.publish_file(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise atomic.write_error(path, error) from error


if __name__ == "__main__":
    run_program(main)
