"""All checks run, and all findings are reported together."""

from collections.abc import Iterator

import pytest

from megatron.errors import ConfigError, DataError, MegatronError, PreflightError
from megatron.preflight.run import RunPlan, collect_findings, run_preflight
from tests.unit.preflight.plans import plan


def yields_two(plan: RunPlan) -> Iterator[MegatronError]:
    yield ConfigError("the first", found="1", fix="mend it")
    yield ConfigError("the second", found="2", fix="mend it")


def raises_one(plan: RunPlan) -> Iterator[MegatronError]:
    raise DataError("the third", found="3", fix="mend it")
    yield


def is_content(plan: RunPlan) -> Iterator[MegatronError]:
    yield from ()


def test_everything_that_is_wrong_is_reported_together() -> None:
    with pytest.raises(PreflightError, match="3 checks failed before training") as caught:
        run_preflight(plan(), [yields_two, raises_one, is_content])
    text = str(caught.value)
    assert [finding.check for finding in caught.value.findings] == [
        "yields_two",
        "yields_two",
        "raises_one",
    ]
    assert all(words in text for words in ("the first", "the second", "the third", "found: 3"))


def test_nothing_wrong_is_no_error() -> None:
    run_preflight(plan(), [is_content])
    assert collect_findings(plan(), []) == []


def test_a_bug_in_a_check_is_not_hidden() -> None:
    def broken(plan: RunPlan) -> Iterator[MegatronError]:
        raise ZeroDivisionError
        yield

    with pytest.raises(ZeroDivisionError):
        run_preflight(plan(), [broken])


def test_replicas_are_what_is_left_of_the_ranks() -> None:
    assert plan(world_size=4, tensor_model_parallel_size=2).data_parallel_size == 2
    assert plan(world_size=3, tensor_model_parallel_size=2).data_parallel_size is None
    assert plan(world_size=1, tensor_model_parallel_size=2).data_parallel_size is None
    assert plan(tensor_model_parallel_size=2, pipeline_model_parallel_size=3).model_ranks == 6
