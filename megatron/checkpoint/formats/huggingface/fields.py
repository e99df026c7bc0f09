"""Reads a config.json field by field, by name, type and meaning; lists the fields not read.

Nothing is guessed: a value that our model does not support is refused by its field and value. A
field that the family's own class in `transformers` does not read changes nothing there, and is
listed.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from megatron.config.model import ModelConfig, RopeType
from megatron.errors import CheckpointError
from megatron.json_values import JsonObject, JsonValue

_REQUIRED: Any = object()
ROTARY_BASE = 10000.0  # the default of transformers, but for some families
T = TypeVar("T")

# Written by every family, without effect on the network: bookkeeping, generation, training.
_BOOKKEEPING = frozenset(
    [
        "model_type",
        "architectures",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "use_cache",
        "_name_or_path",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "unk_token_id",
        "initializer_range",
        "classifier_dropout",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "task_specific_params",
        "gradient_checkpointing",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "return_dict_in_generate",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "is_decoder",
        "is_encoder_decoder",
        "torchscript",
        "pruned_heads",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "add_cross_attention",
        "tie_encoder_decoder",
        "finetuning_task",
        "prefix",
        "tokenizer_class",
        "use_bfloat16",
        "tf_legacy_loss",
        "n_ctx",
        "pretraining_tp",
        "reorder_and_upcast_attn",
        "_attn_implementation_autoset",
        "attn_implementation",
        "_attn_implementation",
        "auto_map",
    ]
)


class Fields:
    """The fields of one config.json."""

    def __init__(self, path: Path, values: JsonObject) -> None:
        self.path, self._values = path, values
        self._asked: set[str] = set()

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return the value of any kind; what is null counts as absent where there is a default."""
        self._asked.add(name)
        value = self._values.get(name)
        if value is None:
            if default is _REQUIRED:
                raise CheckpointError(
                    "the config of a Hugging Face folder lacks a field that its family needs",
                    found=f"{self.path}: no {name!r}",
                    fix="copy config.json again, from the release that the weights are of",
                )
            return default
        return value

    def has(self, name: str) -> bool:
        """Return whether the field is there, be it null."""
        self._asked.add(name)
        return name in self._values

    def integer(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a whole number above 0, or the default."""
        value = self.get(name, default)
        if value is not default and (type(value) is not int or value < 1):
            raise self.wrong_kind(name, value, "a whole number above 0")
        return value

    def integer_of(self, *names: str) -> int:
        """Return a whole number above 0 that releases call by one of several names."""
        found = [value for name in names if (value := self.integer(name, None)) is not None]
        return int(found[0] if found else self.integer(names[-1]))

    def number(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return a number, as a float, or the default."""
        value = self.get(name, default)
        if value is not default:
            if type(value) not in (int, float):
                raise self.wrong_kind(name, value, "a number")
            return float(value)
        return value

    def boolean(self, name: str, default: Any = _REQUIRED) -> Any:
        """Return true or false, or the default."""
        value = self.get(name, default)
        if value is not default and type(value) is not bool:
            raise self.wrong_kind(name, value, "true or false")
        return value

    def mapping(self, name: str) -> JsonObject:
        """Return an object; empty where there is none."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.wrong_kind(name, value, "an object")
        return value

    def choice(self, name: str, choices: Mapping[str, T], default: str) -> T:
        """Return what `choices` gives for the text of the field."""
        value = self.get(name, default)
        if value not in choices:
            raise self.refused(name, value, choices)
        return choices[value]

    def must_be(self, name: str, only: object, default: object, *, why: str) -> None:
        """Refuse any value but `only`."""
        value = self.get(name, default)
        if value != only:
            raise self.refused(name, value, [only], why=why)

    def refused(
        self, name: str, value: object, supported: Collection[object], *, why: str = ""
    ) -> CheckpointError:
        """Return the error for a value that no model of ours computes."""
        return CheckpointError(
            "the Hugging Face model computes something that no model here does"
            + (f": {why}" if why else ""),
            found=f"{self.path}: {name!r} is {value!r}",
            fix=f"{name!r} may be {' or '.join(repr(one) for one in supported)}; "
            "another model cannot be converted",
        )

    def wrong_kind(self, name: str, value: object, wanted: str) -> CheckpointError:
        """Return the error for a value of another type than the field's."""
        return CheckpointError(
            "the config of a Hugging Face folder has a field of the wrong kind",
            found=f"{self.path}: {name!r} is {value!r}, not {wanted}",
            fix="copy config.json again, from the release that the weights are of",
        )

    def unread(self) -> list[str]:
        """Return the fields that were not read, except for bookkeeping."""
        return sorted(
            name
            for name, value in self._values.items()
            if name not in self._asked and name not in _BOOKKEEPING and value is not None
        )


def read_rope(
    fields: Fields, *, base_name: str = "rope_theta", default: float = ROTARY_BASE
) -> dict[str, object]:
    """Return the rotary fields of our model, from either spelling.

    That is `rope_theta` beside `rope_scaling` (before transformers 5), or all of it in
    `rope_parameters`.
    """
    base = fields.number(base_name, default)
    rope = dict(fields.mapping("rope_parameters")) or dict(fields.mapping("rope_scaling"))
    kind = rope.get("rope_type", rope.get("type", "default"))
    where = "rope_parameters" if fields.mapping("rope_parameters") else "rope_scaling"
    # A field of the nested object is checked as those of the outer one are.
    inner = Fields(fields.path, rope)
    result = {"position_embedding_type": "rope", "rotary_base": inner.number("rope_theta", base)}
    if kind == "linear":
        result["rotary_seq_len_interpolation_factor"] = inner.number("factor")
    elif kind == "llama3":
        length = fields.integer("max_position_embeddings")
        result |= {
            "use_rope_scaling": True,
            "rope_scaling_factor": inner.number("factor"),
            "rope_scaling_low_freq_factor": inner.number("low_freq_factor"),
            "rope_scaling_high_freq_factor": inner.number("high_freq_factor"),
            "rope_scaling_original_length": inner.integer(
                "original_max_position_embeddings", length
            ),
        }
    elif kind == "yarn":
        result |= _read_yarn(inner, length=fields.integer("max_position_embeddings"))
    elif kind != "default":
        raise fields.refused(f"{where}.rope_type", kind, ["default", "linear", "llama3", "yarn"])
    return result


def _read_yarn(rope: Fields, *, length: int) -> dict[str, object]:
    """Return our flags of YaRN; `length` is that of the release's sequences."""
    original = rope.integer("original_max_position_embeddings", length)
    factor = rope.number("factor", length / original)
    weights = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    # One of the two alone has no effect in transformers.
    own, of_all = weights if all(weights) else (1.0, 0.0)
    given = rope.number("attention_factor", None)
    if given is not None and factor > 1 and given >= 1:
        own, of_all = (given - 1) / (0.1 * math.log(factor)), 0.0
    elif given not in (None, 1.0):
        raise rope.refused("attention_factor", given, [1.0], why="rotation that shortens")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": rope.number("beta_fast", 32.0),
        "yarn_beta_slow": rope.number("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": rope.boolean("truncate", True),
        "mscale": own,
        "mscale_all_dim": of_all,
    }


def read_rotary_share(fields: Fields, name: str, default: float) -> float:
    """Return the share of a head that rotates: the field `name`, before transformers 5."""
    inner = Fields(fields.path, fields.mapping("rope_parameters"))
    return float(inner.number("partial_rotary_factor", fields.number(name, default)))


def rope_scaling(config: ModelConfig) -> dict[str, JsonValue] | None:
    """Return the `rope_scaling` of a config.json for a `ModelConfig`; both generations read it."""
    if config.use_rope_scaling:
        return {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_length,
        }
    if config.rope_type is RopeType.YARN:
        return {
            "rope_type": "yarn",
            "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.yarn_original_max_position_embeddings,
            "beta_fast": config.yarn_beta_fast,
            "beta_slow": config.yarn_beta_slow,
            "truncate": config.yarn_correction_range_round_to_int,
            **_yarn_weights(config),
        }
    if config.rotary_seq_len_interpolation_factor is not None:
        return {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    return None


def _yarn_weights(config: ModelConfig) -> dict[str, JsonValue]:
    """Return the fields of a config.json that give rotated queries and keys their size."""
    own, of_all = config.mscale, config.mscale_all_dim
    if (own, of_all) == (1.0, 0.0):
        return {}  # what transformers does without fields
    if own and of_all:
        return {"mscale": own, "mscale_all_dim": of_all}
    return {"attention_factor": config.rotary_magnitude}
