"""A command line becomes a run, or one report of everything that is wrong with it."""

import argparse
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.arguments import _parser, parse_args, parse_given
from megatron.config.activations import ActivationPolicy, RecomputeMethod, RecomputeModule
from megatron.config.fields import field_names, flag_name
from megatron.config.model import PositionEmbedding
from megatron.config.optimizer import DecayStyle
from megatron.config.run import GROUPS
from megatron.errors import ConfigError, PreflightError
from tests.support.output import without_times
from tests.unit.config.groups import COMMAND, a_run, problems_of

FLAG_NAMES = [flag_name(name) for group in GROUPS.values() for name in field_names(group)]


def test_a_command_line_becomes_a_run() -> None:
    assert parse_args(COMMAND) == a_run()


@given(st.permutations(range(len(COMMAND) // 2)))
def test_the_order_of_flags_does_not_matter(order: list[int]) -> None:
    words = [word for at in order for word in COMMAND[2 * at : 2 * at + 2]]
    assert parse_args(words) == a_run()


def test_a_value_may_follow_an_equals_sign() -> None:
    command = [f"{name}={value}" for name, value in zip(COMMAND[::2], COMMAND[1::2])]
    assert parse_args(command) == a_run()


def test_a_negative_number_is_a_value() -> None:
    (error,) = problems_of("--seed", "-3")
    assert error.found == "--seed -3"


def test_the_last_of_two_equal_flags_wins() -> None:
    assert parse_args([*COMMAND, "--seed", "1", "--seed", "2"]).training.seed == 2


def test_help_ends_the_program_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_args(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in FLAG_NAMES)


def test_everything_that_is_wrong_is_reported_together() -> None:
    errors = problems_of(
        "--num-layrs", "4", "--seed", "x", "--hidden-dropout", "2", "--batch-size", "8",
        "--use-bnb-optimizer", "--model-preset", "gpt", "--min-lr", "1",
    )  # fmt: skip
    assert [error.problem for error in errors] == [
        "this flag was removed long ago",
        "this flag is of a feature that this version does not have: an optimizer whose state has 8 "
        "bits, rounded in blocks of what a rank holds, so that results would depend on the layout",
        "a flag was given a value of the wrong kind",
        "there is no such flag",
        "there is no such model preset",
        "a dropout probability is outside [0, 1)",
        "it is not between 0 and the peak learning rate",
    ]


def test_each_thing_wrong_with_one_group_is_a_finding_of_its_own() -> None:
    errors = problems_of("--hidden-dropout", "2", "--attention-dropout", "3")
    assert [error.found for error in errors] == ["--hidden-dropout 2.0", "--attention-dropout 3.0"]


def test_every_required_flag_is_asked_for_at_once() -> None:
    text = "\n".join(str(error) for error in problems_of(base=[]))
    for name in ("--num-layers", "--seq-length", "--micro-batch-size", "--lr"):
        assert f"{name} <value>" in text


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("--num-layrs", "--num-layers"),
        ("--hiddensize", "--hidden-size"),
        ("--lr-warmup-itres", "--lr-warmup-iters"),
        ("--checkpoint-activation", "--checkpoint-activations"),
    ],
)
def test_an_unknown_flag_is_answered_with_the_nearest(word: str, near: str) -> None:
    (error,) = problems_of(word, "7")
    assert error.problem == "there is no such flag"
    assert error.found == word
    assert error.fix == f"did you mean {near}?"


@given(data=st.data())
def test_a_flag_without_one_of_its_letters_is_never_taken(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FLAG_NAMES if len(name) > 6]))
    at = data.draw(st.integers(2, len(name) - 1))
    wrong = name[:at] + name[at + 1 :]
    begin_so = {n for n in _parser([])._option_string_actions if n.startswith(wrong)}
    if wrong in begin_so or len(begin_so) == 1:
        return
    errors = problems_of(wrong, "1")
    assert errors[0].found == wrong
    assert errors[0].fix.startswith("several flags begin so" if begin_so else "did you mean --")


def test_a_flag_that_is_like_no_other_is_refused_too() -> None:
    (error,) = problems_of("--xyzzy")
    assert error.fix == "see --help for every flag"


@pytest.mark.parametrize("words", [["--see", "7"], ["--see=7"]])
def test_a_flag_may_be_shortened_to_what_no_other_begins_with(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert parse_args([*COMMAND, *words]).training.seed == 7
    said = without_times(capsys.readouterr().out)
    assert said == "--see: taken as --seed, the only flag that begins so\n"


def test_a_shortened_flag_is_read_as_in_full() -> None:
    assert parse_given(["--no-save-op"]) == {"save_optim": False}
    assert parse_given(["--deepspeed-c", "a"]) == {"deepspeed_config": "a"}
    # The rule of the flag in full holds: Megatron-LM ignores it alone.
    (error,) = problems_of("--num-query", "1")
    assert error.found == "--num-query-groups 1 without --group-query-attention"


def test_a_beginning_of_several_flags_is_answered_with_all_of_them() -> None:
    (error,) = problems_of("--num-layer", "7")
    assert error.problem == "there is no such flag"
    assert error.fix.startswith("several flags begin so: use --num-layers or --num-layers-at-")


def test_what_begins_a_flag_of_the_program_too_is_not_taken_from_it() -> None:
    assert parse_given(["--see", "7"]) == {"seed": 7}
    for beside in ("--seen", "--seed-of-prompts"):
        with pytest.raises(PreflightError) as caught:
            parse_given(["--see", "7"], beside=[beside])
        (finding,) = caught.value.findings
        assert finding.error.fix.startswith("several flags begin so: use --see")


def test_a_flag_of_another_megatron_is_not_short_for_one_of_ours(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert parse_given(["--exit-signal", "SIGTERM"]) == {}  # nor --exit-signal-handler
    assert "accepted, has no effect" in capsys.readouterr().out


def test_a_word_without_a_flag_is_refused() -> None:
    (error,) = problems_of(base=["stray", *COMMAND])
    assert error.problem == "a word on the command line belongs to no flag"
    assert error.found == "stray"


def test_a_flag_without_its_value_is_refused() -> None:
    errors = problems_of("--batch-size", "8", "--lr")
    assert [error.problem for error in errors] == [
        "this flag was removed long ago",
        "a flag is used wrongly",
    ]
    assert "--lr: expected one argument" in str(errors[1].found)


@pytest.mark.parametrize(
    ("words", "policy"),
    [
        (["--checkpoint-activations"], {"method": RecomputeMethod.UNIFORM}),
        (
            ["--checkpoint-activations", "--checkpoint-num-layers", "3"],
            {"method": RecomputeMethod.UNIFORM, "num_layers": 3},
        ),
        (
            ["--checkpoint-activations", "--distribute-checkpointed-activations"],
            {"method": RecomputeMethod.UNIFORM, "distribute": True},
        ),
        (["--recompute-activations"], {"modules": frozenset({RecomputeModule.CORE_ATTN})}),
        (
            ["--recompute-activations", "--recompute-modules", "mlp", "layernorm"],
            {"modules": frozenset({RecomputeModule.MLP, RecomputeModule.LAYERNORM})},
        ),
    ],
)
def test_other_names_of_recomputation_mean_what_they_meant(
    words: list[str], policy: dict[str, Any]
) -> None:
    assert parse_args([*COMMAND, *words]).training.activations == ActivationPolicy(**policy)


def test_a_module_that_cannot_be_recomputed_is_refused() -> None:
    (error,) = problems_of("--recompute-activations", "--recompute-modules", "mlp", "moe")
    assert error.found == "--recompute-modules moe"
    assert error.fix == "give one of core_attn, mlp, act, layernorm"


def test_older_names_of_positions_are_understood() -> None:
    rope = parse_args([*COMMAND, "--use-rotary-position-embeddings"])
    assert rope.model.position_embedding_type is PositionEmbedding.ROPE


def test_an_optional_value_of_a_flag_without_effect_may_be_left_out() -> None:
    assert parse_args(["--lazy-mpu-init", *COMMAND]) == a_run()


def test_a_preset_gives_a_shape_and_typed_flags_win() -> None:
    words = [*COMMAND[4:], "--model-preset", "llama2-7b", "--num-layers", "3"]
    config = parse_args(words)
    assert config.model.num_layers == 3
    assert config.model.hidden_size == 4096
    assert config.data.seq_length == 16  # typed too


def test_a_preset_that_is_not_there_names_the_nearest() -> None:
    (error,) = problems_of("--model-preset", "lama-7b")
    assert error.problem == "there is no such model preset"
    assert error.fix.startswith("did you mean llama-7b? The presets are gpt2-small, ")


def test_defaults_of_a_program_give_way_to_the_command_line_and_to_a_preset() -> None:
    defaults = {"seed": 7, "min_lr": 1e-5, "num_layers": 99}
    config = parse_args([*COMMAND, "--seed", "8"], args_defaults=defaults)
    assert (config.training.seed, config.schedule.min_lr, config.model.num_layers) == (8, 1e-5, 2)
    shaped = parse_args(
        [*COMMAND[2:], "--hidden-size", "768", "--model-preset", "gpt2-small"],
        args_defaults=defaults,
    )
    assert shaped.model.num_layers == 12


def test_a_default_for_a_flag_that_does_not_exist_is_an_error() -> None:
    (error,) = problems_of(args_defaults={"number_of_layers": 3})
    assert error.problem == "args_defaults gives a value to a flag that does not exist"
    assert error.found == "number_of_layers"


def with_own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("mine")
    group.add_argument("--my-weight", type=float, default=0.5)
    group.add_argument("--my-file", default=None)
    group.add_argument("--my-switch", action="store_true")
    return parser


def test_a_program_can_have_flags_of_its_own() -> None:
    config = parse_args([*COMMAND, "--my-weight", "2"], extra_args_provider=with_own_flags)
    assert config.extra == {"my_weight": 2.0, "my_file": None, "my_switch": False}
    args = config.flat()
    assert (args.my_weight, args.my_file, args.my_switch, args.num_layers) == (2.0, None, False, 2)


def test_defaults_reach_a_program_s_own_flags() -> None:
    config = parse_args(
        COMMAND, extra_args_provider=with_own_flags, args_defaults={"my_file": "here"}
    )
    assert config.extra["my_file"] == "here"


def test_a_provider_that_forgets_to_return_the_parser_is_told() -> None:
    def forgetful(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--mine")

    with pytest.raises(ConfigError, match="extra_args_provider did not return the parser") as error:
        parse_args(COMMAND, extra_args_provider=forgetful)  # type: ignore[arg-type]
    assert error.value.found == "forgetful returned NoneType"


def test_a_flag_whose_value_no_checkpoint_can_hold_is_refused() -> None:
    def with_pattern(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--my-pattern", type=re.compile)
        return parser

    with pytest.raises(ConfigError, match="a value that a checkpoint cannot record") as caught:
        parse_args([*COMMAND, "--my-pattern", "a+"], extra_args_provider=with_pattern)
    assert caught.value.found == "--my-pattern of type Pattern"


@pytest.mark.parametrize("style", [style.value for style in DecayStyle])
def test_every_decay_style_can_be_asked_for(style: str) -> None:
    words = [*COMMAND, "--lr-decay-style", style, "--lr-wsd-decay-iters", "2"]
    assert parse_args(words).schedule.lr_decay_style.value == style


def test_only_what_was_given_is_given() -> None:
    assert parse_given([]) == {}
    assert parse_given(["--seed", "3", "--no-load-optim"]) == {"seed": 3, "load_optim": False}
    assert parse_given(["--model-preset", "gpt3-125m", "--num-layers", "3"])["num_layers"] == 3
    with pytest.raises(PreflightError) as caught:
        parse_given(["--seed", "three", "--sed", "1", "--batch-size", "2"], beside=["--said"])
    assert {finding.error.problem for finding in caught.value.findings} == {
        "a flag was given a value of the wrong kind",
        "there is no such flag",
        "this flag was removed long ago",
    }
