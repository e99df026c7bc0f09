"""Paths of corpora in files of Megatron-LM, as the words that name them on a command line here."""

from collections.abc import Sequence
from pathlib import Path

from megatron.errors import ConfigError
from megatron.json_values import JsonValue, parse_json

_USES = ("train", "valid", "test")


def data_path_words(values: Sequence[str]) -> tuple[str, ...]:
    """Return `--data-path` with the words of the file; ConfigError where it cannot be read."""
    (path,) = values
    return "--data-path", *_text_of("--data-args-path", path).split()


def paths_of_splits(values: Sequence[str]) -> tuple[str, ...]:
    """Return `--train-data-path`, ... with the lists of the JSON file under `train`, ...

    Raises:
        ConfigError: the file cannot be read, or does not hold such lists.
    """
    (path,) = values
    flag = "--per-split-data-args-path"
    try:
        content = parse_json(_text_of(flag, path))
    except (ValueError, RecursionError) as error:
        raise _unreadable(flag, path, error) from error
    if not isinstance(content, dict) or not set(content) <= set(_USES):
        raise _unreadable(flag, path, "not an object with the keys train, valid and test alone")
    words: list[str] = []
    for use in _USES:
        if content.get(use):
            words += [f"--{use}-data-path", *_words(flag, path, use, content[use])]
    return tuple(words)


def _words(flag: str, path: str, use: str, value: JsonValue) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(x, str | int | float) for x in value):
        raise _unreadable(flag, path, f"{use} is not a list of weights and prefixes")
    return [str(word) for word in value]


def _text_of(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(flag, path, getattr(error, "strerror", None) or error) from error


def _unreadable(flag: str, path: str, why: object) -> ConfigError:
    return ConfigError(
        "a file of data paths cannot be read",
        found=f"{flag} {path}: {why}",
        fix="check the path, which every rank must see, and what is in the file",
    )
