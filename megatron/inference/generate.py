"""Batched generation with a KV cache, on one model or on the ranks that share it by tensors.

Prompts may differ in length; each row has its own positions. Every tp rank calls `generate` with
the same arguments and gets the same tokens: scores are gathered on all of them, and the choice of
the group's first rank counts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron import device
from megatron.errors import ConfigError
from megatron.inference.end_ids import check_end_id
from megatron.inference.sampling import SamplingParams, sample
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.gpt_model import GPTModel
from megatron.model.kv_cache import KVCache
from megatron.mpu.collectives import all_gather, all_reduce, broadcast
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True)
class Generation:
    """The new tokens after one prompt, without the prompt and without the eod."""

    tokens: tuple[int, ...]
    finish_reason: Literal["eod", "length", "stop"]


@torch.no_grad()
def generate(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | None = None,
    params: SamplingParams,
    eod: int | None,
    seed: int,
    ctx: ParallelContext,
    stop: Callable[[Sequence[int]], bool] | None = None,
) -> list[Generation]:
    """Continue every prompt by up to `max_new_tokens` tokens; a row ends early at `eod`.

    Without a number there are as many as fit into the model's positions behind the longest prompt,
    and into the memory that is free on all tp ranks; rows that use them up end by "length". A row
    also ends with the token after which `stop` of its new tokens is true; all ranks decide
    alike. The model computes in evaluation mode and gets its mode back. The cache takes 2 x layers
    x rows x groups/tp x (longest prompt + max_new_tokens) x head width elements for the length of
    the call.

    Raises:
        ConfigError: no prompt, an empty one, a token or `eod` outside the vocabulary, or more
            positions than the model has; all of it before anything is computed.
        MachineError: keys and values do not fit into memory.
    """
    _check(model, prompts, max_new_tokens, eod)
    if max_new_tokens is None:
        max_new_tokens = _new_tokens_that_fit(model, prompts, ctx)
    with evaluation_mode(model):
        rows = _Rows(model, prompts, max_new_tokens=max_new_tokens, eod=eod, stop=stop)
        generator = torch.Generator(rows.device).manual_seed(seed)
        scores = rows.read_prompts()
        while True:
            chosen = sample(_gather_logits(scores, model, ctx), params, generator)
            if rows.take(broadcast(chosen, ctx.tp).tolist()):
                return rows.results()
            scores = rows.read_newest(chosen)


class _Rows:
    """State of the sequences being generated.

    Finished rows stay in the batch; their new tokens are discarded.
    """

    def __init__(
        self,
        model: GPTModel,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eod: int | None,
        stop: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self._model, self._prompts, self._eod, self._stop = model, prompts, eod, stop
        self._max_new_tokens = max_new_tokens
        self._lengths = [len(prompt) for prompt in prompts]
        self._new: list[list[int]] = [[] for _ in prompts]
        self._ended: list[Literal["eod", "stop"] | None] = [None] * len(prompts)
        self.device = next(model.parameters()).device
        self._cache: KVCache = model.new_cache(
            batch=len(prompts), capacity=max(self._lengths) + max_new_tokens
        )
        self._next = torch.tensor(self._lengths, device=self.device).unsqueeze(1)  # [b, 1]

    def read_prompts(self) -> Tensor:
        """Fill the cache with the prompts; return scores [b, v/tp] of the first new token."""
        longest = max(self._lengths)
        # Causality keeps what stands behind a prompt out of it, so any valid token may.
        padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in self._prompts]
        tokens = torch.tensor(padded, device=self.device)
        return self._model.next_token_logits(tokens, self._next[:, 0] - 1, cache=self._cache)

    def read_newest(self, chosen: Tensor) -> Tensor:
        """Append the `chosen` tokens [b]; return scores [b, v/tp] of the next ones."""
        scores = self._model.next_token_logits(
            chosen.unsqueeze(1),
            torch.zeros_like(chosen),
            cache=self._cache,
            positions=self._next,
        )
        self._next = self._next + 1
        return scores

    def take(self, chosen: list[int]) -> bool:
        """Append the chosen tokens; return whether all rows are done."""
        for row, token in enumerate(chosen):
            if self._ended[row] is not None:
                continue
            if token == self._eod:
                self._ended[row] = "eod"
                continue
            self._new[row].append(token)
            if self._stop is not None and self._stop(self._new[row]):
                self._ended[row] = "stop"
        return all(
            ended or len(new) == self._max_new_tokens for ended, new in zip(self._ended, self._new)
        )

    def results(self) -> list[Generation]:
        """Return the generation of every row."""
        return [
            Generation(tuple(new), ended or "length") for new, ended in zip(self._new, self._ended)
        ]


def _gather_logits(scores: Tensor, model: GPTModel, ctx: ParallelContext) -> Tensor:
    """Gather [b, v/tp] to the true vocabulary's [b, v] on every tp rank, without padding."""
    return all_gather(scores, ctx.tp, dim=-1)[:, : model.build.vocab.true]


def _new_tokens_that_fit(
    model: GPTModel, prompts: Sequence[Sequence[int]], ctx: ParallelContext
) -> int:
    """Return how many tokens fit behind the longest prompt, at least one; equal over tp ranks."""
    positions = model.max_length or model.build.seq_length
    cached = model.cache_capacity(batch=len(prompts))
    here = positions if cached is None else min(positions, cached)
    capacity = all_reduce(torch.tensor(here, device=device.current()), ctx.tp, op="min")
    return max(1, int(capacity) - max(map(len, prompts)))


def _check(
    model: GPTModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | None,
    eod: int | None,
) -> None:
    check_end_id(eod, model.build.vocab.true)
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
    vocabulary = model.build.vocab.true
    for index, prompt in enumerate(prompts):
        wrong = [token for token in prompt if not 0 <= token < vocabulary]
        if wrong:
            raise ConfigError(
                "a prompt holds a token that is not in the vocabulary",
                found=f"token {wrong[0]} in prompt {index}, vocabulary of {vocabulary}",
                fix="use the tokenizer that the model was trained with",
            )
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
