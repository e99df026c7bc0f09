"""A model is rebuilt from its checkpoint's flags; given flags fill in what it lacks."""

import argparse
import shutil
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch

from megatron.arguments import parse_given
from megatron.errors import ConfigError, MegatronError, NumericsError
from megatron.inference.forward import ForwardExecutor
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.gpt_model import GPTModel
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.trained_model import load_model_for_inference, other_weights
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train_all, train_prefix_all, write_tiny_corpus

pytestmark = pytest.mark.slow


def logits_of(folder: str) -> torch.Tensor:
    loaded = load_model_for_inference(folder, device="cpu")
    assert not loaded.model.training
    assert not any(each.requires_grad for each in loaded.model.parameters())
    assert (loaded.config.checkpoint.load, loaded.ctx.world.size) == (folder, 1)
    assert loaded.tokenizer.vocab_size == 51
    return next(loaded.model.parameters()).detach().clone()


class KeepsItsMode(GPTModel):
    """A model that stays in training mode."""

    def eval(self) -> Self:
        return self


def load_a_model_that_keeps_its_mode(folder: str) -> str:
    with patch("megatron.trained_model.GPTModel", KeepsItsMode):
        try:
            load_model_for_inference(folder, device="cpu")
        except NumericsError as error:
            return error.found
    return ""


def test_a_model_is_rebuilt_from_its_checkpoint_alone(tmp_path: Path) -> None:
    corpus, save = write_tiny_corpus(tmp_path / "corpus"), str(tmp_path / "run")
    ((record,),) = run_on_ranks(1, train_all, [tiny_run(corpus, save=save, train_iters=2)])
    (refusal,) = run_on_ranks(1, load_a_model_that_keeps_its_mode, save)
    assert "the model and " in refusal
    assert "in training mode" in refusal
    (embedding,) = run_on_ranks(1, logits_of, save)
    trained = record.state["model/embedding.word.weight"].pieces[0][1]
    assert torch.equal(embedding[:51], trained)
    assert not embedding[51:].any(), "padding rows are zero"


def weights_beside(folder: str, others: list[str]) -> list[Any]:
    """What other checkpoints give beside the first one, whose weights stay as they are."""
    loaded = load_model_for_inference(folder, device="cpu")
    before = next(loaded.model.parameters()).detach().clone()
    found: list[Any] = []
    for other in others:
        try:
            model = other_weights(other)
            assert not any(each.requires_grad for each in model.parameters())
            found.append(next(model.parameters()).detach().clone())
        except MegatronError as error:
            found.append(f"{error.problem}: {error.found}")
    assert torch.equal(next(loaded.model.parameters()), before)
    return found


def test_other_weights_of_the_same_model_are_read_beside_it_and_all_else_is_refused(
    tmp_path: Path,
) -> None:
    corpus = write_tiny_corpus(tmp_path / "corpus")
    saves = {
        name: tiny_run(corpus, save=str(tmp_path / name), train_iters=1, **flags)
        for name, flags in {
            "one": {},
            "two": {"seed": 7},
            "wide": {"ffn_hidden_size": 40},
        }.items()
    }
    for config in saves.values():
        run_on_ranks(1, train_all, [config])
    run_on_ranks(1, train_prefix_all, [tiny_run(corpus, save=str(tmp_path / "p"), train_iters=1)])
    others = [str(tmp_path / name) for name in ("two", "wide", "p", "none")]
    (found,) = run_on_ranks(1, weights_beside, str(tmp_path / "one"), others)
    (expected,) = run_on_ranks(1, logits_of, str(tmp_path / "two"))
    two, wide, prefix, none = found
    assert torch.equal(two, expected)
    assert wide.startswith("the checkpoint is of another model than the one in use: ")
    assert wide.endswith("other values of ffn_hidden_size")
    assert "prefix" in prefix
    assert "does not exist" in none


def scores_of_a_prompt(folder: str) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Scores of the token behind a prompt: over a cache, and of a pass over a prefix."""
    loaded = load_model_for_inference(folder, device="cpu")
    model, prompt = loaded.model, (3, 1, 4, 1, 5)
    tokens = torch.tensor([prompt])
    part = SequenceSlice(0, prompt, 0, (0,), True, len(prompt) if model.prompt_is_prefix else 0)
    with evaluation_mode(model):
        executor = ForwardExecutor(model, loaded.ctx, blocks=1)
        found = executor.scores(ForwardPlan((), (part,)))
    every = torch.ones_like(tokens)
    whole = model(tokens, torch.arange(5)[None], every, is_prefix=every)
    assert isinstance(whole, torch.Tensor)
    return model.prompt_is_prefix, found, whole[-1, :, : model.build.vocab.true]


def test_the_prompts_of_a_prefix_lm_are_prefixes(tmp_path: Path) -> None:
    corpus, save = write_tiny_corpus(tmp_path / "corpus"), str(tmp_path / "run")
    run_on_ranks(1, train_prefix_all, [tiny_run(corpus, save=f"{save}/prefix", train_iters=1)])
    run_on_ranks(1, train_all, [tiny_run(corpus, save=f"{save}/gpt", train_iters=1)])
    for kind in ("prefix", "gpt"):
        ((is_prefix, found, whole),) = run_on_ranks(1, scores_of_a_prompt, f"{save}/{kind}")
        assert is_prefix == (kind == "prefix")
        assert torch.allclose(found, whole, rtol=1e-9) == is_prefix


def weights_of_another_tool(folder: str, words: list[str]) -> Any:
    try:
        loaded = load_model_for_inference(folder, given=parse_given(words))
    except MegatronError as error:
        return str(error)
    return loaded.model(torch.tensor([[1, 2, 3]]))[..., : loaded.tokenizer.vocab_size].detach()


def test_flags_speak_for_a_checkpoint_that_says_nothing_of_its_model(tmp_path: Path) -> None:
    shape = Shape(layers=2)
    folder = save_megatron(tmp_path / "whole", whole_model(shape), shape)
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for path in bare.rglob("*.pt"):
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path)
        del content["args"]
        torch.save(content, path)
    tokens = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(shape.true_rows - 1)]
    tokens += ["--device", "cpu"]
    words = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24"
    model = [*words.split(), "--seq-length", "12", "--max-position-embeddings", "12"]
    (expected,) = run_on_ranks(1, weights_of_another_tool, str(folder), tokens)
    (found,) = run_on_ranks(1, weights_of_another_tool, str(bare), [*tokens, *model])
    assert torch.equal(found, expected)
    (message,) = run_on_ranks(1, weights_of_another_tool, str(bare), tokens)
    assert "does not record enough about its model" in message
    assert "load it with the flags of its model beside it" in message


def test_a_model_in_a_pipeline_does_not_write() -> None:
    with pytest.raises(ConfigError, match="text generation does not support pipeline parallelism"):
        load_model_for_inference("nowhere", given={"pipeline_model_parallel_size": 2})
