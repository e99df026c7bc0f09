"""Checkpoints of a Megatron-DeepSpeed, with its names, its row orders and its flags."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.deepspeed.universal import UniversalSource
from megatron.checkpoint.source import SourceOptions
from tests.distributed.checkpoint.formats.deepspeed.test_source import assert_holds
from tests.support.checkpoints.deepspeed_folders import STEPS, Case, convert, joined
from tests.support.checkpoints.megatron_deepspeed import LAYERS, Piped, write_piped, write_plain

HEAD_WIDTH = 4


@pytest.mark.parametrize(("stage", "version"), [(1, 3.0), (1, 0.0), (2, 1.0), (0, 3.0)])
def test_a_plain_model_is_read_under_our_names_with_the_flags_of_its_run(
    stage: int, version: float, tmp_path: Path
) -> None:
    ranks = write_plain(tmp_path, stage=stage, tp=2, version=version, flags={})
    # What the file calls rows of an older order, we must turn into ours, rank by rank.
    for rank in ranks:
        for name, local in rank.items():
            if ".attention.qkv." in name:
                for kind, values in local.values.items():
                    local.values[kind] = _modern(values, version)
    source = DeepSpeedSource(tmp_path / f"global_step{STEPS}", SourceOptions())
    assert_holds(source, joined(ranks, Case(stage=stage, tp=2)))
    model = source.config["model"]
    assert (model["num_layers"], model["hidden_size"], model["embed_layernorm"]) == (2, 16, True)
    assert source.progress == {
        "iteration": 9,
        "consumed_samples": 77,
        "consumed_tokens": 924,
        "consumed_valid_samples": 5,
    }
    assert source.scalars == {"optimizer": {"steps": STEPS, "loss_scaler": {}}}


def test_bigsciences_gated_units_have_their_halves_in_the_other_order(tmp_path: Path) -> None:
    ranks = write_plain(tmp_path, stage=1, tp=2, version=3.0, flags={"glu": True})
    for rank in ranks:
        for name, local in rank.items():
            if ".mlp.fc1." in name:
                for kind, values in local.values.items():
                    up, gate = values.chunk(2, 0)
                    local.values[kind] = torch.cat([gate, up])
    truth = joined(ranks, Case(stage=1, tp=2))
    folder = tmp_path / f"global_step{STEPS}"
    assert_holds(DeepSpeedSource(folder, SourceOptions()), truth)
    # Its converter ignores halves: they are scrambled in the file alone.
    assert_holds(UniversalSource(convert(folder), SourceOptions()), truth)


def _modern(values: Tensor, version: float) -> Tensor:
    if version >= 2:
        return values
    rest = values.shape[1:]
    if version < 1:
        return values.view(3, -1, HEAD_WIDTH, *rest).transpose(0, 1).reshape(values.shape)
    return values.view(-1, HEAD_WIDTH, 3, *rest).transpose(1, 2).reshape(values.shape)


@pytest.mark.parametrize("first_is_function", [True, False], ids=["bigscience", "microsoft"])
def test_a_pipeline_is_read_with_tables_of_the_stage_that_uses_them(
    first_is_function: bool, tmp_path: Path
) -> None:
    stages = write_piped(tmp_path, pp=2, dp=2, first_is_function=first_is_function)
    first = 3 if first_is_function else 2
    position = "tied_modules.embed.position_embeddings.weight"
    used, unused = (stage.values[position]["weight"] for stage in stages)
    assert not torch.equal(used, unused)  # DeepSpeed's own converter lets the last stage's win
    truth = _by_our_names(stages, first)
    assert torch.equal(truth["model/embedding.position.weight"], used)
    source = DeepSpeedSource(tmp_path / f"global_step{STEPS}", SourceOptions())
    assert_holds(source, truth)
    assert source.grid == (1, 2, 2)


def _by_our_names(stages: list[Piped], first: int) -> dict[str, Tensor]:
    parts = {
        "input_layernorm": "input_norm",
        "self_attention.query_key_value": "attention.qkv",
        "self_attention.dense": "attention.output",
        "post_attention_layernorm": "post_attention_norm",
        "mlp.dense_h_to_4h": "mlp.fc1",
        "mlp.dense_4h_to_h": "mlp.fc2",
    }
    table = {
        "tied_modules.embed.word_embeddings.weight": "embedding.word.weight",
        "tied_modules.embed.position_embeddings.weight": "embedding.position.weight",
    }
    for leaf in ("weight", "bias"):
        for spelling, ours in parts.items():
            for layer in range(LAYERS):
                table[f"{first + layer}.{spelling}.{leaf}"] = f"layers.{layer}.{ours}.{leaf}"
        norm = first + LAYERS + (1 if first == 3 else 0)
        table[f"{norm}.{leaf}"] = f"final_norm.{leaf}"
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, kinds in stage.values.items():
            for kind, values in kinds.items():
                key = "model" if kind == "weight" else f"optimizer/{kind}"
                found.setdefault(f"{key}/{table[name]}", values)
    return found
