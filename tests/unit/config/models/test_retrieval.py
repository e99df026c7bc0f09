"""What of the flags of a retriever is refused, and what follows from them."""

from typing import Any

import pytest

from megatron.config.models.retrieval import RetrievalConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"biencoder_projection_dim": -1}, "a vector has a negative number of numbers"),
        ({"query_in_block_prob": 1.5}, "a share is not between 0 and 1"),
        ({"query_in_block_prob": float("nan")}, "a share is not between 0 and 1"),
        ({"retriever_report_topk_accuracies": (0, 5)}, "among no blocks, or asked for twice"),
        ({"retriever_report_topk_accuracies": (5, 5)}, "among no blocks, or asked for twice"),
    ],
)
def test_values_without_a_meaning_are_refused(flags: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        RetrievalConfig(**flags)


def test_a_shared_tower_has_one_name() -> None:
    assert RetrievalConfig().towers == ("query", "context")
    assert set(RetrievalConfig(biencoder_shared_query_context_model=True).towers) == {"shared"}
