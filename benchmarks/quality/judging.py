"""How good answers are, beside chance: shares right, intervals, and one way of answering better.

An interval here is of the examples that happened to be drawn. Examples of one source (an image)
are alike, so whole sources are drawn again; what another seed of training would give is seen from
the seeds, which stand one by one.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

import numpy as np

DRAWS = 10_000  # of the bootstrap: its 2.5 % points are known to about 0.1 %
_INTERVAL = (2.5, 97.5)


class Answers(NamedTuple):
    """The answers of one method, by seed."""

    accuracies: list[float]
    mean: float
    interval: tuple[float, float]  # 95 %, of the mean over the seeds


class Judgement(NamedTuple):
    """The scores of several methods on the same examples."""

    examples: int
    sources: int  # that the examples are of
    majority: float  # the share of the most frequent label
    answers: dict[str, Answers]
    # By pair "a - b" of ways, in their order: the difference of the means and its 95 % interval.
    differences: dict[str, tuple[float, tuple[float, float]]]


def judge(
    true: Sequence[str],
    answers: Mapping[str, Sequence[Sequence[str]]],
    sources: Sequence[str],
) -> Judgement:
    """Compare the answers of each method, one list for each seed, with the true labels.

    Args:
        sources: of each example what it is about; examples of one source are drawn together.
    """
    names, source_of = np.unique(np.asarray(sources), return_inverse=True)
    right = {
        name: np.array([[a == b for a, b in zip(true, one, strict=True)] for one in seeds])
        for name, seeds in answers.items()
    }
    # For each source: its examples, and how many of them are right on average over the seeds.
    sizes = np.bincount(source_of)
    by_source = {
        name: np.bincount(source_of, weights=found.mean(axis=0)) for name, found in right.items()
    }
    random, drawn = np.random.default_rng(0), {name: np.empty(DRAWS) for name in right}
    for draw in range(DRAWS):
        times = np.bincount(random.integers(len(names), size=len(names)), minlength=len(names))
        for name, found in by_source.items():
            drawn[name][draw] = times @ found / (times @ sizes)
    shares = {
        name: Answers(found.mean(axis=1).tolist(), float(found.mean()), _interval(drawn[name]))
        for name, found in right.items()
    }
    differences = {
        f"{a} - {b}": (shares[a].mean - shares[b].mean, _interval(drawn[a] - drawn[b]))
        for a, b in itertools.combinations(right, 2)
    }
    majority = max(Counter(true).values()) / len(true)
    return Judgement(len(true), len(names), majority, shares, differences)


def bag_of_words(texts: Sequence[str], labels: Sequence[str], unseen: Sequence[str]) -> list[str]:
    """Label unseen texts by logistic regression on their words and pairs of words."""
    text, linear, pipeline = (
        import_module(f"sklearn.{name}")
        for name in ("feature_extraction.text", "linear_model", "pipeline")
    )
    words = text.CountVectorizer(binary=True, ngram_range=(1, 2))
    learner = pipeline.make_pipeline(words, linear.LogisticRegression(max_iter=1000))
    learner.fit(texts, labels)
    return [str(label) for label in learner.predict(unseen)]


def judgement_lines(name: str, found: Judgement) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    yield (
        f"{name}: {found.examples} examples of {found.sources} sources; the largest class is "
        f"{100 * found.majority:.1f} %"
    )
    yield ""
    yield "| answers | accuracy | 95 % interval | by seed |"
    yield "|---|---|---|---|"
    for way, answers in found.answers.items():
        seeds = ", ".join(f"{100 * share:.1f}" for share in answers.accuracies)
        yield f"| {way} | {100 * answers.mean:.1f} % | {_range(answers.interval)} | {seeds} |"
    yield ""
    for pair, (difference, interval) in found.differences.items():
        yield f"{pair}: {100 * difference:+.1f} points ({_range(interval)})"
    yield ""


def _interval(drawn: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> tuple[float, float]:
    low, high = np.percentile(drawn, _INTERVAL)
    return float(low), float(high)


def _range(interval: tuple[float, float]) -> str:
    return " to ".join(f"{100 * share:.1f}" for share in interval)
