"""Folders as gpt-neox writes them, made from a description of its files and nothing of ours.

`whole_model` draws a model under gpt-neox's names, q k v of a group together and gate before up;
`save_neox` cuts it for a number of tensor-parallel ranks. Rows are permuted by plain indexing.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NeoxShape:
    """A small model as gpt-neox's config describes it."""

    layers: int = 2
    hidden: int = 16
    heads: int = 4
    groups: int = 4
    ffn: int = 24  # of each half of a gated MLP
    rows: int = 48  # of the vocabulary, padding included
    gated: bool = False
    rms: bool = False
    parallel: bool = False  # gpt_j_residual
    tied: bool = True
    old_names: bool = False

    @property
    def config(self) -> str:
        """The text of a config file."""
        lines = {
            "num-layers": self.layers,
            "hidden-size": self.hidden,
            "num-attention-heads": self.heads,
            "num-kv-heads": self.groups if self.groups != self.heads else None,
            "seq-length": 8,
            "max-position-embeddings": 8,
            "pos-emb": "rotary",
            "rotary-pct": 0.5,
            "activation": "swiglu" if self.gated else "gelu",
            "intermediate-size": self.ffn * (3 if self.gated else 1),
            "norm": "rmsnorm" if self.rms else "layernorm",
            "gpt-j-residual": str(self.parallel).lower(),
            "no-weight-tying": str(not self.tied).lower(),
            "make-vocab-size-divisible-by": 8,
        }
        return "".join(f"{key}: {value}\n" for key, value in lines.items() if value is not None)


def whole_model(shape: NeoxShape, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter, whole, by the number of its layer in gpt-neox's list and its name there."""
    generator = torch.Generator().manual_seed(seed)
    width = shape.hidden // shape.heads
    gain = "scale" if shape.rms else "weight"
    sizes: dict[str, tuple[int, ...]] = {"0.word_embeddings.weight": (shape.rows, shape.hidden)}
    linear1, linear2 = (
        ("dense_h_to_4h", "dense_4h_to_h") if shape.old_names else ("linear1", "linear2")
    )
    qkv = (shape.heads + 2 * shape.groups) * width
    for layer in range(2, shape.layers + 2):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"{layer}.{norm}.{gain}"] = (shape.hidden,)
            if not shape.rms:
                sizes[f"{layer}.{norm}.bias"] = (shape.hidden,)
        for name, size in (
            ("attention.query_key_value", (qkv, shape.hidden)),
            ("attention.dense", (shape.hidden, shape.hidden)),
            (f"mlp.{linear1}", (shape.ffn * (1 + shape.gated), shape.hidden)),
            (f"mlp.{linear2}", (shape.hidden, shape.ffn)),
        ):
            sizes[f"{layer}.{name}.weight"] = size
            sizes[f"{layer}.{name}.bias"] = size[:1]
    last = shape.layers + 3
    sizes[f"{last}.norm.{gain}"] = (shape.hidden,)
    if not shape.rms:
        sizes[f"{last}.norm.bias"] = (shape.hidden,)
    if not shape.tied:
        sizes[f"{last + 1}.final_linear.weight"] = (shape.rows, shape.hidden)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def cut(name: str, whole: Tensor, shape: NeoxShape, rank: int, tp: int) -> Tensor:
    """One tensor rank's part, in gpt-neox's row order."""
    width = shape.hidden // shape.heads
    if "word_embeddings" in name or "final_linear" in name:
        return whole.chunk(tp)[rank].clone()
    if "query_key_value" in name:
        part = whole.chunk(tp)[rank]
        if shape.groups == shape.heads:
            return part.clone()
        groups, each = shape.groups // tp, shape.heads // shape.groups
        block = (each + 2) * width
        queries = [g * block + i for g in range(groups) for i in range(each * width)]
        keys = [g * block + each * width + i for g in range(groups) for i in range(width)]
        values = [g * block + (each + 1) * width + i for g in range(groups) for i in range(width)]
        return part[queries + keys + values]
    if "linear1" in name or "h_to_4h" in name:
        if not shape.gated:
            return whole.chunk(tp)[rank].clone()
        gate, up = whole.chunk(2)
        return torch.cat([up.chunk(tp)[rank], gate.chunk(tp)[rank]])
    if name.endswith(("dense.weight", "linear2.weight", "4h_to_h.weight")):
        return whole.chunk(tp, dim=1)[rank].clone()
    if shape.parallel and name.endswith(("dense.bias", "linear2.bias", "4h_to_h.bias")):
        # Every rank adds a part of its own; the whole bias is their sum, here exactly.
        rest = whole / 2
        return rest if tp > 1 and rank in (0, tp - 1) else whole if tp == 1 else whole * 0
    return whole.clone()


def save_neox(
    folder: Path,
    model: Mapping[str, Tensor],
    shape: NeoxShape,
    *,
    tp: int = 1,
    pipeline: bool = True,
    moments: Mapping[str, Mapping[str, Tensor]] | None = None,
) -> Path:
    """Write `model` as a save at iteration 10, with a file for each layer or all in one.

    Args:
        moments: masters and moments, whole, which ZeRO-1 keeps with one replica.
    """
    directory = folder / "global_step10"
    (directory / "configs").mkdir(parents=True)
    (directory / "configs" / "run.yml").write_text(shape.config)
    (folder / "latest").write_text("global_step10")
    for rank in range(tp):
        parts = {name: cut(name, value, shape, rank, tp) for name, value in model.items()}
        for layer in range(2, shape.layers + 2):
            parts[f"{layer}.attention.rotary_emb.inv_freq"] = torch.ones(2)
        content: dict[str, Any] = {
            "iteration": 10,
            "args": {
                "num_layers": shape.layers,
                "hidden_size": shape.hidden,
                "num_attention_heads": shape.heads,
                "padded_vocab_size": shape.rows,
                "model_parallel_size": tp,
            },
            "dp_world_size": 1,
            "mp_world_size": tp,
        }
        if pipeline:
            layers: dict[int, dict[str, Tensor]] = {}
            for name, value in parts.items():
                at, _, inner = name.partition(".")
                layers.setdefault(int(at), {})[inner] = value
            for layer, values in layers.items():
                path = directory / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt"
                torch.save(values, path)
            content["module"] = None
        else:
            content["module"] = {f"sequential.{name}": value for name, value in parts.items()}
        if moments is not None:
            prefix = "" if pipeline else "sequential."
            shapes = {
                f"{prefix}{name}": cut(name, value, shape, rank, tp).shape
                for name, value in model.items()
            }
            content["param_shapes"] = [shapes]
            flat = {
                kind: torch.cat([cut(n, values[n], shape, rank, tp).flatten() for n in model])
                for kind, values in moments.items()
            }
            places, at_element = {}, 0
            for name, size in shapes.items():
                places[name] = Namespace(start=at_element, numel=size.numel())
                at_element += size.numel()
            moving = {kind: value for kind, value in flat.items() if kind != "master"}
            state = {
                "base_optimizer_state": {"state": {0: {"step": torch.tensor(7.0), **moving}}},
                "single_partition_of_fp32_groups": [flat["master"]],
                "param_slice_mappings": [places],
                "loss_scaler": None,
            }
            path = directory / f"bf16_zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, path)
        torch.save(content, directory / f"mp_rank_{rank:02d}_model_states.pt")
    return directory
