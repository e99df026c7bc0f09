"""Known families, families without a model here, and the family that fits a model of ours."""

from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.registry import (
    FAMILIES,
    WITHOUT_MODEL,
    family_called,
    family_for,
)
from megatron.checkpoint.model_kind import BERT, CLASSIFIER, PREFIX_LM
from megatron.config.model import Normalization, PositionEmbedding
from megatron.errors import CheckpointError
from tests.support.models import tiny_config
from tests.unit.checkpoint.formats.huggingface.test_family import HELD, LLAMA


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_found_by_its_name(name: str) -> None:
    assert family_called(name, path="x").model_type == name


@pytest.mark.parametrize("name", WITHOUT_MODEL)
def test_a_family_without_a_model_here_is_refused_by_what_it_is(name: str) -> None:
    with pytest.raises(CheckpointError, match="has no model here yet: ") as caught:
        family_called(name, path="folder/config.json")
    assert f"folder/config.json: 'model_type' is {name!r}" in str(caught.value)
    assert WITHOUT_MODEL[name] in str(caught.value)


def test_an_unknown_family_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(CheckpointError, match="is not known here") as caught:
        family_called("lama", path="x")
    assert "did you mean llama?" in str(caught.value)
    with pytest.raises(CheckpointError, match="is not known here"):
        family_called(None, path="x")
    with pytest.raises(CheckpointError, match="is not known here"):
        family_called(["llama"], path="x")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "gpt2"),
        (HELD["gpt_neox"][0], "gpt_neox"),
        (HELD["bloom"][0], "bloom"),
        (HELD["falcon"][0], "falcon"),
        (HELD["falcon"][1], "falcon"),
        (LLAMA, "llama"),
        ({**LLAMA, "sliding_window": 4}, "mistral"),
        (HELD["phi3"][1], "phi3"),
        (HELD["qwen2"][0], "qwen2"),
        (HELD["qwen3"][0], "qwen3"),
        (HELD["smollm3"][1], "smollm3"),
        (HELD["olmo2"][0], "olmo2"),
        (HELD["granite"][1], "granite"),
        (HELD["opt"][0], "opt"),
        (HELD["mixtral"][0], "mixtral"),
        (HELD["gpt_oss"][1], "gpt_oss"),
        (HELD["gemma2"][0], "gemma2"),
        (HELD["gemma3_text"][0], "gemma3_text"),
        (HELD["qwen2_moe"][0], "qwen2_moe"),
        (HELD["qwen3_moe"][0], "qwen3_moe"),
    ],
)
def test_a_model_finds_its_family(changes: dict[str, Any], name: str) -> None:
    assert family_for(tiny_config(**changes)).model_type == name


def test_a_family_can_be_asked_for() -> None:
    assert family_for(tiny_config(**LLAMA), "mistral").model_type == "mistral"
    with pytest.raises(CheckpointError, match="the family gpt2 does not compute") as caught:
        family_for(tiny_config(**LLAMA), "gpt2")
    assert "--normalization RMSNorm (gpt2 has LayerNorm)" in str(caught.value)
    with pytest.raises(CheckpointError, match="is not known here"):
        family_for(tiny_config(), "gpt3")


def test_a_bert_finds_its_family_by_its_kind_and_where_its_norms_stand() -> None:
    after = tiny_config(apply_residual_connection_post_layernorm=True)
    for kind in (BERT, CLASSIFIER):
        assert family_for(after, kind=kind).model_type == "bert"
        assert family_for(tiny_config(), kind=kind).model_type == "megatron-bert"
    assert family_for(after, "bert", kind=BERT).model_type == "bert"
    with pytest.raises(CheckpointError, match="than the family gpt2 takes") as caught:
        family_for(tiny_config(), "gpt2", kind=BERT)
    assert "holds a BERT (kind bert), and the family gpt2 takes a GPT" in str(caught.value)
    with pytest.raises(CheckpointError, match="than the family bert takes"):
        family_for(tiny_config(), "bert")


def test_a_model_of_no_family_is_refused_by_what_comes_closest() -> None:
    config = tiny_config(
        position_embedding_type=PositionEmbedding.ALIBI, normalization=Normalization.LAYER_NORM
    )
    with pytest.raises(CheckpointError, match="no family of Hugging Face models") as caught:
        family_for(config)
    assert caught.value.found == ("--position-embedding-type alibi (gpt2 has learned_absolute)")


def test_a_prefix_lm_is_of_no_family() -> None:
    with pytest.raises(CheckpointError, match="no family of Hugging Face models is of this kind"):
        family_for(tiny_config(), kind=PREFIX_LM)
