"""A checkpoint source in memory: a small GPT under our names, optionally with state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.bert_tensors import BertHeads, bert_tensors
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files.safetensors_io import dtype_code_of
from megatron.checkpoint.gpt_tensors import Shapes, gpt_tensors
from megatron.checkpoint.source import CheckpointSource, SourceBase, TensorDescription
from megatron.checkpoint.t5_tensors import CONFIG_GROUP, t5_tensors
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig

GPT: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "max_position_embeddings": 6,
}
ROWS = 11


class MemorySource(SourceBase):
    """Tensors, config, progress and scalars as they are given; all of them may be changed."""

    format_name = "memory"

    def __init__(self, values: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self.directory = Path("/memory")
        self.values = dict(values)
        self.config: dict[str, dict[str, Any]] = {n: dict(group) for n, group in config.items()}
        self.progress: dict[str, Any] = {}
        self.scalars: dict[str, Any] = {}
        self.largest_read = 0

    @classmethod
    def of_gpt(cls, *, optimizer: bool = False, seed: int = 0, **model: Any) -> "MemorySource":
        """Return a GPT of random values; optionally with AdamW's moments and fp32 masters."""
        flags = {**GPT, **model}
        shapes = gpt_tensors(from_plain(ModelConfig, flags), vocab_rows=ROWS, positions=6)
        return cls._drawn(shapes, flags, optimizer=optimizer, seed=seed)

    @classmethod
    def of_bert(
        cls, heads: BertHeads, *, optimizer: bool = False, seed: int = 0, **model: Any
    ) -> "MemorySource":
        """A BERT of random values, with these heads."""
        flags = {**GPT, **model}
        config = from_plain(ModelConfig, flags)
        shapes = bert_tensors(config, vocab_rows=ROWS, positions=6, heads=heads)
        return cls._drawn(shapes, flags, optimizer=optimizer, seed=seed)

    @classmethod
    def of_t5(
        cls, depth: int, *, optimizer: bool = False, seed: int = 0, **model: Any
    ) -> "MemorySource":
        """A T5 of random values, with so many layers of the decoder."""
        flags, decoder = {**GPT, **model}, {"decoder_num_layers": depth, "decoder_seq_length": 4}
        shapes = t5_tensors(
            from_plain(ModelConfig, flags),
            from_plain(EncoderDecoderConfig, decoder),
            vocab_rows=ROWS,
            positions=6,
        )
        source = cls._drawn(shapes, flags, optimizer=optimizer, seed=seed)
        source.config[CONFIG_GROUP] = decoder
        return source

    @classmethod
    def _drawn(
        cls, shapes: Shapes, flags: Mapping[str, Any], *, optimizer: bool, seed: int
    ) -> "MemorySource":
        generator = torch.Generator().manual_seed(seed)
        values = {
            f"model/{name}": torch.randn(shape, generator=generator)
            for name, shape in shapes.items()
        }
        if optimizer:
            for kind in ("exp_avg", "exp_avg_sq", "master"):
                for name, shape in shapes.items():
                    values[f"optimizer/{kind}/{name}"] = torch.randn(shape, generator=generator)
        source = cls(values, {"model": flags, "data": {"seq_length": 6}})
        if optimizer:
            scaler = {"scale": 64.0, "good_iterations": 2, "overflows_left": 1}
            source.scalars = {"optimizer": {"steps": 7, "loss_scaler": scaler}}
            source.progress = {"iteration": 10, "consumed_samples": 80, "consumed_tokens": 480}
        return source

    @property
    def tensors(self) -> dict[str, TensorDescription]:
        return {
            name: TensorDescription(dtype_code_of(value.dtype), tuple(value.shape))
            for name, value in self.values.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        self.largest_read = max(self.largest_read, box.size)
        return self.values[name][box.slices].clone()


def assert_same(found: CheckpointSource, expected: CheckpointSource) -> None:
    """The same names, dtypes, shapes and bits."""
    assert dict(found.tensors) == dict(expected.tensors)
    for name, known in expected.tensors.items():
        box = Box((0,) * len(known.global_shape), known.global_shape)
        assert torch.equal(found.read(name, box), expected.read(name, box)), name
