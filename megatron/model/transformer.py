"""One pre-norm transformer block, and the boundary at which activations are recomputed.

The residual stream is the model's dtype, or fp32 on request; attention and the MLP always get
and give the model's dtype.
"""

from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.model.attention import SelfAttention
from megatron.model.dropout import ReplicatedDropout
from megatron.model.geometry import AttentionGeometry, Geometry
from megatron.model.mlp import MLP
from megatron.model.norms import build_norm
from megatron.model.specs import Carry, ModelBuild
from megatron.mpu.recompute import recompute


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (pre-norm: GPT-2; Xiong et al., 2002.04745)."""

    def __init__(
        self, config: ModelConfig, build: ModelBuild, geometry: AttentionGeometry, *, layer: int
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self._build = build
        self._residual_after_norm = config.apply_residual_connection_post_layernorm
        self.input_norm = build_norm(config, build.dtype)
        self.attention = SelfAttention(config, build, layer=layer)
        self.post_attention_norm = build_norm(config, build.dtype)
        self.mlp = MLP(config, build)
        self.dropout = ReplicatedDropout(config.hidden_dropout, build.streams)

    def forward(self, carry: Carry) -> Carry:
        """(hidden [s, b, h], position ids?, document ids?) to the same, hidden one layer on."""
        hidden, *ids = carry
        # Made out here: it is not computed again in backward, and all blocks hold the same one.
        geometry = self.geometry.of(hidden, *_padded(ids))
        if self._build.recompute and self.training:
            hidden = recompute(self._run, self._build.streams, hidden, geometry)
        else:
            hidden = self._run(hidden, geometry)
        return (hidden, *ids)

    def _run(self, hidden: Tensor, geometry: Geometry) -> Tensor:
        dtype = self._build.dtype
        normed = self.input_norm(hidden)
        residual = normed if self._residual_after_norm else hidden
        hidden = residual + self.dropout(self.attention(normed.to(dtype), geometry))
        normed = self.post_attention_norm(hidden)
        residual = normed if self._residual_after_norm else hidden
        after: Tensor = residual + self.dropout(self.mlp(normed.to(dtype)))
        return after


def _padded(ids: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    position_ids = ids[0] if ids else None
    return position_ids, ids[1] if len(ids) > 1 else None
