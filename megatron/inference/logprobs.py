"""Log-probabilities of tokens, of the scores as the model gives them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log-probability of a token, and the likeliest tokens with theirs, best first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(
    logits: Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """Return those of one token per row, in float32.

    Args:
        logits: [b, v] scores of the true vocabulary, without penalties and temperature.
        counts: how many of the likeliest tokens are reported for each row.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    best = logprobs.topk(max(counts, default=0), dim=-1)
    at = torch.tensor(list(tokens), device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, at).squeeze(1).tolist()
    top = [list(zip(*pair)) for pair in zip(best.indices.tolist(), best.values.tolist())]
    return [
        TokenLogprobs(value, tuple(row[:count])) for value, row, count in zip(chosen, top, counts)
    ]
