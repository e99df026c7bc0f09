"""How likely given continuations are, and which of several choices is the likeliest.

A pair becomes tokens as lm-eval-harness makes them: context and continuation as one text, cut where
the tokens of the context alone end, with spaces at the end of the context given to the
continuation; a context that is empty is the end of a document. So both count the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron import log
from megatron.engine.scoring import RowScore, ScoringRow
from megatron.errors import ConfigError, DataError, NumericsError
from megatron.tokenizer.protocol import Tokenizer
from tasks.loading import LoadedScorer
from tasks.text_files import Record, read_records


class ContextPair(NamedTuple):
    """A text to score, given the context before it."""

    context: str
    continuation: str


class MultipleChoice(NamedTuple):
    """Choices after one context, of which one is right."""

    context: str
    choices: tuple[str, ...]
    answer: int


class Keys(NamedTuple):
    """The names of the fields to read; several for choices in one field each."""

    context: str = "context"
    continuation: str = "continuation"
    choices: tuple[str, ...] = ("choices",)
    label: str = "label"


@dataclass(frozen=True)
class LikelihoodResult:
    """The scores of pairs, in order."""

    scores: tuple[RowScore, ...]
    truncated: int  # pairs whose context was cut in front

    @property
    def tokens(self) -> int:
        """The number of scored tokens."""
        return sum(score.num_tokens for score in self.scores)

    @property
    def loss(self) -> float:
        """The mean loss, in nats per scored token."""
        return -math.fsum(score.log_likelihood for score in self.scores) / self.tokens

    @property
    def greedy(self) -> float:
        """The share of continuations that greedy decoding generates."""
        return sum(score.is_greedy for score in self.scores) / len(self.scores)

    def numbers(self) -> dict[str, Any]:
        """Return the content of a file of results; `pairs` is in the order of the input."""
        return {
            "loss": self.loss,
            "greedy": self.greedy,
            "tokens": self.tokens,
            "truncated": self.truncated,
            "pairs": [score._asdict() for score in self.scores],
        }

    def describe(self) -> str:
        """Return one line."""
        return (
            f"pairs: {len(self.scores)} | tokens: {self.tokens} | loss per token: "
            f"{self.loss:.4E} | greedy: {self.greedy:.4E} |"
        )


@dataclass(frozen=True)
class ChoiceResult:
    """The choice of each question, by log-likelihood and by log-likelihood per character."""

    answers: tuple[int, ...]
    chosen: tuple[int, ...]
    chosen_by_length: tuple[int, ...]
    log_likelihoods: tuple[tuple[float, ...], ...]
    truncated: int

    @property
    def acc(self) -> float:
        """The share of questions whose most likely choice is right."""
        return _share(self.answers, self.chosen)

    @property
    def acc_norm(self) -> float:
        """The share of right choices by log-likelihood per character."""
        return _share(self.answers, self.chosen_by_length)

    def numbers(self) -> dict[str, Any]:
        """Return the content of a file of results, in the order of the input."""
        return {
            "acc": self.acc,
            "acc_norm": self.acc_norm,
            "total": len(self.answers),
            "truncated": self.truncated,
            "chosen": self.chosen,
            "log_likelihoods": self.log_likelihoods,
        }

    def describe(self) -> str:
        """Return one line."""
        total = len(self.answers)
        return f"questions: {total} | acc: {self.acc:.4E} | acc_norm: {self.acc_norm:.4E} |"


def read_pairs(files: Sequence[str], keys: Keys) -> list[ContextPair]:
    """Return the pairs in JSON lines: a context (which may be empty) and a continuation."""
    return [
        ContextPair(record.text(keys.context), _filled(record, keys.continuation))
        for record in read_records(files)
    ]


def read_questions(files: Sequence[str], keys: Keys) -> list[MultipleChoice]:
    """Return the questions in JSON lines: context, choices, index of the right one from 0.

    Where choices have a field each, the context may be absent, and the first one is right where
    there is no label.
    """
    return [_question(record, keys) for record in read_records(files)]


def evaluate_pairs(loaded: LoadedScorer, pairs: Sequence[ContextPair]) -> LikelihoodResult:
    """Score every pair once."""
    scores, truncated = _scored(loaded, pairs)
    return LikelihoodResult(tuple(scores), truncated)


def evaluate_choices(
    loaded: LoadedScorer, questions: Sequence[MultipleChoice], *, delimiter: str = " "
) -> ChoiceResult:
    """Score every choice of every question once; the first of equal choices wins.

    Args:
        delimiter: what stands between a context and a choice, and does not count as its length.
    """
    pairs = [
        ContextPair(question.context, delimiter + choice)
        for question in questions
        for choice in question.choices
    ]
    scores, truncated = _scored(loaded, pairs)
    remaining = iter(scores)
    values = [tuple(next(remaining).log_likelihood for _ in q.choices) for q in questions]
    by_length = [
        tuple(value / len(choice) for value, choice in zip(each, question.choices))
        for each, question in zip(values, questions)
    ]
    return ChoiceResult(
        answers=tuple(question.answer for question in questions),
        chosen=tuple(each.index(max(each)) for each in values),
        chosen_by_length=tuple(each.index(max(each)) for each in by_length),
        log_likelihoods=tuple(values),
        truncated=truncated,
    )


def encode_pair(tokenizer: Tokenizer, pair: ContextPair) -> tuple[list[int], list[int]]:
    """Return the tokens of the context, and those to score.

    Raises:
        ConfigError: nothing is given, and the tokenizer has no end of a document to begin with.
    """
    given = pair.context.rstrip()  # spaces belong to the word behind them
    tokens = list(tokenizer.tokenize(pair.context + pair.continuation))
    if pair.context:
        context_length = len(tokenizer.tokenize(given))
        return tokens[:context_length], tokens[context_length:]
    if tokenizer.eod is None:
        raise ConfigError(
            "a context is empty, and there is no end of a document to begin with",
            found=f"{tokenizer.name}: {tokenizer.eod_note}",
            fix="give each continuation a context",
        )
    if tokens[:1] == [tokenizer.eod]:  # the text begins with one itself
        return tokens[:1], tokens[1:]
    return [tokenizer.eod], tokens


def row_of(
    context: Sequence[int], continuation: Sequence[int], longest: int | None, *, at: int
) -> tuple[ScoringRow, bool]:
    """Return the row that scores a continuation, and whether its context was cut to fit.

    Args:
        at: number of the row, for errors.

    Raises:
        DataError: there is nothing to score or nothing before it, or the continuation is too long.
    """
    if not context or not continuation:
        raise DataError(
            "a continuation has no token, or no token before it",
            found=f"row {at}: {len(context)} tokens of context, {len(continuation)} to score",
            fix="look at the task's texts",
        )
    if longest is not None and len(continuation) > longest:
        raise DataError(
            "a continuation is longer than the model",
            found=f"row {at}: {len(continuation)} tokens, {longest} positions",
            fix="leave the example out, or use a task with shorter answers",
        )
    tokens = (*context, *continuation)
    is_cut = longest is not None and len(tokens) > longest + 1
    if is_cut and longest is not None:
        tokens = tokens[-longest - 1 :]
    return ScoringRow(tokens, len(tokens) - len(continuation)), is_cut


def checked_scores(scores: Sequence[RowScore]) -> Sequence[RowScore]:
    """Return the scores; NumericsError for one that is no log-probability."""
    wrong = [at for at, score in enumerate(scores) if not score.log_likelihood <= 0]
    if wrong:
        raise NumericsError(
            "the model's scores are no probabilities",
            found=f"log-likelihood {scores[wrong[0]].log_likelihood} of row {wrong[0]}",
            fix="look at the weights: they hold numbers that are not finite",
        )
    return scores


def _scored(loaded: LoadedScorer, pairs: Sequence[ContextPair]) -> tuple[Sequence[RowScore], int]:
    rows = [
        row_of(*encode_pair(loaded.tokenizer, pair), loaded.longest, at=at)
        for at, pair in enumerate(pairs)
    ]
    truncated = sum(is_cut for _, is_cut in rows)
    if truncated:
        log.warning(f"{truncated} of {len(rows)} rows are longer than the model: cut in front")
    return checked_scores(loaded.scorer.score([row for row, _ in rows])), truncated


def _question(record: Record, keys: Keys) -> MultipleChoice:
    apart = len(keys.choices) > 1
    context = "" if apart and keys.context not in record.fields else record.text(keys.context)
    if apart:
        choices = tuple(_filled(record, key) for key in keys.choices)
    else:
        (key,) = keys.choices
        listed = record.value(key)
        if not isinstance(listed, list) or not all(isinstance(c, str) and c for c in listed):
            raise record.wrong(key, "a list of texts")
        choices = tuple(listed)
    label = 0
    if not apart or keys.label in record.fields:
        label = record.value(keys.label)
        is_one = isinstance(label, int) and not isinstance(label, bool)
        if not is_one or not 0 <= label < len(choices):
            raise record.wrong(keys.label, f"the number of a choice, 0 to {len(choices) - 1}")
    if len(choices) < 2:
        raise record.wrong(keys.choices[0], "a list of two texts or more")
    return MultipleChoice(context, choices, label)


def _filled(record: Record, key: str) -> str:
    text = record.text(key)
    if not text:
        raise record.wrong(key, "a text that is not empty")
    return text


def _share(answers: Sequence[int], chosen: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(answers, chosen)) / len(answers)
