"""Greedy generation of a LLaMA of 52 million random weights, beside `generate` of transformers.

`python benchmarks/inference/decode.py`: for each batch, both continue the same prompts of random
tokens by the same number of tokens, in turns; printed are new tokens per second, prompts included
in the time, as medians of the rounds, and the median of the ratios of a round. In fp32 both have to
choose the same tokens. How to read it is in benchmarks/README.md.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.machine import machine
from benchmarks.peers.plain_gpt import LlamaShape
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.errors import NumericsError
from megatron.inference.forward import ForwardExecutor
from megatron.inference.generate import generate
from megatron.inference.paged_cache import blocks_for
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.model.init import initialize_parameters
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.program import run_program
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request
from megatron.scheduling.scheduler import Scheduler

SHAPE = LlamaShape(
    layers=12, hidden=512, heads=8, groups=4, ffn=1408, vocab=32000, seq_length=256, micro_batch=1
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Prompts = list[list[int]]
Generator = Callable[[Prompts, int], Prompts]
"""Continues prompts by so many tokens, and returns the new ones."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every dtype and batch, print a table, and write it if asked."""
    flags = _parser().parse_args(argv)
    shape = LlamaShape(**{**asdict(SHAPE), "layers": flags.layers})
    found: list[dict[str, Any]] = []
    for dtype in flags.dtype:
        model = our_model(shape, dtype)
        contestants = {"ours": our_generator(model, batch_invariant=True)}
        contestants["ours, not invariant"] = our_generator(model, batch_invariant=False)
        if flags.speculative_tokens:
            for name, is_right in (("all", True), ("no", False)):
                contestants[f"{name} proposed tokens right"] = speculative_generator(
                    model, contestants["ours"], flags.speculative_tokens, is_right=is_right
                )
        if importlib.util.find_spec("transformers") is None:
            print("transformers is not installed: its column is left out")
        else:
            contestants["transformers"] = their_generator(model, shape, dtype)
        for batch in flags.batch:
            row = {"dtype": dtype, "batch": batch}
            row |= measure(contestants, batch, flags, same_tokens=dtype == "fp32")
            found.append(row)
            print(line_of(row), flush=True)
    if flags.json is not None:
        report: dict[str, Any] = {"benchmark": "inference/decode", "machine": machine()}
        report |= {"shape": asdict(shape)}
        report |= {"prompt": flags.prompt, "new": flags.new, "rounds": flags.rounds, "rows": found}
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


def our_model(shape: LlamaShape, dtype: str) -> GPTModel:
    """Return our model with random weights, in evaluation mode."""
    config = ModelConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        ffn_hidden_size=shape.ffn,
        normalization=Normalization.RMS_NORM,
        position_embedding_type=PositionEmbedding.ROPE,
        max_position_embeddings=shape.seq_length,
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
    )
    ctx = ParallelContext.single()
    build = ModelBuild(
        ctx=ctx,
        vocab=VocabSize(shape.vocab, shape.vocab),
        seq_length=shape.seq_length,
        streams=RandomStreams(1),
        precision=PrecisionConfig(bf16=dtype == "bf16"),
    )
    model = GPTModel(config, build).eval().requires_grad_(False)
    initialize_parameters(model, seed=1, ctx=ctx)
    return model


def our_generator(model: GPTModel, *, batch_invariant: bool) -> Generator:
    """Return our `generate` as a contestant, with rows and keys padded or not."""
    ctx, greedy = ParallelContext.single(), SamplingParams(greedy=True)

    def run(prompts: Prompts, new: int) -> Prompts:
        executor = partial(ForwardExecutor, batch_invariant=batch_invariant)
        with patch("megatron.inference.generate.ForwardExecutor", executor):
            done = generate(
                model, prompts, max_new_tokens=new, params=greedy, eod=None, seed=0, ctx=ctx
            )
        return [list(each.tokens) for each in done]

    return run


def speculative_generator(
    model: GPTModel, plain: Generator, tokens: int, *, is_right: bool
) -> Generator:
    """Return a contestant with proposed tokens, all of which are right, or all wrong.

    What proposes them takes no time: the texts are those that `plain` generates, once.
    """
    vocabulary, length = model.build.vocab.true, model.build.seq_length
    following: dict[tuple[int, ...], list[int]] = {}

    def draft(prompt: Sequence[int], done: int, room: int) -> list[int]:
        known = following[tuple(prompt)][done : done + room]
        return known if is_right else [(token + 1) % vocabulary for token in known]

    def run(prompts: Prompts, new: int) -> Prompts:
        if tuple(prompts[0]) not in following:
            following.update(zip(map(tuple, prompts), plain(prompts, new)))
        blocks = len(prompts) * blocks_for(length)
        step_tokens = max(512, len(prompts) * (1 + tokens))
        limits = SchedulerLimits(
            blocks=blocks,
            max_length=length,
            vocab_size=vocabulary,
            max_tokens_per_step=step_tokens,
            max_sequences=len(prompts),
            speculative_tokens=tokens,
        )
        scheduler, executor = (
            Scheduler(limits),
            ForwardExecutor(model, ParallelContext.single(), blocks=blocks),
        )
        for number, prompt in enumerate(prompts):
            request = Request(
                id=str(number), prompt=tuple(prompt), max_new_tokens=new, arrival_ns=0
            )
            scheduler.submit(request)
        found: Prompts = [[] for _ in prompts]
        greedy = SamplingParams(greedy=True)
        draws = [SequenceDraw(params=greedy, seed=0) for _ in prompts]
        while (plan := scheduler.plan(0)).slices:
            drafts = {
                part.sequence: draft(
                    prompts[part.sequence], len(found[part.sequence]), part.draft_room
                )
                for part in plan.slices
                if part.draft_room
            }
            results = executor.run(scheduler.propose(drafts), dict(enumerate(draws)))
            for each in results:
                found[each.sequence] += each.tokens
            scheduler.complete({each.sequence: each.tokens for each in results if each.tokens})
        return found

    return run


def their_generator(model: GPTModel, shape: LlamaShape, dtype: str) -> Generator:
    """Return `generate` of transformers' Llama with a copy of our weights."""
    from benchmarks.peers import packages

    peer: Any = packages.transformers(model.named_parameters(), shape).model
    peer = peer.to(DTYPES[dtype]).eval()
    peer.generation_config.pad_token_id = 0

    @torch.no_grad()
    def run(prompts: Prompts, new: int) -> Prompts:
        tokens = torch.tensor(prompts)
        done = peer.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            use_cache=True,
        )
        new_tokens: Prompts = done[:, tokens.shape[1] :].tolist()
        return new_tokens

    return run


def measure(
    contestants: dict[str, Generator], batch: int, flags: argparse.Namespace, *, same_tokens: bool
) -> dict[str, Any]:
    """Return tokens per second of each contestant, and medians of the first over each other one.

    Raises:
        NumericsError: contestants that have to choose the same tokens do not.
    """
    prompts = torch.randint(
        SHAPE.vocab, (batch, flags.prompt), generator=torch.Generator().manual_seed(batch)
    ).tolist()
    chosen = {name: run(prompts, flags.new) for name, run in contestants.items()}  # warm
    if same_tokens and any(tokens != chosen["ours"] for tokens in chosen.values()):
        raise NumericsError(
            "contestants choose other tokens, and may not compute the same",
            found=f"batch {batch}: {chosen}",
            fix="look for the first token that differs; a near tie would be chance",
        )
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for turn in range(flags.rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            start = time.perf_counter()
            contestants[name](prompts, flags.new)
            seconds[name].append(time.perf_counter() - start)
    tokens = batch * flags.new
    return {
        "tokens_per_second": {name: tokens / median(found) for name, found in seconds.items()},
        "ours_over": {
            name: median(theirs / ours for ours, theirs in zip(seconds["ours"], found))
            for name, found in seconds.items()
            if name != "ours"
        },
    }


def line_of(row: dict[str, Any]) -> str:
    """Return one measurement as a line of text."""
    speeds = ", ".join(f"{name} {speed:.1f}" for name, speed in row["tokens_per_second"].items())
    ratios = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in row["ours_over"].items())
    return f"{row['dtype']}, batch {row['batch']}: tokens/s {speeds}; ours is {ratios}"


_SPECULATIVE_HELP = (
    "beside them two contestants with so many proposed tokens in a step, all right and all wrong: "
    "what proposals can gain and cost [none]"
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="decode", description=__doc__)
    add = parser.add_argument
    add("--dtype", nargs="+", choices=tuple(DTYPES), default=list(DTYPES), help="[both]")
    add("--batch", type=int, nargs="+", default=[1, 8, 32], help="prompts at a time [1 8 32]")
    add("--prompt", type=int, default=128, help="tokens of a prompt [%(default)s]")
    add("--new", type=int, default=32, help="new tokens of each [%(default)s]")
    add("--rounds", type=int, default=5, help="measured turns of each contestant [%(default)s]")
    add("--layers", type=int, default=SHAPE.layers, help="of the model [%(default)s]")
    add("--speculative-tokens", type=int, default=0, metavar="N", help=_SPECULATIVE_HELP)
    add("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser


if __name__ == "__main__":
    run_program(main)
