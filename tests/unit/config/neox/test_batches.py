"""gpt-neox's rules for batches: sizes that agree, or an error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.neox.batches import batch_sizes, replicas
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "copies", "sizes"),
    [
        (None, 4, 1, 8, (4, 32)),
        (32, None, 1, 8, (4, 32)),
        (None, 4, 2, 2, (4, 16)),
        (64, 4, None, 8, (4, 64)),
        (64, None, None, 8, (8, 64)),
        (None, 4, None, 8, (4, 32)),
        (32, 4, 1, 8, (4, 32)),
    ],
)
def test_what_is_not_given_is_derived(
    train: int | None, micro: int | None, accumulation: int | None, copies: int, sizes: object
) -> None:
    found = batch_sizes(train=train, micro=micro, accumulation=accumulation, replicas=copies)
    assert found == sizes


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "problem"),
    [
        (64, 4, 1, "contradict each other"),  # accumulation is not derived unless it is null
        (33, None, 1, "contradict each other"),
        (7, None, 1, "contradict each other"),
        (65, 4, None, "contradict each other"),
        (None, 0, 1, "contradict each other"),
        (None, None, 1, "is not given"),
    ],
)
def test_sizes_that_do_not_agree_are_refused(
    train: int | None, micro: int | None, accumulation: int | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        batch_sizes(train=train, micro=micro, accumulation=accumulation, replicas=8)
    assert f"train_micro_batch_size_per_gpu {micro}" in str(caught.value.found)


@given(
    st.integers(1, 300) | st.none(), st.integers(1, 20) | st.none(), st.integers(1, 4) | st.none(),
    st.integers(1, 8),
)  # fmt: skip
def test_what_is_returned_is_what_was_given_and_a_whole_number_of_steps(
    train: int | None, micro: int | None, accumulation: int | None, copies: int
) -> None:
    try:
        found = batch_sizes(train=train, micro=micro, accumulation=accumulation, replicas=copies)
    except ConfigError:
        assert train is not None or micro is None
        return
    steps, rest = divmod(found.train, found.micro * copies)
    assert rest == 0
    assert (train or found.train, micro or found.micro) == (found.train, found.micro)
    assert steps == accumulation or accumulation is None


def test_replicas_are_the_ranks_beside_tensor_and_pipeline() -> None:
    assert replicas(8, pipeline=0, tensor=2) == 4
    assert replicas(8, pipeline=2, tensor=2) == 2
    with pytest.raises(ConfigError, match="no whole number of replicas") as caught:
        replicas(6, pipeline=2, tensor=2)
    assert caught.value.fix == "start a multiple of 4 ranks"
