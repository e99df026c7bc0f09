"""A Hugging Face folder from any source of checkpoints: weights, config.json, tokenizer files.

Hugging Face's tensors are assembled from ours one at a time, into shards that are never in memory
as a whole. The folder appears under its name complete or not at all.
"""

import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron import log
from megatron.atomic import sync_directory
from megatron.checkpoint import gpt_tensors, model_kind
from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.boxes import whole as whole_box
from megatron.checkpoint.files import safetensors_io
from megatron.checkpoint.files.durable import from_os_error, write_file
from megatron.checkpoint.files.safetensors_header import ITEM_BYTES, tensor_bytes
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.formats.huggingface import tokenizer as tokenizers
from megatron.checkpoint.formats.huggingface.families.registry import family_for
from megatron.checkpoint.formats.huggingface.families.vit import (
    preprocessor_config,
    refuse_other_heads,
    vision_of,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.layouts import (
    Reshaped,
    StackInOne,
    Strip,
    box_of,
    flat,
    less_than_ours,
    their_shapes,
)
from megatron.checkpoint.formats.huggingface.weights import INDEX, SINGLE
from megatron.checkpoint.source import CheckpointSource, WriteOptions
from megatron.checkpoint.t5_tensors import CONFIG_GROUP
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.models.vision import VisionConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject, JsonValue

SHARD_BYTES = 5 * 10**9  # of one file; a larger tensor has a file of its own
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_ROOM_BYTES = 64 << 20  # for tokenizer files and headers
_PREFIX = "model/"


class WriterPart(NamedTuple):
    """Rows of one of our tensors that go into one tensor of the folder."""

    name: str
    box: Box  # of our tensor
    strip: Strip


@dataclass
class ExportTarget:
    """One tensor of the folder: its shape, type and parts."""

    shape: tuple[int, ...]
    dtype_code: str
    transposed: bool
    columns: tuple[int, ...] = ()  # of a `StackInOne`, of our rows of each matrix
    less: float = 0.0  # values there are so much less than ours
    parts: list[WriterPart] = field(default_factory=list)


def write_huggingface(source: CheckpointSource, save: Path, options: WriteOptions) -> Path:
    """Write the weights of `source` as the Hugging Face folder `save`, and return it.

    Raises:
        CheckpointError: no family holds the model; the folder is not empty; there is no room, or
            the source is damaged. Nothing is left behind then.
    """
    model = model_of(source)
    kind = model_kind.known_kind(source.kind, source.tensors)
    family = family_for(model, options.family, kind=kind)
    sizes = _sizes(source, model, kind)
    targets = plan_targets(source, model, family, sizes, options.dtype)
    _refuse_existing(save)
    tokenizer = tokenizers.plan(
        source.config.get("tokenizer", {}), options, has_decoder=sizes.decoder is not None
    )
    needed = sum(tensor_bytes(target.dtype_code, target.shape) for target in targets.values())
    stage = save.with_name(f".{save.name}.partial-{secrets.token_hex(4)}")
    try:
        save.parent.mkdir(parents=True, exist_ok=True)
        folders.require_space(save.parent, needed + _ROOM_BYTES)
        stage.mkdir()
        _write_weights(source, stage, targets, options.max_shard_bytes or SHARD_BYTES)
        _write_json(stage / "config.json", _config(family, model, sizes, targets, tokenizer))
        if sizes.vision is not None:
            _write_json(stage / "preprocessor_config.json", preprocessor_config(sizes.vision))
        elif not model_kind.has_optional_heads(kind):
            _write_json(stage / "generation_config.json", _generation(tokenizer))
        tokenizer.write(stage)
        sync_directory(stage)
        stage.replace(save)  # an empty folder may be there
        sync_directory(save.parent)
    except OSError as error:
        raise from_os_error(error, "writing the Hugging Face folder") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    log.info(
        f"wrote {save}: a {family.model_type} model of {len(targets)} tensors, {needed:,} bytes; "
        f"tokenizer: {tokenizer.note}"
    )
    return save


def model_of(source: CheckpointSource) -> ModelConfig:
    """Return the model of `source`; CheckpointError if it does not record its shape."""
    try:
        return from_plain(ModelConfig, source.config.get("model", {}))
    except ConfigError as error:
        raise CheckpointError(
            "the checkpoint does not record the model of its weights",
            found=f"{source.directory} ({source.format_name}): {error.problem}; {error.found}",
            fix="convert it to the sharded format with the flags of its model first",
        ) from error


def plan_targets(
    source: CheckpointSource,
    model: ModelConfig,
    family: Family,
    sizes: Sizes,
    dtype: str | None = None,
) -> dict[str, ExportTarget]:
    """Return the tensors to export by name, in model order, and the rows of ours in each.

    Raises:
        CheckpointError: the source's tensors are not those of the model that it describes.
    """
    stored = {
        name.removeprefix(_PREFIX): description
        for name, description in source.tensors.items()
        if name.startswith(_PREFIX)
    }
    expected = family.tensors_of(model, sizes)
    _compare(source, expected, {name: found.global_shape for name, found in stored.items()})
    targets: dict[str, ExportTarget] = {}
    for name, (code, shape) in stored.items():
        rule, keys = family.rule(name, model)
        if isinstance(rule, StackInOne):
            columns = rule.columns(shape[1])
            whole = ExportTarget(rule.their_shape(shape), dtype or code, True, columns)
            strip = next(rule.strips(model, flat(shape)[0], keys))
            for matrix in range(shape[0]):
                box = Box((matrix, *(0 for _ in shape[1:])), (1, *shape[1:]))
                whole.parts.append(WriterPart(_PREFIX + name, box, strip))
            targets[keys[0]] = whole
            continue
        strips = list(rule.strips(model, flat(shape)[0], keys))
        if isinstance(rule, Reshaped):
            whole = ExportTarget(rule.their_shape(shape, vision_of(sizes)), dtype or code, False)
            whole.parts.append(WriterPart(_PREFIX + name, whole_box(shape), strips[0]))
            targets[keys[0]] = whole
            continue
        transposed = rule.transposed and len(shape) == 2
        less = less_than_ours(rule)
        if less:
            code = stored[gpt_tensors.WORD_TABLE][0]  # ours may be wider, to hold theirs exactly
        for key, target_shape in their_shapes(shape, strips, transposed=transposed).items():
            targets[key] = ExportTarget(target_shape, dtype or code, transposed, less=less)
        for strip in strips:
            targets[strip.key].parts.append(WriterPart(_PREFIX + name, box_of(shape, strip), strip))
    return {family.written_key(key, sizes): target for key, target in targets.items()}


def read_target(source: CheckpointSource, target: ExportTarget) -> Tensor:
    """Return one tensor of the folder, assembled from our rows."""
    dtype = safetensors_io.dtype_of(target.dtype_code)
    name, box, _ = target.parts[0]
    if target.less:
        return (source.read(name, box) - target.less).to(dtype).view(target.shape)
    if box.size == math.prod(target.shape) and not target.transposed:
        return source.read(name, box).to(dtype).view(target.shape)
    result = torch.zeros(target.shape, dtype=dtype)  # as rows that are none of ours stay
    for name, box, strip in target.parts:
        if target.columns:
            (matrix,) = source.read(name, box).to(dtype)
            result[box.offset[0]][..., torch.tensor(target.columns)] = matrix.movedim(0, -1)
            continue
        rows = source.read(name, box).flatten(0, max(0, len(box.shape) - 2))
        if target.transposed:
            result[:, strip.at : strip.at + strip.rows] = rows.t()
        else:
            result[strip.at : strip.at + strip.rows] = rows
    return result


def shards(targets: Mapping[str, ExportTarget], limit: int) -> Iterator[list[str]]:
    """Yield names for one file each, in the order of the model, up to `limit` bytes."""
    names: list[str] = []
    total = 0
    for name, target in targets.items():
        size = tensor_bytes(target.dtype_code, target.shape)
        if names and total + size > limit:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def _write_weights(
    source: CheckpointSource, stage: Path, targets: Mapping[str, ExportTarget], limit: int
) -> None:
    groups = list(shards(targets, limit))
    where: dict[str, str] = {}
    total = 0
    for at, names in enumerate(groups, start=1):
        file = SINGLE if len(groups) == 1 else f"model-{at:05d}-of-{len(groups):05d}.safetensors"
        # Larger element types first, so that all lie at multiples of their size.
        names = sorted(names, key=lambda name: -ITEM_BYTES[targets[name].dtype_code])
        safetensors_io.write_stream(
            stage / file,
            [(name, targets[name].dtype_code, targets[name].shape) for name in names],
            (read_target(source, targets[name]) for name in names),
            metadata={"format": "pt"},  # required by transformers
        )
        where |= dict.fromkeys(names, file)
        total += sum(tensor_bytes(targets[n].dtype_code, targets[n].shape) for n in names)
    if len(groups) > 1:
        index: JsonObject = {
            "metadata": {"total_size": total},
            "weight_map": dict(sorted(where.items())),
        }
        _write_json(stage / INDEX, index)


def _compare(
    source: CheckpointSource,
    expected: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
) -> None:
    problems = [f"missing: {name}" for name in expected if name not in stored]
    problems += [f"unknown: {name}" for name in stored if name not in expected]
    problems += [
        f"shape: {name} is {list(stored[name])}, and its config makes it {list(shape)}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    if problems:
        raise CheckpointError(
            "the checkpoint does not hold a whole model of the shape that it describes",
            found=f"{source.directory}: {'; '.join(problems[:4])}"
            + (f"; and {len(problems) - 4} more" if len(problems) > 4 else ""),
            fix="convert a checkpoint of pretrain_gpt, pretrain_bert or pretrain_t5, saved whole",
        )


def _refuse_existing(save: Path) -> None:
    if save.exists() and (not save.is_dir() or any(save.iterdir())):
        raise CheckpointError(
            "the folder for the Hugging Face model is not empty",
            found=str(save),
            fix="name a new folder, or remove what is there",
        )


def _sizes(source: CheckpointSource, model: ModelConfig, kind: str) -> Sizes:
    if kind == model_kind.VIT:
        vision = from_plain(VisionConfig, source.config.get("vision", {}))
        refuse_other_heads(vision)
        return Sizes(0, vision.num_tokens, vision=vision)
    tensors = {
        name.removeprefix(_PREFIX): known.global_shape for name, known in source.tensors.items()
    }
    heads = BertHeads.of(tensors) if model_kind.has_optional_heads(kind) else None
    decoder = _decoder(source) if kind == model_kind.T5 else None
    rows = tensors.get(gpt_tensors.WORD_TABLE, (0,))[0]
    table = tensors.get(gpt_tensors.POSITION_TABLE)
    if table is not None or model.position_embedding_type is PositionEmbedding.LEARNED:
        return Sizes(rows, (table or (0,))[0], heads, decoder)
    data: Mapping[str, Any] = source.config.get("data", {})
    positions = model.max_position_embeddings or data.get("seq_length")
    if positions is None:
        raise CheckpointError(
            "the checkpoint does not record the length of its sequences",
            found=f"{source.directory}: neither max_position_embeddings nor seq_length",
            fix="convert it to the sharded format with --seq-length first",
        )
    return Sizes(rows, int(positions), heads, decoder)


def _decoder(source: CheckpointSource) -> EncoderDecoderConfig:
    try:
        decoder = from_plain(EncoderDecoderConfig, source.config.get(CONFIG_GROUP, {}))
    except ConfigError as error:
        raise _no_decoder(source, f"{error.problem}; {error.found}") from error
    if decoder.decoder_num_layers is None:
        raise _no_decoder(source, "no decoder_num_layers")
    return decoder


def _no_decoder(source: CheckpointSource, found: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint does not record the decoder of its weights",
        found=f"{source.directory} ({source.format_name}): {found}",
        fix="convert a checkpoint of pretrain_t5, saved whole",
    )


def _config(
    family: Family,
    model: ModelConfig,
    sizes: Sizes,
    targets: Mapping[str, ExportTarget],
    tokenizer: tokenizers.TokenizerFiles,
) -> JsonObject:
    codes = {target.dtype_code for target in targets.values()}
    table = next(iter(targets.values()))
    return {
        "architectures": [family.architecture_of(sizes)],
        "model_type": family.model_type,
        **family.write_config(model, sizes),
        **({"vocab_size": sizes.vocab_rows, "use_cache": True} if sizes.vision is None else {}),
        "initializer_range": model.init_method_std,
        "torch_dtype": _DTYPE_NAMES.get(table.dtype_code if len(codes) > 1 else codes.pop()),
        **tokenizer.special_ids,
    }


def _generation(tokenizer: tokenizers.TokenizerFiles) -> JsonObject:
    ids = {name: token for name, token in tokenizer.special_ids.items() if token is not None}
    return {"_from_model_config": True, **ids}


def _write_json(path: Path, values: JsonValue) -> None:
    write_file(path, (json.dumps(values, indent=2, allow_nan=False) + "\n").encode())
