"""What generate_text.py prints of one sample, and the kinds of models that write samples."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.errors import ConfigError
from megatron.inference.encoder_decoder.beam_search import BeamParams, EarlyStopping
from megatron.inference.encoder_decoder.generate import (
    generate_answers,
    search_answers,
    without_end,
)
from megatron.inference.generate import RowRules, generate
from megatron.inference.offload.working_bytes import CacheDemand
from megatron.inference.sampling_params import SamplingParams
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import hash_seed
from megatron.tokenizer.protocol import Tokenizer
from megatron.trained_model import load_model_for_inference, load_text_to_text_model
from tools.flags.device_map import placement_options
from tools.flags.grammar import grammar_constraint, grammar_of
from tools.flags.model import ModelChoice


@dataclass(frozen=True)
class Continuation:
    """One generated sample, as the program prints it."""

    prompt: str
    text: str
    tokens: tuple[int, ...]
    finish_reason: str

    def as_json(self) -> str:
        """Return one line of JSON in ASCII, since some readers break lines at U+2028 too."""
        return json.dumps(vars(self))


class Continue(Protocol):
    """Writes samples."""

    def __call__(self, texts: Sequence[str], batch: int) -> list[Continuation]:
        """Return the samples of each text, in order; `batch` tells draws of batches apart."""


class Writer(NamedTuple):
    """A loaded model and the ranks that share it; `answers`: what it writes stands alone."""

    continue_: Continue
    ctx: ParallelContext
    answers: bool = False


def decoder_writer(args: argparse.Namespace, choice: ModelChoice) -> Writer:
    """Load a GPT or a prefix LM, which continues prompts."""
    if args.num_beams is not None:
        raise ConfigError(
            "beam search is there for models of an encoder and a decoder",
            found=f"--num-beams {args.num_beams}, and a model of one stack",
            fix="leave it out; --greedy takes the likeliest token",
        )
    params, grammar = sampling_params(args), grammar_of(args)
    placement = placement_options(
        args, CacheDemand(sequences=args.batch_size * args.num_samples, length=None)
    )
    loaded = load_model_for_inference(
        choice.folder,
        choice.iteration,
        given=choice.given,
        weight_quantization=choice.weight_quantization,
        placement=placement,
        shares_experts=True,
    )
    constraint = grammar_constraint(grammar, loaded.tokenizer, loaded.model.build.vocab.true)

    def continue_(texts: Sequence[str], batch: int) -> list[Continuation]:
        repeated = [text for text in texts for _ in range(args.num_samples)]
        generations = generate(
            loaded.model,
            [_tokens(loaded.tokenizer, text) for text in repeated],
            max_new_tokens=args.num_tokens,
            params=params,
            eod=loaded.tokenizer.eod,
            seed=hash_seed(args.seed, batch),
            ctx=loaded.ctx,
            rules=RowRules(constraint=constraint),
        )
        return [
            Continuation(text, loaded.tokenizer.detokenize(g.tokens), g.tokens, g.finish_reason)
            for text, g in zip(repeated, generations)
        ]

    return Writer(continue_, loaded.ctx)


def text_to_text_writer(args: argparse.Namespace, choice: ModelChoice) -> Writer:
    """Load a T5, which answers prompts; with beams the samples of one are the best sequences."""
    for flag, given in (
        ("--device-map", args.device_map),
        ("--weight-quantization", choice.weight_quantization),
    ):
        if given is not None:
            raise ConfigError(
                "a model of an encoder and a decoder is in memory as a whole, in its own precision",
                found=f"{flag} {given}",
                fix="leave it out",
            )
    if grammar_of(args) is not None:
        raise ConfigError(
            "answers of a model of an encoder and a decoder follow no grammar",
            found="flags of a grammar, and a T5",
            fix="leave them out",
        )
    params, beams = sampling_params(args), _beam_params(args)
    loaded = load_text_to_text_model(choice.folder, choice.iteration, given=choice.given)
    words, marks = loaded.tokenizer, DecoderMarks.of(loaded.tokenizer)
    flags = loaded.config
    longest = args.num_tokens
    if longest is None:
        longest = flags.encoder_decoder.decoder_seq_length or flags.data.seq_length

    def continue_(texts: Sequence[str], batch: int) -> list[Continuation]:
        inputs = [marks.ended(words.tokenize(text)) for text in texts]
        if beams is not None:
            found = search_answers(
                loaded.model, inputs, marks, max_new_tokens=longest, params=beams, ctx=loaded.ctx
            )
            samples = [
                (text, without_end(one.tokens, marks.end), len(one.tokens))
                for text, row in zip(texts, found)
                for one in row[: args.num_samples]
            ]
            return [
                Continuation(
                    text,
                    words.detokenize(tokens),
                    tokens,
                    "eod" if len(tokens) < length else "length",
                )
                for text, tokens, length in samples
            ]
        repeated = [at for at in range(len(texts)) for _ in range(args.num_samples)]
        generations = generate_answers(
            loaded.model,
            [inputs[at] for at in repeated],
            marks,
            max_new_tokens=longest,
            params=params,
            seed=hash_seed(args.seed, batch),
            ctx=loaded.ctx,
        )
        return [
            Continuation(texts[at], words.detokenize(g.tokens), g.tokens, g.finish_reason)
            for at, g in zip(repeated, generations)
        ]

    return Writer(continue_, loaded.ctx, answers=True)


def add_beam_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of beam search."""
    add = parser.add_argument
    add("--num-beams", type=int, metavar="N", help=_BEAMS_HELP)
    add("--length-penalty", type=float, default=1.0, help=_PENALTY_HELP)
    add(
        "--early-stopping",
        choices=[each.value for each in EarlyStopping],
        default=EarlyStopping.HEURISTIC.value,
        help="with --num-beams, when the search of a text ends [heuristic]",
    )


_BEAMS_HELP = "T5: search with so many beams; --num-samples are the best sequences"
_PENALTY_HELP = "with --num-beams, the power of the length that divides a score [1.0]"


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """Return how tokens are drawn; ConfigError for values out of range."""
    return SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, greedy=args.greedy
    )


def _beam_params(args: argparse.Namespace) -> BeamParams | None:
    if args.num_beams is None:
        return None
    params = BeamParams(
        beams=args.num_beams,
        length_penalty=args.length_penalty,
        early_stopping=EarlyStopping(args.early_stopping),
    )
    plain = {"greedy": False, "top_k": 0, "top_p": 0.0, "temperature": 1.0}
    if given := [name for name, value in plain.items() if getattr(args, name) != value]:
        raise ConfigError(
            "beam search draws nothing",
            found=f"--num-beams {args.num_beams}, --{given[0].replace('_', '-')}",
            fix="leave one of them out",
        )
    if args.num_samples > args.num_beams:
        raise ConfigError(
            "there are fewer beams than samples",
            found=f"--num-beams {args.num_beams}, --num-samples {args.num_samples}",
            fix=f"use --num-beams {args.num_samples} or more",
        )
    return params


def _tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    tokens = tokenizer.tokenize(text)
    if tokens:
        return tokens
    if tokenizer.eod is None:
        raise ConfigError(
            "an empty prompt has nothing to start from",
            found=f"a tokenizer without an end-of-document token: {tokenizer.eod_note}",
            fix="give a prompt with text",
        )
    return [tokenizer.eod]
