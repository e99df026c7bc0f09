"""A model that is not ready for inference is refused, with everything that is wrong with it."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.errors import ConfigError, NumericsError
from megatron.inference.model_checks import check_inference_model
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from tests.support.models import TINY_VOCAB, tiny_config, tiny_model

CTX = ParallelContext.single()


def ready(**changes: Any) -> GPTModel:
    return tiny_model(tiny_config(**changes)).eval().requires_grad_(False)


def check(model: GPTModel, *, vocabulary: int = TINY_VOCAB.true, eod: int | None = 3) -> None:
    check_inference_model(model, CTX, vocabulary=vocabulary, eod=eod)


def one_drops(model: GPTModel) -> None:
    model.get_submodule("layers.1").train()


def one_learns(model: GPTModel) -> None:
    model.get_parameter("final_norm.weight").requires_grad_()


def one_is_infinite(model: GPTModel) -> None:
    model.get_parameter("final_norm.weight").fill_(torch.inf)


def one_changes(model: GPTModel) -> None:
    calls = count()

    def added(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * (1 + 1e-3 * next(calls))

    model.get_submodule("final_norm").register_forward_hook(added)


@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "alibi"])
def test_a_model_that_is_ready_passes(kind: str) -> None:
    check(ready(position_embedding_type=kind))
    check(ready(position_embedding_type=kind), vocabulary=40)  # rows that have no text


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (one_drops, "layers.1 and "),
        (one_learns, "final_norm.weight with gradients"),
        (one_is_infinite, "scores that are not finite"),
        (one_changes, "other scores for the same tokens"),
    ],
)
def test_one_fault_is_found(breaks: Callable[[GPTModel], None], words: str) -> None:
    model = ready()
    breaks(model)
    with pytest.raises(NumericsError, match="not ready for inference") as caught:
        check(model)
    assert caught.value.found.startswith("rank 0: ")
    assert words in caught.value.found


def test_everything_that_is_wrong_is_said_at_once() -> None:
    model = ready()
    for breaks in (one_drops, one_learns, one_changes):
        breaks(model)
    with pytest.raises(NumericsError) as caught:
        check(model, vocabulary=TINY_VOCAB.true + 1)
    for words in ("in training mode", "with gradients", "scores for 50 tokens, a vocabulary of 51"):
        assert words in caught.value.found


def test_an_end_of_document_that_cannot_be_generated_is_refused() -> None:
    with pytest.raises(ConfigError, match="ends a text is not in the vocabulary"):
        check(ready(), eod=TINY_VOCAB.true)
