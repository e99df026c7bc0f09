"""Reads a config file as nested values, with the place of each key for messages.

The suffix tells the language. Nothing is known of flags here.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue, parse_json

SUFFIXES = (".yaml", ".yml", ".json", ".toml")


class Content(NamedTuple):
    """The keys of a file.

    Args:
        lines: the line of a key by all keys that lead to it, for YAML alone.
    """

    path: str
    values: JsonObject
    lines: Mapping[tuple[str, ...], int]

    def place(self, *keys: str) -> str:
        """Return where a key stands, for messages."""
        line = self.lines.get(keys)
        return self.path if line is None else f"{self.path}, line {line}"


def read_content(path: str, *, flag: str = "--config") -> Content:
    """Return the content of a config file; an empty one has no keys.

    Args:
        flag: that named it, for messages.

    Raises:
        ConfigError: it cannot be read, is not of the language of its suffix, or has a key twice.
    """
    suffix = Path(path).suffix
    if suffix not in SUFFIXES:
        raise ConfigError(
            "the language of a config file is not known",
            found=f"{flag} {path}",
            fix=f"let its name end with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}",
        )
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "a config file cannot be read",
            found=f"{flag} {path}: {getattr(error, 'strerror', None) or error}",
            fix="give the path of a file of UTF-8 text",
        ) from error
    values, lines = _parsed(text, suffix, path)
    if not isinstance(values, Mapping):
        raise ConfigError(
            "a config file has no keys",
            found=f"{path}: one {type(values).__name__}",
            fix="write the name of a flag and its value in each line, such as seq_length: 2048",
        )
    return Content(path, values, lines)


def _parsed(text: str, suffix: str, path: str) -> tuple[JsonValue, dict[tuple[str, ...], int]]:
    if suffix in (".yaml", ".yml"):
        from megatron.config.files.yaml_text import YamlError, parse_yaml

        try:
            return parse_yaml(text)
        except YamlError as error:
            line = "" if error.line is None else f" in line {error.line}"
            raise ConfigError(
                "a config file cannot be read as YAML",
                found=f"{path}: {error.problem}{line}",
                fix=error.fix,
            ) from None
    try:
        return (parse_json(text) if suffix == ".json" else tomllib.loads(text)), {}
    except (ValueError, RecursionError) as error:  # of both languages; messages name the line
        raise ConfigError(
            f"a config file cannot be read as {suffix[1:].upper()}",
            found=f"{path}: {error}",
            fix="mend it, and name each key once",
        ) from error
