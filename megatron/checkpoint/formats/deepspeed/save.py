"""Saves a running job in DeepSpeed's own layout, under the same rules as in our format.

DeepSpeed's engine writes its files through a writer that makes them durable and records their
digests. The folder appears by one rename, after all ranks are done and rank 0 has read it back.
"""

# SAVE/global_step100/                      DeepSpeed's files, `megatron.json`, random states
# SAVE/latest                               "global_step100", for DeepSpeed and its tools
# SAVE/latest_checkpointed_iteration.txt    "100"; last of all
# SAVE/.global_step100.partial-1f3a5c7e/    a save under way, or one that crashed

import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files import torch_file
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.manifest import FileRecord, GridLayout
from megatron.checkpoint.folder.retention import KEEP_ALL, Retention
from megatron.checkpoint.formats.deepspeed.parameters import (
    RECORD,
    UNIVERSAL_INFO,
    KnownParameter,
    RunRecord,
    merged,
    universal_info,
)
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.save.saving import Saved, run_on_rank0
from megatron.checkpoint.save.sealed_save import SealedSave
from megatron.checkpoint.sharded import Snapshot
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext

DEEPSPEED_TRACKER = "latest"
_ROOM_BYTES = 1 << 20  # for pickled names and numbers
_PARAMETER_BYTES = 2048  # of them, for each parameter in each file

ClientState = dict[str, Any]
Write = Callable[[Path, str, ClientState, "DurableWriter"], None]


class Live(NamedTuple):
    """The parts of a DeepSpeed engine that a save uses.

    `parameters` are those of this rank by DeepSpeed's names, `order` the names as its optimizer
    numbers them. `write(folder, tag, client_state, writer)` lets DeepSpeed save, every file through
    the writer; all ranks call it together.
    """

    parameters: Mapping[str, KnownParameter]
    order: tuple[str, ...]
    write: Write


class DurableWriter:
    """Writes DeepSpeed's files durably, records their digests, and keeps the first error.

    A rank that raised within DeepSpeed's save would leave the others in its barriers.
    """

    def __init__(self) -> None:
        self.files: dict[str, FileRecord] = {}
        self.error: Exception | None = None

    def save(self, content: Any, path: str) -> None:
        """Write `content` to a new file at `path`, unless something has failed before."""
        if self.error is not None:
            return
        try:
            self.files[Path(path).name] = torch_file.save(Path(path), content)
        except Exception as error:  # reported to all ranks after the last barrier
            self.error = error

    def result(self) -> Mapping[str, FileRecord]:
        """Return the records of the written files; raise the error that was kept."""
        if self.error is not None:
            raise self.error
        return self.files


def save_deepspeed(
    folder: str,
    snapshot: Snapshot,
    live: Live,
    *,
    iteration: int,
    ctx: ParallelContext,
    retention: Retention = KEEP_ALL,
) -> Saved:
    """Write the state of a DeepSpeed engine into `folder`, and make it the latest there.

    All ranks call this together; on return it is durable. `snapshot` is what our own format would
    hold of the same moment.

    Raises:
        CheckpointError: the same on every rank. The former checkpoint is as it was.
    """
    started = time.monotonic()
    run_folder = Path(folder)
    offers = run_on_all_ranks(
        ctx,
        "describing what to save",
        lambda: (live.parameters, _needed_bytes(snapshot, live, first=ctx.dp.is_first)),
    )
    parameters = run_on_all_ranks(
        ctx, "naming what to save", lambda: merged(offer for offer, _ in offers)
    )[0]
    name = folders.deepspeed_name(iteration)

    def make() -> str:
        folders.begin(run_folder)
        folders.require_space(run_folder, sum(needed for _, needed in offers) + _ROOM_BYTES)
        stage = run_folder / f".{name}.partial-{secrets.token_hex(4)}"
        stage.mkdir()
        return stage.name

    stage = run_folder / run_on_rank0(ctx, "making room for the checkpoint", make)
    state = _client_state(snapshot, live, parameters, iteration, ctx)
    writer = DurableWriter()
    _write_with_deepspeed(live, run_folder, stage.name, state, writer)
    save = SealedSave(
        ctx=ctx,
        stage=stage,
        snapshot=snapshot,
        iteration=iteration,
        retention=retention,
        started=started,
    )
    return save.complete(
        writer.result,
        commit=lambda: _commit(stage, run_folder / name, iteration),
        check=lambda: _check_written(stage, snapshot),
    )


def _write_with_deepspeed(
    live: Live, there: Path, tag: str, state: ClientState, writer: DurableWriter
) -> None:
    """Let DeepSpeed write; keep an error of its own like those of the writer."""
    try:
        live.write(there, tag, state, writer)
    except Exception as error:  # reported to all ranks at the next step
        writer.error = writer.error or error


def _needed_bytes(snapshot: Snapshot, live: Live, *, first: bool) -> int:
    """Return the size in bytes of this rank's files.

    That is its share of the optimizer and, on replica 0, also the weights.
    """
    counted = [t for t in snapshot.tensors if first or not t.name.startswith("model/")]
    parts = [part.view for tensor in counted for part in tensor.parts]
    tensor_bytes = sum(view.numel() * view.element_size() for view in parts)
    # ZeRO keeps an fp32 copy of fp32 weights, too, which is no part of our state.
    weights = sum(
        part.view.numel() * part.view.element_size()
        for tensor in snapshot.tensors
        if tensor.name.startswith("model/")
        for part in tensor.parts
    )
    return tensor_bytes + weights + _PARAMETER_BYTES * len(live.parameters)


def _client_state(
    snapshot: Snapshot,
    live: Live,
    parameters: Mapping[str, KnownParameter],
    iteration: int,
    ctx: ParallelContext,
) -> ClientState:
    record = RunRecord(
        iteration=iteration,
        layout=GridLayout.of(ctx.topology),
        progress=snapshot.progress,
        config=snapshot.config,
        scalars=snapshot.scalars,
        parameters=parameters,
        order=live.order,
    )
    return {
        RECORD: record.to_plain(),
        UNIVERSAL_INFO: universal_info(parameters),
        "iteration": iteration,
        # DeepSpeed counts anew in every process; these are of the whole run.
        "global_steps": iteration,
        "global_samples": snapshot.progress["consumed_samples"],
        "skipped_steps": snapshot.progress["skipped_iterations"],
    }


def _check_written(stage: Path, snapshot: Snapshot) -> None:
    """Open the written files on rank 0 as a reader would, and compare them with the run."""
    with DeepSpeedSource(stage, SourceOptions()) as source:
        expected = {tensor.name: tensor.global_shape for tensor in snapshot.tensors}
        wrong = [
            name
            for name, shape in expected.items()
            if name not in source.tensors or source.tensors[name].global_shape != shape
        ]
        if wrong:
            raise CheckpointError(
                "what DeepSpeed wrote does not hold all of the run",
                found=f"{wrong[0]} and {len(wrong) - 1} more of {len(expected)} tensors",
                fix="this is a defect: report it; save with --checkpoint-format sharded meanwhile",
            )


def _commit(stage: Path, final: Path, iteration: int) -> Path:
    """Make the finished stage the checkpoint, and update both trackers."""
    trackers = {DEEPSPEED_TRACKER: final.name, folders.TRACKER: f"{iteration}\n"}
    return folders.publish(stage, final.name, trackers)
