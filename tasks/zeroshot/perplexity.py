"""Perplexity of a text per token, and per word of the text as it was handed out (adjusted)."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from tasks.loading import LoadedScorer
from tasks.text_files import read_text
from tasks.zeroshot.detokenize import wikitext
from tasks.zeroshot.windows import overlapping_windows

USUAL_STEP = 32  # Megatron-LM's
_MOST = 20.0  # of an exponent that is printed, as in Megatron-LM


@dataclass(frozen=True)
class PerplexityResult:
    """The loss of a text, in nats per token."""

    loss: float
    tokens: int  # that were scored: every one but the first of each text
    words: int  # of the text before it was detokenised, split at single spaces
    token_ratio: float  # (tokens of the texts - 1) / (words - 1)

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(_MOST, self.loss))

    @property
    def adjusted_perplexity(self) -> float:
        """The perplexity per word, comparable between models of any vocabulary."""
        return math.exp(min(_MOST, self.loss * self.token_ratio))

    def numbers(self) -> dict[str, Any]:
        """Return the content of a file of results."""
        derived = {
            "perplexity": self.perplexity,
            "adjusted_perplexity": self.adjusted_perplexity,
        }
        return {**asdict(self), **derived}

    def describe(self) -> str:
        """Return one line, as Megatron-LM prints it."""
        return (
            f"avg loss: {self.loss:.4E} | ppl: {self.perplexity:.4E} | "
            f"adjusted ppl: {self.adjusted_perplexity:.4E} | token ratio: {self.token_ratio} |"
        )


def read_texts(files: Sequence[str]) -> list[str]:
    """Return the files' texts; DataError for an empty file."""
    texts = [read_text(Path(name)) for name in files]
    for name, text in zip(files, texts):
        if not text.strip():
            raise DataError("a text is empty", found=name, fix="leave it out of --valid-data")
    return texts


def evaluate_perplexity(
    loaded: LoadedScorer,
    texts: Sequence[str],
    *,
    step: int | None = None,
    is_wikitext: bool = False,
) -> PerplexityResult:
    """Score every token of every text but the first, once.

    Args:
        step: tokens that each further window scores (`overlapping_windows`); None: `USUAL_STEP`, or
            all of a window that is shorter.
        is_wikitext: take WikiText's spaces out before.
    """
    length = loaded.seq_length
    step = step or min(USUAL_STEP, length)
    rows, all_tokens, words = [], 0, 0
    for at, text in enumerate(texts):
        tokens = loaded.tokenizer.tokenize(wikitext(text) if is_wikitext else text)
        if len(tokens) < 2:
            raise DataError(
                "a text is too short to predict anything of it",
                found=f"text {at}: {len(tokens)} tokens",
                fix="leave it out of --valid-data",
            )
        all_tokens += len(tokens)
        words += len(text.strip().split(" "))
        rows += overlapping_windows(tokens, length=length, step=step)
    scores = loaded.scorer.score(rows)
    scored = sum(score.num_tokens for score in scores)
    assert scored == all_tokens - len(texts)  # noqa: S101  # invariant: windows do not repeat
    loss = -math.fsum(score.log_likelihood for score in scores) / scored
    ratio = (all_tokens - 1) / (words - 1) if words > 1 else float(all_tokens)
    return PerplexityResult(loss, scored, words, ratio)
