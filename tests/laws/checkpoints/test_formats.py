"""The format law: whatever goes through two formats is the same bits, in every order of two.

Weights through all of them; optimizer state, counts and loss scale through those that have it.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.formats import registry
from megatron.checkpoint.source import WriteOptions
from tests.support.checkpoints.sources import MemorySource

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "swiglu": True,
    "ffn_hidden_size": 24,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
MODELS: dict[str, dict[str, Any]] = {"llama": LLAMA, "gpt2": {"num_layers": 2}}


def _source(kind: str) -> MemorySource:
    """A model in bf16, whose weights are its masters rounded: some formats keep masters alone."""
    source = MemorySource.of_gpt(optimizer=True, **MODELS[kind])
    source.config["precision"] = {"bf16": True}
    for name in [name for name in source.values if name.startswith("model/")]:
        master = source.values[f"optimizer/master/{name.removeprefix('model/')}"]
        source.values[name] = master.bfloat16()
    return source


WRITABLE = list(registry.writable())


@pytest.mark.parametrize(
    ("pair", "kind"),
    [
        # Models in turn: every format is first and second with both.
        pytest.param(
            (first, second),
            kind,
            marks=[pytest.mark.wide] if (one + other + to) % 2 else [],
            id=f"{first}-{second}-{kind}",
        )
        for (one, first), (other, second) in itertools.permutations(enumerate(WRITABLE), 2)
        for to, kind in enumerate(MODELS)
    ],
)
def test_two_formats_after_each_other_lose_nothing(
    tmp_path: Path, pair: tuple[str, str], kind: str
) -> None:
    source = _source(kind)
    has_optimizer = all(registry.get(name).has_optimizer for name in pair)
    options = WriteOptions(
        tensor_model_parallel_size=2, make_vocab_size_divisible_by=4, copy_tokenizer=False
    )
    registry.get(pair[0]).write(source, tmp_path / "first", options)  # type: ignore[misc]
    with registry.open_source(tmp_path / "first") as first:
        first.verify()
        registry.get(pair[1]).write(first, tmp_path / "second", options)  # type: ignore[misc]
    with registry.open_source(tmp_path / "second") as second:
        assert second.format_name == pair[1]
        expected = {name for name in source.values if name.startswith("model/") or has_optimizer}
        # A universal checkpoint of weights alone has masters all the same: the weights, widened.
        more = set(second.tensors) - expected
        assert not expected - set(second.tensors)
        assert all(name.startswith("optimizer/master/") for name in more)
        assert not more or pair == ("huggingface", "universal")
        for name in expected:
            found = second.read(name, whole(second.tensors[name].global_shape))
            assert torch.equal(found, source.values[name]), name
        if has_optimizer:
            assert second.scalars["optimizer"]["steps"] == 7
            assert second.progress["iteration"] == 10
            assert second.progress["consumed_samples"] == 80
