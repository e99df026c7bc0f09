"""How the next token is chosen from its scores, for each sequence by itself.

Scores are of the true vocabulary: padding columns are cut off before they come here, so a padding
id cannot be chosen. Probabilities are computed in float32, whatever the scores' dtype. A draw is a
function of the scores of its row and of one number, which is a hash of seed, sequence, position and
choice: neither the other rows nor what was drawn before matter. No row sorts the whole vocabulary,
unless its candidates are more than `_CANDIDATES`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megatron.errors import ConfigError
from megatron.inference.sampling_params import SamplingParams
from megatron.mpu.random import hash_seed

_CANDIDATES = 256
_UNIFORM_BITS = 48  # so that a product with a sum in float64 stays below the sum


class TokenConstraint(Protocol):
    """Says which tokens may follow an output."""

    def allowed(self, output: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which tokens [v] may follow; None if the output itself is not allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDraw:
    """What the draw of the next token of one sequence depends on, beside its scores.

    Attributes:
        sequence: tells sequences of one seed apart.
        choice: tells samples of one prompt apart.
        prompt: the tokens of the prompt, for penalties.
        output: the tokens generated so far, for penalties.
        constraint: which tokens may follow the output; None: all may.
        top_logprobs: how many of the likeliest tokens are reported with their log-probabilities,
            beside that of the drawn one; None: none is.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int
    sequence: int = 0
    choice: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    constraint: TokenConstraint | None = None
    top_logprobs: int | None = None

    def uniform(self, position: int) -> float:
        """Return a number in [0, 1) for the token at `position` of the sequence."""
        hashed = hash_seed(self.seed, "token", self.sequence, position, self.choice)
        return (hashed >> (63 - _UNIFORM_BITS)) / (1 << _UNIFORM_BITS)


def check_draw(draw: SequenceDraw, vocabulary: int) -> None:
    """Check that what a draw names is in the vocabulary.

    Raises:
        ConfigError: a token is not, or more log-probabilities than tokens are asked for.
    """
    outside = [token for token, _ in draw.params.logit_bias if token >= vocabulary]
    if outside:
        raise ConfigError(
            "a bias is given for a token that is not in the vocabulary",
            found=f"token {outside[0]}, vocabulary of {vocabulary}",
            fix="use the tokenizer that the model was trained with",
        )
    if draw.top_logprobs is not None and not 0 <= draw.top_logprobs <= vocabulary:
        raise ConfigError(
            "there are not as many tokens as log-probabilities are asked for",
            found=f"{draw.top_logprobs} log-probabilities, vocabulary of {vocabulary}",
            fix="ask for 0 to 20",
        )


def draw_tokens(logits: Tensor, draws: Sequence[SequenceDraw], positions: Sequence[int]) -> Tensor:
    """Return one token per row, [b] int64, from scores [b, v] over the true vocabulary.

    Args:
        positions: of the drawn tokens in their sequences.
    """
    if all(draw.params.greedy and not _changes_scores(draw) for draw in draws):
        return logits.max(dim=-1).indices  # faster than argmax on CPUs, fourfold in bfloat16
    chosen = torch.empty(len(draws), dtype=torch.int64, device=logits.device)
    scores = _changed_scores(logits, draws)
    kinds: dict[str, list[int]] = {"greedy": [], "all": [], "limited": []}
    for row, draw in enumerate(draws):
        kind = "greedy" if draw.params.greedy else "limited" if draw.params.has_limits else "all"
        kinds[kind].append(row)
    for kind, rows in kinds.items():
        if not rows:
            continue
        at = torch.tensor(rows, device=logits.device)
        if kind == "greedy":
            chosen[at] = scores[at].max(dim=-1).indices
            continue
        params = [draws[row].params for row in rows]
        uniforms = torch.tensor(
            [draws[row].uniform(positions[row]) for row in rows],
            dtype=torch.float64,
            device=logits.device,
        )
        tempered = scores[at] / _column([each.temperature for each in params], scores)
        draw_rows = _draw_from_all if kind == "all" else _draw_limited
        chosen[at] = draw_rows(tempered, params, uniforms)
    return chosen


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution [b, v] of a draw without penalties, zero for excluded tokens.

    It sorts the vocabulary: draws do not compute it.
    """
    scores = logits.float() / params.temperature
    candidates = _candidates(scores, [params] * len(scores), scores.shape[-1])
    weights = candidates.weights / candidates.weights.sum(dim=-1, keepdim=True)
    return torch.zeros_like(scores).scatter_(-1, candidates.tokens, weights)


def _changes_scores(draw: SequenceDraw) -> bool:
    changes = draw.params.has_penalties or draw.params.logit_bias
    return bool(changes) or draw.constraint is not None


def _changed_scores(logits: Tensor, draws: Sequence[SequenceDraw]) -> Tensor:
    """Return scores in float32, with biases, penalties and constraint of each row."""
    scores = logits.float()
    if scores.data_ptr() == logits.data_ptr() and any(map(_changes_scores, draws)):
        scores = scores.clone()
    for row, draw in zip(scores, draws):
        params = draw.params
        if params.logit_bias:
            biased, added = zip(*params.logit_bias)
            row[list(biased)] += torch.tensor(added, device=row.device)
        if params.repetition_penalty != 1 and (draw.prompt or draw.output):
            seen = torch.tensor(sorted({*draw.prompt, *draw.output}), device=row.device)
            before = row[seen]
            row[seen] = torch.where(
                before > 0, before / params.repetition_penalty, before * params.repetition_penalty
            )
        if params.has_output_penalties and draw.output:
            times = Counter(draw.output)
            tokens = torch.tensor(list(times), device=row.device)
            counts = torch.tensor(list(times.values()), device=row.device)
            row[tokens] -= params.presence_penalty + params.frequency_penalty * counts
        if draw.constraint is not None:
            allowed = draw.constraint.allowed(draw.output)
            if allowed is not None:  # else it stands behind a proposed token that is not drawn
                row.masked_fill_(torch.from_numpy(~allowed).to(row.device), -torch.inf)
    return scores


def _draw_from_all(scores: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Draw from the softmax of scores [b, v]."""
    return _inverse(scores.softmax(dim=-1), uniforms)


def _draw_limited(scores: Tensor, params: Sequence[SamplingParams], uniforms: Tensor) -> Tensor:
    """Draw under the limits of each row: among the likeliest, or all where those do not cover."""
    few = _candidates(scores, params, min(_CANDIDATES, scores.shape[-1]))
    chosen = few.tokens.gather(1, _inverse(few.weights, uniforms).unsqueeze(1)).squeeze(1)
    for row in (~few.cover).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        every = _candidates(scores[one], params[one], scores.shape[-1])
        chosen[one] = every.tokens[0, _inverse(every.weights, uniforms[one])]
    return chosen


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The likeliest tokens of each row, best first, and weights that a draw is in proportion to.

    Attributes:
        tokens: [b, k] int64.
        weights: [b, k] fp32, zero for tokens that the limits exclude.
        cover: [b], whether no token beside them could be drawn.
    """

    tokens: Tensor
    weights: Tensor
    cover: Tensor


def _candidates(scores: Tensor, params: Sequence[SamplingParams], count: int) -> _Candidates:
    """Return the `count` likeliest tokens of scores [b, v] under the limits of each row."""
    vocabulary = scores.shape[-1]
    if count == vocabulary:
        likeliest, tokens = scores.sort(dim=-1, descending=True, stable=True)
    else:
        likeliest, tokens = scores.topk(count, dim=-1)
    top_k = _column([each.top_k or vocabulary for each in params], scores)
    top_p = _column([each.top_p or 1.0 for each in params], scores)
    min_p = _column([each.min_p for each in params], scores)
    ranks = torch.arange(count, device=scores.device)
    likeliest = likeliest.masked_fill(ranks >= top_k, -torch.inf)
    # Among the top k where they are all here, else among all tokens.
    among = torch.where(
        top_k <= count,
        likeliest.logsumexp(dim=-1, keepdim=True),
        scores.logsumexp(dim=-1, keepdim=True),
    )
    weights = (likeliest - among).exp()
    # A token stays while those before it do not add up to top_p: the first one always does.
    before = weights.cumsum(dim=-1) - weights
    excluded = ((before >= top_p) & (top_p < 1)) | (weights < min_p * weights[:, :1])
    # Of more than `count` top tokens the sum is not known here.
    cover = (top_k <= count) | ((top_k == vocabulary) & excluded[:, -1:])
    return _Candidates(tokens, weights.masked_fill(excluded, 0.0), cover.squeeze(1))


def _inverse(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the index [b] whose share of the cumulated weights [b, k] holds each uniform [b]."""
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(sums, (uniforms * sums[:, -1]).unsqueeze(1), right=True).squeeze(1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(1)
