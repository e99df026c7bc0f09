"""Fields are of the expected kind, or refused by name and value."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.fields import Fields, read_rope, rope_scaling
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def fields(**values: Any) -> Fields:
    return Fields(Path("config.json"), values)


def test_values_of_the_right_kind_are_given() -> None:
    given = fields(n=3, x=2, yes=True, text="b", none=None, inner={"a": 1})
    assert (given.integer("n"), given.number("x"), given.boolean("yes")) == (3, 2.0, True)
    assert given.integer("none", 5) == given.integer("absent", 5) == 5
    assert given.mapping("inner") == {"a": 1}
    assert given.mapping("none") == {}
    assert given.choice("text", {"a": 1, "b": 2}, "a") == 2
    assert given.choice("absent", {"a": 1, "b": 2}, "a") == 1
    assert given.integer_of("absent", "none", "n") == given.integer_of("n", "absent") == 3
    assert given.has("none")
    assert not given.has("absent")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda f: f.integer("x"), "'x' is 2.5, not a whole number"),
        (lambda f: f.integer("zero"), "'zero' is 0, not a whole number"),
        (lambda f: f.integer("yes"), "'yes' is True, not a whole number"),
        (lambda f: f.number("text"), "'text' is 'b', not a number"),
        (lambda f: f.boolean("n"), "'n' is 3, not true or false"),
        (lambda f: f.mapping("n"), "'n' is 3, not an object"),
    ],
)
def test_a_value_of_another_kind_is_refused(ask: Callable[[Fields], Any], message: str) -> None:
    given = fields(x=2.5, zero=0, yes=True, text="b", n=3)
    with pytest.raises(CheckpointError, match="a field of the wrong kind") as caught:
        ask(given)
    assert message in str(caught.value)


def test_a_field_that_is_needed_is_asked_for() -> None:
    with pytest.raises(CheckpointError, match="lacks a field that its family needs") as caught:
        fields().get("hidden_size")
    assert "no 'hidden_size'" in str(caught.value)


def test_a_value_that_no_model_follows_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="no model here does: why") as caught:
        fields(scale=False).must_be("scale", True, True, why="why")
    assert "'scale' is False" in str(caught.value)
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        fields(act="mish").choice("act", {"silu": 1, "gelu": 2}, "silu")
    assert "'act' is 'mish'" in str(caught.value)
    assert "'silu' or 'gelu'" in str(caught.value)


def test_what_nobody_asked_for_is_listed_without_bookkeeping() -> None:
    given = fields(a=1, b=2, c=None, torch_dtype="float32", model_type="llama")
    given.get("a")
    assert given.unread() == ["b"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"rotary_base": 10000.0}),
        ({"rope_theta": 5e5}, {"rotary_base": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rotary_base": 5e5}),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rotary_base": 5.0, "rotary_seq_len_interpolation_factor": 2.0},
        ),
        (
            {"rope_theta": 5.0, "rope_scaling": LLAMA3},
            {
                "rotary_base": 5.0,
                "use_rope_scaling": True,
                "rope_scaling_factor": 8.0,
                "rope_scaling_low_freq_factor": 1.0,
                "rope_scaling_high_freq_factor": 4.0,
                "rope_scaling_original_length": 8192,
            },
        ),
    ],
)
def test_rotary_fields_of_both_generations(
    values: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = read_rope(fields(**values, max_position_embeddings=64))
    assert found == {"position_embedding_type": "rope", **expected}
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = from_plain(ModelConfig, shape | found)
    again = {"rope_theta": config.rotary_base, "rope_scaling": rope_scaling(config)}
    assert read_rope(fields(**again, max_position_embeddings=64)) == found


YARN = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}


@pytest.mark.parametrize(
    ("given", "changes"),
    [
        ({"factor": 4.0, "original_max_position_embeddings": 16}, {}),
        ({"original_max_position_embeddings": 16}, {}),  # the factor is that of the lengths
        (
            {"factor": 2.0},
            {"rotary_scaling_factor": 2.0, "yarn_original_max_position_embeddings": 64},
        ),
        (
            {
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 8,
                "beta_slow": 0.5,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 0.6,
            },
            {
                "yarn_beta_fast": 8.0,
                "yarn_beta_slow": 0.5,
                "yarn_correction_range_round_to_int": False,
                "mscale": 0.7,
                "mscale_all_dim": 0.6,
            },
        ),
        # One weight alone has no effect in transformers.
        ({"factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.7}, {}),
        (
            {"factor": math.e, "original_max_position_embeddings": 16, "attention_factor": 1.25},
            {"rotary_scaling_factor": math.e, "mscale": 2.5},
        ),
    ],
)
def test_yarn_is_read_and_written(given: dict[str, Any], changes: dict[str, Any]) -> None:
    given = {"rope_type": "yarn"} | given
    found = read_rope(fields(rope_scaling=given, max_position_embeddings=64))
    expected = {"position_embedding_type": "rope", "rotary_base": 1e4, **YARN, **changes}
    assert found == pytest.approx(expected)
    shape = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    config = from_plain(ModelConfig, shape | found)
    again = read_rope(fields(rope_scaling=rope_scaling(config), max_position_embeddings=64))
    assert again == pytest.approx(found)


def test_a_size_of_rotated_queries_below_one_is_refused() -> None:
    given = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5}
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        read_rope(fields(rope_scaling=given, max_position_embeddings=64))
    assert "'attention_factor' is 0.5" in str(caught.value)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_a_scaling_that_no_model_here_has_is_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        read_rope(fields(rope_scaling={"rope_type": kind, "factor": 4.0}))
    assert f"'rope_scaling.rope_type' is {kind!r}" in str(caught.value)
