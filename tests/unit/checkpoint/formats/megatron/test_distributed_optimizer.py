"""Places in the distributed optimizer's flat tensors follow its buffer; other files are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.formats.megatron import distributed_optimizer
from megatron.checkpoint.formats.megatron.distributed_optimizer import (
    BufferParameter,
    bucket_size,
    buffer_plan,
)
from megatron.errors import CheckpointError
from tests.support.examples import examples

OVERLAP = {"overlap_grad_reduce": True}


def test_parameters_are_in_reverse_and_begin_at_multiples_of_64() -> None:
    parameters = [BufferParameter((3, 5)), BufferParameter((64,)), BufferParameter((10,))]
    assert buffer_plan(parameters, None) == ((128, 64, 0), 143)


def test_padding_between_buckets_is_not_in_the_file() -> None:
    parameters = [BufferParameter((7,)), BufferParameter((70,)), BufferParameter((10,))]
    # The second one is aligned within its bucket, whose end is 134; the third begins there.
    assert buffer_plan(parameters, 100) == ((134, 64, 0), 141)


def test_an_embedding_of_two_stages_is_a_bucket_of_its_own() -> None:
    shared = BufferParameter((10,), is_shared=True)
    other = BufferParameter((7,))
    assert buffer_plan([shared, other], None) == ((64, 0), 74)
    assert buffer_plan([other, shared], None) == ((10, 0), 17)


@examples(60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=9),
    limit=st.none() | st.integers(1, 400),
)
def test_no_two_parameters_overlap(sizes: list[tuple[int, bool]], limit: int | None) -> None:
    parameters = [BufferParameter((size,), shared) for size, shared in sizes]
    plan = buffer_plan(parameters, limit)
    ends = [start + one.size for start, one in zip(plan.starts, parameters)]
    assert ends[0] == plan.length
    assert plan.starts[-1] == 0
    for start, end in zip(plan.starts, ends[1:]):
        assert 0 <= start - end < 64


@pytest.mark.parametrize(
    ("args", "stage", "chunk", "expected"),
    [
        ({}, 0, 0, None),
        (OVERLAP, 0, 0, 40_000_000),
        ({**OVERLAP, "data_parallel_size": 30, "context_parallel_size": 2}, 0, 0, 60_000_000),
        ({**OVERLAP, "ddp_bucket_size": 500}, 0, 0, 500),
        ({**OVERLAP, "ddp_num_buckets": 3}, 0, 0, 34),
        ({**OVERLAP, "ddp_bucket_size": 500}, 1, 0, None),
        ({**OVERLAP, "ddp_bucket_size": 500}, 0, 1, None),
    ],
)
def test_the_size_of_a_bucket_follows_the_flags(
    args: dict[str, Any], stage: int, chunk: int, expected: int | None
) -> None:
    assert bucket_size(args, stage=stage, chunk=chunk, elements=100) == expected


def _saved(tmp_path: Path, content: Any) -> Path:
    torch.save(content, tmp_path / "distrib_optim.pt")
    return tmp_path / "distrib_optim.pt"


FLAT = {kind: torch.zeros(4) for kind in ("param", "exp_avg", "exp_avg_sq")}


def test_a_list_of_one_optimizer_is_that_optimizer(tmp_path: Path) -> None:
    content = [{"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): FLAT}}]
    (buffer,) = distributed_optimizer.read(_saved(tmp_path, content)) or []
    assert set(buffer) == {"master", "exp_avg", "exp_avg_sq"}


def test_the_form_before_february_2024_is_known(tmp_path: Path) -> None:
    old = {0: {torch.float32: [{"param": torch.zeros(4)}]}}
    assert distributed_optimizer.read(_saved(tmp_path, old)) is None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{}, {}], "states of 2 optimizers, as models with experts have"),
        (5, "a int"),
        (
            {"buckets_coalesced": True, 0: {torch.float32: {"param": torch.zeros(4)}}},
            "buffer 0 lacks one of param, exp_avg, exp_avg_sq",
        ),
    ],
)
def test_other_content_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    path = _saved(tmp_path, content)
    with pytest.raises(CheckpointError, match="is not that of the model beside it") as error:
        distributed_optimizer.read(path)
    assert words in str(error.value.found)


def test_flat_tensors_of_another_length_are_refused() -> None:
    parameters = {"a": BufferParameter((3,))}
    with pytest.raises(CheckpointError, match="is not that of the model beside it") as error:
        distributed_optimizer.views(Path("x.pt"), {"exp_avg": torch.zeros(4)}, parameters, None)
    assert "x.pt: 4 elements of exp_avg, where the parameters beside it take 3" in str(
        error.value.found
    )
