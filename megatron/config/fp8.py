"""Fp8Config: whether the matrix products of linear layers take 8-bit operands, and their scales."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megatron.config.fields import check_field, default_of, field_names, flag, flag_name, raise_all
from megatron.errors import ConfigError


class Fp8Format(StrEnum):
    """The 8-bit formats of operands (Micikevicius et al. 2022, arXiv 2209.05433)."""

    E4M3 = "e4m3"
    HYBRID = "hybrid"  # gradients in e5m2, everything else in e4m3


class Fp8Recipe(StrEnum):
    """Which elements of an operand share a scale."""

    TENSORWISE = "tensorwise"
    DELAYED = "delayed"  # as tensorwise, by the largest values of steps before
    ROWWISE = "rowwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"

    @property
    def multiple(self) -> int:
        """What every dimension of a weight has to be a multiple of, on each rank."""
        return {Fp8Recipe.BLOCKWISE: 128, Fp8Recipe.MXFP8: 32}.get(self, 16)


class AmaxAlgorithm(StrEnum):
    """Which entry of a history of largest values a scale comes from."""

    MAX = "max"
    MOST_RECENT = "most_recent"


_HISTORY_LENGTH = 1024  # steps, as in Transformer Engine


class LayerEnds(NamedTuple):
    """How many transformer layers stay in the model's precision: the first and the last ones."""

    first: int = 0
    last: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Matrix products of linear layers with 8-bit operands; none unless a format is given."""

    fp8_format: Fp8Format | None = flag(
        None,
        help="multiply the linear layers of transformer blocks in FP8: e4m3 for all operands, or "
        "hybrid with e5m2 for gradients; needs --bf16",
    )
    fp8_recipe: Fp8Recipe = flag(
        Fp8Recipe.TENSORWISE,
        help="which elements share a scale: tensorwise all of a matrix, rowwise a row, blockwise "
        "128 of a row (128x128 of a weight), mxfp8 32 of a row with powers of two; delayed is "
        "tensorwise by the largest values of steps before",
    )
    fp8_amax_history_len: int | None = flag(
        None,
        help="with --fp8-recipe delayed, how many steps a history of largest values holds "
        f"[{_HISTORY_LENGTH}]",
    )
    fp8_amax_compute_algo: AmaxAlgorithm | None = flag(
        None,
        help="with --fp8-recipe delayed, take scales from the largest value of the history (max) "
        "or from the newest one (most_recent) [max]",
    )
    fp8_margin: int = flag(
        0, help="leave room for values 2^N times the largest one: scales grow by 2^N"
    )
    fp8_wgrad: bool = flag(True, help="compute gradients of weights in FP8 too")
    first_last_layers_bf16: bool = flag(
        False, help="keep the first and the last transformer layers in the model's precision"
    )
    num_layers_at_start_in_bf16: int = flag(
        1, help="how many first layers --first-last-layers-bf16 keeps"
    )
    num_layers_at_end_in_bf16: int = flag(
        1, help="how many last layers --first-last-layers-bf16 keeps"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def ends(self) -> LayerEnds:
        """The transformer layers that stay in the model's precision."""
        if not self.first_last_layers_bf16:
            return LayerEnds()
        return LayerEnds(self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16)

    @property
    def history_length(self) -> int:
        """How many steps a history of largest values holds."""
        return self.fp8_amax_history_len or _HISTORY_LENGTH

    @property
    def amax_algorithm(self) -> AmaxAlgorithm:
        """Which entry of a history a scale comes from."""
        return self.fp8_amax_compute_algo or AmaxAlgorithm.MAX

    def has_layer(self, layer: int, num_layers: int) -> bool:
        """Return whether the linear layers of transformer layer `layer`, from 0, are in FP8."""
        first, last = self.ends
        return self.fp8_format is not None and first <= layer < num_layers - last

    def _problems(self) -> Iterator[ConfigError]:
        given = [
            flag_name(name)
            for name in field_names(type(self))
            if name != "fp8_format" and getattr(self, name) != default_of(type(self), name)
        ]
        if given and self.fp8_format is None:
            yield ConfigError(
                "flags of FP8 were given, and nothing is computed in FP8",
                found=f"{', '.join(given)} without --fp8-format",
                fix="add --fp8-format hybrid, or leave them out",
            )
        if self.fp8_amax_history_len is not None:
            yield from check_field(
                self.fp8_amax_history_len > 0,
                "fp8_amax_history_len",
                self.fp8_amax_history_len,
                problem="a history of largest values holds no step",
                fix="use 1 or more",
            )
        of_history = ("fp8_amax_history_len", "fp8_amax_compute_algo")
        unused = [
            f"{flag_name(name)} {value}"
            for name in of_history
            if (value := getattr(self, name)) is not None
        ]
        if unused and self.fp8_recipe is not Fp8Recipe.DELAYED:
            yield ConfigError(
                "a history of largest values was described, and scales come from the values at "
                "hand",
                found=f"{', '.join(unused)} with --fp8-recipe {self.fp8_recipe}",
                fix="add --fp8-recipe delayed, or leave them out",
            )
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            value = getattr(self, name)
            yield from check_field(
                value >= 0, name, value, problem="a number of layers is negative", fix="use 0"
            )
            if value != default_of(type(self), name) and not self.first_last_layers_bf16:
                yield ConfigError(
                    "a number of layers outside FP8 was given, and all layers are in FP8",
                    found=f"{flag_name(name)} {value} without --first-last-layers-bf16",
                    fix="add --first-last-layers-bf16, or leave it out",
                )
        # e4m3 has 18 binades; what is left of them has to hold the values of a matrix.
        largest = 0 if self.fp8_recipe is Fp8Recipe.MXFP8 else 8
        yield from check_field(
            0 <= self.fp8_margin <= largest,
            "fp8_margin",
            self.fp8_margin,
            problem=f"the room above the largest value is not one that {self.fp8_recipe} can leave",
            fix=f"use 0 to {largest}" if largest else "leave it out: those scales are specified",
        )
