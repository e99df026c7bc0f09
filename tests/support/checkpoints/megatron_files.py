"""Megatron's classic checkpoints, made from a description of the format and nothing of ours.

`whole_model` draws a GPT or BERT as whole tensors under Megatron's names; `save_megatron` cuts it
for a TP, PP and version, and writes files. Row orders of old versions are permuted here by plain
indexing, so that a mistake in the code under test is not made twice.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.megatron.names import megatron_name
from megatron.checkpoint.source import CheckpointSource

_HEADS = ("lm_head.", "binary_head.")  # beside the language model


@dataclass(frozen=True)
class Shape:
    """A small GPT as Megatron's flags describe it."""

    layers: int = 4
    hidden: int = 16
    heads: int = 4
    groups: int = 4
    ffn: int = 24
    rows: int = 44  # of the vocabulary, padding included
    true_rows: int = 41
    positions: int | None = 12
    gated: bool = False
    tied: bool = True
    bias: bool = True
    bert: bool = False  # with both heads
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.hidden // self.heads


def whole_model(shape: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter, whole, under the names of version 3, q k v of a group together."""
    generator = torch.Generator().manual_seed(seed)
    sizes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (shape.rows, shape.hidden)
    }
    if shape.positions:
        sizes["embedding.position_embeddings.weight"] = (shape.positions, shape.hidden)
    if shape.bert:
        sizes["embedding.tokentype_embeddings.weight"] = (2, shape.hidden)
    fc1 = shape.ffn * (2 if shape.gated else 1)
    qkv = (shape.heads + 2 * shape.groups) * shape.width
    for layer in range(shape.layers):
        for name, size in (
            ("input_layernorm", (shape.hidden,)),
            ("self_attention.query_key_value", (qkv, shape.hidden)),
            ("self_attention.dense", (shape.hidden, shape.hidden)),
            ("post_attention_layernorm", (shape.hidden,)),
            ("mlp.dense_h_to_4h", (fc1, shape.hidden)),
            ("mlp.dense_4h_to_h", (shape.hidden, shape.ffn)),
        ):
            sizes[f"encoder.layers.{layer}.{name}.weight"] = size
            if shape.bias or "layernorm" in name:
                sizes[f"encoder.layers.{layer}.{name}.bias"] = size[:1]
    sizes["encoder.final_layernorm.weight"] = sizes["encoder.final_layernorm.bias"] = (
        shape.hidden,
    )
    if shape.bert:
        sizes["pooler.dense.weight"] = (shape.hidden, shape.hidden)
        sizes["pooler.dense.bias"] = (shape.hidden,)
    if not shape.tied:
        sizes["output_layer.weight"] = (shape.rows, shape.hidden)
    if shape.bert:
        sizes["lm_head.bias"] = (shape.rows,)
        sizes["lm_head.dense.weight"] = (shape.hidden, shape.hidden)
        sizes["lm_head.dense.bias"] = (shape.hidden,)
        sizes["lm_head.layernorm.weight"] = sizes["lm_head.layernorm.bias"] = (shape.hidden,)
        sizes["binary_head.weight"], sizes["binary_head.bias"] = (2, shape.hidden), (2,)
    return {name: torch.randn(size, generator=generator) for name, size in sizes.items()}


def flags(shape: Shape, tp: int, pp: int) -> dict[str, Any]:
    """What the run that saved it would have had in `args`."""
    return {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "ffn_hidden_size": shape.ffn,
        "kv_channels": shape.width,
        "group_query_attention": shape.groups != shape.heads,
        "num_query_groups": shape.groups,
        "max_position_embeddings": shape.positions or 64,
        "position_embedding_type": "learned_absolute" if shape.positions else "rope",
        "swiglu": shape.gated,
        "add_bias_linear": shape.bias,
        "untie_embeddings_and_output_weights": not shape.tied,
        "bias_gelu_fusion": True,
        "seq_length": 12,
        "padded_vocab_size": shape.rows,
        "make_vocab_size_divisible_by": 4,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "consumed_train_samples": 80,
        "consumed_valid_samples": 16,
        "lr": 1e-3,
        "train_iters": 100,
        **shape.args,
    }


def save_megatron(
    folder: Path,
    model: Mapping[str, Tensor],
    shape: Shape,
    *,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    version: float | None = 3.0,
    old_names: bool = False,
    core: bool = False,
    moments: Mapping[str, Mapping[str, Tensor]] | None = None,
    iteration: int = 10,
    legacy_files: bool = False,
    distributed: bool = False,
) -> Path:
    """Write `model` as a save of Megatron at iteration 10.

    Args:
        core: under Megatron core's names, in the order of `model`.
        moments: kinds of the optimizer's state, whole.
        distributed: the state is that of the distributed optimizer, in a file beside.
    """
    directory = folder / f"iter_{iteration:07d}"
    per = shape.layers // (pp * chunks)
    for stage in range(pp):
        for rank in range(tp):
            content: dict[str, Any] = {
                "args": argparse.Namespace(**flags(shape, tp, pp)),
                "iteration": iteration,
                "tokens": 960,
            }
            if version is not None:
                content["checkpoint_version"] = version
            names: list[tuple[str, str]] = []  # (whole name, local name), in module order
            of_chunks: list[list[tuple[str, str]]] = []
            for chunk in range(chunks):
                virtual = chunk * pp + stage
                stage_parameters = list(_of_stage(model, shape, virtual, per, pp * chunks))
                state: dict[str, Any] = {} if core else {"language_model": {}}
                for whole_name, local in stage_parameters:
                    part = cut(whole_name, model[whole_name], shape, rank, tp, version or 0.0)
                    if core:
                        state[core_name(local)] = part
                    else:
                        _put(state, local, part, old_names)
                names += stage_parameters
                last = virtual == pp * chunks - 1
                if last and virtual and shape.tied:
                    word = "embedding.word_embeddings.weight"
                    part = cut(word, model[word], shape, rank, tp, version or 0.0)
                    if core:  # the weight of a layer whose bias is in the model
                        at = [name for name, _ in names].index("lm_head.bias")
                        items = [*state.items()]
                        place = [*state].index("output_layer.bias")
                        items.insert(place, ("output_layer.weight", part))
                        state = dict(items)
                    else:  # last in the file; among the modules before a BERT's heads
                        state["word_embeddings_for_head"] = {"weight": part}
                        heads = [
                            at for at, (name, _) in enumerate(names) if name.startswith(_HEADS)
                        ]
                        at = heads[0] if heads else len(names)
                    names.insert(at, (word, "word_embeddings_for_head.weight"))
                of_chunks.append(names[sum(map(len, of_chunks)) :])
                content["model" if chunks == 1 else f"model{chunk}"] = state
            if moments is not None:
                content["optimizer"] = _optimizer(
                    moments, model, names, shape, rank, tp, version or 0.0
                )
            state_beside: dict[Any, Any] = {}
            if moments is not None and distributed:
                groups = [{"step": 7, "wd_mult": decay} for decay in (1.0, 0.0)]
                scaler = content["optimizer"]["grad_scaler"]
                content["optimizer"] = {
                    "optimizer": {"param_groups": groups}, "grad_scaler": scaler
                }  # fmt: skip
                state_beside = {"buckets_coalesced": True}
                for at, of_chunk in enumerate(of_chunks):
                    limit = shape.args.get("ddp_bucket_size") if stage == at == 0 else None
                    state_beside[at] = {
                        (torch.bfloat16, torch.float32): {
                            {"master": "param"}.get(kind, kind): _buffer(
                                [
                                    (
                                        cut(name, values[name], shape, rank, tp, 3.0),
                                        shape.tied and pp > 1 and "word_embeddings" in name,
                                    )
                                    for name, _ in of_chunk
                                ],
                                limit,
                            )
                            for kind, values in moments.items()
                        }
                    }
            path = directory / (
                f"mp_rank_{rank:02d}" if pp == 1 else f"mp_rank_{rank:02d}_{stage:03d}"
            )
            path.mkdir(parents=True)
            if state_beside:
                torch.save(state_beside, path / "distrib_optim.pt")
            torch.save(
                content,
                path / "model_optim_rng.pt",
                _use_new_zipfile_serialization=not legacy_files,
            )
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return directory


def _buffer(parameters: list[tuple[Tensor, bool]], limit: int | None) -> Tensor:
    """The file's form of one gradient buffer, by way of the buffer itself with all its padding.

    `parameters` are in module order, each with whether two stages share it.
    """
    multiple = 384  # of the end of a bucket: lcm(replicas, 128), at 3 replicas
    places: list[tuple[int, Tensor]] = []
    buckets: list[tuple[int, int]] = []  # start and end without padding
    start = at = 0
    for tensor, shared in reversed(parameters):
        at = (at + 63) // 64 * 64
        if shared and at > start:
            buckets.append((start, at))
            start = at = (at + multiple - 1) // multiple * multiple
        places.append((at, tensor))
        at += tensor.numel()
        if shared or (limit is not None and at - start >= limit):
            buckets.append((start, at))
            start = at = (at + multiple - 1) // multiple * multiple
    if at > start:
        buckets.append((start, at))
    buffer = torch.zeros(buckets[-1][1])
    for place, tensor in places:
        buffer[place : place + tensor.numel()] = tensor.flatten()
    return torch.cat([buffer[first:last] for first, last in buckets])


def core_name(name: str) -> str:
    """Megatron core's name of a BERT's parameter that is called `name` in version 3."""
    for spelling, cores in (
        ("self_attention.query_key_value", "self_attention.linear_qkv"),
        ("self_attention.dense", "self_attention.linear_proj"),
        ("mlp.dense_h_to_4h", "mlp.linear_fc1"),
        ("mlp.dense_4h_to_h", "mlp.linear_fc2"),
        ("input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
        ("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
        ("lm_head.layernorm", "lm_head.layer_norm"),
        ("lm_head.bias", "output_layer.bias"),
    ):
        name = name.replace(spelling, cores)
    return name


def cut(name: str, whole: Tensor, shape: Shape, rank: int, tp: int, version: float) -> Tensor:
    """One tensor rank's part, in the row order of `version`."""
    if "word_embeddings" in name or "output_layer" in name or name == "lm_head.bias":
        return whole.chunk(tp)[rank].clone()
    if "query_key_value" in name:
        part = whole.chunk(tp)[rank].clone()
        heads, width = shape.heads // tp, shape.width
        if version < 1:  # all queries, all keys, all values
            rows = [
                head * 3 * width + kind * width + channel
                for kind in range(3)
                for head in range(heads)
                for channel in range(width)
            ]
            return part[rows]
        if version < 2:  # q k v alternate channel by channel
            rows = [
                head * 3 * width + kind * width + channel
                for head in range(heads)
                for channel in range(width)
                for kind in range(3)
            ]
            return part[rows]
        return part
    if "dense_h_to_4h" in name:
        if not shape.gated:
            return whole.chunk(tp)[rank].clone()
        gate, up = whole.chunk(2)
        parts = [gate.chunk(tp)[rank], up.chunk(tp)[rank]]
        if "glu_activation" in shape.args:  # bigscience's activation is on the second half
            parts.reverse()
        return torch.cat(parts)
    if name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight")):
        return whole.chunk(tp, dim=1)[rank].clone()
    return whole.clone()


def _of_stage(
    model: Mapping[str, Tensor], shape: Shape, virtual: int, per: int, count: int
) -> Iterator[tuple[str, str]]:
    for name in model:
        if name.startswith("embedding.") and virtual == 0:
            yield name, name
        elif name.startswith("encoder.layers."):
            layer, _, rest = name.removeprefix("encoder.layers.").partition(".")
            if int(layer) // per == virtual:
                yield name, f"encoder.layers.{int(layer) - virtual * per}.{rest}"
        elif not name.startswith("embedding.") and virtual == count - 1:
            yield name, name


def _put(state: dict[str, Any], name: str, tensor: Tensor, old_names: bool) -> None:
    top, _, rest = name.partition(".")
    if name.startswith(_HEADS):
        state.setdefault(top, {})[rest] = tensor
        return
    into = state["language_model"]
    if top == "embedding":
        module, _, leaf = rest.partition(".")
        into.setdefault("embedding", {}).setdefault(module, {})[leaf] = tensor
        return
    if old_names:
        top = {"encoder": "transformer"}.get(top, top)
        rest = rest.replace("self_attention", "attention")
    into.setdefault(top, {})[rest] = tensor


def _optimizer(
    moments: Mapping[str, Mapping[str, Tensor]],
    model: Mapping[str, Tensor],
    names: list[tuple[str, str]],
    shape: Shape,
    rank: int,
    tp: int,
    version: float,
) -> dict[str, Any]:
    decayed = [whole for whole, _ in names if model[whole].dim() > 1]
    spared = [whole for whole, _ in names if model[whole].dim() == 1]
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    masters: list[list[Tensor]] = []
    for group in (decayed, spared):
        numbers = []
        masters.append([])
        for whole in group:
            number = len(state)
            numbers.append(number)
            state[number] = {
                kind: cut(whole, values[whole], shape, rank, tp, version)
                for kind, values in moments.items()
                if kind != "master"
            }
            if "master" in moments:
                masters[-1].append(cut(whole, moments["master"][whole], shape, rank, tp, version))
        groups.append({"params": numbers, "lr": 1e-3, "weight_decay": 0.1, "step": 7})
    inner = {"state": state, "param_groups": groups}
    if "master" not in moments:
        return inner
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
    return {"optimizer": inner, "fp32_from_fp16_params": masters, "grad_scaler": scaler}


def check_parameters(
    source: CheckpointSource, model: Mapping[str, Tensor], prefix: str, rows: int
) -> None:
    """Every parameter under our name, whole, in our order, without padding rows."""
    found = [name for name in source.tensors if name.startswith(prefix)]
    assert len(found) == len(model)
    for name in found:
        known = source.tensors[name]
        expected = model[megatron_name(name.removeprefix(prefix))]
        if "embedding.word" in name or name.endswith(("/output.weight", "/output_bias.bias")):
            expected = expected[:rows]
        assert known.global_shape == tuple(expected.shape), name
        assert torch.equal(
            source.read(name, Box((0,) * len(known.global_shape), known.global_shape)), expected
        ), name
