"""Log-probabilities are those of the log-softmax in float32, of prompts in any company."""

from typing import Any

import pytest
import torch

from megatron.config.model import PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.inference import forward
from megatron.inference.logprobs import TokenLogprobs, token_logprobs
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request
from tests.support.inference.engine_loop import EngineRun, executor_of, run_engine
from tests.support.models import tiny_build, tiny_config, tiny_model

VOCABULARY = VocabSize(900, 904)
PROMPTS = [tuple((7919 * at + 13 * name) % 900 for at in range(length)) for name, length in
           enumerate((70, 5, 1, 33))]  # fmt: skip
WIDE = SchedulerLimits(blocks=40, block_size=16, max_length=96, vocab_size=900)
# bf16 scores of size 1 to 4 are rounded to 2^-7; their log-softmax is in float32.
CLOSE = {"fp32": 1e-5, "bf16": 0.05}


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


def test_which_of_equal_tokens_are_the_likeliest_does_not_depend_on_other_rows() -> None:
    logits = torch.zeros(2, 3000)
    (alone,) = token_logprobs(logits[:1], [4], [3])
    assert token_logprobs(logits, [4, 4], [3, 900])[0] == alone


def model_of(precision: str) -> GPTModel:
    config = tiny_config(
        hidden_size=128,
        num_query_groups=2,
        position_embedding_type=PositionEmbedding.ROPE,
        swiglu=True,
        max_position_embeddings=96,
        init_method_std=0.1,
    )
    chosen = PrecisionConfig(bf16=precision == "bf16")
    return tiny_model(config, tiny_build(precision=chosen, vocab=VOCABULARY)).eval()


def scored(model: GPTModel, limits: SchedulerLimits, *prompts: int, **changes: Any) -> EngineRun:
    values = {"max_new_tokens": 0, "arrival_ns": 0, "prompt_logprobs": 2} | changes
    requests = [Request(id=str(name), prompt=PROMPTS[name], **values) for name in prompts]
    return run_engine(executor_of(model, limits), requests, limits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_those_of_a_prompt_have_the_same_bits_in_any_company_and_any_parts(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(precision)
    alone = {str(name): scored(model, WIDE, name).targets[str(name)] for name in range(4)}
    for name, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            logits = model(torch.tensor([prompt]))[:, 0, :900].float().log_softmax(-1)
        assert len(alone[str(name)]) == len(prompt) - 1
        for place, found in enumerate(alone[str(name)]):
            expected = float(logits[place, prompt[place + 1]])
            assert found.chosen == pytest.approx(expected, abs=CLOSE[precision])
            assert found.top[0][1] == pytest.approx(
                float(logits[place].max()), abs=CLOSE[precision]
            )
    assert scored(model, WIDE, 3, 0, 2, 1).targets == alone
    monkeypatch.setattr(forward, "SCORED_TOGETHER", 3)
    # 11 blocks of 16 tokens, in parts of 19: requests wait, and lose their blocks.
    tight = SchedulerLimits(
        blocks=11,
        block_size=16,
        max_length=96,
        vocab_size=900,
        max_tokens_per_step=19,
        max_sequences=4,
    )
    found = scored(model, tight, 1, 3, 0, 2, max_new_tokens=26)
    assert found.targets == alone
    assert found.preemptions > 0


def test_a_prompt_that_is_scored_is_computed_whole_behind_one_that_is_cached() -> None:
    model = model_of("fp32")
    again = (
        Request(id="a", prompt=PROMPTS[0], max_new_tokens=1, arrival_ns=0),
        Request(id="b", prompt=PROMPTS[0], max_new_tokens=1, arrival_ns=0, prompt_logprobs=0),
    )
    limits = SchedulerLimits(blocks=40, max_length=96, vocab_size=900, max_sequences=1)
    found = run_engine(executor_of(model, limits), again, limits)
    assert len(found.targets["b"]) == len(PROMPTS[0]) - 1
    assert found.tokens["a"] == found.tokens["b"]
