"""Every spelling of another Megatron stands for the flag that its table says."""

import pytest

from megatron.arguments import parse_args, parse_given
from megatron.config.checkpoint import CheckpointFormatName
from megatron.config.runtime import LogLevel
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from tests.support.output import without_times
from tests.unit.config.groups import COMMAND, a_run, problems_of

# What some aliases need beside them.
BESIDE = {
    "--train-data": [],
    "--disable-fp8-wgrad": ["--fp8-format", "hybrid", "--bf16"],
    "--persistent-save-interval": ["--save", "out"],
}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_is_taken(alias: str) -> None:
    wants_value = len([word for word in ALIASES[alias] if word.startswith("--")]) * 2 > len(
        ALIASES[alias]
    )
    value = "uniform" if ALIASES[alias][-1] == "--recompute-method" else "7"
    command = [word for word in COMMAND if word not in ("--data-path", "corpus")]
    command += [] if alias == "--train-data" else ["--data-path", "corpus"]
    command += BESIDE.get(alias, [])
    config = parse_args([*command, alias, *([value] if wants_value else [])])
    assert config != a_run()


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("--ckpt-format torch", {"checkpoint_format": CheckpointFormatName.MEGATRON}),
        ("--dist-ckpt-format torch_dist", {"checkpoint_format": CheckpointFormatName.SHARDED}),
        ("--ckpt-format fsdp_dtensor", {"checkpoint_format": CheckpointFormatName.SHARDED}),
        ("--logging-level 30", {"log_level": LogLevel.WARNING}),
        ("--iterations-to-skip 7 9", {"skip_train_iteration_range": ("7-7", "9-9")}),
        ("--window-size 127,0", {"sliding_window": 128}),
        ("--window-size (0,0)", {"sliding_window": 1}),
        ("--window-size 7 0", {"sliding_window": 8}),
        ("--profile_steps 2,3", {"profile_step_start": 2, "profile_step_end": 3}),
        ("--profile-steps 4,6", {"profile_step_start": 4, "profile_step_end": 6}),
        ("--cuda-graph-scope full_iteration", {"cuda_graph": True}),
        ("--cuda-graph-scope attn,mlp", {}),
        ("--profile pt", {"profile": True}),
        ("--profile pt-full", {"profile": True}),
        ("--profile", {"profile": True}),
    ],
)
def test_values_are_written_as_ours(words: str, given: dict[str, object]) -> None:
    assert parse_given(words.split()) == given


def test_what_a_value_was_taken_as_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    parse_given(["--ckpt-format", "torch_dist"])
    said = without_times(capsys.readouterr().out)
    assert said == "--ckpt-format torch_dist: taken as --checkpoint-format sharded\n"
    parse_given(["--cuda-graph-scope", "attn", "mlp"])
    said = without_times(capsys.readouterr().out)
    assert said.startswith("--cuda-graph-scope attn mlp: no effect (full_iteration is --cuda-graph")


@pytest.mark.parametrize(
    "words",
    [
        *("--ckpt-format torch_dcp", "--ckpt-format", "--logging-level 25"),
        *("--profile_steps 2", "--window-size 127,127", "--window-size -1,0", "--window-size 128"),
        *("--cuda-graph-scope", "--cuda-graph-scope layers"),
    ],
)
def test_a_value_without_counterpart_is_refused(words: str) -> None:
    (error,) = problems_of(*words.split())
    assert error.problem == "a flag of another Megatron has a value without counterpart here"
    assert error.found == words
    assert error.fix == f"use one that has: {CONVERTED[words.split()[0]].meaning}"
