"""Weights & Biases. WANDB_MODE=offline writes files, which `wandb sync` sends later."""

from collections.abc import Mapping

from megatron.progress import Progress
from megatron.trackers.tracker import Service, TrackedRun

_WITHOUT_KEY = ("offline", "disabled")
_AXES = ("iteration", "consumed samples", "consumed tokens")


class WandbTracker:
    """One run of a project."""

    def __init__(self, run: TrackedRun) -> None:
        """Begin the run, or continue the one of this name.

        Terminal, code and git of the run are not recorded: they may hold what should not leave.
        """
        import wandb

        flags = run.trackers
        settings = wandb.Settings(console="off", disable_code=True, disable_git=True)
        self._run = wandb.init(
            project=flags.wandb_project,
            entity=flags.wandb_entity,
            name=flags.wandb_exp_name,
            dir=flags.wandb_save_dir,
            id=run.name,
            resume="allow",
            config=dict(run.configs),
            allow_val_change=True,  # flags of a resumed run may differ
            settings=settings,
        )
        # Its own steps only grow; a run that is resumed from an earlier save would lose points.
        for axis in _AXES:
            self._run.define_metric(axis)
        self._run.define_metric("*", step_metric=_AXES[0])

    def log_scalars(self, values: Mapping[str, float], at: Progress) -> None:
        """Hand the numbers over; another process writes or sends them."""
        axes = zip(_AXES, (at.iteration, at.consumed_samples, at.consumed_tokens))
        self._run.log({**values, **dict(axes)})

    def close(self) -> None:
        """Wait until all is written or sent."""
        self._run.finish()


def _problem() -> str | None:
    import wandb

    try:
        if wandb.setup().settings.mode in _WITHOUT_KEY or wandb.login(verify=False, prompt=False):
            return None
    except wandb.errors.Error as error:  # names the variable or the file, never the key
        return str(error)
    return "no API key in WANDB_API_KEY or where `wandb login` puts it"


SERVICE = Service(
    "Weights & Biases", "wandb_project", "wandb", ("WANDB_API_KEY",), WandbTracker, _problem
)
