"""The peer of a LLaMA: as `plain_gpt.py`, with the layers of LLaMA.

Pre-norm RMSNorm, rotary positions, SwiGLU, groups of queries, a head of its own, no biases
(LLaMA, arXiv 2302.13971; groups: arXiv 2305.13245). Trained by `PlainTrainer`.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.plain_gpt import Block, LlamaShape

NORM_EPS = 1e-5
ROTARY_BASE = 10000.0


class PlainLlama(nn.Module):
    """LLaMA's network from torch's own modules."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        norm = partial(nn.RMSNorm, shape.hidden, eps=NORM_EPS)
        rotary = _Rotary(shape)
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(
            Block(norm, _Attention(shape, rotary), _MLP(shape)) for _ in range(shape.layers)
        )
        self.norm = norm()
        self.output = nn.Linear(shape.hidden, shape.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, v] of [b, s] tokens."""
        x = self.word(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits


class _Rotary:
    """Rotates heads [b, heads, s, d] by the angles of their positions, in fp32 (RoFormer, 2021).

    Channel i of the first half of a head is paired with channel i of the second.
    """

    def __init__(self, shape: LlamaShape) -> None:
        width = shape.hidden // shape.heads
        speeds = ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles = torch.arange(shape.seq_length, dtype=torch.float32)[:, None] * speeds
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, heads: Tensor) -> Tensor:
        first, second = heads.float().chunk(2, dim=-1)
        turned = (
            first * self._cos - second * self._sin,
            second * self._cos + first * self._sin,
        )
        return torch.cat(turned, dim=-1).to(heads.dtype)


class _Attention(nn.Module):
    def __init__(self, shape: LlamaShape, rotary: _Rotary) -> None:
        super().__init__()
        self.heads, self.groups = shape.heads, shape.groups
        self.width = shape.hidden // shape.heads
        rows = (self.heads + 2 * self.groups) * self.width
        self.qkv = nn.Linear(shape.hidden, rows, bias=False)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self._rotary = rotary

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        parts = (self.heads, self.groups, self.groups)
        q, k, v = self.qkv(x).view(b, s, -1, self.width).transpose(1, 2).split(parts, dim=1)
        q, k = self._rotary(q), self._rotary(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output: Tensor = self.output(y.transpose(1, 2).reshape(b, s, h))
        return output


class _MLP(nn.Module):
    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.fc2 = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.fc1(x).chunk(2, dim=-1)
        output: Tensor = self.fc2(F.silu(gate) * up)
        return output
