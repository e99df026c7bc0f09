"""Log-probabilities are those of the log-softmax in float32."""

import pytest
import torch

from megatron.inference.logprobs import TokenLogprobs, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_log_softmax(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = logits.float().log_softmax(-1)
    found = token_logprobs(logits, [5, 0, 39], [0, 2, 3])
    assert [each.chosen for each in found] == [
        expected[row, token].item() for row, token in enumerate([5, 0, 39])
    ]
    for row, count in enumerate([0, 2, 3]):
        best = expected[row].topk(count)
        assert found[row].top == tuple(zip(best.indices.tolist(), best.values.tolist()))


def test_without_alternatives_there_is_the_chosen_token_alone() -> None:
    assert token_logprobs(torch.zeros(1, 2), [1], [0]) == [
        TokenLogprobs(torch.tensor(0.5).log().item(), ())
    ]
