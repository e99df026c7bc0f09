"""The calls of tools in an answer, as it comes: text that may be a call is held back.

A call is given away when it is complete; what begins like one and is none stays text.
"""

import json
import re
from collections.abc import Collection
from typing import NamedTuple

from megatron.serving.chat_tools.call_format import CallFormat

_NAME = r"([\w.-]{1,64})"


class ToolCall(NamedTuple):
    """A call: the name of a function, and the JSON of its arguments as the model wrote it."""

    name: str
    arguments: str


class ReadPart(NamedTuple):
    """What became certain of an answer."""

    text: str = ""
    calls: tuple[ToolCall, ...] = ()


class CallReader:
    """Reads one answer.

    White space may differ from that of the format, and is dropped beside calls.

    Args:
        names: of the functions that may be called.
    """

    def __init__(self, form: CallFormat, names: Collection[str]) -> None:
        self._names, self._held, self._has_calls = names, "", False
        self._trigger = form.before.split()[0]
        self._first = re.compile(_spaced(form.before) + _NAME + _spaced(form.between))
        self._after = re.compile(_spaced(form.after))
        self._next: re.Pattern[str] | None = None
        if form.separator is not None:
            self._next = re.compile(_spaced(form.separator) + _NAME + _spaced(form.between))

    def add(self, text: str) -> ReadPart:
        """Take more text of an answer; return what became certain."""
        self._held += text
        return self._read(is_end=False)

    def end(self) -> ReadPart:
        """Return the rest."""
        return self._read(is_end=True)

    def _read(self, *, is_end: bool) -> ReadPart:
        texts: list[str] = []
        calls: list[ToolCall] = []
        while (at := self._held.find(self._trigger)) >= 0:
            before, held = self._held[:at], self._held[at:]
            if (block := self._block(held)) is not None:
                found, end = block
                calls += found
                texts.append("" if self._has_calls and not before.strip() else before.rstrip())
                self._held, self._has_calls = held[end:], True
            elif is_end:  # it was none
                texts.append(before + self._trigger)
                self._held = held[len(self._trigger) :]
            else:
                spaces = len(before) - len(before.rstrip())
                texts.append(before[: len(before) - spaces])
                self._held = self._held[at - spaces :]
                return ReadPart("".join(texts), tuple(calls))
        certain = len(self._held) - (0 if is_end else self._uncertain())
        rest, self._held = self._held[:certain], self._held[certain:]
        texts.append("" if self._has_calls and not rest.strip() else rest)
        return ReadPart("".join(texts), tuple(calls))

    def _uncertain(self) -> int:
        """Return how many of the last characters may belong to a call, or stand before one."""
        held, most = self._held, min(len(self._held), len(self._trigger) - 1)
        fitting = (n for n in range(most, 0, -1) if held.endswith(self._trigger[:n]))
        begun = next(fitting, 0)
        return len(held) - len(held[: len(held) - begun].rstrip())

    def _block(self, text: str) -> tuple[list[ToolCall], int] | None:
        """Return the calls at the beginning of a text, and where they end; None: not complete."""
        calls: list[ToolCall] = []
        opened = self._first.match(text)
        while opened is not None and opened[1] in self._names:
            try:
                value, end = json.JSONDecoder().raw_decode(text, opened.end())
            except ValueError:
                return None
            if not isinstance(value, dict):
                return None
            calls.append(ToolCall(opened[1], text[opened.end() : end]))
            opened = None if self._next is None else self._next.match(text, end)
            if opened is None:
                closed = self._after.match(text, end)
                return None if closed is None else (calls, closed.end())
        return None


def _spaced(text: str) -> str:
    """Return a pattern of a text in which white space may be any, or none."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
