"""A sequence gets the same bits in any company, and the probe finds where it does not."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import PositionEmbedding, SoftmaxType
from megatron.config.precision import PrecisionConfig
from megatron.errors import NumericsError
from megatron.inference import paged_attention
from megatron.inference.forward import ForwardExecutor
from megatron.inference.invariance import (
    BatchInvariance,
    probe_batch_invariance,
    require_batch_invariance,
)
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from megatron.mpu.context import ParallelContext
from tests.support.inference.fed_sequences import FedSequences
from tests.support.models import tiny_build, tiny_config, tiny_model

CTX = ParallelContext.single()
PRECISIONS = {"fp32": PrecisionConfig(), "bf16": PrecisionConfig(bf16=True)}
LLAMA = {
    "position_embedding_type": PositionEmbedding.ROPE,
    "swiglu": True,
    "untie_embeddings_and_output_weights": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "alibi": {"position_embedding_type": PositionEmbedding.ALIBI},
    "windows": LLAMA | {"sliding_window": 100, "window_attn_skip_freq": "2"},
    "experts": LLAMA | {"num_experts": 4, "ffn_hidden_size": 96},
    "sinks": LLAMA | {"softmax_type": SoftmaxType.LEARNABLE},
}


def model_of(kind: str, precision: str, **changes: Any) -> GPTModel:
    """A model wide enough that products of other shapes have other bits."""
    values = {"hidden_size": 128, "num_query_groups": 2, "max_position_embeddings": 640}
    values |= {"init_method_std": 0.1, **KINDS[kind], **changes}
    build = tiny_build(precision=PRECISIONS[precision], vocab=VocabSize(900, 904))
    return tiny_model(tiny_config(**values), build).eval()


def rows_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(900, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_those_of_the_sequence_alone(kind: str, precision: str) -> None:
    model = model_of(kind, precision)
    rows = rows_of(530, 5, 37, 300, 1, 511)
    alone = []
    for row in rows:
        alone.append(FedSequences(model, [row], block_size=32).whole(0))
    for parts in (
        [{0: 500, 1: 2, 3: 299}, {0: 29, 2: 36, 1: 2}, {5: 510}, dict.fromkeys(range(6), 1)],
        [{5: 511}, {0: 16}, {0: 64, 3: 100}, {0: 449, 3: 199}, {4: 1, 2: 37, 1: 5, 0: 1, 3: 1}],
    ):
        fed = FedSequences(model, rows, block_size=32, seed=3)
        last: dict[int, Tensor] = {}
        for step in parts:
            last |= fed.step(step)
        assert fed.done == [len(row) for row in rows]
        for row, scores in last.items():
            assert torch.equal(scores, alone[row]), (row, (scores - alone[row]).abs().max())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_probe_finds_nothing_under_padding(precision: str) -> None:
    model = model_of("llama", precision)
    executor = ForwardExecutor(model, CTX, blocks=30)
    assert probe_batch_invariance(executor, model, CTX) == BatchInvariance(())
    assert not executor.cache.pool[:, :, executor.cache.null_block].any()


def test_the_probe_finds_what_depends_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", "bf16")
    executor = ForwardExecutor(model, CTX, blocks=30)
    exact = model.hidden_states

    def depends(tokens: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return exact(tokens, *args, **kwargs) * (1 + len(tokens) / 64)

    monkeypatch.setattr(model, "hidden_states", depends)
    found = probe_batch_invariance(executor, model, CTX)
    assert found.differences == ("in a batch", "in parts", "computed again")
    assert not found.holds


def test_the_probe_finds_attention_that_depends_on_the_tokens_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama", "bf16")
    executor = ForwardExecutor(model, CTX, blocks=30)
    exact = paged_attention.PagedAttention.attend

    def depends(self: Any, layer: int, heads: Any, **kwargs: Any) -> Tensor:
        return exact(self, layer, heads, **kwargs) * (1 + (len(heads.queries) > 400))

    monkeypatch.setattr(paged_attention.PagedAttention, "attend", depends)
    assert probe_batch_invariance(executor, model, CTX).differences == ("attention to many keys",)


@pytest.mark.parametrize("blocks", [2, 3, 8])
def test_the_probe_takes_what_the_pool_has(blocks: int) -> None:
    model = model_of("gpt2", "fp32", max_position_embeddings=9)
    assert probe_batch_invariance(ForwardExecutor(model, CTX, blocks=blocks), model, CTX).holds


def test_what_differs_is_refused_by_name() -> None:
    require_batch_invariance(BatchInvariance(()))
    with pytest.raises(NumericsError, match="would get other scores beside other requests") as hit:
        require_batch_invariance(BatchInvariance(("in a batch", "in parts")))
    assert "other bits in a batch, in parts" in str(hit.value)
