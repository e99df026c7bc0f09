"""Flags of a run beside a checkpoint: read by one parser, whatever program they are given to."""

import argparse

import pytest

from megatron.config.runtime import DeviceKind
from megatron.errors import ConfigError, PreflightError
from tools.flags.model import ModelChoice, add_model_flags, read_model_flags


def read(words: str) -> tuple[argparse.Namespace, ModelChoice]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_model_flags(parser)
    parser.add_argument("--micro-batch-size", type=int)
    parser.add_argument("--prompt", nargs="+")
    return read_model_flags(parser, words.split())


def test_flags_of_the_program_and_of_a_run_are_told_apart() -> None:
    own, choice = read("--load x --prompt a b --num-layers 2 --micro-batch-size 4 --seed=3")
    assert own.prompt == ["a", "b"]
    assert choice == ModelChoice("x", None, {"num_layers": 2, "micro_batch_size": 4, "seed": 3})


def test_a_machine_and_an_iteration() -> None:
    _, choice = read("--load x --device cpu --ckpt-step 3")
    assert choice.given["device"] is DeviceKind.CPU
    assert choice.iteration == 3
    assert read("--load x --ckpt-step 3 --iteration 5")[1].iteration == 5


def test_weights_may_be_stored_in_8_bits() -> None:
    assert read("--load x")[1].weight_quantization is None
    assert read("--load x --weight-quantization int8")[1].weight_quantization == "int8"


def test_fp32_is_a_precision_beside_the_others() -> None:
    _, choice = read("--load x --fp32")
    assert choice.given == {"fp16": False, "bf16": False, "fp64": False}
    with pytest.raises(ConfigError, match="more than one precision") as raised:
        read("--load x --fp32 --bf16")
    assert raised.value.found == "--fp32 --bf16"


def test_a_flag_that_nobody_has_is_refused_with_the_nearest_of_both() -> None:
    with pytest.raises(PreflightError) as raised:
        read("--load x --promt a")
    assert "did you mean --prompt?" in str(raised.value)
    with pytest.raises(PreflightError) as raised:
        read("--load x --num-layrs 3")
    assert "did you mean --num-layers?" in str(raised.value)
    with pytest.raises(PreflightError, match="1 check failed") as raised:
        read("--load x --num-layers three")
    assert "a flag was given a value of the wrong kind" in str(raised.value)
