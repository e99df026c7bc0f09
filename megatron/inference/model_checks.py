"""Whether a model that was loaded for inference is ready: looked at on the model, not assumed.

All ranks that share the model call this together, once, after its weights are there. It costs two
forward passes of a few tokens.
"""

import math
import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron.errors import NumericsError
from megatron.inference.end_ids import check_end_id
from megatron.inference.stage_links import StageLinks
from megatron.model.gpt_model import GPTModel, gpt_carry
from megatron.mpu.collectives import all_gather, all_gather_object
from megatron.mpu.context import ParallelContext
from megatron.optimizer.replicated_grads import check_replicated_agree

_TOKENS = 4


@torch.no_grad()
def check_inference_model(
    model: GPTModel, ctx: ParallelContext, *, vocabulary: int, eod: int | None
) -> None:
    """Check modes, gradients, repeatability, the width of the scores, and that ranks are equal.

    Args:
        vocabulary: tokens that the tokenizer knows.
        eod: its end-of-document token.

    Raises:
        ConfigError: the end-of-document token is not in the vocabulary.
        NumericsError: on every rank that shares the model, with all that is wrong; on those of a
            stage, if their weights differ.
    """
    check_end_id(eod, model.build.vocab.true)
    check_replicated_agree(model.named_parameters(), ctx.tp)
    modes = list(_mode_problems(model))
    (hidden, logits), (_, again) = _forward(model, ctx), _forward(model, ctx)
    wrong = modes + list(_score_problems(logits, again, max(vocabulary, model.build.vocab.true)))
    own = (wrong, (model.layer_range, _checksum(hidden)))
    gathered = all_gather_object(own, ctx.whole_model)
    problems = [
        f"rank {rank}: {', '.join(found)}"
        for rank, (found, _) in zip(ctx.whole_model.ranks, gathered)
        if found
    ]
    stages = len({layers for _, (layers, _) in gathered})
    if len({of_stage for _, of_stage in gathered}) > stages and not model.build.sequence_parallel:
        problems.append("tensor-parallel ranks compute different hidden states")
    if problems:
        raise NumericsError(
            "the model is not ready for inference",
            found="; ".join(problems),
            fix="load it with load_model_for_inference(), and leave its modes and gradients alone",
        )


def _mode_problems(model: GPTModel) -> Iterator[str]:
    training = [name or "the model" for name, each in model.named_modules() if each.training]
    if training:
        yield f"{_some(training)} in training mode"
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if learning:
        yield f"{_some(learning)} with gradients"


def _score_problems(logits: Tensor, again: Tensor, vocabulary: int) -> Iterator[str]:
    """Look at scores [s, b, v] that were computed twice.

    Kernels of GPUs may add in another order, so that only much larger differences are an error.
    """
    if logits.shape[-1] != vocabulary:
        yield f"scores for {logits.shape[-1]} tokens, a vocabulary of {vocabulary}"
    if not bool(logits.isfinite().all()):
        yield "scores that are not finite"
    elif not torch.allclose(logits, again, rtol=0, atol=_rounding(logits)):
        yield "other scores for the same tokens"


def _rounding(logits: Tensor) -> float:
    return math.sqrt(torch.finfo(logits.dtype).eps) * float(logits.abs().max())


def _forward(model: GPTModel, ctx: ParallelContext) -> tuple[Tensor, Tensor]:
    """Return hidden states [s, b, h] before the output layer, and scores [s, b, v].

    The scores are of the true vocabulary. Hidden states of a stage are those that it sends.
    """
    count = max(ctx.tp.size, min(_TOKENS, model.max_length or _TOKENS))
    count -= count % ctx.tp.size  # each rank has as many under sequence parallelism
    tokens = torch.arange(count, device=next(model.parameters()).device).unsqueeze(0)
    tokens %= model.build.vocab.true
    links, vocabulary = StageLinks(model, ctx), model.build.vocab.true
    before = links.receive(count)
    carry = gpt_carry(tokens) if before is None else (before.unsqueeze(1),)
    stop = min(model.layer_range.stop, len(model.specs) - 1)
    carry = model.run(carry, start=model.layer_range.start, stop=stop)
    links.send(carry[0].flatten(0, 1))

    def scores() -> Tensor:
        (logits,) = model.run(carry, start=-1)
        return all_gather(logits, ctx.tp, dim=-1)[..., :vocabulary]

    return carry[0], links.from_last((count, 1, vocabulary), scores)


def _checksum(hidden: Tensor) -> int:
    return zlib.crc32(hidden.contiguous().view(-1).view(torch.uint8).cpu().numpy().data)


def _some(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
