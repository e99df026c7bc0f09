"""Tests of the accessor facade in a process that has not initialised it."""

import pytest

from megatron import mpu
from megatron.errors import NotInitialisedError


def test_accessors_say_what_to_call_first() -> None:
    assert not mpu.model_parallel_is_initialized()
    with pytest.raises(NotInitialisedError, match="model parallelism is not initialised"):
        mpu.get_tensor_model_parallel_rank()


def test_initialising_without_processes_is_refused() -> None:
    with pytest.raises(NotInitialisedError, match="before the processes found each other"):
        mpu.initialize_model_parallel(1, 1)


def test_destroying_nothing_is_allowed() -> None:
    mpu.destroy_model_parallel()
