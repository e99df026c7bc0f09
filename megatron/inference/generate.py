"""Batched generation with a static batch: the engine's forward passes, without a scheduler.

Prompts may differ in length. Every rank that shares the model calls `generate` with the same
arguments and gets the same tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megatron import device
from megatron.device import free_memory_bytes
from megatron.errors import ConfigError
from megatron.inference.end_ids import check_end_id
from megatron.inference.forward import ForwardExecutor, model_block_bytes, require_finite
from megatron.inference.paged_cache import BLOCK_SIZE, blocks_for, check_blocks_fit
from megatron.inference.sampling import SequenceDraw, TokenConstraint
from megatron.inference.sampling_params import SamplingParams
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.gpt_model import GPTModel
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import ParallelContext
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice

_STEP_TOKENS = 512  # of a forward pass over prompts: longer ones take more memory and gain little


@dataclass(frozen=True, slots=True)
class Generation:
    """The new tokens after one prompt, without the prompt and without the eod."""

    tokens: tuple[int, ...]
    finish_reason: Literal["eod", "length", "stop"]


class RowConstraint(TokenConstraint, Protocol):
    """What the new tokens of a row have to spell; such as `constraint.GrammarConstraint`."""

    def copy(self) -> "RowConstraint":
        """Return the same for another row."""

    def problem(self, output: Sequence[int]) -> str | None:
        """Return why an output does not match, or cannot be followed; None if it can."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What new tokens of a row may be, beside their number.

    Attributes:
        stop: whether a row ends with the newest of its new tokens.
        constraint: what new tokens have to spell, before the first one.
    """

    stop: Callable[[Sequence[int]], bool] | None = None
    constraint: RowConstraint | None = None


_ANYTHING = RowRules()


def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    params: SamplingParams,
    eod: int | None,
    seed: int,
    ctx: ParallelContext,
    rules: RowRules = _ANYTHING,
) -> list[Generation]:
    """Continue every prompt by up to `max_new_tokens` tokens; a row ends early at `eod`.

    Without a number there are as many as fit into the model's positions behind the longest prompt,
    and into the memory that is free on all ranks; rows that use them up end by "length". A row
    also ends with the token after which `rules.stop` of its new tokens is true; all ranks decide
    alike. The model computes in evaluation mode and gets its mode back. For the length of the call
    every row takes the blocks of its prompt and of `max_new_tokens` (`block_bytes`). What is drawn
    depends on `seed`, the number of the row and its tokens alone.

    Raises:
        ConfigError: no prompt, an empty one, a token or `eod` outside the vocabulary, or more
            positions than the model has; all of it before anything is computed. Or a constraint
            could not be followed.
        MachineError: keys and values do not fit into memory.
        NumericsError: scores are not finite.
    """
    check_prompts(
        prompts, max_new_tokens=max_new_tokens, eod=eod, vocabulary=model.build.vocab.true
    )
    _check_room(model, prompts, max_new_tokens)
    model.row_products()  # before free memory is looked at: they may keep a copy of the weights
    if max_new_tokens is None:
        max_new_tokens = _new_tokens_that_fit(model, prompts, ctx)
    rows = _Rows(
        prompts,
        max_new_tokens=max_new_tokens,
        eod=eod,
        rules=rules,
        prompt_is_prefix=model.prompt_is_prefix,
    )
    blocks = sum(map(len, rows.blocks))
    check_blocks_fit(
        blocks, model_block_bytes(model, ctx), free_memory_bytes(), what=f"{len(prompts)} prompts"
    )
    with evaluation_mode(model):
        executor = ForwardExecutor(model, ctx, blocks=blocks)
        chosen: dict[int, int] = {}
        for plan in rows.prompt_plans():
            chosen |= _drawn(executor, plan, rows.draws(plan, params, seed))
        while not rows.take(chosen):
            plan = rows.next_plan()
            chosen = _drawn(executor, plan, rows.draws(plan, params, seed))
    return rows.results()


def _drawn(
    executor: ForwardExecutor, plan: ForwardPlan, draws: dict[int, SequenceDraw]
) -> dict[int, int]:
    """Return the tokens that one step draws, by row."""
    results = executor.run(plan, draws)
    require_finite({each.sequence: each.is_finite for each in results})
    return {each.sequence: each.tokens[0] for each in results if each.tokens}


class _Rows:
    """State of the sequences being generated; a row that ended is in no further step."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eod: int | None,
        rules: RowRules = _ANYTHING,
        prompt_is_prefix: bool = False,
    ) -> None:
        self._prompts, self._eod, self._stop = prompts, eod, rules.stop
        first_state = rules.constraint
        self._constraints = [None if first_state is None else first_state.copy() for _ in prompts]
        self._prompt_is_prefix = prompt_is_prefix
        self._max_new_tokens = max_new_tokens
        self._new: list[list[int]] = [[] for _ in prompts]
        self._ended: list[Literal["eod", "length", "stop"] | None] = [None] * len(prompts)
        self.blocks: list[tuple[int, ...]] = []
        first = 0
        for prompt in prompts:
            # The last new token is never computed.
            count = blocks_for(len(prompt) + max_new_tokens - 1)
            self.blocks.append(tuple(range(first, first + count)))
            first += count

    def prompt_plans(self) -> Iterator[ForwardPlan]:
        """Yield the steps that read all prompts, each of at most `_STEP_TOKENS` tokens.

        Prompts that are prefixes are read one by one, each in one step.
        """
        if self._prompt_is_prefix:
            for row, prompt in enumerate(self._prompts):
                yield ForwardPlan((), (self._slice(row, prompt, 0, True),))
            return
        slices: list[SequenceSlice] = []
        left = _STEP_TOKENS
        for row, prompt in enumerate(self._prompts):
            start = 0
            while start < len(prompt):
                end = min(len(prompt), start + left)
                slices.append(self._slice(row, prompt[start:end], start, end == len(prompt)))
                left -= end - start
                start = end
                if left == 0:
                    yield ForwardPlan((), tuple(slices))
                    slices, left = [], _STEP_TOKENS
        if slices:
            yield ForwardPlan((), tuple(slices))

    def next_plan(self) -> ForwardPlan:
        """Return the step that reads the newest token of every row that has not ended."""
        return ForwardPlan(
            (),
            tuple(
                self._slice(row, new[-1:], len(self._prompts[row]) + len(new) - 1, True)
                for row, new in enumerate(self._new)
                if self._ended[row] is None
            ),
        )

    def draws(
        self, plan: ForwardPlan, params: SamplingParams, seed: int
    ) -> dict[int, SequenceDraw]:
        """Return how the tokens of a step are drawn, by row."""
        return {
            each.sequence: SequenceDraw(
                params=params,
                seed=seed,
                sequence=each.sequence,
                prompt=self._prompts[each.sequence],
                output=self._new[each.sequence],
                constraint=self._constraints[each.sequence],
            )
            for each in plan.slices
            if each.samples
        }

    def take(self, chosen: dict[int, int]) -> bool:
        """Append the chosen tokens, by row; return whether all rows are done."""
        for row, token in sorted(chosen.items()):
            new = self._new[row]
            if token == self._eod:
                self._ended[row] = "eod"
                continue
            new.append(token)
            self._check_constraint(row)
            if self._stop is not None and self._stop(new):
                self._ended[row] = "stop"
            elif len(new) == self._max_new_tokens:
                self._ended[row] = "length"
        return None not in self._ended

    def _check_constraint(self, row: int) -> None:
        constraint, new = self._constraints[row], self._new[row]
        if constraint is not None and (problem := constraint.problem(new)) is not None:
            raise ConfigError(
                "a text cannot be continued as its grammar says",
                found=f"prompt {row} after {len(new)} new tokens: {problem}",
                fix="use a smaller grammar",
            )

    def results(self) -> list[Generation]:
        """Return the generation of every row."""
        return [
            Generation(tuple(new), ended or "length") for new, ended in zip(self._new, self._ended)
        ]

    def _slice(self, row: int, tokens: Sequence[int], start: int, samples: bool) -> SequenceSlice:
        used = blocks_for(start + len(tokens))
        prefix = len(self._prompts[row]) if self._prompt_is_prefix else 0
        return SequenceSlice(row, tuple(tokens), start, self.blocks[row][:used], samples, prefix)


def _new_tokens_that_fit(
    model: GPTModel, prompts: Sequence[Sequence[int]], ctx: ParallelContext
) -> int:
    """Return how many tokens fit behind the longest prompt, at least one; equal on all ranks.

    The keys and values of all rows take at most half of the memory that is free.
    """
    here = model.max_length or model.build.seq_length
    free = free_memory_bytes()
    if free is not None:
        blocks = free // 2 // model_block_bytes(model, ctx)
        here = min(here, blocks // len(prompts) * BLOCK_SIZE)
    capacity = all_reduce(torch.tensor(here, device=device.current()), ctx.whole_model, op="min")
    return max(1, int(capacity) - max(map(len, prompts)))


def check_prompts(
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None,
    eod: int | None,
    vocabulary: int,
) -> None:
    """Check that there are prompts to continue, of tokens of the model; None: as many as fit.

    Raises:
        ConfigError: no prompt, an empty one, or a token or `eod` outside the vocabulary.
    """
    check_end_id(eod, vocabulary)
    if max_new_tokens is not None and max_new_tokens < 1:
        raise ConfigError(
            "the number of tokens to generate is not positive",
            found=f"--num-tokens {max_new_tokens}",
            fix="use 1 or more",
        )
    empty = [index for index, prompt in enumerate(prompts) if not prompt]
    if not prompts or empty:
        raise ConfigError(
            "there is nothing to continue",
            found=f"prompt {empty[0]} has no tokens" if prompts else "no prompts",
            fix="give each prompt at least one token, such as the end-of-document token",
        )
    for index, prompt in enumerate(prompts):
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise ConfigError(
                "a prompt holds a token that is not in the vocabulary",
                found=f"token {wrong[0]} in prompt {index}, vocabulary of {vocabulary}",
                fix="use the tokenizer that the model was trained with",
            )


def _check_room(
    model: GPTModel, prompts: Sequence[Sequence[int]], max_new_tokens: int | None
) -> None:
    longest, room = max(map(len, prompts)), model.max_length
    wanted = max_new_tokens or 1
    if room is not None and longest + wanted > room:
        raise ConfigError(
            "prompt and new tokens do not fit into the positions that the model has",
            found=f"{longest} + {wanted} tokens, {room} positions",
            fix=f"use --num-tokens {room - longest}"
            if room > longest
            else f"use prompts below {room} tokens",
        )
