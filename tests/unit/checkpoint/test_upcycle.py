"""Dense checkpoints as models with experts: what tensors become, and what cannot become one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.checkpoint.source import CheckpointSource
from megatron.checkpoint.upcycle import UpcycledSource
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from tests.support.checkpoints.sources import ROWS, MemorySource
from tests.support.models import tiny_build

DENSE: dict[str, Any] = {"add_bias_linear": False, "swiglu": True, "ffn_hidden_size": 12}
FOUR: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2}


def router(config: ModelConfig, name: str, shape: tuple[int, ...]) -> Tensor:
    """Values that say what they were drawn for."""
    generator = torch.Generator().manual_seed(len(name) + shape[0])
    return config.init_method_std * torch.randn(shape, generator=generator)


def upcycled(source: MemorySource, **flags: Any) -> UpcycledSource:
    return UpcycledSource(source, FOUR | flags, router)


def test_every_expert_is_the_mlp_and_all_else_stays() -> None:
    source = MemorySource.of_gpt(optimizer=True, **DENSE)
    found = upcycled(source, moe_layer_freq="[0,1]")
    config = from_plain(ModelConfig, found.config["model"])
    assert config.expert_layers == (False, True)
    shapes = gpt_tensors(config, vocab_rows=ROWS, positions=6)
    described = {name: known.global_shape for name, known in found.tensors.items()}
    assert list(described.items()) == [(f"model/{name}", shape) for name, shape in shapes.items()]
    for name, shape in described.items():
        values = found.read(name, whole(shape))
        if name.endswith("router.weight"):
            assert torch.equal(values, router(config, name.removeprefix("model/"), shape))
        elif ".experts." in name:
            for expert in values:
                assert torch.equal(expert, source.values[name.replace(".experts", "")])
        else:
            assert torch.equal(values, source.values[name])
    name, box = "model/layers.1.mlp.experts.fc1.weight", Box((1, 3, 2), (2, 4, 5))
    part = found.read(name, box)
    assert torch.equal(part, found.read(name, whole(described[name]))[box.slices])
    assert part.is_contiguous()
    assert (found.progress, found.scalars, found.kind) == (source.progress, {}, source.kind)
    found.verify()


def logits_of(source: CheckpointSource, tokens: Tensor) -> Tensor:
    config = from_plain(ModelConfig, source.config["model"])
    model = GPTModel(config, tiny_build(vocab=VocabSize(ROWS, ROWS))).eval()
    names = [name for name in source.tensors if name.startswith("model/")]
    values = {name: source.read(name, whole(source.tensors[name].global_shape)) for name in names}
    model.load_state_dict({name.removeprefix("model/"): value for name, value in values.items()})
    logits = model(tokens)
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"moe_router_topk": 3},
        {"moe_router_score_function": "sigmoid"},
        {"moe_layer_freq": "2"},
    ],
)
@pytest.mark.parametrize("biases", [False, True])
def test_it_computes_what_the_dense_model_does(flags: dict[str, Any], biases: bool) -> None:
    """Whatever the dense model was told of experts, such as a factor of their shares."""
    idle = {"moe_router_topk_scaling_factor": 2.5, "moe_ffn_hidden_size": 9, "num_experts": 1}
    source = MemorySource.of_gpt(**(DENSE | {"add_bias_linear": biases}), **idle)
    tokens = torch.arange(12).view(2, 6) % ROWS
    expected, found = logits_of(source, tokens), logits_of(upcycled(source, **flags), tokens)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # sums in another order


def test_routers_are_of_the_dtype_of_the_other_weights() -> None:
    source = MemorySource.of_gpt(**DENSE)
    source.values = {name: value.bfloat16() for name, value in source.values.items()}
    found = upcycled(source)
    name = "model/layers.0.mlp.router.weight"
    assert found.tensors[name].dtype_code == "BF16"
    assert found.read(name, Box((1, 0), (2, 8))).dtype == torch.bfloat16


def test_a_model_with_experts_cannot_begin_so() -> None:
    with pytest.raises(CheckpointError, match="has experts already") as caught:
        upcycled(MemorySource.of_gpt(**DENSE, num_experts=2))
    assert "/memory" in str(caught.value)


def test_a_model_that_is_not_described_is_refused() -> None:
    source = MemorySource.of_gpt(**DENSE)
    source.config.clear()
    with pytest.raises(CheckpointError, match="does not say which model it is of"):
        upcycled(source)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"moe_router_topk": 1, "moe_router_score_function": "sigmoid"}, "--moe-router-topk 1"),
        ({"num_experts": 1}, "--num-experts 1, --moe-router-topk 2"),
        ({"moe_router_topk": 5}, "--moe-router-topk 5, --num-experts 4"),
        ({"moe_layer_freq": "[1]"}, "--moe-layer-freq [1]"),
    ],
)
def test_flags_that_make_no_sense_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        upcycled(MemorySource.of_gpt(**DENSE), **flags)
    assert words in str(caught.value)
