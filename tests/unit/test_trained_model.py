"""A model is rebuilt from its checkpoint's flags; given flags fill in what it lacks."""

import argparse
import shutil
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.arguments import parse_given
from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, MegatronError, NumericsError
from megatron.inference.forward import ForwardExecutor
from megatron.inference.generate import generate
from megatron.inference.offload.place_model import PlacementOptions
from megatron.inference.offload.placement import DeviceMap
from megatron.inference.offload.working_bytes import CacheDemand
from megatron.inference.sampling_params import SamplingParams
from megatron.initialize import shutdown_megatron
from megatron.model.evaluation_mode import evaluation_mode
from megatron.model.gpt_model import GPTModel
from megatron.ops.quantized_products import StoredFormat
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from megatron.trained_model import (
    load_draft_model,
    load_model_for_inference,
    load_text_to_text_model,
    other_weights,
)
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.ranks import run_on_ranks
from tests.support.tiny import VOCABULARY, tiny_run, train_all, train_prefix_all, write_tiny_corpus

pytestmark = pytest.mark.slow
# Between what the tiny model needs beside a step of 4 tokens, and what all of it needs.
FEW_BYTES = 2_651_500


def logits_of(folder: str) -> torch.Tensor:
    loaded = load_model_for_inference(folder, device="cpu")
    assert not loaded.model.training
    assert not any(each.requires_grad for each in loaded.model.parameters())
    assert (loaded.config.checkpoint.load, loaded.ctx.world.size) == (folder, 1)
    assert loaded.tokenizer.vocab_size == 51
    return next(loaded.model.parameters()).detach().clone()


def loaded_in_8_bits(folder: str) -> tuple[set[torch.dtype], float]:
    """Which dtypes weights have, and how far scores are from those of the weights themselves."""
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    exact = load_model_for_inference(folder, device="cpu").model(tokens)
    shutdown_megatron()
    model = load_model_for_inference(folder, device="cpu", weight_quantization="int8").model
    return {each.dtype for each in model.parameters()}, float(
        (model(tokens) - exact).norm() / exact.norm()
    )


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
    ((dtypes, error),) = run_on_ranks(1, loaded_in_8_bits, save)
    assert torch.int8 in dtypes
    assert 0 < error < 0.05  # products of two layers are off by 0.7 % each
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


def draft_beside(folder: str, draft: str) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Return a weight of a model and that of its draft model; or why there is none.

    Several ranks split the model; the first one alone loads a draft model.
    """
    split = dist.get_world_size()
    loaded = load_model_for_inference(folder, device="cpu", tensor_model_parallel_size=split)
    if not loaded.ctx.world.is_first:
        return "not the first rank"
    try:
        model = load_draft_model(draft, loaded, given={"num_layers": 2, "device": DeviceKind.CPU})
    except MegatronError as error:
        return str(error)
    assert not model.training
    first, second = (next(each.parameters()) for each in (loaded.model, model))
    return first.detach().clone(), second.detach().clone()


def test_a_draft_model_is_loaded_beside_a_model_of_the_same_tokenizer(tmp_path: Path) -> None:
    corpus, save = write_tiny_corpus(tmp_path / "corpus"), str(tmp_path / "run")
    kinds: dict[str, dict[str, Any]] = {
        "large": {},
        "small": {"num_layers": 1, "seed": 9},
        "other": {"num_layers": 1, "vocab_size": VOCABULARY + 1},
    }
    for folder, changes in kinds.items():
        run = tiny_run(corpus, save=f"{save}/{folder}", train_iters=1, **changes)
        run_on_ranks(1, train_all, [run])
    (found,) = run_on_ranks(1, draft_beside, f"{save}/large", f"{save}/small")
    assert not isinstance(found, str)
    assert not torch.equal(*found)
    (alone,) = run_on_ranks(1, logits_of, f"{save}/small")
    assert torch.equal(found[1], alone)
    beside, nothing = run_on_ranks(2, draft_beside, f"{save}/large", f"{save}/small")
    assert nothing == "not the first rank"
    assert torch.equal(beside[1], found[1])
    assert len(beside[0]) < len(found[0]), "a part of it"
    (refusal,) = run_on_ranks(1, draft_beside, f"{save}/large", f"{save}/other")
    assert "the draft model was trained with another tokenizer than the model" in refusal


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


def placed_logits(folder: str, offload: str, cpu: int) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Logits, and the memories of layers, of a model that is placed."""
    options = PlacementOptions(
        device_map=DeviceMap.AUTO,
        demand=CacheDemand(sequences=1, length=4, step_tokens=4, blocks=1),
        max_memory={"cpu": cpu},
        folder=Path(offload),
    )
    try:
        given = {"fp64": True}
        loaded = load_model_for_inference(folder, device="cpu", given=given, placement=options)
        assert loaded.placed is not None
        assert loaded.placed.blocks == 1
        return loaded.model(torch.tensor([[1, 2, 3]])), loaded.placed.placement.homes
    finally:
        shutdown_megatron()


def bits_are_equal(folders: list[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Load models in memory and placed; return the memories of their layers."""
    found = []
    for folder, offload in folders:
        loaded = load_model_for_inference(folder, device="cpu", given={"fp64": True})
        expected = loaded.model(torch.tensor([[1, 2, 3]]))
        shutdown_megatron()
        logits, homes = placed_logits(folder, offload, FEW_BYTES)
        assert torch.equal(logits, expected)
        found.append(homes)
    return found


def why_not_placed(calls: list[tuple[str, str, int]]) -> list[str]:
    found = []
    for call in calls:
        try:
            placed_logits(*call)
        except MegatronError as error:
            found.append(str(error))
    return found


def test_checkpoints_of_any_format_are_placed_and_compute_the_same_bits(tmp_path: Path) -> None:
    corpus, runs = write_tiny_corpus(tmp_path / "corpus"), tmp_path / "runs"
    run_on_ranks(1, train_all, [tiny_run(corpus, save=f"{runs}/one", train_iters=1)])
    megatron = {"checkpoint_format": "megatron", "train_iters": 1}
    run_on_ranks(1, train_all, [tiny_run(corpus, save=f"{runs}/megatron", **megatron)])
    names = ("one", "megatron")
    folders = [(str(runs / name), str(tmp_path / name)) for name in names]
    (homes,) = run_on_ranks(1, bits_are_equal, folders)
    assert [set(each) for each in homes] == [{"cpu", "disk"}] * 2
    written = {name: len(list((tmp_path / name).glob("*.safetensors"))) for name in names}
    # Of our own format only the word table, which has rows of padding in memory, is written.
    assert (written["one"], written["megatron"]) == (1, 3)


def test_a_placement_that_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    corpus, save = write_tiny_corpus(tmp_path / "corpus"), str(tmp_path / "run")
    run_on_ranks(1, train_all, [tiny_run(corpus, save=save, train_iters=1)])
    offload = str(tmp_path / "offload")
    for (refusal,) in run_on_ranks(2, why_not_placed, [(save, offload, FEW_BYTES)]):
        assert "--device-map in one process, or split over ranks" in refusal
        assert "2 ranks" in refusal
    inside = str(next(Path(save).glob("iter_*")) / "offload")
    calls = [(save, inside, FEW_BYTES), (save, offload, 1000)]
    ((in_checkpoint, no_room),) = run_on_ranks(1, why_not_placed, calls)
    assert "the offload folder lies in the checkpoint" in in_checkpoint
    assert "the model does not fit into the memory that may be used" in no_room
    shard = next(Path(save).rglob("shard-*.safetensors"))
    with shard.open("r+b") as file:
        file.truncate(shard.stat().st_size - 8)
    ((damaged,),) = run_on_ranks(1, why_not_placed, [(save, offload, FEW_BYTES)])
    assert "the checkpoint is damaged" in damaged
    assert not Path(offload).exists()


def generated(folder: str, stored: StoredFormat | None, given: dict[str, Any]) -> Any:
    """Return the layers on this rank, and greedy tokens; or why there are none."""
    flags = {"device": DeviceKind.CPU, "fp64": True} | given
    try:
        loaded = load_model_for_inference(folder, given=flags, weight_quantization=stored)
    except MegatronError as error:
        return str(error)
    found = generate(
        loaded.model, [[3, 1, 4], [1]], max_new_tokens=6, params=SamplingParams(greedy=True),
        eod=None, seed=1, ctx=loaded.ctx,
    )  # fmt: skip
    return tuple(loaded.model.layer_range), [each.tokens for each in found]


def test_stages_are_cut_by_the_flags_and_generate_what_one_rank_does(tmp_path: Path) -> None:
    save = str(tmp_path / "run")
    corpus = write_tiny_corpus(tmp_path / "corpus")
    run_on_ranks(1, train_all, [tiny_run(corpus, save=save, train_iters=1, num_layers=4)])
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2}
    interleaved = stages | {"num_virtual_stages_per_pipeline_rank": 2}
    cut = stages | {"decoder_first_pipeline_num_layers": 3}
    cases: list[tuple[StoredFormat | None, dict[str, Any], list[tuple[int, int]]]] = [
        (None, stages, [(0, 3), (3, 7)]),
        ("int8", cut, [(0, 4), (4, 7)]),
    ]
    for stored, flags, layers in cases:
        ((_, expected),) = run_on_ranks(1, generated, save, stored, {})
        found = run_on_ranks(2, generated, save, stored, flags)
        assert found == [(each, expected) for each in layers]
    for refusal in run_on_ranks(2, generated, save, None, interleaved):
        assert "text generation does not support virtual pipeline stages" in refusal
    # What its fix says: the same training with virtual stages, whose checkpoint has plain ones.
    virtual = str(tmp_path / "virtual")
    run = tiny_run(corpus, save=virtual, train_iters=1, num_layers=4, **interleaved)
    run_on_ranks(2, train_all, [run])
    ((_, expected),) = run_on_ranks(1, generated, save, None, {})
    found = run_on_ranks(2, generated, virtual, None, stages)
    assert found == [((0, 3), expected), ((3, 7), expected)]


def test_weights_that_come_and_go_are_not_stored_in_8_bits() -> None:
    options = PlacementOptions(device_map=DeviceMap.AUTO, demand=CacheDemand(sequences=1, length=8))
    with pytest.raises(ConfigError, match="come and go cannot be stored in 8 bits"):
        load_model_for_inference("nowhere", placement=options, weight_quantization="int8")


def test_a_t5_over_pipeline_stages_is_refused_before_it_is_loaded() -> None:
    with pytest.raises(ConfigError, match="generates no text over pipeline stages"):
        load_text_to_text_model("nowhere", given={"pipeline_model_parallel_size": 2})
