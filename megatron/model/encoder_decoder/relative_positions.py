"""T5's relative positions: a number for each head and range of distances, added to its scores.

A stack has one table for all of its layers (Raffel et al. 2020, arXiv 1910.10683, section 2.1).
What a reader would get wrong: the table travels in the carry to the blocks that read it, on
whatever pipeline stage they are, and its gradient comes back the same way.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.model.init import table_init
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.partition import Partition, set_parameter_metadata


class RelativePositions(nn.Module):
    """The table of a stack, [buckets, a/tp]."""

    def __init__(
        self, config: ModelConfig, build: ModelBuild, decoder: EncoderDecoderConfig
    ) -> None:
        super().__init__()
        rows = decoder.relative_attention_num_buckets
        heads = config.num_attention_heads // build.ctx.tp.size
        self.weight = nn.Parameter(torch.empty(rows, heads, dtype=build.dtype))
        set_parameter_metadata(
            self.weight, init=table_init(config), partition=Partition("tp", dim=1)
        )

    def forward(self, carry: Carry) -> Carry:
        """Put a copy of the table at the end of the carry."""
        # A copy: engines that share parameters out release the weight behind its layer.
        return (*carry, self.weight.clone())


def buckets_of_distances(
    distances: Tensor, *, num_buckets: int, max_distance: int, both_directions: bool
) -> Tensor:
    """Return the row of the table for each distance, the key's position minus the query's.

    Half of the rows are for one distance each, the others for ranges that grow as its logarithm up
    to `max_distance`; with both directions each of them has half of all rows. In float32, as in
    T5's own code, which decides where a range ends.

    Args:
        distances: int64, of any shape.
        both_directions: keys behind the query have rows of their own; else there are none.
    """
    first = torch.zeros_like(distances)
    if both_directions:
        num_buckets //= 2
        first = (distances > 0).to(torch.int64) * num_buckets
        steps = distances.abs()
    else:
        steps = (-distances).clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(steps.clamp(min=1).to(torch.float32) / exact) / math.log(
        max_distance / exact
    )
    far = exact + (growth * (num_buckets - exact)).to(torch.int64)
    return first + torch.where(steps < exact, steps, far.clamp(max=num_buckets - 1))


class RelativeBias:
    """Computes the biases of the scores of a sequence from a table; remembers rows of distances.

    Args:
        both_directions: as `buckets_of_distances`.
    """

    def __init__(self, decoder: EncoderDecoderConfig, *, both_directions: bool) -> None:
        self._decoder, self._both_directions = decoder, both_directions
        self._rows: Tensor | None = None
        self._of: tuple[int, torch.device] | None = None

    def bias(self, table: Tensor, length: int) -> Tensor:
        """Return what is added to the scores [q, k] of a sequence: [1, a/tp, s, s]."""
        diagonals = F.embedding(self._rows_of(length, table.device), table).t()  # [a/tp, 2 s - 1]
        # Query q reads the distances -q .. s - 1 - q, which are a window of the diagonals.
        return diagonals.unfold(1, length, 1).flip(1).unsqueeze(0)

    def bias_of_keys(self, table: Tensor, positions: Tensor, keys: int) -> Tensor:
        """Return the biases of queries at int64 `positions` [q] over keys 0..keys-1.

        Returns:
            [1, a/tp, q, keys].
        """
        distances = torch.arange(keys, device=positions.device) - positions.unsqueeze(1)
        return F.embedding(self._buckets(distances), table).permute(2, 0, 1).unsqueeze(0)

    @torch.inference_mode(False)  # an inference tensor would break the next training step
    @torch.no_grad()
    def _rows_of(self, length: int, device: torch.device) -> Tensor:
        """Return the row of each distance -(s - 1) .. s - 1, int64 [2 s - 1]."""
        if self._rows is None or self._of != (length, device):
            self._of = (length, device)
            self._rows = self._buckets(torch.arange(1 - length, length, device=device))
        return self._rows

    def _buckets(self, distances: Tensor) -> Tensor:
        return buckets_of_distances(
            distances,
            num_buckets=self._decoder.relative_attention_num_buckets,
            max_distance=self._decoder.relative_attention_max_distance,
            both_directions=self._both_directions,
        )
