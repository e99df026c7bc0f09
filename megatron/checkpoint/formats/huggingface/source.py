"""Hugging Face model folders as checkpoints: opened for reading, whatever the family.

A family (`families/`) defines which rows of which tensors in files make up one of ours; this module
reads config.json, compares files and table by name and shape, and reads rows. Folders hold only
weights: no optimizer, no progress. `writer` writes them.
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megatron import log
from megatron.checkpoint import gpt_tensors
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.files.safetensors_header import ITEM_BYTES
from megatron.checkpoint.files.safetensors_io import dtype_of
from megatron.checkpoint.formats.huggingface import tokenizer as tokenizers
from megatron.checkpoint.formats.huggingface.families.registry import family_called
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import (
    Reshaped,
    StackInOne,
    Strip,
    flat,
    less_than_ours,
    their_shapes,
)
from megatron.checkpoint.formats.huggingface.weights import open_weights
from megatron.checkpoint.source import SourceBase, SourceOptions, TensorDescription
from megatron.checkpoint.t5_tensors import CONFIG_GROUP
from megatron.config.fields import from_plain, to_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.json_values import JsonObject, parse_json

CONFIG = "config.json"
_PREFIX = "model/"
_SHOWN = 8
_COMPARED_ROWS = 1 << 12
_DEQUANTIZE_MXFP4 = (
    "write its numbers with transformers first: AutoModelForCausalLM.from_pretrained(FOLDER, "
    "dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True))"
    ".save_pretrained(NEW_FOLDER)"
)


class _Layout(NamedTuple):
    """One of our tensors: its shape, and where its rows are."""

    shape: tuple[int, ...]
    strips: tuple[Strip, ...]
    transposed: bool
    columns: tuple[int, ...] = ()  # of a `StackInOne`, of the rows of each matrix
    less: float = 0.0  # values in files are so much less than ours
    is_reshaped: bool = False  # files keep its values in their order, in another shape


class HuggingFaceSource(SourceBase):
    """The weights of one folder under our names, in our order of heads and halves."""

    format_name = "huggingface"

    def __init__(self, directory: Path, options: SourceOptions) -> None:
        self.directory = directory
        fields = read_config(directory / CONFIG)
        self.family = family_called(fields.get("model_type"), path=fields.path)
        self.model = _model_config(self.family, fields)
        sizes = self.family.read_sizes(fields)
        _warn_of_unread_fields(fields)
        _check_vocabulary(sizes, options, fields.path)
        self._weights = open_weights(directory)
        try:
            self._keys = _known_keys(self.family, self._weights.tensors, directory)
            self._shapes = {
                key: self._weights.tensors[own].global_shape for key, own in self._keys.items()
            }
            self.sizes = replace(sizes, heads=self.family.heads_in(self._shapes))
            self._layouts = self._matched()
            self._tensors = {n: self._described(n) for n in self._layouts}
            self._check_copies()
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, TensorDescription]:
        """Dtype and whole shape of every parameter, as the model will have them."""
        return self._tensors

    @property
    def config(self) -> Mapping[str, JsonObject]:
        """The model, the tokenizer that lies beside it, and the precision of the weights."""
        first = next(iter(self._tensors.values()))
        code = self._tensors.get(_PREFIX + gpt_tensors.WORD_TABLE, first).dtype_code
        precision = {"BF16": {"bf16": True}, "F16": {"fp16": True}, "F64": {"fp64": True}}
        decoder = self.sizes.decoder
        common: dict[str, JsonObject] = {
            "model": to_plain(self.model),
            **({} if decoder is None else {CONFIG_GROUP: to_plain(decoder)}),
            "data": {"seq_length": self.sizes.positions, **_binary_head(self.sizes)},
            "precision": precision.get(code, {}),
        }
        if self.sizes.vision is not None:
            tokenizer: JsonObject = {"tokenizer_type": "NullTokenizer", "vocab_size": 1}
            return common | {"vision": to_plain(self.sizes.vision), "tokenizer": tokenizer}
        described = tokenizers.described(self.directory, self.sizes.vocab_rows)
        return common | {"tokenizer": described}

    @property
    def progress(self) -> Mapping[str, int]:
        """Empty: a folder holds weights, not a run."""
        return {}

    @property
    def scalars(self) -> JsonObject:
        """Empty: there is no optimizer."""
        return {}

    def read(self, name: str, box: Box) -> Tensor:
        """Return the elements `box` of `name`; touches the rows that hold them and no others."""
        layout, result = self._layouts[name], self._empty(name, box)
        if layout.less:
            stored = torch.empty(box.shape, dtype=dtype_of(self._code_of(layout)))
            self._read_rows(layout, box, stored)
            return result.copy_(stored).add_(layout.less)
        if layout.is_reshaped:
            return result.copy_(self._whole(layout)[box.slices])
        if layout.columns:
            self._read_stack(layout, box, result)
            return result
        if len(layout.shape) < 3:
            self._read_rows(layout, box, result)
            return result
        (matrix, row, *columns), (_, *lengths) = box.offset, box.shape
        for at, target in enumerate(result, start=matrix):
            inside = Box((at * layout.shape[1] + row, *columns), tuple(lengths))
            self._read_rows(layout, inside, target)
        return result

    def range_of(self, name: str) -> TensorRange | None:
        """Return where a tensor lies that is the whole of one in the files, as it is there."""
        layout = self._layouts[name]
        if layout.transposed or layout.columns or layout.less or len(layout.strips) != 1:
            return None
        found = self._weights.range_of(self._keys[layout.strips[0].key])
        return found if found is not None and found.shape == layout.shape else None

    def _whole(self, layout: _Layout) -> Tensor:
        """Return all values of a tensor that files keep in another shape, in ours."""
        key = self._keys[layout.strips[0].key]
        shape = self._weights.tensors[key].global_shape
        stored = torch.empty(shape, dtype=dtype_of(self._code_of(layout)))
        self._weights.read_into(key, Box((0,) * len(shape), shape), stored)
        return stored.view(layout.shape)

    def _read_rows(self, layout: _Layout, box: Box, result: Tensor) -> None:
        """Fill `result` with the rows and columns `box` of a layout, stacks as one matrix."""
        (first, *columns), (count, *widths) = box.offset, box.shape
        apart: dict[str, list[tuple[int, int, Tensor]]] = {}
        for strip in layout.strips:
            start, stop = max(first, strip.start), min(first + count, strip.start + strip.rows)
            if start >= stop:
                continue
            target = result[start - first : stop - first]
            at, key = strip.at + start - strip.start, self._keys[strip.key]
            if layout.transposed:
                apart.setdefault(key, []).append((at, stop - start, target))
            else:
                inside = Box((at, *columns), (stop - start, *widths))
                self._weights.read_into(key, inside, target)
        for key, wanted in apart.items():
            self._read_columns(key, wanted, columns[0], widths[0])

    def _read_stack(self, layout: _Layout, box: Box, result: Tensor) -> None:
        """Fill `result` with a box of a stack that is one tensor: the span of its columns, once."""
        (first, row, *offsets), (count, rows, *widths) = box.offset, box.shape
        wanted = layout.columns[row : row + rows]
        low, high = min(wanted), max(wanted) + 1
        span = torch.empty((count, *widths, high - low), dtype=result.dtype)
        at = Box((first, *offsets, low), (count, *widths, high - low))
        self._weights.read_into(self._keys[layout.strips[0].key], at, span)
        result.copy_(span[..., torch.tensor(wanted) - low].movedim(-1, 1))

    def close(self) -> None:
        """Close the files."""
        self._weights.close()

    def _empty(self, name: str, box: Box) -> Tensor:
        return torch.empty(box.shape, dtype=dtype_of(self._tensors[name].dtype_code))

    def _read_columns(
        self, key: str, wanted: list[tuple[int, int, Tensor]], row: int, rows: int
    ) -> None:
        """Read columns of a transposed tensor: the span of all that are needed, once."""
        low = min(at for at, _, _ in wanted)
        high = max(at + count for at, count, _ in wanted)
        span = torch.empty((rows, high - low), dtype=wanted[0][2].dtype)
        self._weights.read_into(key, Box((row, low), (rows, high - low)), span)
        for at, count, target in wanted:
            target.copy_(span[:, at - low : at - low + count].t())

    def _matched(self) -> dict[str, _Layout]:
        """Return our tensors and where they are.

        Raises:
            CheckpointError: names and shapes in the files that are not those of the config.
        """
        shapes = self.family.tensors_of(self.model, self.sizes)
        layouts: dict[str, _Layout] = {}
        expected: dict[str, tuple[int, ...]] = {}
        for name, shape in shapes.items():
            rule, keys = self.family.rule(name, self.model)
            strips = self._stored_strips(tuple(rule.strips(self.model, flat(shape)[0], keys)))
            if isinstance(rule, StackInOne):
                layouts[_PREFIX + name] = _Layout(shape, strips, True, rule.columns(shape[1]))
                expected[keys[0]] = rule.their_shape(shape)
                continue
            if isinstance(rule, Reshaped):
                assert self.sizes.vision is not None  # noqa: S101  # invariant: as its family says
                layouts[_PREFIX + name] = _Layout(shape, strips, False, is_reshaped=True)
                expected[keys[0]] = rule.their_shape(shape, self.sizes.vision)
                continue
            transposed = rule.transposed and len(shape) == 2
            less = less_than_ours(rule)
            layouts[_PREFIX + name] = _Layout(shape, strips, transposed, less=less)
            expected |= their_shapes(shape, strips, transposed=transposed)
        spare, stored = self.family.repeated(self.model), self._shapes
        problems = [
            f"missing: {key}{_nearest(key, stored)}" for key in expected if key not in stored
        ]
        problems += [
            f"unknown: {key}{_nearest(key, expected)}"
            for key in stored
            if key not in expected and key not in spare
        ]
        problems += [
            f"shape: {key} is {list(stored[key])}, and {CONFIG} makes it {list(shape)}"
            for key, shape in expected.items()
            if key in stored and stored[key] != shape
        ]
        if problems:
            raise _mismatch(self.directory, self.family, self.sizes, problems)
        return layouts

    def _stored_strips(self, strips: tuple[Strip, ...]) -> tuple[Strip, ...]:
        """Return the strips whose keys are stored, of a tensor that may be stored twice."""
        if not all(strip.key in self.family.copies for strip in strips):
            return strips
        return tuple(strip for strip in strips if strip.key in self._keys) or strips[:1]

    def _described(self, name: str) -> TensorDescription:
        layout = self._layouts[name]
        codes = {self._weights.tensors[self._keys[s.key]].dtype_code for s in layout.strips}
        if len(codes) > 1:
            keys = ", ".join(sorted({strip.key for strip in layout.strips}))
            raise CheckpointError(
                "tensors that are one here have several element types",
                found=f"{self.directory}: {keys} are {', '.join(sorted(codes))}",
                fix="save the model in one type with transformers: "
                "model.to(torch.bfloat16).save_pretrained(FOLDER)",
            )
        code = codes.pop()
        if layout.less and ITEM_BYTES[code] < 4:
            code = "F32"  # half precision near 1 would lose most digits of what is stored
        return TensorDescription(code, layout.shape)

    def _code_of(self, layout: _Layout) -> str:
        """Return the element type in files of a tensor that is one there."""
        return self._weights.tensors[self._keys[layout.strips[0].key]].dtype_code

    def _check_copies(self) -> None:
        """Check that a tensor stored beside the one that it is tied to is equal to it."""
        for key, ours in self.family.repeated(self.model).items():
            name = _PREFIX + ours
            if key in self._keys and name in self._tensors and not self._is_copy(key, name):
                raise self._not_tied(key, ours)

    def _is_copy(self, key: str, name: str) -> bool:
        own = self._keys[key]
        if self._weights.tensors[own] != self._tensors[name]:
            return False
        rows, *widths = self._tensors[name].global_shape
        for start in range(0, rows, _COMPARED_ROWS):
            count = min(_COMPARED_ROWS, rows - start)
            box = Box((start, *(0 for _ in widths)), (count, *widths))
            expected, copy = self.read(name, box), self._empty(name, box)
            self._weights.read_into(own, box, copy)
            if not torch.equal(expected.view(torch.uint8), copy.view(torch.uint8)):
                return False
        return True

    def _not_tied(self, key: str, ours: str) -> CheckpointError:
        if key not in self.family.head:
            return CheckpointError(
                "files hold one tensor of the model twice, with two values",
                found=f"{self.directory}: {key} and another key of {ours} are not equal",
                fix="take out the one that is not meant, or save the model anew with transformers",
            )
        return CheckpointError(
            "the config ties the output projection to the embedding, and the files hold another",
            found=f"{self.directory}: {key} is not the word embedding",
            fix=f"set 'tie_word_embeddings' to false in {CONFIG} if the projection is meant, or "
            "take it out of the files",
        )


def read_config(path: Path) -> Fields:
    """Return the config.json at `path`.

    Raises:
        CheckpointError: it is missing or not a JSON object; it names a field twice; the weights
            are quantized.
    """
    try:
        values = parse_json(path.read_bytes(), constants=True)
    except FileNotFoundError as error:
        raise CheckpointError(
            "a Hugging Face folder has no config.json",
            found=str(path.parent),
            fix="copy the folder whole",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _not_a_config(path, str(error)) from error
    if not isinstance(values, dict):
        raise _not_a_config(path, "it is not an object")
    fields = Fields(path, values)
    quantization = fields.get("quantization_config", None)
    if quantization is not None:
        is_mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
        raise CheckpointError(
            "the weights of a Hugging Face folder are quantized",
            found=f"{path}: 'quantization_config' is {values['quantization_config']!r}"[:300],
            fix=_DEQUANTIZE_MXFP4
            if is_mxfp4
            else "take the release whose weights are float32, bfloat16 or float16",
        )
    return fields


def _model_config(family: Family, fields: Fields) -> ModelConfig:
    values = family.read_config(fields)
    std = fields.number("initializer_range", None)
    if std:
        values["init_method_std"] = std
    try:
        return from_plain(ModelConfig, values)
    except ConfigError as error:
        raise CheckpointError(
            f"the config of a Hugging Face folder describes no model: {error.problem}",
            found=f"{fields.path}: {error.found}",
            fix="copy config.json again, from the release that the weights are of",
        ) from error


def _warn_of_unread_fields(fields: Fields) -> None:
    """Warn of fields that the family's class in transformers does not read either."""
    if unread := fields.unread():
        log.warning(
            f"{fields.path} has fields that its family does not have, which were not read: "
            f"{', '.join(unread)}"
        )


def _check_vocabulary(sizes: Sizes, options: SourceOptions, path: Path) -> None:
    """Check that the vocabularies are equal: probabilities sum over all rows of the model."""
    if sizes.vision is not None:
        return
    if options.vocab_size is not None and options.vocab_size != sizes.vocab_rows:
        raise CheckpointError(
            "the vocabulary of a Hugging Face model is not that of this run",
            found=f"{path}: 'vocab_size' is {sizes.vocab_rows}, and this run has "
            f"{options.vocab_size} tokens",
            fix=f"add --true-vocab-size {sizes.vocab_rows}: rows that no text uses belong to the "
            "model too"
            if sizes.vocab_rows > options.vocab_size
            else "use the tokenizer of the model, which has no tokens beside it: --tokenizer-type "
            f"HFTokenizer --tokenizer-name-or-path {path.parent}",
        )


def _known_keys(family: Family, stored: Collection[str], directory: Path) -> dict[str, str]:
    """Map current names with the family's prefix to names in the files, without buffers.

    Files that were saved from a bare base model have no prefix.
    """
    bare = not any(key.startswith(family.prefix) for key in stored)
    known: dict[str, str] = {}
    names = [(n, key) for key in stored if not family.is_buffer(key) for n in family.keys_for(key)]
    for name, key in names:
        if name in family.head and family.head[0] not in known:
            name = family.head[0]
        elif bare:
            name = family.with_prefix(name)
        if name in known:
            raise CheckpointError(
                "files hold one tensor under two spellings of its name",
                found=f"{directory}: {known[name]} and {key}",
                fix="save the model anew with transformers: model.save_pretrained(FOLDER)",
            )
        known[name] = key
    return known


def _binary_head(sizes: Sizes) -> dict[str, bool]:
    return {} if sizes.heads is None else {"bert_binary_head": sizes.heads.order}


def _mismatch(
    directory: Path, family: Family, sizes: Sizes, problems: list[str]
) -> CheckpointError:
    shown = problems[:_SHOWN]
    if len(problems) > _SHOWN:
        shown.append(f"and {len(problems) - _SHOWN} more")
    return CheckpointError(
        f"the files of a Hugging Face folder do not hold the {family.model_type} model that its "
        "config describes",
        found=f"{directory}:\n    " + "\n    ".join(shown),
        fix="take config.json and weights of the same release, of a model such as "
        f"{family.architecture_of(sizes)}",
    )


def _nearest(key: str, keys: Iterable[str]) -> str:
    close = difflib.get_close_matches(key, list(keys), n=2, cutoff=0.8)
    return f" (nearest: {', '.join(close)})" if close else ""


def _not_a_config(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        "the config.json of a Hugging Face folder cannot be read",
        found=f"{path}: {reason}",
        fix="copy it again, from the release that the weights are of",
    )
