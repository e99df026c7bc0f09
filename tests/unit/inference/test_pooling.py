"""An embedding pools the last hidden states, with the same bits in any parts and any company."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.precision import PrecisionConfig
from megatron.errors import NumericsError
from megatron.inference.pooling import PooledStates, Pooling
from megatron.model.gpt_model import GPTModel, gpt_carry
from megatron.model.specs import VocabSize
from megatron.model.stage import run_layers
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request
from tests.support.examples import examples
from tests.support.inference.engine_loop import EngineRun, executor_of, run_engine
from tests.support.models import tiny_build, tiny_config, tiny_model

PROMPTS = [tuple((31 * at + name) % 90 for at in range(length)) for name, length in
           enumerate((70, 5, 1, 33))]  # fmt: skip
WIDE = SchedulerLimits(blocks=40, block_size=16, max_length=96, vocab_size=90)
# float32, by products in another order than those of the whole sequence.
CLOSE = 1e-5


def model_of(precision: str) -> GPTModel:
    config = tiny_config(hidden_size=64, max_position_embeddings=96, init_method_std=0.1)
    chosen = PrecisionConfig(bf16=precision == "bf16")
    return tiny_model(config, tiny_build(precision=chosen, vocab=VocabSize(90, 96))).eval()


def embedded(
    model: GPTModel, limits: SchedulerLimits, *prompts: int, pooling: Pooling = Pooling.MEAN
) -> dict[str, tuple[float, ...]]:
    requests = [
        Request(id=str(name), prompt=PROMPTS[name], max_new_tokens=0, arrival_ns=0, embeds=True)
        for name in prompts
    ]
    run: EngineRun = run_engine(executor_of(model, limits), requests, limits, pooling=pooling)
    return {name: states.embedding() for name, states in run.states.items()}


@examples(60)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from(Pooling),
    st.integers(0, 99),
)
def test_states_in_parts_have_the_bits_of_those_at_once(
    parts: list[int], pooling: Pooling, seed: int
) -> None:
    hidden = torch.randn(sum(parts), 24, generator=torch.Generator().manual_seed(seed)) * 50
    whole, split = PooledStates(pooling), PooledStates(pooling)
    whole.add(0, hidden)
    split.add(0, hidden[:1] + 1)  # of a pass whose blocks were lost
    for start, part in zip(torch.tensor([0, *parts]).cumsum(0).tolist(), hidden.split(parts)):
        split.add(start, part)
    assert split.embedding() == whole.embedding()
    expected = hidden.double().mean(dim=0) if pooling is Pooling.MEAN else hidden[-1].double()
    expected /= expected.norm()
    torch.testing.assert_close(torch.tensor(whole.embedding()), expected.float())


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_embeddings_have_the_same_bits_in_any_company(precision: str, pooling: Pooling) -> None:
    model = model_of(precision)
    alone = {
        name: each
        for at in range(4)
        for name, each in embedded(model, WIDE, at, pooling=pooling).items()
    }
    assert embedded(model, WIDE, 3, 0, 2, 1, pooling=pooling) == alone
    tight = SchedulerLimits(
        blocks=6, block_size=16, max_length=96, vocab_size=90, max_tokens_per_step=13,
        max_sequences=4,
    )  # fmt: skip
    assert embedded(model, tight, 1, 3, 0, 2, pooling=pooling) == alone
    if precision == "fp32":
        for at, prompt in enumerate(PROMPTS):
            with torch.no_grad():
                carry = gpt_carry(torch.tensor([prompt]))
                hidden = run_layers(model, model.specs[:-1], carry)[0][:, 0].double()
            expected = hidden.mean(dim=0) if pooling is Pooling.MEAN else hidden[-1]
            expected /= expected.norm()
            found = torch.tensor(alone[str(at)], dtype=torch.float64)
            torch.testing.assert_close(found, expected, rtol=0, atol=CLOSE)


def test_states_without_a_direction_are_refused() -> None:
    states = PooledStates(Pooling.MEAN)
    states.add(0, torch.zeros(2, 3))
    with pytest.raises(NumericsError, match="the embedding of a prompt has no direction"):
        states.embedding()
