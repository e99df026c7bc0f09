"""The command line: flags from the config groups, Megatron's older spellings, all errors at once.

The meaning of a flag stands in the config group that owns it, the answer to each flag of other
Megatrons in `config.spellings` and `config.dependent_flags`.
"""

import argparse
import contextlib
import difflib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from megatron import log
from megatron.config.deepspeed.agreement import flags_from_json
from megatron.config.deepspeed.plan import read_json
from megatron.config.dependent_flags import (
    EXPLAINED,
    FlagValue,
    GivenFlags,
    NoChange,
    meanings,
)
from megatron.config.fields import (
    FieldsError,
    add_flags,
    field_names,
    flag_name,
    from_flags,
    is_number,
)
from megatron.config.files.printing import config_file
from megatron.config.files.words import (
    CONFIG,
    PRINT_CONFIG,
    FileWords,
    with_places,
    words_of_files,
)
from megatron.config.neox.mapping import FLAG as NEOX_CONFIG
from megatron.config.neox.mapping import NeoxConfig, read_neox
from megatron.config.presets import PRESETS
from megatron.config.run import GROUPS, RunConfig
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from megatron.config.spellings.known import is_answered
from megatron.config.spellings.no_effect import NO_EFFECT, Ignored
from megatron.config.spellings.refused import REFUSED, REMOVED, Refused, take_one_value
from megatron.config.spellings.usage import Values, look_up, take_values
from megatron.errors import ConfigError, Finding, PreflightError
from megatron.launch import launch_from_environment

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


class CommandLineError(PreflightError):
    """Everything wrong with a command line; `config` is the run without it, where there is one."""

    def __init__(self, problems: Iterable[ConfigError], config: RunConfig | None = None) -> None:
        super().__init__(Finding("command_line", error) for error in problems)
        self.config = config


def parse_args(
    argv: Sequence[str] | None = None,
    *,
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, object] | None = None,
    world_size: int | None = None,
) -> RunConfig:
    """Turn a command line into a `RunConfig`, or raise one error that lists all that is wrong.

    Args:
        argv: the flags; the program's own when not given.
        extra_args_provider: adds a program's own flags to the parser, as in Megatron.
        args_defaults: values for flags that the command line does not give.
        world_size: ranks of the run, from which gpt-neox's files derive batches; those of the
            launcher when not given.

    Raises:
        CommandLineError: with all that is wrong.
        CheckpointError: --use-checkpoint-args, and the checkpoint is missing, damaged or records
            too little.
        SystemExit: after `--help` and `--print-config`.
    """
    words = sys.argv[1:] if argv is None else argv
    providers = (extra_args_provider, args_defaults or {}, world_size)
    if not any(PRINT_CONFIG.startswith(word) for word in words if len(word) > len("--p")):
        return _parsed(words, *providers)
    with contextlib.redirect_stdout(sys.stderr):  # notes, of which none belongs into a file
        config = _parsed(words, *providers)
    if log.is_rank_zero():
        _Parser()._print_message(config_file(config.to_plain()), sys.stdout)
    _Parser().exit()


def _parsed(
    argv: Sequence[str],
    extra_args_provider: ExtraArgsProvider | None,
    args_defaults: Mapping[str, object],
    world_size: int | None,
) -> RunConfig:
    problems: list[ConfigError] = []
    parser = _parser(problems)
    own_fields = {action.dest for action in parser._actions}
    if extra_args_provider is not None:
        parser = _with_extra_flags(parser, extra_args_provider)
    argv = _in_full(argv, parser)
    files = words_of_files(argv, parser, GROUPS, _neox_reader(world_size), problems)
    given = _read(parser, files, problems)
    del given["print_config"]
    extra = {name: given.pop(name) for name in sorted(given) if name not in own_fields}
    defaults = dict(args_defaults)
    for name in [name for name in extra if name in defaults]:
        default = defaults.pop(name)
        extra[name] = default if extra[name] is None else extra[name]
    problems += _unknown_defaults(set(defaults) - own_fields)
    typed = {name: value for name, value in given.items() if value is not None}
    preset = _preset(typed.pop("model_preset", None), problems)
    stored = _from_checkpoint(preset | typed)
    values = defaults | stored | preset | _from_deepspeed(typed, problems) | typed
    values |= _from_dependent(files, values, problems)
    groups: dict[str, Any] = {}
    for name, group in GROUPS.items():
        if any(given.get(field, 0) is None for field in field_names(group)):
            continue  # a value could not be read, and is in `problems`
        try:
            groups[name] = from_flags(group, values)
        except FieldsError as several:
            problems += several.errors
        except ConfigError as error:
            problems.append(error)
    whole = len(groups) == len(GROUPS)
    config = RunConfig(**groups, extra=_jsonable(extra)) if whole else None
    if problems or config is None:
        raise CommandLineError(with_places(problems, files.places, parser), config)
    return config


def parse_given(argv: Sequence[str], *, beside: Iterable[str] = ()) -> dict[str, object]:
    """Return the values of the fields that a command line names: no defaults, no config.

    For programs that load the run of a checkpoint and let flags override it. Spellings and refusals
    are those of `parse_args`; the caller checks whether the values go together.

    Args:
        beside: flags that the program has read itself; an error about a typo suggests them too.

    Raises:
        CommandLineError: with all that is wrong.
    """
    problems: list[ConfigError] = []
    parser = _parser(problems)
    argv = _in_full(argv, parser, beside)
    files = words_of_files(argv, parser, GROUPS, _neox_reader(None), problems)
    given = _read(parser, files, problems, beside)
    if given.pop("print_config"):
        problems.append(
            ConfigError(
                "a whole configuration is that of a training, and this program starts none",
                found=PRINT_CONFIG,
                fix=f"give it to pretrain_gpt.py, or use tools/inspect_checkpoint.py SAVE {CONFIG}",
            )
        )
    typed = {name: value for name, value in given.items() if value is not None}
    values = _preset(typed.pop("model_preset", None), problems) | typed
    values |= _from_dependent(files, values, problems)
    if problems:
        raise CommandLineError(with_places(problems, files.places, parser))
    return values


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            "a flag is used wrongly", found=message, fix="see --help for what follows each flag"
        )


def _parser(problems: list[ConfigError]) -> argparse.ArgumentParser:
    parser = _Parser(
        allow_abbrev=False,  # `_in_full` says what it took, and knows flags of other Megatrons
        description="Pretrain a language model. Every flag is listed once, with its default in "
        "brackets.",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=100),
        usage="%(prog)s --num-layers N --hidden-size N ... [flags]",
    )
    parser.add_argument(
        "--model-preset",
        default=None,
        help="take the model's shape from a table; flags given beside it win. One of "
        + ", ".join(PRESETS),
    )
    parser.add_argument(
        CONFIG,
        nargs="+",
        metavar="FILE",
        default=None,
        help="files of flags (.yaml, .yml, .json, .toml), keys under the titles below or without; "
        "later ones win over earlier ones, and the command line over all",
    )
    parser.add_argument(
        NEOX_CONFIG,
        nargs="+",
        metavar="FILE",
        default=None,
        help="config files of gpt-neox, which together are one; --config and the command line win",
    )
    parser.add_argument(
        PRINT_CONFIG,
        action="store_true",
        help="print the whole configuration as a file for --config, and start nothing",
    )
    for name, group in GROUPS.items():
        add_flags(parser, name, group, problems)
    return parser


def _neox_reader(world_size: int | None) -> Callable[[Sequence[str]], NeoxConfig]:
    def read(paths: Sequence[str]) -> NeoxConfig:
        ranks = launch_from_environment().world_size if world_size is None else world_size
        found = read_neox(paths, world_size=ranks)
        if found.problems:  # what a part of a config lacks is not worth a line
            raise CommandLineError(found.problems)
        return found

    return read


def _read(
    parser: argparse.ArgumentParser,
    files: FileWords,
    problems: list[ConfigError],
    beside: Iterable[str] = (),
) -> dict[str, object]:
    """Return the parsed value of each destination; None where a value cannot be read."""
    words = _translate([*files.words, *files.typed], parser, problems)
    try:
        namespace, unknown = parser.parse_known_args(words)
    except ConfigError as error:  # argparse stops at the first flag that lacks its value
        raise CommandLineError(with_places([*problems, error], files.places, parser)) from None
    problems += _unknown_flags(unknown, [*parser._option_string_actions, *beside])
    return vars(namespace)


def _with_extra_flags(
    parser: argparse.ArgumentParser, provider: ExtraArgsProvider
) -> argparse.ArgumentParser:
    extended = provider(parser)
    if not isinstance(extended, argparse.ArgumentParser):
        raise ConfigError(
            "extra_args_provider did not return the parser",
            found=f"{getattr(provider, '__name__', provider)} returned {type(extended).__name__}",
            fix="end the function with `return parser`",
        )
    return extended


def _in_full(
    argv: Sequence[str], parser: argparse.ArgumentParser, beside: Iterable[str] = ()
) -> list[str]:
    """Return a command line without = and shortened flags; log each of these once.

    A flag is short for the only one of ours that begins so, unless another Megatron has it.
    """
    names = [*parser._option_string_actions, *beside]
    words = []
    for word in argv:
        name, *value = _split_equals(word)
        answered = name in names or is_answered(name)
        longer = [] if answered or not name.startswith("--") else _beginning_with(name, names)
        meanings = {_meaning(one, parser) for one in longer}
        if len(meanings) == 1 and None not in meanings:
            log.info(f"{name}: taken as {longer[0]}, the only flag that begins so")
            name = longer[0]
        words += [name, *value]
    return words


def _beginning_with(start: str, names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if name.startswith(start)), key=len)


def _meaning(name: str, parser: argparse.ArgumentParser) -> tuple[str, object] | None:
    """Return what tells two flags apart that are no spellings of one; None: not of this parser."""
    action = parser._option_string_actions.get(name)
    return None if action is None else (action.dest, action.const)


def _translate(
    argv: Sequence[str], parser: argparse.ArgumentParser, problems: list[ConfigError]
) -> list[str]:
    """Replace legacy spellings, drop flags without effect (with a note), note refused ones."""
    words: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in parser._option_string_actions:
            words.append(word)
            problems += take_one_value(word, rest)
        elif word in ALIASES:
            words += ALIASES[word]
        elif word in EXPLAINED:
            continue  # `_from_dependent` reads it together with the others
        elif word in CONVERTED:
            words += _converted(word, take_values(Values.MANY, rest), problems)
        elif (ignored := look_up(NO_EFFECT, word)) is not None:
            problems += _without_effect(word, take_values(ignored.values, rest), ignored)
        elif word in REMOVED:
            take_values(Values.MANY, rest)
            problems.append(_removed(word))
        elif (refused := look_up(REFUSED, word)) is not None:
            take_values(Values.MANY, rest)
            problems.append(_refusal(word, refused))
        else:
            words.append(word)
    return words


def _converted(word: str, values: Sequence[str], problems: list[ConfigError]) -> tuple[str, ...]:
    given = " ".join([word, *values])
    try:
        ours = CONVERTED[word].words(values)
    except ValueError:
        problems.append(
            ConfigError(
                "a flag of another Megatron has a value without counterpart here",
                found=given,
                fix=f"use one that has: {CONVERTED[word].meaning}",
            )
        )
        return ()
    except ConfigError as error:
        problems.append(error)
        return ()
    if ours:
        log.info(f"{given}: taken as {' '.join(ours)}")
    else:
        log.info(f"{given}: no effect ({CONVERTED[word].meaning})")
    return ours


def _without_effect(word: str, values: Sequence[str], ignored: Ignored) -> list[ConfigError]:
    given = " ".join([word, *values])
    if ignored.only and (not values or not set(values) <= set(ignored.only)):
        kept = " or ".join(f"{word} {value}" for value in ignored.only)
        return [
            ConfigError(
                "this value is of a feature that this version does not have",
                found=given,
                fix=f"use {kept}, or leave it out: {ignored.because}",
            )
        ]
    log.info(f"{given}: accepted, has no effect here because {ignored.because}")
    return []


def _removed(word: str) -> ConfigError:
    return ConfigError("this flag was removed long ago", found=word, fix=f"use {REMOVED[word]}")


def _refusal(word: str, refused: Refused) -> ConfigError:
    return ConfigError(
        f"this flag is of a feature that this version does not have: {refused.feature}",
        found=word,
        fix=f"use {refused.instead}",
    )


def _split_equals(word: str) -> list[str]:
    if word.startswith("--") and "=" in word:
        name, _, value = word.partition("=")
        return [name, value]
    return [word]


def _unknown_flags(unknown: Iterable[str], known: Iterable[str]) -> list[ConfigError]:
    names = [name for name in known if name.startswith("--")]
    problems = []
    after_unknown_flag = False  # then the word is that flag's value, and not worth a line
    for word in unknown:
        if not word.startswith("-") or is_number(word):
            if after_unknown_flag:
                continue
            problems.append(
                ConfigError(
                    "a word on the command line belongs to no flag",
                    found=word,
                    fix="put a flag before it, or quote it together with the word before",
                )
            )
            continue
        after_unknown_flag = True
        if longer := _beginning_with(word, names):
            fix = f"several flags begin so: use {' or '.join(longer)}"
        elif near := difflib.get_close_matches(word, [*names, *ALIASES], n=1, cutoff=0.5):
            fix = f"did you mean {near[0]}?"
        else:
            fix = "see --help for every flag"
        problems.append(ConfigError("there is no such flag", found=word, fix=fix))
    return problems


def _unknown_defaults(names: Iterable[str]) -> list[ConfigError]:
    return [
        ConfigError(
            "args_defaults gives a value to a flag that does not exist",
            found=name,
            fix="use the flag's name with underscores, as in get_args()",
        )
        for name in sorted(names)
    ]


def _from_deepspeed(typed: Mapping[str, object], problems: list[ConfigError]) -> dict[str, object]:
    """Return the flags not on the command line that DeepSpeed's JSON sets; log each once."""
    path = typed.get("deepspeed_config")
    if not isinstance(path, str) or not typed.get("deepspeed"):
        return {}
    try:
        from_json = flags_from_json(read_json(path), typed)
    except FieldsError as several:
        problems += several.errors
        return {}
    except ConfigError as error:
        problems.append(error)
        return {}
    for name, value in from_json.items():
        log.info(f"{flag_name(name)} {value}: from {path}, as the flag is not given")
    return from_json


def _from_checkpoint(given: Mapping[str, object]) -> dict[str, object]:
    """Return the flags that --use-checkpoint-args takes from the checkpoint to begin with.

    Without them nearly every other flag would be missing, so what it raises is raised at once.
    """
    if not given.get("use_checkpoint_args"):
        return {}
    from megatron.checkpoint.load.stored_run import flags_of_checkpoint  # imports torch

    return flags_of_checkpoint(given)


def _from_dependent(
    files: FileWords,
    values: Mapping[str, object],
    problems: list[ConfigError],
) -> dict[str, object]:
    """Return values of fields that other Megatrons' flags set, which depend on other flags.

    A key of a config file that is a flag of ours was written for this program, so it means what it
    says.
    """
    words = {word for word in files.typed if word.startswith("--")}
    own = {flag_name(field) for group in GROUPS.values() for field in field_names(group)}
    words |= {word for word in files.words if word.startswith("--") and word not in own}
    meant: dict[str, object] = {}
    for flag, meaning in meanings(GivenFlags(words, values)):
        if isinstance(meaning, FlagValue) and meaning.field in files.places:
            continue
        if isinstance(meaning, FlagValue):
            meant[meaning.field] = meaning.value
            shown = f"{flag_name(meaning.field)} {meaning.value}"
            log.info(f"{flag}: taken as {shown}, because {meaning.because}")
        elif isinstance(meaning, NoChange):
            log.info(f"{flag}: accepted, has no effect here because {meaning.because}")
        else:
            problems.append(meaning)
    return meant


def _preset(name: object, problems: list[ConfigError]) -> dict[str, object]:
    if not isinstance(name, str):
        return {}
    if name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=1, cutoff=0.0)[0]
        problems.append(
            ConfigError(
                "there is no such model preset",
                found=f"--model-preset {name}",
                fix=f"did you mean {near}? The presets are {', '.join(PRESETS)}",
            )
        )
        return {}
    return dict(PRESETS[name])


def _jsonable(extra: Mapping[str, object]) -> dict[str, object]:
    for name, value in extra.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ConfigError(
                "a program's own flag holds a value that a checkpoint cannot record",
                found=f"--{name.replace('_', '-')} of type {type(value).__name__}",
                fix="use a text, a number, a boolean or a list of them as the flag's type",
            ) from None
    return dict(extra)
