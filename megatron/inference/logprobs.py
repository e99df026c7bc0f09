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
    """Return those of one token per row, in float32; each row's depend on nothing but the row.

    Args:
        logits: [b, v] scores of the true vocabulary, without penalties and temperature.
        counts: how many of the likeliest tokens are reported for each row.
    """
    logprobs = logits.float().log_softmax(dim=-1)
    at = torch.tensor(list(tokens), device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, at).squeeze(1).tolist()
    found = [TokenLogprobs(value, ()) for value in chosen]
    for count in set(counts) - {0}:  # which of equal ones `topk` returns depends on their number
        rows = [row for row, wanted in enumerate(counts) if wanted == count]
        best = logprobs[torch.tensor(rows, device=logits.device)].topk(count, dim=-1)
        for row, ids, values in zip(rows, best.indices.tolist(), best.values.tolist()):
            found[row] = TokenLogprobs(chosen[row], tuple(zip(ids, values)))
    return found
