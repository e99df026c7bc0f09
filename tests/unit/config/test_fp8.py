"""Flags of FP8: what they mean together, and the spellings of other Megatrons."""

from typing import Any

import pytest

from megatron.arguments import parse_args
from megatron.config.fields import FieldsError
from megatron.config.fp8 import AmaxAlgorithm, Fp8Config, Fp8Format, Fp8Recipe, LayerEnds
from megatron.errors import ConfigError
from tests.unit.config.groups import COMMAND, a_run, problems_of


def test_nothing_is_in_fp8_unless_a_format_is_given() -> None:
    assert a_run().fp8 == Fp8Config()
    assert not Fp8Config().has_layer(0, 2)
    assert Fp8Config(fp8_format=Fp8Format.E4M3).has_layer(0, 1)


def test_first_and_last_layers_can_stay_out() -> None:
    config = Fp8Config(fp8_format=Fp8Format.HYBRID, first_last_layers_bf16=True)
    assert config.ends == LayerEnds(1, 1)
    assert [config.has_layer(layer, 4) for layer in range(4)] == [False, True, True, False]
    flags = {"num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 2}
    uneven = Fp8Config(fp8_format=Fp8Format.HYBRID, first_last_layers_bf16=True, **flags)
    assert [uneven.has_layer(layer, 4) for layer in range(4)] == [True, True, False, False]


@pytest.mark.parametrize(
    ("flags", "message", "found"),
    [
        (
            {"fp8_recipe": Fp8Recipe.ROWWISE, "fp8_wgrad": False},
            "flags of FP8 were given, and nothing is computed in FP8",
            "--fp8-recipe, --fp8-wgrad without --fp8-format",
        ),
        (
            {"fp8_format": Fp8Format.E4M3, "num_layers_at_end_in_bf16": 2},
            "all layers are in FP8",
            "--num-layers-at-end-in-bf16 2 without --first-last-layers-bf16",
        ),
        (
            {
                "fp8_format": Fp8Format.E4M3,
                "first_last_layers_bf16": True,
                "num_layers_at_start_in_bf16": -1,
            },
            "a number of layers is negative",
            "--num-layers-at-start-in-bf16 -1",
        ),
        (
            {"fp8_format": Fp8Format.E4M3, "fp8_margin": 9},
            "the room above the largest value is not one that tensorwise can leave",
            "--fp8-margin 9",
        ),
        (
            {"fp8_format": Fp8Format.E4M3, "fp8_recipe": Fp8Recipe.MXFP8, "fp8_margin": 1},
            "the room above the largest value is not one that mxfp8 can leave",
            "--fp8-margin 1",
        ),
        (
            {"fp8_format": Fp8Format.E4M3, "fp8_amax_history_len": 1024},
            "a history of largest values was described",
            "--fp8-amax-history-len 1024 with --fp8-recipe tensorwise",
        ),
        (
            {
                "fp8_format": Fp8Format.E4M3,
                "fp8_recipe": Fp8Recipe.MXFP8,
                "fp8_amax_compute_algo": AmaxAlgorithm.MAX,
            },
            "a history of largest values was described",
            "--fp8-amax-compute-algo max with --fp8-recipe mxfp8",
        ),
        (
            {
                "fp8_format": Fp8Format.E4M3,
                "fp8_recipe": Fp8Recipe.DELAYED,
                "fp8_amax_history_len": 0,
            },
            "holds no step",
            "--fp8-amax-history-len 0",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    flags: dict[str, Any], message: str, found: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Fp8Config(**flags)
    assert caught.value.found == found


def test_a_history_has_the_length_of_transformer_engine_unless_said_otherwise() -> None:
    config = parse_args([*COMMAND, "--bf16", "--fp8-hybrid", "--fp8-recipe", "delayed"]).fp8
    assert (config.history_length, config.amax_algorithm) == (1024, AmaxAlgorithm.MAX)
    words = ["--fp8-amax-history-len", "16", "--fp8-amax-compute-algo", "most_recent", "--bf16"]
    config = parse_args([*COMMAND, "--fp8-hybrid", "--fp8-recipe", "delayed", *words]).fp8
    assert (config.history_length, config.amax_algorithm) == (16, AmaxAlgorithm.MOST_RECENT)


def test_all_that_is_wrong_is_said_together() -> None:
    with pytest.raises(FieldsError) as caught:
        Fp8Config(fp8_margin=-1)
    assert len(caught.value.errors) == 2


@pytest.mark.parametrize(
    ("words", "form"),
    [
        (["--fp8-e4m3"], Fp8Format.E4M3),
        (["--fp8-hybrid", "--fp8-interval", "1"], Fp8Format.HYBRID),
        (["--fp8-format", "hybrid", "--no-fp8-wgrad"], Fp8Format.HYBRID),
    ],
)
def test_spellings_of_other_megatrons(words: list[str], form: Fp8Format) -> None:
    config = parse_args([*COMMAND, *words, "--bf16"])
    assert config.fp8.fp8_format is form
    assert config.fp8.fp8_wgrad == ("--no-fp8-wgrad" not in words)


def test_what_is_not_built_is_refused() -> None:
    (problem,) = problems_of("--fp8-recipe", "custom", "--fp8-format", "hybrid", "--bf16")
    assert "tensorwise, delayed, rowwise, blockwise, mxfp8" in str(problem)
