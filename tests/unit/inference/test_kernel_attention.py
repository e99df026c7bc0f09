"""Steps whose attention is computed by the kernel have the scores of the whole sequence."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig, PositionEmbedding, SoftmaxType
from megatron.config.precision import PrecisionConfig
from megatron.inference.forward import ForwardExecutor
from megatron.inference.kernel_attention import KernelAttention, kernel_serves
from megatron.inference.paged_cache import PagedCache
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from megatron.ops import library
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.inference.fed_sequences import FedSequences
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config, tiny_model, tiny_tokens

CTX = ParallelContext.single()
# float32: scores near 1 after sums of 64 products in a few layers, added in another order.
CLOSE = 1e-4
WIDE: dict[str, Any] = {"hidden_size": 64, "num_query_groups": 2, "max_position_embeddings": 80}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window of some layers": {"sliding_window": 5, "window_attn_skip_freq": "2"},
    "experts": {"num_experts": 4, "moe_router_topk": 2, "swiglu": True, "ffn_hidden_size": 24},
}


def model_of(**changes: Any) -> GPTModel:
    build = tiny_build(precision=PrecisionConfig())
    return tiny_model(tiny_config(**WIDE | changes), build).eval()


@torch.no_grad()
def whole_scores(model: GPTModel, tokens: list[int]) -> Tensor:
    return model(torch.tensor([tokens]))[-1, 0, : TINY_VOCAB.true]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("kind", [PositionEmbedding.ROPE, PositionEmbedding.LEARNED])
def test_scores_of_any_parts_are_those_of_the_whole_sequence(
    kind: PositionEmbedding, feature: str
) -> None:
    model = model_of(position_embedding_type=kind, **FEATURES[feature])
    rows = [tiny_tokens(1, length, seed=length)[0].tolist() for length in (60, 7, 35)]
    fed = FedSequences(model, rows, block_size=16)
    first = SequenceSlice(0, (1, 2), 0, (0,), True)
    assert (fed.executor.groups([first]) == ()) == (library.INSTRUCTION_SET is not None)
    fed.executor.cache.pool[:, :, : fed.executor.cache.null_block] = torch.nan
    for step in ({0: 40, 1: 1}, {0: 1, 1: 5, 2: 33}, {0: 18, 2: 1}, {0: 1, 1: 1, 2: 1}):
        for row, scores in fed.step(step).items():
            expected = whole_scores(model, rows[row][: fed.done[row]])
            torch.testing.assert_close(scores, expected, rtol=CLOSE, atol=CLOSE)


def test_a_prefix_is_seen_whole_by_its_prompt() -> None:
    model = model_of(position_embedding_type=PositionEmbedding.ROPE)
    text = tiny_tokens(1, 24)[0].tolist()
    executor = ForwardExecutor(model, CTX, blocks=2, block_size=16)
    for start, end in ((0, 20), (20, 21), (21, 24)):
        own = SequenceSlice(0, tuple(text[start:end]), start, (1, 0), True, 20)
        found = executor.scores(ForwardPlan((), (own,)))
        places = torch.arange(end)[None]
        marks = (places < 20).long()
        with torch.no_grad():
            whole = model(
                torch.tensor([text[:end]]), places, torch.zeros_like(marks), is_prefix=marks
            )
        expected = whole[-1, 0, : TINY_VOCAB.true]
        torch.testing.assert_close(found[0], expected, rtol=CLOSE, atol=CLOSE)


def test_tiles_hold_every_row_once() -> None:
    cache = cache_of()
    slices = (
        SequenceSlice(4, (1,) * 30, 3, (5, 2, 6), True, 8),
        SequenceSlice(9, (1,), 17, (1, 0), True, 8),
    )
    slots, tiles, tables = KernelAttention(cache, slices, each=3, window=None)._places
    assert tables.tolist() == [5, 2, 6, 1, 0]
    assert tiles.tolist() == [
        [0, 3, 0, 32, 8, 0],
        [0, 3, 32, 32, 8, 0],
        [0, 3, 64, 26, 8, 0],
        [30, 17, 0, 3, 0, 3],
    ]
    assert slots[:2].tolist() == [5 * 16 + 3, 5 * 16 + 4]
    assert slots[-1] == 1


def cache_of(dtype: torch.dtype = torch.float32, block_size: int = 16) -> PagedCache:
    return PagedCache(
        layers=1, blocks=7, groups=2, head_width=16, dtype=dtype, device=torch.device("cpu"),
        block_size=block_size,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "cache", "expected"),
    [
        ({}, {}, True),
        ({"sliding_window": 3}, {}, True),
        ({}, {"dtype": torch.bfloat16}, True),
        ({}, {"dtype": torch.float64}, False),
        ({}, {"block_size": 8}, False),
        ({"position_embedding_type": PositionEmbedding.ALIBI}, {}, False),
        ({"attention_soft_cap": 2.0}, {}, False),
        ({"softmax_type": SoftmaxType.LEARNABLE}, {}, False),
    ],
)
def test_models_that_the_kernel_serves(
    changes: dict[str, Any], cache: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "INSTRUCTION_SET", "plain")
    config: ModelConfig = tiny_config(**WIDE | changes)
    assert kernel_serves(config, cache_of(**cache)) == expected
