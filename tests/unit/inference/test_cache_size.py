"""Blocks fit beside a step whose bytes are bounded from above."""

from typing import Any

import pytest
import torch

from megatron import device
from megatron.config.model import PositionEmbedding
from megatron.errors import MachineError
from megatron.inference.cache_size import StepSize, blocks_that_fit, step_bytes
from megatron.inference.forward import ForwardExecutor, model_block_bytes
from megatron.inference.sampling import SequenceDraw
from megatron.inference.sampling_params import SamplingParams
from megatron.inference.weight_quantization import quantize_weights
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.mpu.stage_plan import LayerRange
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.live_bytes import PeakBytes
from tests.support.models import tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
SIZE = StepSize(tokens=70, sequences=3, length=600)
KINDS: dict[str, dict[str, Any]] = {
    "learned": {},
    "alibi": {"position_embedding_type": PositionEmbedding.ALIBI},
    "windows": {"sliding_window": 30, "window_attn_skip_freq": "2"},
    "soft caps": {"attention_soft_cap": 2.0, "num_query_groups": 2},
    "experts": {"num_experts": 4, "swiglu": True, "ffn_hidden_size": 24},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_takes_no_more_than_the_bound(kind: str) -> None:
    model = tiny_model(tiny_config(max_position_embeddings=640, **KINDS[kind])).eval()
    executor = ForwardExecutor(model, CTX, blocks=60)
    tables = [tuple(range(20 * row, 20 * row + 20)) for row in range(3)]
    executor.scores(ForwardPlan((), (SequenceSlice(0, (1,) * 70, 0, tables[0][:3], False),)))
    slices = [SequenceSlice(0, (1,) * 68, 532, tables[0][:19], True)]
    slices += [SequenceSlice(row, (1,), 599, tables[row][:19], True) for row in (1, 2)]
    params = SamplingParams(top_p=0.999, presence_penalty=0.1)
    draws = {row: SequenceDraw(params=params, seed=0, top_logprobs=2) for row in range(3)}
    with PeakBytes(apart_from=[*model.parameters(), executor.cache.pool]) as live:
        executor.run(ForwardPlan((), tuple(slices)), draws)
    bound = step_bytes(
        model.config, SIZE, tp=1, vocabulary=model.build.vocab.padded, dtype=torch.float64
    )
    assert live.peak <= bound
    assert bound <= 40 * live.peak  # a bound, and not any large number


def test_a_matrix_that_is_converted_has_room_beside_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(tiny_config(max_position_embeddings=640)).eval().requires_grad_(False)
    monkeypatch.setattr(device, "free_memory_bytes", lambda: 10 << 20)
    before = blocks_that_fit(model, CTX, SIZE)
    quantize_weights(model, "fp8")
    after = blocks_that_fit(model, CTX, SIZE)
    assert before is not None
    assert after is not None
    widest = 64 * 16 * 8  # of the MLP, in float64
    assert 0 <= before - after - widest // model_block_bytes(model, CTX) <= 1
    assert before > after


def test_what_is_free_beside_a_step_is_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tiny_config(max_position_embeddings=640))
    of_one = model_block_bytes(model, CTX)
    vocabulary = model.build.vocab.padded
    reserved = step_bytes(model.config, SIZE, tp=1, vocabulary=vocabulary, dtype=torch.float64)

    def fit(free: int | None) -> int | None:
        monkeypatch.setattr(device, "free_memory_bytes", lambda: free)
        return blocks_that_fit(model, CTX, SIZE)

    assert fit(reserved + 30 * of_one) == 29  # one is the block of zeros
    assert fit(reserved + 20 * of_one) == 19
    assert fit(None) is None
    with pytest.raises(MachineError, match="of one sequence do not fit") as raised:
        fit(reserved + 20 * of_one - 1)
    assert "19 blocks of 600 tokens" in str(raised.value)
    assert "at most 576 tokens" in str(raised.value)
    with pytest.raises(MachineError, match="steps of fewer tokens"):
        fit(0)


def test_a_stage_has_room_for_hidden_states_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(max_position_embeddings=640, num_layers=2)
    stage = GPTModel(config, tiny_build(), layers=LayerRange(0, 2))
    assert stage.is_stage
    of_one = model_block_bytes(stage, CTX)
    vocabulary = stage.build.vocab.padded
    reserved = step_bytes(config, SIZE, tp=1, vocabulary=vocabulary, dtype=torch.float64)
    under_way = 2 * SIZE.tokens * config.hidden_size * 8
    free = reserved + under_way + 30 * of_one
    monkeypatch.setattr(device, "free_memory_bytes", lambda: free)
    assert blocks_that_fit(stage, CTX, SIZE) == 29
