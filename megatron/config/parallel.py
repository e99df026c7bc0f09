"""ParallelConfig: how many ways the model is split over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is split over ranks; what is left over is data parallel."""

    tensor_model_parallel_size: int = flag(
        1, help="ranks that share each layer's matrices", aliases=("--tensor-parallel",)
    )
    pipeline_model_parallel_size: int = flag(
        1, help="ranks that share the layers", aliases=("--pipeline-parallel",)
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            value = getattr(self, name)
            yield from check_field(
                value > 0,
                name,
                value,
                problem="a parallel size is not positive",
                fix="use 1 for no parallelism of that kind",
            )
