"""What a family of Hugging Face models is: names, a table of tensors, and two ways of configs."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.formats.hf_families.fields import Fields
from megatron.checkpoint.formats.hf_families.layouts import Rule
from megatron.config.fields import flag_name
from megatron.config.model import ModelConfig

_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class Sizes:
    """What a config.json says that is not in a `ModelConfig`."""

    vocab_rows: int
    positions: int


@dataclass(frozen=True)
class Family:
    """One `model_type`.

    Attributes:
        prefix: what the base model's keys begin with when a head is above it; files of a bare
            base model leave it out.
        head: the keys of the output projection, the one to write first.
        ours: what our model has to be for the family to hold it: attribute of `ModelConfig` to
            the values it may have.
        tensors: rule for each of our tensors, by its name with `{}` for the layer. Keys are
            without `prefix`, but for `head`.
        buffers: patterns of keys that hold no weights: masks and frequencies of old releases.
        plain_heads: it has no groups of queries, and heads that together are as wide as the
            hidden states.
        read_config: fields of `ModelConfig` as plain values.
        write_config: the config.json without what all families have.
    """

    model_type: str
    architecture: str
    prefix: str
    head: tuple[str, ...]
    ours: Mapping[str, Sequence[Any]]
    tensors: Mapping[str, Rule]
    buffers: tuple[str, ...]
    read_config: Callable[[Fields], dict[str, Any]]
    read_sizes: Callable[[Fields], Sizes]
    write_config: Callable[[ModelConfig, Sizes], dict[str, Any]]
    plain_heads: bool = False

    def lacks(self, config: ModelConfig) -> Iterator[str]:
        """What of our model the family has no place for, spelled as flags."""
        for name, allowed in self.ours.items():
            value = getattr(config, name)
            if value not in allowed:
                there = " or ".join(str(one) for one in allowed)
                yield f"{_spelled(name)} {value} ({self.model_type} has {there})"
        if not self.plain_heads:
            return
        heads, width = config.num_attention_heads, config.head_width
        if config.query_groups != heads:
            yield f"--num-query-groups {config.query_groups} ({self.model_type} has {heads})"
        if heads * width != config.hidden_size:
            own = config.hidden_size / heads
            yield f"--kv-channels {width} ({self.model_type} has {own:g})"

    def rule(self, name: str) -> tuple[Rule, tuple[str, ...]]:
        """The rule of one of our tensors, and its keys as files have them."""
        found = _LAYER.match(name)
        layer = found.group(1) if found else ""
        rule = self.tensors[_LAYER.sub("layers.{}.", name)]
        keys = tuple(
            key if key in self.head else self.prefix + key.replace("{}", layer) for key in rule.keys
        )
        return rule, keys

    def is_buffer(self, key: str) -> bool:
        """Whether `key` holds no weights."""
        return any(re.search(pattern, key) for pattern in self.buffers)


def _spelled(name: str) -> str:
    return {
        "glu": "--glu-activation",
        "activation": "activation",
    }.get(name) or flag_name(name)
