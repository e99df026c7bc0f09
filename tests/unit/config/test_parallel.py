"""How many ways a model is split: what is refused."""

import pytest

from megatron.config.parallel import ParallelConfig
from megatron.errors import ConfigError


def test_nothing_is_split_unless_asked_for() -> None:
    config = ParallelConfig()
    assert (config.tensor_model_parallel_size, config.pipeline_model_parallel_size) == (1, 1)


@pytest.mark.parametrize("name", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
@pytest.mark.parametrize("size", [0, -2])
def test_a_parallel_size_is_positive(name: str, size: int) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match="a parallel size is not positive") as caught:
        ParallelConfig(**{name: size})
    assert caught.value.found == f"{flag} {size}"
