"""The three ways a model learns where a token stands: a learned table, rotation, a linear bias.

Angles and slopes are computed in float64 and rounded once: in bfloat16 every position above 256
would share its angle with its neighbours. Which tokens may see each other is `geometry`'s part.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig, RopeType
from megatron.errors import ConfigError
from megatron.mpu.partition import Init, set_parameter_metadata


class LearnedPositions(nn.Module):
    """A table with one trained vector per position, replicated over tp.

    Args:
        sequence_parallel: it is used for this rank's tokens only, so its gradient is a summand.
    """

    def __init__(
        self, rows: int, width: int, *, init: Init, sequence_parallel: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, dtype=dtype))
        set_parameter_metadata(self.weight, init=init, sequence_parallel=sequence_parallel)

    def forward(
        self, length: int, position_ids: Tensor | None, part: slice | None = None
    ) -> Tensor:
        """Return the vectors of positions 0..length-1 as [s, 1, h], or of [b, s] ids as [s, b, h].

        Args:
            length: tokens of a whole sequence; there are fewer ids under context parallelism.
            part: the tokens whose vectors are returned; None: all of them.

        Raises:
            ConfigError: the sequence is longer than the table.
        """
        rows = self.weight.shape[0]
        if length > rows:
            raise ConfigError(
                "a sequence is longer than the table of learned positions",
                found=f"{length} tokens, --max-position-embeddings {rows}",
                fix=f"use sequences of at most {rows} tokens, "
                f"or train with --max-position-embeddings {length}",
            )
        tokens = part or slice(0, length)
        if position_ids is None:
            return self.weight[tokens].unsqueeze(1)
        return F.embedding(position_ids.t()[tokens], self.weight)


class Rotation(NamedTuple):
    """Cosine and sine of every angle, [s, 1 or b, 1, 1, r/2], where r channels of a head rotate."""

    cos: Tensor
    sin: Tensor


class RotaryAngles:
    """Rotary position embedding, RoFormer eq. 34 (Su et al. 2021, arXiv 2104.09864).

    Channel i of the first half of the rotating channels is paired with channel i of the second
    half (GPT-NeoX and LLaMA; the paper pairs neighbours). With `rotary_percent` below 1 only the
    first channels of a head rotate.

    Raises:
        ConfigError: the rotating channels are not an even, positive number.
    """

    def __init__(self, config: ModelConfig) -> None:
        self.channels = int(config.head_width * config.rotary_percent)
        if self.channels < 2 or self.channels % 2:
            raise ConfigError(
                "rotary positions turn pairs of channels, and these do not pair up",
                found=f"{self.channels} rotating channels in a head of {config.head_width} "
                f"(--rotary-percent {config.rotary_percent})",
                fix=f"use heads with an even number of channels and "
                f"--rotary-percent {2 * max(self.channels // 2, 1) / config.head_width:g}",
            )
        self._config = config

    def at(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of int64 `positions` [s] or [b, s], rounded to `dtype` once."""
        frequencies = rotary_frequencies(self._config, self.channels, positions.device)  # [r/2]
        # [s, b] or [s, 1], then the group and head dimensions, then the channels.
        by_sequence = positions.t() if positions.dim() == 2 else positions.unsqueeze(1)
        angles = by_sequence.to(torch.float64)[:, :, None, None, None] * frequencies
        size = self._config.rotary_magnitude
        cos, sin = ((size * table).to(dtype).contiguous() for table in (angles.cos(), angles.sin()))
        return Rotation(cos, sin)


def rotary_frequencies(config: ModelConfig, channels: int, device: torch.device) -> Tensor:
    """Return radians per position of each pair of rotating channels, [channels/2] in float64.

    Interpolation of positions (Chen et al. 2023, arXiv 2306.15595) divides all of them. The scaling
    of Llama 3.1 (arXiv 2407.21783) divides those that turn less than `low_freq_factor` times over
    the length that was trained on, leaves those that turn more than `high_freq_factor` times, and
    goes linearly from one to the other between. For that of YaRN see `_yarn_frequencies`.
    """
    steps = torch.arange(0, channels, 2, dtype=torch.float64, device=device)
    frequencies = config.rotary_base ** (-steps / channels)
    if config.rotary_seq_len_interpolation_factor is not None:
        return frequencies / config.rotary_seq_len_interpolation_factor
    if config.rope_type is RopeType.YARN:
        return _yarn_frequencies(config, frequencies)
    if not config.use_rope_scaling:
        return frequencies
    turns = frequencies * config.rope_scaling_original_length / (2 * math.pi)
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def _yarn_frequencies(config: ModelConfig, frequencies: Tensor) -> Tensor:
    """Return frequencies [r/2] as YaRN scales them (Peng et al. 2023, arXiv 2309.00071).

    With L tokens trained on before, a frequency w turns L w / 2 pi times over them, which is its r
    (eq. 17). It becomes (1 - g) w / s + g w for the factor s (eq. 20), where g goes from 0 at few
    turns to 1 at many (eq. 18). As in the authors' code, and in all others, g is linear in the
    number of the pair of channels and not in r: with n channels and base b, the pair of r turns is
    n ln(L / 2 pi r) / (2 ln b), rounded outwards for both bounds if they are to be whole.
    """
    pairs, base = len(frequencies), config.rotary_base
    length = config.yarn_original_max_position_embeddings
    low, high = (
        pairs * math.log(length / (2 * math.pi * turns)) / math.log(base)
        for turns in (config.yarn_beta_fast, config.yarn_beta_slow)
    )
    if config.yarn_correction_range_round_to_int:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    if low == high:
        high += 0.001  # as there: a step instead of a ramp
    numbers = torch.arange(pairs, dtype=torch.float64, device=frequencies.device)
    slow = ((numbers - low) / (high - low)).clamp(0, 1)
    return frequencies * (slow / config.rotary_scaling_factor + (1 - slow))


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of every head of the whole model (Press et al. 2021, 2108.12409, sec. 3).

    For a power of two they are 2^(-8i/n), i = 1..n. For other counts the paper's code takes those
    of the next lower power p, then every second one of 2p.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    extra = [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)]
    return slopes + extra[: num_heads - power]
