"""LAMBADA (Paperno et al. 2016): the last word of a passage, guessed from all that is before it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.engine.scoring import Row
from megatron.errors import DataError
from megatron.tokenizer.protocol import Tokenizer
from tasks.loading import LoadedScorer
from tasks.text_files import read_text


@dataclass(frozen=True)
class LambadaResult:
    """How many of the passages ended as the model would have ended them."""

    correct: int
    total: int
    truncated: int  # passages whose beginning did not fit into the model

    @property
    def accuracy(self) -> float:
        """The share of the passages."""
        return self.correct / self.total

    def describe(self) -> str:
        """One line, as Megatron-LM prints it."""
        return (
            f"number correct: {self.correct:.4E} | total examples: {self.total:.4E} | "
            f"avg accuracy: {self.accuracy:.4E}"
        )


def read_passages(files: Sequence[str]) -> list[str]:
    """The texts of JSON lines; DataError with file and line for any that is none."""
    passages = []
    for name in files:
        for number, line in enumerate(read_text(Path(name)).splitlines(), start=1):
            if line.strip():
                passages.append(_text_of(line, f"{name}:{number}"))
    if not passages:
        raise DataError(
            "there is no passage to evaluate", found=", ".join(files), fix="give JSON lines"
        )
    return passages


def evaluate_lambada(
    loaded: LoadedScorer, passages: Sequence[str], *, strict: bool
) -> LambadaResult:
    """Score every passage once.

    Args:
        strict: the last word counts, separated by a space from what is before it; else the last
            token of the passage alone (Megatron-LM's two ways).
    """
    rows, truncated = [], 0
    for at, text in enumerate(passages):
        context, answer = _split(loaded.tokenizer, text, strict=strict)
        if not context or not answer:
            raise DataError(
                "a passage has no last word, or nothing before it",
                found=f"passage {at}: {text[:60]!r}",
                fix="leave it out of the file",
            )
        tokens = (*context, *answer)
        room = loaded.scorer.max_length
        if room is not None and len(tokens) - 1 > room:
            tokens, truncated = tokens[-room - 1 :], truncated + 1
        rows.append(Row(tokens, len(tokens) - len(answer)))
    if truncated:
        log.warning(f"{truncated} of {len(rows)} passages are longer than the model: cut in front")
    scores = loaded.scorer.score(rows)
    return LambadaResult(sum(score.is_greedy for score in scores), len(scores), truncated)


def _split(tokenizer: Tokenizer, text: str, *, strict: bool) -> tuple[list[int], list[int]]:
    if not strict:
        tokens = list(tokenizer.tokenize(text))
        return tokens[:-1], tokens[-1:]
    words = text.split()
    if not words:
        return [], []
    before = text[: text.rfind(words[-1])].strip()
    return list(tokenizer.tokenize(before)), list(tokenizer.tokenize(" " + words[-1]))


def _text_of(line: str, where: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            "a line is not a JSON object with a text",
            found=f"{where}: {line[:60]!r} ({type(error).__name__}: {error})",
            fix='give lines such as {"text": "..."}',
        ) from None
    if not isinstance(text, str):
        raise DataError(
            "a passage is not a text",
            found=f"{where}: {type(text).__name__}",
            fix='give lines such as {"text": "..."}',
        )
    return text
