"""Where a text ends that is not to contain some strings, while it is still being written."""

from collections.abc import Sequence
from typing import NamedTuple


class ReleasedText(NamedTuple):
    """Text that no later text can take back, and whether it is the end."""

    text: str
    is_stopped: bool


class StopStrings:
    """Holds back the end of a text as long as it may be the beginning of a stop string.

    Of several matches the one that ends first counts, and of those the longest; its text and all
    behind it are dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._pending = ""

    @property
    def pending(self) -> str:
        """The text that was added and not returned yet."""
        return self._pending

    def add(self, text: str) -> ReleasedText:
        """Return what is certain after more text."""
        text = self._pending + text
        matches = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        if matches:
            self._pending = ""
            return ReleasedText(text[: min(matches)[1]], True)
        most = min(len(text), self._longest - 1)
        kept = next((n for n in range(most, 0, -1) if self._begins_with(text[-n:])), 0)
        self._pending = text[len(text) - kept :]
        return ReleasedText(text[: len(text) - kept], False)

    def end(self) -> str:
        """Return what was held back, because no text follows."""
        pending, self._pending = self._pending, ""
        return pending

    def _begins_with(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stops)
