"""LAMBADA, WIKITEXT103 and PERPLEXITY: a GPT scores text that it has not seen.

Model and tokenizer are those of the checkpoint. Under torchrun the model is spread over
--tensor-model-parallel-size x --pipeline-model-parallel-size ranks and the rows over the replicas
that are left; results do not depend on any of that.
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron import log
from megatron.errors import ConfigError
from tasks.loading import Grid, LoadedScorer, load_scorer
from tasks.zeroshot.lambada import LambadaResult, evaluate_lambada, read_passages
from tasks.zeroshot.perplexity import (
    USUAL_STEP,
    PerplexityResult,
    evaluate_perplexity,
    read_texts,
)
from tools.text_output import write_text_files

LAMBADA, WIKITEXT103 = "LAMBADA", "WIKITEXT103"


def main(name: str, argv: Sequence[str]) -> None:
    """Read the flags, evaluate, and print the result on rank 0."""
    flags = parser(name).parse_args(argv)
    _check(name, flags)
    # Files are read before the model: what is wrong with them is known within a second.
    passages = read_passages(flags.valid_data) if name == LAMBADA else []
    texts = [] if name == LAMBADA else read_texts(flags.valid_data)
    loaded = load_scorer(
        flags.load,
        flags.iteration,
        grid=Grid(flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size),
        micro_batch_size=flags.micro_batch_size,
        device=flags.device,
    )
    result: LambadaResult | PerplexityResult
    if name == LAMBADA:
        result = evaluate_lambada(loaded, passages, strict=flags.strict_lambada)
    else:
        result = evaluate_perplexity(
            loaded,
            texts,
            step=flags.overlapping_eval,
            length=flags.seq_length,
            is_wikitext=name == WIKITEXT103,
        )
    _say(name, result, loaded, flags.output)


def parser(name: str) -> argparse.ArgumentParser:
    """The flags of one of the three tasks."""
    made = argparse.ArgumentParser(prog=f"tasks.main --task {name}", allow_abbrev=False)
    add = made.add_argument
    add("--load", required=True, metavar="FOLDER", help="folder of checkpoints of a GPT")
    add("--iteration", type=int, help="which of them; the newest when not given")
    add(
        "--valid-data",
        nargs="+",
        required=True,
        metavar="FILE",
        help="JSON lines with a text each" if name == LAMBADA else "text files, one text each",
    )
    add("--micro-batch-size", type=int, default=8, help="rows that a replica reads together [8]")
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share a layer [1]")
    add("--pipeline-model-parallel-size", type=int, default=1, help="ranks that share layers [1]")
    add("--device", choices=("cpu", "cuda"), help="as in training when not given")
    add("--output", metavar="FILE", help="also write the result there, as JSON")
    if name == LAMBADA:
        add(
            "--strict-lambada",
            action="store_true",
            help="the whole last word counts, not its last token alone",
        )
    else:
        add(
            "--overlapping-eval",
            type=int,
            metavar="STEP",
            help="tokens that each further window scores, the rest of it being context; when not "
            f"given {USUAL_STEP}, or the whole window where that is shorter",
        )
        add("--seq-length", type=int, help="tokens of a window; as in training when not given")
    return made


def _check(name: str, flags: argparse.Namespace) -> None:
    sizes = ["micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"]
    if name != LAMBADA:
        sizes += ["overlapping_eval", "seq_length"]
    for size in sizes:
        value = getattr(flags, size)
        if value is not None and value < 1:
            raise ConfigError(
                "a size is not positive",
                found=f"--{size.replace('_', '-')} {value}",
                fix="use a whole number from 1",
            )


def _say(
    name: str, result: LambadaResult | PerplexityResult, loaded: LoadedScorer, output: str | None
) -> None:
    if loaded.ctx.rank != 0:
        return
    words = f" validation results on {name} | {result.describe()}"
    log.info("\n".join(["-" * len(words), words, "-" * len(words)]))
    if output is not None:
        values = {key: value for key, value in asdict(result).items() if _is_json(value)}
        write_text_files({Path(output): json.dumps({"task": name, **values}, indent=1) + "\n"})


def _is_json(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
