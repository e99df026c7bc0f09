"""How the next token is chosen from its scores.

Scores are of the true vocabulary: padding columns are cut off before they come here, so a padding
id cannot be chosen. Probabilities are computed in float32, whatever the scores' dtype.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.config.fields import check_field, raise_all
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Temperature, and limits on the tokens that may be sampled.

    The limits apply one after the other: temperature, then the `top_k` likeliest (0: all), then
    the likeliest whose probabilities first add up to `top_p` (Holtzman et al. 2019,
    arXiv 1904.09751; 0 or 1: all).

    Raises:
        ConfigError: a value outside its range, or limits together with greedy choice.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    greedy: bool = False

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            0 < self.temperature < float("inf"),
            "temperature",
            self.temperature,
            problem="the sampling temperature is not a positive number",
            fix="use 1.0, or --greedy for the likeliest token",
        )
        yield from check_field(
            self.top_k >= 0,
            "top_k",
            self.top_k,
            problem="the number of candidate tokens is negative",
            fix="use 0 for no limit",
        )
        yield from check_field(
            0 <= self.top_p <= 1,
            "top_p",
            self.top_p,
            problem="the probability of the candidate tokens is outside [0, 1]",
            fix="use 0.9, or 0 for no limit",
        )
        if self.greedy and (self.top_k or self.top_p or self.temperature != 1):
            yield ConfigError(
                "greedy choice leaves nothing to sample",
                found=f"--greedy, --temperature {self.temperature}, --top-k {self.top_k}, "
                f"--top-p {self.top_p}",
                fix="drop --greedy, or the other three",
            )


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> Tensor:
    """Return one token per row, [b] int64, from scores [b, v] over the true vocabulary.

    `generator` is on the device of the scores; greedy choice does not touch it.
    """
    if params.greedy:
        return logits.argmax(dim=-1)
    return torch.multinomial(probabilities(logits, params), 1, generator=generator).squeeze(1)


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution [b, v] of `sample`: sums to 1, zero for excluded tokens."""
    scores = logits.float() / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        chosen = scores.topk(params.top_k, dim=-1)
        # By index and not by a threshold, which would let ties in.
        limited = torch.full_like(scores, -torch.inf)
        scores = limited.scatter_(-1, chosen.indices, chosen.values)
    distribution = scores.softmax(dim=-1)
    if 0 < params.top_p < 1:
        distribution = _nucleus(distribution, params.top_p)
    return distribution


def _nucleus(distribution: Tensor, top_p: float) -> Tensor:
    likeliest, order = distribution.sort(dim=-1, descending=True)
    # A token stays while those before it do not add up to top_p: the first one always does.
    before = likeliest.cumsum(dim=-1) - likeliest
    nucleus = likeliest.masked_fill(before >= top_p, 0.0)
    nucleus = nucleus / nucleus.sum(dim=-1, keepdim=True)
    return torch.zeros_like(distribution).scatter_(-1, order, nucleus)
