"""LAMBADA (Paperno et al. 2016): the last word of a passage, guessed from all that is before it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron import log
from megatron.engine.scoring import ScoringRow
from megatron.errors import DataError
from megatron.tokenizer.protocol import Tokenizer
from tasks.loading import LoadedScorer
from tasks.text_files import read_records


@dataclass(frozen=True)
class LambadaResult:
    """The number of passages whose ending the model predicts."""

    correct: int
    total: int
    truncated: int  # passages whose beginning did not fit into the model

    @property
    def accuracy(self) -> float:
        """The share of passages predicted."""
        return self.correct / self.total

    def numbers(self) -> dict[str, Any]:
        """Return the content of a file of results."""
        return {**asdict(self), "accuracy": self.accuracy}

    def describe(self) -> str:
        """Return one line, as Megatron-LM prints it."""
        return (
            f"number correct: {self.correct:.4E} | total examples: {self.total:.4E} | "
            f"avg accuracy: {self.accuracy:.4E}"
        )


def read_passages(files: Sequence[str]) -> list[str]:
    """Return the texts of JSON lines; DataError with file and line for any that has none."""
    return [record.text("text") for record in read_records(files)]


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
        room = loaded.longest
        if room is not None and len(tokens) - 1 > room:
            tokens, truncated = tokens[-room - 1 :], truncated + 1
        rows.append(ScoringRow(tokens, len(tokens) - len(answer)))
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
