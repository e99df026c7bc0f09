"""`from megatron import mpu` gives user code Megatron's accessor names."""

import pytest

from megatron import mpu
from megatron.mpu import initialize


def test_the_package_exposes_the_facade_and_nothing_else() -> None:
    assert mpu.get_data_parallel_group is initialize.get_data_parallel_group
    with pytest.raises(AttributeError, match="no attribute 'get_embedding_group'"):
        _ = mpu.get_embedding_group
