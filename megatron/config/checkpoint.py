"""CheckpointConfig: where checkpoints go and come from, and which parts of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints go and come from."""

    save: str | None = flag(None, help="folder to save checkpoints in")
    load: str | None = flag(
        None,
        help="folder to load the newest checkpoint from; the run starts fresh only when it is "
        "also --save and has never held one",
    )
    save_interval: int | None = flag(
        None, help="iterations between checkpoints; when not set only at the end"
    )
    save_optim: bool = flag(True, help="save the optimizer's state")
    save_rng: bool = flag(True, help="save the random generators")
    load_optim: bool = flag(True, help="load the optimizer's state")
    load_rng: bool = flag(True, help="load the random generators")
    finetune: bool = flag(False, help="load only the weights and start at iteration 0 of new data")
    keep_last: int | None = flag(
        None, help="newest checkpoints to keep; when not set every one is kept"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        for name in ("save_interval", "keep_last"):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 1 or more"
                )
        if self.save_interval is not None and self.save is None:
            yield ConfigError(
                "checkpoints have an interval but no place",
                found=f"--save-interval {self.save_interval} without --save",
                fix="add --save FOLDER, or drop --save-interval",
            )
        if self.finetune and self.load is None:
            yield ConfigError(
                "fine-tuning needs weights to start from",
                found="--finetune without --load",
                fix="add --load FOLDER",
            )
