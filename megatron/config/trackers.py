"""TrackersConfig: the services that record a run's numbers, beside TensorBoard.

Keys are no flags: everybody on the machine can read a command line. The library of each service
finds them where it always does, in the environment or in a file of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackersConfig:
    """Services that record a run: Weights & Biases, MLflow, Comet and trackio."""

    tracker_rank: int | None = flag(
        None, help="rank that writes to all trackers, TensorBoard among them; when not set the last"
    )
    wandb_project: str | None = flag(
        None,
        help="record the run in this project of Weights & Biases; WANDB_MODE=offline: on disk",
    )
    wandb_exp_name: str | None = flag(None, help="name of the run in Weights & Biases")
    wandb_entity: str | None = flag(None, help="user or team of the project in Weights & Biases")
    wandb_save_dir: str | None = flag(
        None, help="folder of Weights & Biases' local files; when not set it chooses one"
    )
    mlflow_experiment: str | None = flag(None, help="record the run in this experiment of MLflow")
    mlflow_tracking_uri: str | None = flag(
        None, help="MLflow's server or folder; when not set what MLFLOW_TRACKING_URI says"
    )
    comet_project: str | None = flag(
        None, help="record the run in this project of Comet (COMET_START_ONLINE=false: on disk)"
    )
    trackio_project: str | None = flag(
        None, help="record the run in this project of trackio, which is on this machine's disk"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        rank = self.tracker_rank
        yield from check_field(
            rank is None or rank >= 0,
            "tracker_rank",
            rank,
            problem="there is no such rank",
            fix="use 0, or leave it out for the last rank",
        )
        parts = urlsplit(self.mlflow_tracking_uri or "")
        if "@" in parts.netloc:
            server = parts.netloc.rpartition("@")[2]
            yield ConfigError(
                "a password is on the command line, which everybody on the machine can read",
                found=f"--mlflow-tracking-uri with a user before {server}",
                fix=f"use --mlflow-tracking-uri {parts._replace(netloc=server).geturl()}, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
            )
