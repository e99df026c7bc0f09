"""EngineConfig: which engine trains, and the flags about DeepSpeed.

The JSON file that `--deepspeed_config` names is read by `config.deepspeed.plan`, which compares it
with the flags key by key; nothing here opens a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


class ZeroStage(StrEnum):
    """What ZeRO partitions over replicas: each stage its own part and those before it."""

    NOTHING = "0"
    OPTIMIZER = "1"
    GRADIENTS = "2"
    PARAMETERS = "3"


class RemoteDevice(StrEnum):
    """The device of ZeRO stage 3 parameters that are not in use."""

    NONE = "none"
    CPU = "cpu"
    NVME = "nvme"


# Flags with a meaning for DeepSpeed only.
_DEEPSPEED_FIELDS = (
    "deepspeed_config",
    "zero_stage",
    "zero_reduce_scatter",
    "zero_contigious_gradients",
    "zero_reduce_bucket_size",
    "zero_allgather_bucket_size",
    "remote_device",
    "use_pin_memory",
    "cpu_optimizer",
    "pp_partition_method",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Which engine trains: our own, or DeepSpeed with its JSON file."""

    deepspeed: bool = flag(
        False, help="train through DeepSpeed instead of the native engine", aliases=("--deepscale",)
    )
    deepspeed_config: str | None = flag(
        None,
        help="DeepSpeed's JSON file; its values fill flags that are not given, and must not "
        "contradict those that are",
        aliases=("--deepspeed_config", "--deepscale_config"),
    )
    zero_stage: ZeroStage | None = flag(
        None,
        help="ZeRO stage of DeepSpeed: 1 shares the optimizer's state out over replicas, 2 also "
        "gradients, 3 also parameters; when not set the JSON's, or 0",
        values={f"{stage}.0": f"{stage}" for stage in range(4)},
    )
    zero_reduce_scatter: bool = flag(
        False, help="ZeRO reduces each part of a gradient to its owner alone"
    )
    zero_contigious_gradients: bool = flag(
        False,
        help="ZeRO copies gradients into one buffer as they come",
        aliases=("--zero-contiguous-gradients",),
    )
    zero_reduce_bucket_size: int | None = flag(
        None, help="gradients that ZeRO reduces in one collective"
    )
    zero_allgather_bucket_size: int | None = flag(
        None, help="parameters that ZeRO gathers in one collective"
    )
    remote_device: RemoteDevice | None = flag(
        None, help="where ZeRO stage 3 keeps parameters that are not in use"
    )
    use_pin_memory: bool = flag(
        False, help="what ZeRO offloads to the CPU lies in page-locked memory"
    )
    cpu_optimizer: bool = flag(
        False, help="ZeRO keeps the optimizer's state on the CPU, and updates weights there"
    )
    cpu_torch_adam: bool = flag(
        False,
        help="update offloaded weights with torch's AdamW, even where DeepSpeed's CPUAdam builds",
        aliases=("--cpu_torch_adam",),
    )
    pp_partition_method: str | None = flag(
        None,
        help="how DeepSpeed cuts the model into pipeline stages: uniform, parameters, or "
        "type:REGEX by layers whose class name matches",
    )
    use_pipeline_engine: bool = flag(
        True,
        help="several pipeline stages are trained by DeepSpeed's PipelineEngine; one stage never "
        "is",
        off=("--no-pipeline-parallel",),
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def flags_of_deepspeed(self) -> tuple[str, ...]:
        """Return the names of the fields that are set and have a meaning for DeepSpeed only."""
        return tuple(name for name in _DEEPSPEED_FIELDS if getattr(self, name) not in (None, False))

    def _problems(self) -> Iterator[ConfigError]:
        for name in ("zero_reduce_bucket_size", "zero_allgather_bucket_size"):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 500000000"
                )
