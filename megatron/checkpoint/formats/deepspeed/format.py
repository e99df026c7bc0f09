"""The records of DeepSpeed's two formats: what its engine saves, and its universal layout."""

from pathlib import Path

from megatron.checkpoint.files.store import place
from megatron.checkpoint.formats.deepspeed import files, universal
from megatron.checkpoint.formats.deepspeed.save import DEEPSPEED_TRACKER, save_deepspeed
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.format import Format, PlannedRun, RunSave
from megatron.checkpoint.save.saving import Saved
from megatron.errors import ConfigError


def _save_run(run: RunSave) -> Saved:
    live = run.live()
    if live is None:
        raise ConfigError(
            "only the DeepSpeed engine saves in DeepSpeed's layout",
            found="--checkpoint-format deepspeed without --deepspeed",
            fix="add --deepspeed, or drop --checkpoint-format",
        )
    return save_deepspeed(
        run.folder,
        run.snapshot,
        live,
        iteration=run.iteration,
        ctx=run.ctx,
        retention=run.retention,
    )


def _refuse_run(run: PlannedRun) -> ConfigError | None:
    """Return the error for a run that cannot be saved in this layout: only DeepSpeed writes it."""
    flags = run.config.checkpoint
    found = []
    if not run.config.engine.deepspeed:
        found.append("no --deepspeed")
    if not flags.save_optim:
        found.append("--no-save-optim")
    if not isinstance(place(flags.save or ""), Path):
        found.append(f"--save {flags.save}")
    if not found:
        return None
    return ConfigError(
        "DeepSpeed cannot write the checkpoints of this run",
        found=f"--checkpoint-format deepspeed with {', '.join(found)}",
        fix="train with --deepspeed and save to a folder with the optimizer's state, or use "
        "--checkpoint-format sharded",
    )


DEEPSPEED = Format(
    name=DeepSpeedSource.format_name,
    recognise=files.recognise,
    open_source=DeepSpeedSource,
    save_run=_save_run,
    refuse_run=_refuse_run,
    folder_tracker=DEEPSPEED_TRACKER,
)
UNIVERSAL = Format(
    name=universal.UniversalSource.format_name,
    recognise=universal.recognise,
    open_source=universal.UniversalSource,
    write=universal.write_universal,
    folder_tracker=universal.TRACKER,
)
