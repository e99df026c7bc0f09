"""Reads keys of a gpt-neox config by their kinds, with neox's defaults, and collects problems."""

import difflib
from collections.abc import Callable, Mapping
from typing import NoReturn

from megatron.config.neox.keys import KEYS, JointKey
from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue


class RefusedKeyError(ValueError):
    """A key has a value that cannot be taken; the problem has been noted."""


class KeyReader:
    """The keys of a config, in neox's spelling with underscores.

    Args:
        place: where a key stands, for messages.
    """

    def __init__(self, config: JsonObject, place: Callable[[str], str]) -> None:
        self._config, self._place = config, place
        self.problems: list[ConfigError] = []

    def has(self, key: str) -> bool:
        """Return whether the config has the key, be it null."""
        return key in self._config

    def is_null(self, key: str) -> bool:
        """Return whether the config has the key, and it says null."""
        return key in self._config and self._config[key] is None

    def value(self, key: str) -> JsonValue:
        """Return the value of a key, or neox's default where it is null or not there."""
        value = self._config.get(key)
        rule = KEYS[key]
        return rule.default if value is None and isinstance(rule, JointKey) else value

    def number(self, key: str) -> float | None:
        """Return a number."""
        value = self.value(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        self.refuse(key, "a value is of the wrong kind", "give a number, without quotes")

    def whole(self, key: str) -> int | None:
        """Return a whole number."""
        value = self.number(key)
        if value is None or isinstance(value, int):
            return value
        self.refuse(key, "a value is of the wrong kind", "give a whole number")

    def switch(self, key: str) -> bool:
        """Return true or false; null is false."""
        value = self.value(key)
        if value is None or isinstance(value, bool):
            return bool(value)
        self.refuse(key, "a value is of the wrong kind", "give true or false")

    def text(self, key: str) -> str | None:
        """Return a text."""
        value = self.value(key)
        if value is None or isinstance(value, str):
            return value
        self.refuse(key, "a value is of the wrong kind", "give a text, in quotes")

    def word(self, key: str, meanings: Mapping[str, JsonValue], fix: str) -> JsonValue:
        """Return what a choice, in letters of any case, means here."""
        value = (self.text(key) or "").lower()
        if value not in meanings:
            self.refuse(key, "this value has no counterpart here", fix)
        return meanings[value]

    def block(self, key: str) -> JsonObject:
        """Return an object in braces; empty where there is none."""
        value = self.value(key)
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.refuse(key, "a value is of the wrong kind", "give keys in braces")

    def refuse(self, key: str, problem: str, fix: str) -> NoReturn:
        """Note a problem with a key of the config.

        Raises:
            RefusedKeyError: always.
        """
        self.problems.append(self.problem(key, problem, fix))
        raise RefusedKeyError(key)

    def problem(self, key: str, problem: str, fix: str) -> ConfigError:
        """Return a problem with a key, with its value and its place."""
        given = key in self._config
        place = self._place(key) if given else "neox's default"
        value = self._config[key] if given else self.value(key)
        return ConfigError(problem, found=f"{key}: {value!r} ({place})", fix=fix)

    def unknown(self, key: str) -> ConfigError:
        """Return the answer to a key that gpt-neox does not have."""
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.5)
        return ConfigError(
            "gpt-neox has no such key",
            found=f"{key} ({self._place(key)})",
            fix=f"did you mean {near[0]}?" if near else "leave it out",
        )
