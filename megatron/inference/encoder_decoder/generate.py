"""Generation from the inputs of an encoder: one answer to each, drawn token by token or searched.

Every rank that shares the model calls these functions with the same arguments and gets the same
answers. The inputs of a batch are filled up to the longest one, so what is beside a row changes its
scores by rounding, as the length of their sums does.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.errors import ConfigError
from megatron.inference.encoder_decoder.beam_search import (
    BeamParams,
    BeamSearch,
    Hypothesis,
)
from megatron.inference.encoder_decoder.decoder_state import DecoderState
from megatron.inference.forward import require_finite
from megatron.inference.generate import Generation, check_prompts
from megatron.inference.sampling import SequenceDraw, check_draw, draw_tokens
from megatron.inference.sampling_params import SamplingParams
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.gpt_model import most_positions
from megatron.model.t5_model import T5Model
from megatron.mpu.collectives import broadcast
from megatron.mpu.context import ParallelContext


def generate_answers(
    model: T5Model,
    inputs: Sequence[Sequence[int]],
    marks: DecoderMarks,
    *,
    max_new_tokens: int,
    params: SamplingParams,
    seed: int,
    ctx: ParallelContext,
    stop: Callable[[Sequence[int]], bool] | None = None,
) -> list[Generation]:
    """Answer every input by up to `max_new_tokens` tokens; a row ends early at `marks.end`.

    As `inference.generate`, of which it has the draws: what is drawn depends on `seed`, the number
    of the row and its answer so far alone. Penalties look at the answer, not at the input.

    Raises:
        ConfigError: no input, an empty one, a token outside the vocabulary, or more positions than
            the model has; all of it before anything is computed.
        MachineError: keys and values do not fit into memory.
        NumericsError: scores are not finite.
    """
    _check(model, inputs, marks, max_new_tokens)
    outputs: list[list[int]] = [[] for _ in inputs]
    ended: list[Literal["eod", "length", "stop"] | None] = [None] * len(inputs)
    last = [marks.start] * len(inputs)
    draws = [SequenceDraw(params=params, seed=seed, sequence=row) for row in range(len(inputs))]
    check_draw(draws[0], model.build.vocab.true)
    with evaluation_mode(model):
        state = DecoderState(model, ctx, inputs, pad=marks.pad, length=max_new_tokens)
        while None in ended:
            running = [row for row, end in enumerate(ended) if end is None]
            scores = state.step(last)[running]
            require_finite(dict(zip(running, scores.amax(dim=-1).isfinite().tolist())))
            drawn = draw_tokens(
                scores,
                [replace(draws[row], output=outputs[row]) for row in running],
                [len(outputs[row]) for row in running],
            )
            for row, token in zip(running, broadcast(drawn, ctx.model).tolist()):
                last[row] = token  # rows that ended repeat their last one
                if token == marks.end:
                    ended[row] = "eod"
                    continue
                outputs[row].append(token)
                if stop is not None and stop(outputs[row]):
                    ended[row] = "stop"
                elif len(outputs[row]) == max_new_tokens:
                    ended[row] = "length"
    return [Generation(tuple(new), end or "length") for new, end in zip(outputs, ended)]


def search_answers(
    model: T5Model,
    inputs: Sequence[Sequence[int]],
    marks: DecoderMarks,
    *,
    max_new_tokens: int,
    params: BeamParams,
    ctx: ParallelContext,
) -> list[list[Hypothesis]]:
    """Return the best answers to every input, as many as there are beams at most, best first.

    Errors are those of `generate_answers`, and of `BeamSearch`.
    """
    _check(model, inputs, marks, max_new_tokens)
    count, beams = len(inputs), params.beams
    vocabulary = model.build.vocab.true
    searches = [
        BeamSearch(params, max_new_tokens=max_new_tokens, eod=marks.end, vocabulary=vocabulary)
        for _ in inputs
    ]
    last = [marks.start] * (beams * count)
    running = set(range(count))
    with evaluation_mode(model):
        state = DecoderState(model, ctx, inputs, pad=marks.pad, copies=beams, length=max_new_tokens)
        while running:
            scores = state.step(last).float().log_softmax(dim=-1).view(beams, count, -1)
            finite = scores.amax(dim=-1).isfinite().all(dim=0).tolist()
            require_finite({row: finite[row] for row in running})
            parents = list(range(beams * count))
            for row in sorted(running):
                step = searches[row].advance(scores[:, row])
                if step is None:
                    running.remove(row)
                    continue
                for beam, (parent, token) in enumerate(zip(*step)):
                    parents[beam * count + row] = parent * count + row
                    last[beam * count + row] = token
            state.reorder(parents)
    return [search.ended for search in searches]


def without_end(tokens: Sequence[int], end: int | None) -> tuple[int, ...]:
    """Return the tokens of a sequence without the one that ends it."""
    return tuple(tokens[:-1] if tokens and tokens[-1] == end else tokens)


def _check(
    model: T5Model, inputs: Sequence[Sequence[int]], marks: DecoderMarks, max_new_tokens: int
) -> None:
    check_prompts(
        inputs, max_new_tokens=max_new_tokens, eod=marks.end, vocabulary=model.build.vocab.true
    )
    room = most_positions(model.config, model.build)
    longest = max(map(len, inputs))
    if room is not None and max(longest, max_new_tokens) > room:
        raise ConfigError(
            "a row of the encoder or of the decoder is longer than the positions of the model",
            found=f"an input of {longest} tokens, --num-tokens {max_new_tokens}, {room} positions",
            fix=f"use inputs and --num-tokens of {room} or fewer",
        )
