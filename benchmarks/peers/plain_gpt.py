"""The peer: a GPT as a careful user would write it in eager PyTorch, and nothing of Megatron.

Batch-first, fused attention, fused AdamW, torch's own clipping and cross entropy. It computes what
ours does (pre-norm, learned positions, tied head, tanh GELU, biases, no dropout), so that from the
same weights both have the same loss, which `train_cpu.py` checks.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Bf16Style(StrEnum):
    """Two common ways to train in bfloat16; comparisons use the first, which was no slower."""

    MASTERS = "masters"  # bf16 weights; AdamW works on an fp32 copy, as in Megatron
    AUTOCAST = "autocast"  # fp32 weights, cast by torch.autocast where they are multiplied


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a GPT-2 and of its batches."""

    layers: int
    hidden: int
    heads: int
    seq_length: int
    vocab: int
    micro_batch: int

    @property
    def tokens(self) -> int:
        """Return the number of tokens of one batch."""
        return self.micro_batch * self.seq_length

    @property
    def query_groups(self) -> int:
        """Return the number of heads of keys and values."""
        return self.heads


@dataclass(frozen=True, kw_only=True)
class LlamaShape(Shape):
    """The shape of a LLaMA: RMSNorm, rope, SwiGLU, groups of queries, no biases, untied head."""

    groups: int  # of queries
    ffn: int  # width within an MLP

    @property
    def query_groups(self) -> int:
        """Return the number of heads of keys and values."""
        return self.groups


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters of the optimizer."""

    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip_grad: float = 1.0


class PlainGPT(nn.Module):
    """GPT-2's network (Radford et al. 2019) from torch's own modules."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.word = nn.Embedding(shape.vocab, shape.hidden)
        self.position = nn.Embedding(shape.seq_length, shape.hidden)
        self.blocks = nn.ModuleList(
            Block(partial(nn.LayerNorm, shape.hidden), _Attention(shape), _MLP(shape))
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits [b, s, v] of [b, s] tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word(tokens) + self.position(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.word.weight)


def cross_entropy_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the mean loss of [b, s + 1] tokens by a model that maps [b, s] to logits."""

    def loss(text: Tensor) -> Tensor:
        logits = model(text[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), text[:, 1:].flatten())

    return loss


class PlainTrainer:
    """Forward, backward, clipping and AdamW of a model; one call is one step.

    Args:
        loss: of [b, s + 1] tokens, where the model has its own; None: `cross_entropy_of` it.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        bf16: Bf16Style | None = None,
        loss: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.model, self._recipe = model, recipe
        self._loss = loss or cross_entropy_of(model)
        self._autocast = bf16 is Bf16Style.AUTOCAST
        self._parameters: list[Tensor] = list(model.parameters())
        # What AdamW works on: the weights themselves, or their fp32 copies.
        self._weights: list[Tensor] = list(self._parameters)
        self._masters = bf16 is Bf16Style.MASTERS
        if self._masters:
            self._weights = [p.detach().clone().float() for p in self._parameters]
            for weight in self._weights:
                weight.grad = torch.empty_like(weight)
            for parameter in model.parameters():  # tables of angles stay as they are
                parameter.data = parameter.data.to(torch.bfloat16)
        decayed = [weight for weight in self._weights if weight.dim() > 1]
        others = [weight for weight in self._weights if weight.dim() <= 1]
        self._rule = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": recipe.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate,
            betas=recipe.betas,
            eps=recipe.eps,
            fused=True,
        )

    def step(self, text: Tensor) -> tuple[float, float]:
        """Do one optimizer step on [b, s + 1] tokens; return its loss and gradient norm."""
        context = (
            torch.autocast(text.device.type, dtype=torch.bfloat16)
            if self._autocast
            else contextlib.nullcontext()
        )
        with context:
            loss = self._loss(text)
        torch.autograd.backward(loss)
        if self._masters:
            gradients = [_gradient(weight) for weight in self._weights]
            torch._foreach_copy_(gradients, [_gradient(p) for p in self._parameters])
        norm = nn.utils.clip_grad_norm_(self._weights, self._recipe.clip_grad)
        self._rule.step()
        if self._masters:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._weights)
        for parameter in self._parameters:
            parameter.grad = None
        return loss.item(), norm.item()


def copy_weights(ours: Iterable[tuple[str, Tensor]], plain: nn.Module, shape: Shape) -> None:
    """Copy our named parameters to `plain`; every one must have a counterpart."""
    words = {"embedding": "", "layers": "blocks", "final_norm": "norm"}
    copy_parameters(ours, plain, words, partial(q_then_k_then_v, shape))


@torch.no_grad()
def copy_parameters(
    ours: Iterable[tuple[str, Tensor]],
    model: nn.Module,
    words: Mapping[str, str],
    as_there: Callable[[str, Tensor], Tensor],
) -> None:
    """Copy our named parameters to `model`; every one must have a counterpart.

    Args:
        words: what stands there for a word of our names; nothing for an empty one.
        as_there: makes the value that `model` has from our name and our value.
    """
    targets = dict(model.named_parameters())
    for name, value in ours:
        target = ".".join(filter(None, (words.get(word, word) for word in name.split("."))))
        targets.pop(target).copy_(as_there(name, value))
    if targets:
        raise KeyError(f"no values for {', '.join(sorted(targets))}")


def q_then_k_then_v(shape: Shape, name: str, value: Tensor) -> Tensor:
    """Return a parameter of ours with rows of all q, then of all k, then of all v."""
    return torch.cat(q_k_v(shape, value)) if ".qkv." in name else value


def q_k_v(shape: Shape, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v of a parameter of ours, whose rows stand group by group, [q .. q k v]."""
    queries = shape.heads // shape.query_groups
    by_group = value.view(shape.query_groups, queries + 2, shape.hidden // shape.heads, -1)
    parts = (by_group[:, :queries], by_group[:, queries], by_group[:, queries + 1])
    q, k, v = (part.reshape(-1, *value.shape[1:]) for part in parts)
    return q, k, v


class Block(nn.Module):
    """A pre-norm block with our parameter names, so that weights can be copied by name."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.input_norm = norm()
        self.attention = attention
        self.post_attention_norm = norm()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        """Map hidden states [b, s, h]."""
        x = x + self.attention(self.input_norm(x))
        after: Tensor = x + self.mlp(self.post_attention_norm(x))
        return after


class _Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (
            part.view(b, s, self.heads, h // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(h, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.output(y.transpose(1, 2).reshape(b, s, h))
        return output


class _MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden, 4 * shape.hidden)
        self.fc2 = nn.Linear(4 * shape.hidden, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return output


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None  # noqa: S101  # invariant: every parameter is used
    return tensor.grad
