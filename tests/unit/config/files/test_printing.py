"""A run that is printed as a config file is read back as the same run."""

import contextlib
import dataclasses
import enum
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.arguments import parse_args, parse_given
from megatron.config.fields import _kind_of
from megatron.config.files.printing import config_file
from megatron.config.run import GROUPS, RECORDED_JSON, RunConfig
from megatron.errors import ConfigError, PreflightError
from tests.unit.config.groups import COMMAND, a_model, a_run

_READ_FILES = ("deepspeed_config", "use_checkpoint_args")  # flags whose files have to be there
_FEW = 88  # fields that cannot be changed by themselves, as those of muP without --use-mup


def _again(config: RunConfig, folder: Path) -> RunConfig:
    path = folder / "printed.yaml"
    path.write_text(config_file(config.to_plain()), encoding="utf-8")
    return parse_args(["--config", str(path)])


def _value(hint: object, turn: int) -> object:
    kind = _kind_of(hint)
    values = [*kind.item] if issubclass(kind.item, enum.Enum) else _SAMPLES[kind.item]
    value = values[turn % len(values)]
    return (value,) if kind.is_tuple else value


_SAMPLES: dict[type, list[object]] = {
    bool: [True, False],
    int: [3, 4],
    float: [0.5, 1e-9, 2.0, 0.0],
    str: ["1e-8", "no", "010", "a b: c #d"],
}


def _changed(run: RunConfig, turn: int) -> RunConfig:
    """Return a run with other values of as many fields as go together."""
    for name, group in GROUPS.items():
        hints = typing.get_type_hints(group)
        for field in dataclasses.fields(group):
            value = _value(hints[field.name], turn)
            if field.name not in _READ_FILES:
                with contextlib.suppress(ConfigError):
                    other = dataclasses.replace(getattr(run, name), **{field.name: value})
                    run = dataclasses.replace(run, **{name: other})
    return run


def test_every_flag_is_read_back_as_it_is_printed(tmp_path: Path) -> None:
    start = a_run(model=a_model(openai_gelu=True))
    differ: set[str] = set()
    for turn in range(4):
        run = _changed(start, turn)
        assert _again(run, tmp_path) == run
        differ |= {
            name for name in run.flat() if getattr(run.flat(), name) != getattr(start.flat(), name)
        }
    assert len(differ) > len([*start.flat()]) - _FEW


@given(st.lists(st.text(min_size=1).filter(lambda text: text[0] != "-"), min_size=1), st.floats(0))
def test_texts_and_numbers_of_any_kind_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], clip: float
) -> None:
    words = ["--load", texts[0], "--finetune", "--load-only", *texts]
    run = parse_args([*COMMAND, *words, "--clip-grad", str(clip)])
    assert _again(run, tmp_path_factory.getbasetemp()) == run


def test_a_weight_that_was_left_out_is_not_one_of_0_that_was_given(tmp_path: Path) -> None:
    run = parse_args([*COMMAND, "--moe-router-load-balancing-type", "seq_aux_loss"])
    assert _again(run, tmp_path) == run


def test_a_printed_run_is_grouped_and_whole() -> None:
    text = config_file(a_run().to_plain())
    assert [line[:-1] for line in text.splitlines() if line[0] not in " -"] == [*GROUPS]
    assert "\n  num_query_groups: null\n" in text


def test_what_a_checkpoint_records_beside_the_flags_is_left_out() -> None:
    plain = a_run().to_plain()
    assert config_file(plain | {RECORDED_JSON: {"a": 1}}) == config_file(plain)


@pytest.mark.parametrize("flag", ["--print-config", "--print-c"])
def test_the_flag_prints_the_merged_run_and_ends_the_program_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("seed: 7\neval_iters: 7\n")
    words = [*COMMAND, "--config", str(path), "--seed", "8", "--no-masked-softmax-fusion"]
    with pytest.raises(SystemExit) as caught:
        parse_args([*words, flag])
    assert caught.value.code == 0
    printed = tmp_path / "printed.yaml"
    said = capsys.readouterr()
    assert "--no-masked-softmax-fusion: accepted" in said.err
    printed.write_text(said.out)
    run = parse_args(["--config", str(printed)])
    assert (run.training.seed, run.training.eval_iters) == (8, 7)
    assert run == parse_args(words)


def test_a_run_that_is_wrong_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PreflightError):
        parse_args([*COMMAND, "--print-config", "--seed", "-1"])
    assert capsys.readouterr().out == ""


def test_a_program_that_starts_no_training_has_no_whole_run_to_print() -> None:
    assert parse_given(["--seed", "1"]) == {"seed": 1}
    with pytest.raises(PreflightError, match="this program starts none"):
        parse_given(["--print-config"])
