"""RunConfig: every config group of one run, as one value that can be stored and compared.

Ranks compare its fingerprint, and checkpoints record it. `get_args()` returns the flat view to user
programs, which can only read it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig, TokenizerConfig
from megatron.config.engine import EngineConfig
from megatron.config.fields import from_plain, to_plain
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.config.models.vision import VisionConfig
from megatron.config.optimizer import OptimizerConfig, ScheduleConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.runtime import LaunchConfig, LoggingConfig
from megatron.config.trackers import TrackersConfig
from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError
from megatron.json_values import JsonValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """The complete configuration of one run."""

    model: ModelConfig
    data: DataConfig
    tokenizer: TokenizerConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    precision: PrecisionConfig
    parallel: ParallelConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    launch: LaunchConfig
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    fp8: Fp8Config = dataclasses.field(default_factory=Fp8Config)
    encoder_decoder: EncoderDecoderConfig = dataclasses.field(default_factory=EncoderDecoderConfig)
    trackers: TrackersConfig = dataclasses.field(default_factory=TrackersConfig)
    retrieval: RetrievalConfig = dataclasses.field(default_factory=RetrievalConfig)
    vision: VisionConfig = dataclasses.field(default_factory=VisionConfig)
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # a program's own flags

    @property
    def num_blocks(self) -> int:
        """Transformer layers of the whole model, of an encoder and its decoder together."""
        layers = self.model.num_layers
        return layers + self.encoder_decoder.decoder_layers(layers)

    def to_plain(self) -> dict[str, dict[str, JsonValue]]:
        """Return nested JSON values; `from_plain` turns them back exactly."""
        groups = {name: to_plain(getattr(self, name)) for name in GROUPS}
        return groups | {"extra": dict(self.extra)}

    @classmethod
    def from_plain(cls, values: Mapping[str, Mapping[str, object]]) -> "RunConfig":
        """Rebuild a config from `to_plain`; a missing or an unknown group is an error.

        A group that older versions did not have takes its defaults, as those versions behaved.
        """
        missing = sorted(set(GROUPS) - set(values) - ADDED_LATER)
        if missing:
            raise ConfigError(
                "a stored run config lacks whole groups",
                found="no " + ", ".join(missing),
                fix="read it with the version that wrote it",
            )
        unknown = sorted(
            set(values) - set(GROUPS) - {"extra", RECORDED_JSON, RUN_NAME, RECENT_LOSSES}
        )
        if unknown:
            raise ConfigError(
                "a stored run config holds groups that this version does not know",
                found=", ".join(unknown),
                fix="read it with the version that wrote it",
            )
        groups: dict[str, Any] = {
            name: from_plain(GROUPS[name], values.get(name, {})) for name in GROUPS
        }
        return cls(**groups, extra=dict(values.get("extra", {})))

    def fingerprint(self) -> str:
        """Return sixteen hex digits that differ between any two different configs."""
        text = json.dumps(self.to_plain(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def flat(self) -> "FlatView":
        """Return Megatron's flat namespace over the groups, for reading."""
        return FlatView(self)


GROUPS: "Mapping[str, type[DataclassInstance]]" = {
    "model": ModelConfig,
    "encoder_decoder": EncoderDecoderConfig,
    "vision": VisionConfig,
    "data": DataConfig,
    "tokenizer": TokenizerConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "precision": PrecisionConfig,
    "fp8": Fp8Config,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "trackers": TrackersConfig,
    "launch": LaunchConfig,
    "engine": EngineConfig,
    "retrieval": RetrievalConfig,
}
# Groups that a stored config may lack, and what may be beside the groups: the JSON that
# DeepSpeed was given, which follows from the flags and a file; and how trackers know the run.
ADDED_LATER = frozenset({"engine", "fp8", "encoder_decoder", "retrieval", "trackers", "vision"})
RECORDED_JSON = "deepspeed_json"
RUN_NAME = "run_in_trackers"
RECENT_LOSSES = "recent_losses"


class FlatView:
    """A read-only view of a `RunConfig`: `args.hidden_size`, `args.lr`. Assigning raises."""

    __slots__ = ("_config",)

    def __init__(self, config: RunConfig) -> None:
        object.__setattr__(self, "_config", config)

    def __getattr__(self, name: str) -> Any:
        if name in self._config.extra:
            return self._config.extra[name]
        for group in GROUPS:
            if name in {field.name for field in dataclasses.fields(GROUPS[group])}:
                return getattr(getattr(self._config, group), name)
        raise AttributeError(f"no flag --{name.replace('_', '-')} in this run")

    def __setattr__(self, name: str, value: object) -> None:
        raise ConfigError(
            "the arguments of a run cannot be changed",
            found=f"args.{name} = {value!r}",
            fix="give the flag on the command line, or pass the value as an argument",
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (FlatView, (self._config,))  # the default would assign, which raises

    def __iter__(self) -> Iterator[str]:
        for group in GROUPS.values():
            yield from (field.name for field in dataclasses.fields(group))
        yield from self._config.extra
