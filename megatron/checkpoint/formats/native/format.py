"""The record of our own format: sharded safetensors files under a manifest."""

from pathlib import Path

from megatron.checkpoint.formats.format import Format, RunSave
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.save.saving import Saved, save_snapshot
from megatron.checkpoint.source import SourceOptions


def _open(directory: Path, options: SourceOptions) -> ShardedSource:
    return ShardedSource(directory)  # it stores no padding rows, so `options` add nothing


def _save_run(run: RunSave) -> Saved | None:
    at, rule = run.iteration, run.retention
    if run.background is None:
        return save_snapshot(run.folder, run.snapshot, iteration=at, ctx=run.ctx, retention=rule)
    run.background.start(run.folder, run.snapshot, iteration=at, retention=rule)
    return None


FORMAT = Format(
    name=sharded.NAME,
    recognise=sharded.recognise,
    open_source=_open,
    write=write_sharded,
    save_run=_save_run,
    is_native=True,
    saves_in_background=True,
)
