"""Defines a family of Hugging Face models: names, a table of tensors, and config converters."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.checkpoint import model_kind
from megatron.checkpoint.bert_tensors import BertHeads, bert_tensors
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import TensorRule
from megatron.checkpoint.gpt_tensors import WORD_TABLE, Shapes, gpt_tensors
from megatron.checkpoint.t5_tensors import t5_tensors
from megatron.checkpoint.vit_tensors import vit_tensors
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.fields import flag_name
from megatron.config.model import ModelConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.models.vision import VisionConfig
from megatron.json_values import JsonValue

_LAYER = re.compile(r"^((?:encoder\.|decoder\.)?layers)\.(\d+)\.")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model that its `ModelConfig` does not hold.

    `heads` are those of a BERT, which follow from the files, not from config.json; `decoder` is
    that of a T5; `vision` are the flags of images of a ViT, which has no vocabulary. None: the
    model is another.
    """

    vocab_rows: int
    positions: int
    heads: BertHeads | None = None
    decoder: EncoderDecoderConfig | None = None
    vision: VisionConfig | None = None


# What no family has unless it says so.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "has_sinks": (False,),
    "has_plain_unit": (True,),
    "norm_placement": (NormPlacement.BEFORE,),
    "qk_layernorm_scope": (QkNormScope.HEAD,),
    "softmax_scale": (None,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logit_divisor": (1.0,),
    "attention_soft_cap": (None,),
    "logit_soft_cap": (None,),
    "window_rotary_base": (None,),
    "moe_router_add_bias": (False,),
    "use_mup": (False,),
}


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        prefix: the beginning of the base model's keys in a model with a head; files of a bare base
            model leave it out.
        head: the keys of the output projection, the one to write first.
        supported: the models of ours that the family can hold: attribute of `ModelConfig` to the
            values it may have.
        free: attributes that may have any value, although those of most families have one.
        tensors: rule for each of our tensors, by its name with `{}` for the layer. Keys are without
            `prefix`, except for `head` and keys with a prefix in `above`; `{before}` in a key
            stands for the layer before, `{last}` for the last one.
        buffers: patterns of keys that hold no weights: masks and frequencies of old releases.
        experts: its layers have experts; all others are dense.
        dense_layers: beside such layers it may have others.
        plain_heads: it has no groups of queries, and heads that together are as wide as the
            hidden states.
        derived: attributes that have the one value that the others make necessary, by what
            returns it.
        read_config: fields of `ModelConfig` as plain values.
        write_config: the config.json without what all families have.
        kinds: the kinds of our models that it holds, as defined in `model_kind`.
        above: beginnings of the keys of heads, which have no prefix.
        spellings: endings of keys in old releases to what they are now.
        for_several: endings of keys to those of several keys of the table, all with this value.
        copies: keys that may be stored although they repeat a tensor of ours, which is named.
        of_heads: the architecture of a BERT with these heads, in place of `architecture`.
    """

    model_type: str
    architecture: str
    prefix: str
    head: tuple[str, ...]
    supported: Mapping[str, Sequence[object]]
    tensors: Mapping[str, TensorRule]
    buffers: tuple[str, ...]
    read_config: Callable[[Fields], dict[str, object]]
    read_sizes: Callable[[Fields], Sizes]
    write_config: Callable[[ModelConfig, Sizes], dict[str, JsonValue]]
    free: tuple[str, ...] = ()
    plain_heads: bool = False
    derived: Mapping[str, Callable[[ModelConfig], object]] = field(default_factory=dict)
    experts: bool = False
    dense_layers: bool = False
    kinds: tuple[str, ...] = (model_kind.GPT,)
    above: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    for_several: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    of_heads: Callable[[BertHeads], str] | None = None

    def lacks(self, config: ModelConfig) -> Iterator[str]:
        """Yield the features of our model that the family lacks, spelled as flags."""
        for name, allowed in {**_PLAIN, **self.supported}.items():
            value = getattr(config, name)
            if name not in self.free and value not in allowed:
                supported = " or ".join(str(one) for one in allowed)
                yield f"{_spelled(name)} {value} ({self.model_type} has {supported})"
        has_all = self.dense_layers or all(config.expert_layers)
        if self.experts and config.has_experts and not has_all:
            dense = config.expert_layers.index(False)
            yield f"layer {dense} without experts ({self.model_type} has them in every layer)"
        if config.has_experts != self.experts:
            supported = "experts" if self.experts else "one MLP in a layer"
            yield f"--num-experts {config.num_experts} ({self.model_type} has {supported})"
        for name, needed in self.derived.items():
            value, own_value = getattr(config, name), needed(config)
            if value != own_value:
                yield f"{_spelled(name)} {value} ({self.model_type} has {own_value})"
        if not self.plain_heads:
            return
        heads, width = config.num_attention_heads, config.head_width
        if config.query_groups != heads:
            yield f"--num-query-groups {config.query_groups} ({self.model_type} has {heads})"
        if heads * width != config.hidden_size:
            own = config.hidden_size / heads
            yield f"--kv-channels {width} ({self.model_type} has {own:g})"

    def rule(self, name: str, config: ModelConfig) -> tuple[TensorRule, tuple[str, ...]]:
        """Return the rule of one of our tensors, and its keys as files have them."""
        found = _LAYER.match(name)
        layer = int(found.group(2)) if found else 0
        rule = self.tensors.get(name) or self.tensors[_LAYER.sub(r"\1.{}.", name)]
        numbers = {"{}": layer, "{before}": layer - 1, "{last}": config.num_layers - 1}
        keys = [_filled(self.with_prefix(key), numbers) for key in rule.keys]
        return rule, tuple(keys)

    def tensors_of(self, config: ModelConfig, sizes: Sizes) -> Shapes:
        """Return whole shapes of all of our tensors, by their names without `model/`."""
        rows, positions = sizes.vocab_rows, sizes.positions
        if sizes.decoder is not None:
            return t5_tensors(config, sizes.decoder, vocab_rows=rows, positions=positions)
        if sizes.vision is not None:
            return vit_tensors(config, sizes.vision)
        if sizes.heads is None:
            return gpt_tensors(config, vocab_rows=rows, positions=positions)
        return bert_tensors(config, vocab_rows=rows, positions=positions, heads=sizes.heads)

    def heads_in(self, shapes: Shapes) -> BertHeads | None:
        """Return the heads of files with these prefixed keys and shapes; None if no BERT's."""
        if not model_kind.has_optional_heads(self.kinds[0]):
            return None
        keys = {name: self.with_prefix(rule.keys[0]) for name, rule in self.tensors.items()}
        return BertHeads.of({name: shapes[key] for name, key in keys.items() if key in shapes})

    def architecture_of(self, sizes: Sizes) -> str:
        """Return the class of transformers that reads all of it."""
        if self.of_heads is None or sizes.heads is None:
            return self.architecture
        return self.of_heads(sizes.heads)

    def written_key(self, key: str, sizes: Sizes) -> str:
        """Return a prefixed key as it is in files: without the prefix for a bare base model."""
        heads = sizes.heads
        has_head = heads is None or heads.order or heads.words or heads.classes
        return key if has_head else key.removeprefix(self.prefix)

    def repeated(self, config: ModelConfig) -> Mapping[str, str]:
        """Return keys that may repeat a tensor of ours, with its name, as a tied head does."""
        heads = dict.fromkeys(self.head, WORD_TABLE) if config.tied else {}
        return {**heads, **self.copies}

    def is_above(self, key: str) -> bool:
        """Return whether `key` is a head's, and has no prefix."""
        return key in self.head or key.startswith(self.above)

    def with_prefix(self, key: str) -> str:
        """Return a key of the table as files have it that hold a head."""
        return key if self.is_above(key) else self.prefix + key

    def respelled(self, key: str) -> str:
        """Return a key as it is spelled now."""
        for old, new in self.spellings.items():
            if key.endswith(old):
                return key.removesuffix(old) + new
        return key

    def keys_for(self, key: str) -> tuple[str, ...]:
        """Return the keys of the table that a key in files stands for, as they are spelled now."""
        for one, several in self.for_several.items():
            if key.endswith(one):
                return tuple(key.removesuffix(one) + other for other in several)
        return (self.respelled(key),)

    def is_buffer(self, key: str) -> bool:
        """Return whether `key` holds no weights."""
        return any(re.search(pattern, key) for pattern in self.buffers)


def _filled(key: str, numbers: Mapping[str, int]) -> str:
    for sign, number in numbers.items():
        key = key.replace(sign, str(number))
    return key


def _spelled(name: str) -> str:
    return {
        "glu": "--glu-activation",
        "ffn_width": "--ffn-hidden-size",
        "score_scale": "--softmax-scale",
        "activation": "activation",
        "has_sinks": "scores of sinks",
        "has_bounded_unit": "bounds of a gated unit",
        "has_plain_unit": "a gated unit without offset and bound",
        "layers_without_rotation": "layers without rotation",
        "layers_without_window": "layers without the window of others",
    }.get(name) or flag_name(name)
