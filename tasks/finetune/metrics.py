"""The metrics that the tasks are known by, as scikit-learn and SciPy compute them."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

Metric = Callable[[Sequence[float], Sequence[float]], float]  # true, predicted


def _accuracy(true: Sequence[float], predicted: Sequence[float]) -> float:
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(true, predicted))


def _f1(true: Sequence[float], predicted: Sequence[float]) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(true, predicted, zero_division=0.0))


def _matthews(true: Sequence[float], predicted: Sequence[float]) -> float:
    from sklearn.metrics import matthews_corrcoef

    return float(matthews_corrcoef(true, predicted))


def _pearson(true: Sequence[float], predicted: Sequence[float]) -> float:
    from scipy.stats import pearsonr

    return _number(pearsonr(true, predicted).statistic)


def _spearman(true: Sequence[float], predicted: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return _number(spearmanr(true, predicted).statistic)


def _number(value: float) -> float:
    """Return 0 for an undefined correlation, where all values are equal."""
    return 0.0 if math.isnan(value) else float(value)


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "accuracy": _accuracy,
        "f1": _f1,
        "matthews": _matthews,
        "pearson": _pearson,
        "spearman": _spearman,
    }
)
