"""Config files as words of a command line, which stand before the words that the user typed.

So a key is answered as its flag is: other spellings, refusals, checks. What a reader would get
wrong: files are merged by the flag that a key means, in any spelling, before there are words.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatron import log
from megatron.config.fields import flag_name
from megatron.config.files.reading import Content, read_content
from megatron.config.neox.mapping import FLAG as NEOX_CONFIG
from megatron.config.neox.mapping import NeoxConfig
from megatron.config.presets import PRESETS
from megatron.config.spellings.aliases import ALIASES
from megatron.config.spellings.known import is_answered
from megatron.config.spellings.usage import Values, take_values
from megatron.errors import ConfigError
from megatron.json_values import JsonValue

CONFIG, PRINT_CONFIG = "--config", "--print-config"
EXTRA = "extra"  # the group of a program's own flags
_PRESET = "model_preset"


class FileWords(NamedTuple):
    """A command line, and the files that it names as words before it.

    Args:
        words: the keys of the files as flags and their values, which come first.
        typed: the command line without the names of the files.
        places: where the value of a destination of the parser was read.
    """

    words: tuple[str, ...]
    typed: tuple[str, ...]
    places: Mapping[str, str]


class _Entry(NamedTuple):
    flag: str
    value: JsonValue
    place: str


def words_of_files(
    argv: Sequence[str],
    parser: argparse.ArgumentParser,
    groups: Iterable[str],
    read_neox: Callable[[Sequence[str]], NeoxConfig],
    problems: list[ConfigError],
) -> FileWords:
    """Read gpt-neox's files and those of `--config`.

    Files of `--config` win over gpt-neox's, later ones over earlier ones, the command line over
    all.

    Args:
        groups: names that keys may be grouped under; groups mean nothing.
        read_neox: returns what gpt-neox's files mean, and raises what is wrong with them.
        problems: receives what is wrong with the files.
    """
    paths, others = _taken(CONFIG, argv, problems)
    neox_paths, typed = _taken(NEOX_CONFIG, others, problems)
    merged: dict[str, _Entry] = {}
    if neox_paths:
        neox = read_neox(neox_paths)
        for note in neox.notes:
            log.info(note)
        for field, value in neox.values.items():
            merged[field] = _Entry(flag_name(field), value, neox.places[field])
    for path in paths:
        try:
            content = read_content(path)
        except ConfigError as error:
            problems.append(error)
            continue
        _merge(merged, _entries(content, parser, (*groups, EXTRA), problems))
    if presets := [value for word, value in pairwise(typed) if word == flag_name(_PRESET)]:
        _forget_shape(merged, presets[-1], ())
    words: list[str] = []
    for entry in merged.values():
        try:
            words += _words(entry, parser._option_string_actions.get(entry.flag))
        except _WrongKindError as expected:
            problems.append(
                ConfigError(
                    "a config file has a value of the wrong kind",
                    found=f"{entry.flag[2:].replace('-', '_')}: {entry.value!r} ({entry.place})",
                    fix=f"give {expected}",
                )
            )
    given = {_target(word, parser) for word in typed if word.startswith("--")}
    places = {target: entry.place for target, entry in merged.items() if target not in given}
    return FileWords(tuple(words), typed, places)


def _taken(
    flag: str, argv: Sequence[str], problems: list[ConfigError]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the files of all uses of a flag, and the command line without them."""
    values: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == flag:
            values += take_values(Values.MANY, rest)
        else:
            others.append(word)
    if not values and flag in argv:
        problems.append(
            ConfigError(
                "no config file was named",
                found=flag,
                fix=f"give files after it, such as {flag} base.yaml mine.yaml",
            )
        )
    return tuple(values), tuple(others)


def with_places(
    problems: Iterable[ConfigError], places: Mapping[str, str], parser: argparse.ArgumentParser
) -> list[ConfigError]:
    """Return the problems; those about flags that a file gives say which file, and where in it."""
    return [_with_place(problem, places, parser) for problem in problems]


def _with_place(
    problem: ConfigError, places: Mapping[str, str], parser: argparse.ArgumentParser
) -> ConfigError:
    flags = dict.fromkeys(re.findall(r"--[a-z][\w-]*", str(problem.found or "")))
    from_files = [flag for flag in flags if _target(flag, parser) in places]
    if not from_files:
        return problem
    where = "; ".join(f"{flag} from {places[_target(flag, parser)]}" for flag in from_files)
    return type(problem)(problem.problem, found=f"{problem.found} ({where})", fix=problem.fix)


def _entries(
    content: Content,
    parser: argparse.ArgumentParser,
    groups: Sequence[str],
    problems: list[ConfigError],
) -> dict[str, _Entry]:
    """Return the keys of one file by what they mean to the parser."""
    found: dict[str, _Entry] = {}
    for key, value, place in _flattened(content, groups, parser, problems):
        flag = _flag(key, parser)
        if flag in (CONFIG, PRINT_CONFIG, NEOX_CONFIG):
            problems.append(
                ConfigError(
                    "a config file does not name others",
                    found=f"{key} ({place})",
                    fix=f"name all files on the command line: {CONFIG} base.yaml mine.yaml",
                )
            )
        elif flag is None:
            problems.append(_unknown(key, place, parser))
        elif (target := _target(flag, parser)) in found:
            problems.append(
                ConfigError(
                    "one flag stands in a config file twice",
                    found=f"{found[target].flag[2:]} ({found[target].place}), {key} ({place})",
                    fix="keep one of the two",
                )
            )
        else:
            found[target] = _Entry(flag, value, place)
    return found


def _flattened(
    content: Content,
    groups: Sequence[str],
    parser: argparse.ArgumentParser,
    problems: list[ConfigError],
) -> Iterator[tuple[str, JsonValue, str]]:
    for key, value in content.values.items():
        if not isinstance(value, Mapping):
            yield key, value, content.place(key)
        elif key in groups:
            for inner, inner_value in value.items():
                yield inner, inner_value, content.place(key, inner)
        else:
            fix = f"did you mean {_near(key, groups)}? The groups are {', '.join(groups)}"
            if _flag(key, parser) is not None:
                fix = f"give {key} a value; the groups are {', '.join(groups)}"
            problems.append(
                ConfigError(
                    "there is no such group of flags",
                    found=f"{key} ({content.place(key)})",
                    fix=fix,
                )
            )


def _merge(merged: dict[str, _Entry], newer: Mapping[str, _Entry]) -> None:
    """Let the keys of a file win over those before; null and an empty list unset a flag."""
    if preset := newer.get(_PRESET):
        _forget_shape(merged, preset.value, newer)
    for target, entry in newer.items():
        merged.pop(target, None)
        if entry.value is not None and entry.value != []:
            merged[target] = entry


def _forget_shape(merged: dict[str, _Entry], preset: JsonValue, kept: Iterable[str]) -> None:
    """Remove what a preset that is named later sets."""
    for target in PRESETS.get(str(preset), {}):
        if target not in kept:
            merged.pop(target, None)


def _flag(key: str, parser: argparse.ArgumentParser) -> str | None:
    """Return the flag of a key; None if no parser and no table has it."""
    for flag in (flag_name(key), f"--{key}"):
        if flag in parser._option_string_actions or is_answered(flag):
            return flag
    return None


def _target(flag: str, parser: argparse.ArgumentParser) -> str:
    action = parser._option_string_actions.get(flag)
    return flag if action is None else action.dest


def _unknown(key: str, place: str, parser: argparse.ArgumentParser) -> ConfigError:
    names = [*parser._option_string_actions, *ALIASES]
    near = _near(flag_name(key), [name for name in names if name.startswith("--")], cutoff=0.5)
    return ConfigError(
        "a config file has a key that is no flag",
        found=f"{key} ({place})",
        fix=f"did you mean {near[2:].replace('-', '_')}?" if near else "see --help for every flag",
    )


def _near(word: str, names: Sequence[str], cutoff: float = 0.0) -> str:
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=cutoff)), "")


class _WrongKindError(ValueError):
    """A value of a kind that the flag does not take; says which it does."""


def _words(entry: _Entry, action: argparse.Action | None) -> list[str]:
    flag, value = entry.flag, entry.value
    if value is False and (action is None or action.nargs == 0):
        # Of a switch of ours that says no, false says yes; any other is as if it were not there.
        negative = action is not None and getattr(action, "const", None) is False
        return [flag_name(action.dest), "true"] if action is not None and negative else []
    if value is True and (action is None or action.nargs == 0):
        return [flag]
    if action is not None and action.nargs == 0:
        raise _WrongKindError("true or false")
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if is_list and action is not None and action.nargs in (None, "?"):
        raise _WrongKindError("one value, not a list")
    kind = None if action is None else getattr(action.type, "__name__", "str")
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    return [flag, *(_word(item, kind, in_list=is_list) for item in items)]


def _word(value: JsonValue, kind: str | None, *, in_list: bool) -> str:
    """Return the word that a command line would have for a value.

    Raises:
        _WrongKindError: no flag of this kind takes it.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "float" and value == "Infinity":  # as stored configs have it
        return value
    if kind in ("int", "float") and not is_number:
        raise _WrongKindError(f"a {'whole ' if kind == 'int' else ''}number, without quotes")
    if kind == "str" and not isinstance(value, str) and not (in_list and is_number):
        raise _WrongKindError("a text, in quotes")
    if isinstance(value, bool) and kind in (None, "bool"):
        return "true" if value else "false"
    if isinstance(value, str):
        if value.startswith("-"):
            raise _WrongKindError("a text that does not begin with a dash")
        return value
    if not is_number:
        raise _WrongKindError("one value, or a list of them")
    return repr(value)
