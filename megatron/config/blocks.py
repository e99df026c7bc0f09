"""Checks the flags about blocks: where norms stand, fixed factors, and those that muP gives.

The flags themselves are fields of `ModelConfig`.
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Protocol

from megatron.config.fields import check_field
from megatron.errors import ConfigError


class NormPlacement(StrEnum):
    """Where the norms of a block stand, of each of its two branches."""

    BEFORE = "before"
    AFTER = "after"  # before the addition of the residual, as in OLMo 2
    BOTH = "both"  # as in Gemma 2

    @property
    def is_before(self) -> bool:
        """Whether a branch reads normed hidden states."""
        return self is not NormPlacement.AFTER

    @property
    def is_after(self) -> bool:
        """Whether the output of a branch is normed."""
        return self is not NormPlacement.BEFORE


class QkNormScope(StrEnum):
    """The channels that a norm of queries, or of keys, has its statistics of."""

    HEAD = "head"  # those of one head; all heads share a gain
    ALL_HEADS = "all-heads"  # those of all heads of a token together, as in OLMo 2


class _Flags(Protocol):
    """The fields of `ModelConfig` that are about a block, and what they are combined with."""

    @property
    def norm_placement(self) -> NormPlacement: ...
    @property
    def apply_residual_connection_post_layernorm(self) -> bool: ...
    @property
    def qk_layernorm(self) -> bool: ...
    @property
    def qk_layernorm_scope(self) -> QkNormScope: ...
    @property
    def embedding_multiplier(self) -> float: ...
    @property
    def residual_multiplier(self) -> float: ...
    @property
    def softmax_scale(self) -> float | None: ...
    @property
    def attention_soft_cap(self) -> float | None: ...
    @property
    def logit_soft_cap(self) -> float | None: ...
    @property
    def logit_divisor(self) -> float: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def window_rotary_base(self) -> float | None: ...
    @property
    def position_embedding_type(self) -> str: ...
    @property
    def use_mup(self) -> bool: ...
    @property
    def init_method_xavier_uniform(self) -> bool: ...


def block_problems(flags: _Flags) -> Iterator[ConfigError]:
    """Yield the errors in the flags about blocks."""
    placement = flags.norm_placement
    if flags.apply_residual_connection_post_layernorm and not placement.is_before:
        yield ConfigError(
            "residuals were to be taken after norms that do not exist",
            found=f"--apply-residual-connection-post-layernorm, --norm-placement {placement}",
            fix="leave one of the two out, or use --norm-placement both",
        )
    if flags.qk_layernorm_scope is not QkNormScope.HEAD and not flags.qk_layernorm:
        yield ConfigError(
            "norms of queries and keys were described, and the model has none",
            found=f"--qk-layernorm-scope {flags.qk_layernorm_scope} without --qk-layernorm",
            fix="add --qk-layernorm, or drop --qk-layernorm-scope",
        )
    base, positions = flags.window_rotary_base, flags.position_embedding_type
    if base is not None and (flags.sliding_window is None or positions != "rope"):
        yield ConfigError(
            "layers with a window were to rotate otherwise, and there are none, or none rotates",
            found=f"--window-rotary-base {base}, --sliding-window {flags.sliding_window}, "
            f"--position-embedding-type {positions}",
            fix="add --sliding-window and --position-embedding-type rope, or drop "
            "--window-rotary-base",
        )
    for name in _FACTORS:
        value = getattr(flags, name)
        if value is not None:
            yield from check_field(
                0 < value < math.inf,
                name,
                value,
                problem="it is not a positive number",
                fix="use a number above 0, or leave it out",
            )


_FACTORS = (
    *("embedding_multiplier", "residual_multiplier", "softmax_scale", "logit_divisor"),
    *("attention_soft_cap", "logit_soft_cap", "window_rotary_base"),
    *("mup_attn_scale_power", "mup_embedding_mult", "mup_output_mult"),
)


# What --use-mup goes with, and means nothing without.
MUP_DEFAULTS: Mapping[str, float | None] = {
    "mup_base_hidden_size": None,
    "mup_base_head_dim": None,
    "mup_attn_scale_power": 1.0,
    "mup_embedding_mult": 1.0,
    "mup_output_mult": 1.0,
}


def mup_problems(flags: _Flags) -> Iterator[ConfigError]:
    """Yield the errors in the flags of muP."""
    for name in ("mup_base_hidden_size", "mup_base_head_dim"):
        value = getattr(flags, name)
        if value is not None:
            yield from check_field(
                value > 0, name, value, problem="it is not positive", fix="leave it out"
            )
    if not flags.use_mup:
        given = [
            f"--{name.replace('_', '-')}"
            for name, default in MUP_DEFAULTS.items()
            if getattr(flags, name) != default
        ]
        if given:
            yield ConfigError(
                "flags of muP were given without muP",
                found=f"{', '.join(given)} without --use-mup",
                fix="add --use-mup, or leave them out",
            )
        return
    if flags.softmax_scale is not None:
        yield ConfigError(
            "the factor of scores was given twice",
            found=f"--use-mup, --softmax-scale {flags.softmax_scale}",
            fix="drop --softmax-scale; --mup-base-head-dim and --mup-attn-scale-power make it",
        )
    if flags.init_method_xavier_uniform:
        yield ConfigError(
            "initial values were to follow two rules",
            found="--use-mup, --init-method-xavier-uniform",
            fix="drop --init-method-xavier-uniform",
        )
