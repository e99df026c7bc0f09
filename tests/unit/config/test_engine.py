"""The flags that choose an engine, and those that are DeepSpeed's alone."""

import pytest

from megatron.arguments import parse_args
from megatron.config.engine import EngineConfig, ZeroStage
from megatron.errors import ConfigError
from tests.unit.config.groups import COMMAND


def test_the_native_engine_trains_unless_deepspeed_is_asked_for() -> None:
    assert not EngineConfig().deepspeed
    assert EngineConfig().flags_of_deepspeed == ()


@pytest.mark.parametrize("words", [["--deepspeed"], ["--deepscale"]])
def test_deepspeed_can_be_asked_for_under_its_older_name(words: list[str]) -> None:
    assert parse_args([*COMMAND, *words]).engine == EngineConfig(deepspeed=True)


@pytest.mark.parametrize("flag", ["--deepspeed_config", "--deepspeed-config", "--deepscale_config"])
def test_the_file_has_every_spelling_that_scripts_use(flag: str) -> None:
    assert parse_args([*COMMAND, flag, "ds.json"]).engine.deepspeed_config == "ds.json"


@pytest.mark.parametrize("spelled", ["1", "1.0"])
def test_a_zero_stage_may_be_written_as_a_fraction(spelled: str) -> None:
    # bigscience's parser takes --zero-stage as a floating-point number.
    asked = parse_args([*COMMAND, "--zero-stage", spelled]).engine
    assert asked.zero_stage is ZeroStage.OPTIMIZER


def test_flags_of_deepspeed_alone_are_known() -> None:
    asked = EngineConfig(zero_stage=ZeroStage.NOTHING, use_pin_memory=True, cpu_torch_adam=True)
    assert asked.flags_of_deepspeed == ("zero_stage", "use_pin_memory")


@pytest.mark.parametrize("name", ["zero_reduce_bucket_size", "zero_allgather_bucket_size"])
def test_an_empty_bucket_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="it is not positive") as caught:
        EngineConfig(**{name: 0})
    assert caught.value.found == f"--{name.replace('_', '-')} 0"
