"""The scores of the tasks by plain loops: what a careful user would write to check a framework.

Nothing of our model, our tokenizers or our scorer is here: a model is any function from tokens to
logits, windows are cut as they come, and the softmax is torch's over the whole vocabulary.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.peers.plain_gpt import PlainGPT, Shape, copy_weights
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.formats import registry

Logits = Callable[[Tensor], Tensor]  # [b, s] tokens -> [b, s, v]
Encode = Callable[[str], list[int]]


class PlainLoss(NamedTuple):
    """Nats per token, and the number of tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss)


@torch.no_grad()
def plain_loss(
    logits: Logits, tokens: Sequence[int], *, length: int, step: int, batch: int = 16
) -> PlainLoss:
    """Score every token but the first, each in the first window that contains it.

    Windows read `length` tokens and begin `step` tokens after one another.
    """
    losses: list[float] = []
    text = torch.tensor(tokens)
    starts = [0]
    while starts[-1] + length + 1 < len(text):
        starts.append(starts[-1] + step)
    seen = 1  # tokens scored so far, the first one among them
    full = [start for start in starts if start + length + 1 <= len(text)]
    rest = starts[len(full) :]
    groups = [full[at : at + batch] for at in range(0, len(full), batch)]
    for group in [*groups, *([start] for start in rest)]:
        windows = torch.stack([text[start : start + length + 1] for start in group])
        for start, targets, found in zip(group, windows[:, 1:], logits(windows[:, :-1])):
            fresh = slice(seen - start - 1, None)
            scores = found[fresh].double().log_softmax(dim=-1).gather(-1, targets[fresh, None])
            losses += (-scores[:, 0]).tolist()
            seen += len(scores)
    return PlainLoss(math.fsum(losses) / len(losses), len(losses))


@torch.no_grad()
def plain_endings(
    logits: Logits, encode: Encode, passages: Sequence[str], *, length: int, strict: bool
) -> int:
    """Count the passages whose last token, or whole last word, the greedy choice predicts."""
    correct = 0
    for passage in passages:
        if strict:
            before, _, word = passage.strip().rpartition(" ")
            context, answer = encode(before.strip()), encode(f" {word}")
        else:
            *context, last = encode(passage)
            answer = [last]
        tokens = torch.tensor([*context, *answer])[-length - 1 :]
        best = logits(tokens[None, :-1])[0].argmax(dim=-1)
        correct += best[-len(answer) :].tolist() == answer
    return correct


def plain_gpt(folder: Path, *, seq_length: int) -> PlainGPT:
    """Return the GPT of one of our checkpoints as plain PyTorch, with weights by name."""
    with registry.open_source(folder) as source:
        model: Mapping[str, Any] = source.config["model"]
        names = [name for name in source.tensors if name.startswith("model/")]
        weights = {
            name.removeprefix("model/"): source.read(name, whole(source.tensors[name].global_shape))
            for name in names
        }
    shape = Shape(
        layers=model["num_layers"],
        hidden=model["hidden_size"],
        heads=model["num_attention_heads"],
        seq_length=seq_length,
        vocab=len(weights["embedding.word.weight"]),
        micro_batch=1,
    )
    plain = PlainGPT(shape)
    copy_weights(weights.items(), plain, shape)
    return plain.eval()


def transformers_logits(folder: Path) -> Logits:
    """Return the model of a Hugging Face folder, computed by `transformers`."""
    transformers: Any = importlib.import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True
    ).eval()

    def logits(tokens: Tensor) -> Tensor:
        found: Tensor = model(tokens).logits
        return found

    return logits
