"""One sample as it is written: its text without stop strings, and its tokens with their scores."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.serving.engine_client import FinishedBy, TokenDrawn, TokenScore
from megatron.serving.stop_strings import StopStrings
from megatron.tokenizer.token_text import TextRules


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token of an answer.

    Attributes:
        offset: characters of the sample's text before it.
        score: None for the first token of a prompt.
    """

    token: int
    offset: int
    score: TokenScore | None


@dataclass(frozen=True, slots=True)
class SamplePart:
    """What of a sample became certain since the last time."""

    text: str = ""
    tokens: tuple[ShownToken, ...] = ()


class SampleText:
    """The text of one sample.

    Attributes:
        count: tokens that were drawn for it; with the one that completes a stop string, and the
            stop token.
        finish: why it ended; None while it has not.
    """

    def __init__(
        self, rules: TextRules, before: Sequence[int], *, stops: Sequence[str], min_tokens: int
    ) -> None:
        self.count = 0
        self.finish: FinishedBy | None = None
        self._text, self._stops = rules.start(before), StopStrings(stops)
        self._min_tokens = min_tokens
        self._taken = self._length = 0  # characters that were given away, and that are certain
        self._new: list[str] = []
        self._tokens: deque[ShownToken] = deque()

    def add(self, drawn: TokenDrawn) -> None:
        """Add the next token; what follows the end is dropped."""
        if self.finish is not None:
            return
        self.count += 1
        place = self._length + len(self._stops.pending)
        self._tokens.append(ShownToken(drawn.token, place, drawn.score))
        if drawn.finish != "stop":  # a stop token is no text
            self._write(self._text.add(drawn.token))
        if self.finish is None and drawn.finish is not None:
            self._write(self._text.end())
            self._release(self._stops.end())
            self.finish = self.finish or drawn.finish

    def take(self) -> SamplePart:
        """Return what became certain since the last call."""
        text = "".join(self._new)
        self._new.clear()
        self._taken += len(text)
        tokens = []
        while self._tokens and (self.finish or self._tokens[0].offset < self._taken):
            tokens.append(self._tokens.popleft())
        return SamplePart(text, tuple(tokens))

    def _write(self, text: str) -> None:
        if self.count < self._min_tokens:
            self._release(text)
            return
        released = self._stops.add(text)
        self._release(released.text)
        if released.is_stopped:
            self.finish = "stop"
            while self._tokens and self._tokens[-1].offset >= self._length:
                self._tokens.pop()

    def _release(self, text: str) -> None:
        if text:
            self._new.append(text)
            self._length += len(text)


def prompt_tokens(
    rules: TextRules, tokens: Sequence[int], scores: Sequence[TokenScore]
) -> tuple[ShownToken, ...]:
    """Return the tokens of a prompt with their places and scores; the first has none."""
    text, length = rules.start(), 0
    shown = []
    for token, score in zip(tokens, (None, *scores), strict=True):
        shown.append(ShownToken(token, length, score))
        length += len(text.add(token))
    return tuple(shown)
