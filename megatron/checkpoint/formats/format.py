"""Defines the record of a checkpoint format: all that the rest of the program uses of it.

A record is in `format.py` of its package; `registry.FORMATS` lists them. Code that loads, saves,
converts or checks flags reads a record, and never compares a format's name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.formats.deepspeed.save import Live
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.checkpoint.save.saving import Saved
from megatron.checkpoint.sharded import Snapshot
from megatron.checkpoint.source import CheckpointSource, SourceOptions, WriteOptions
from megatron.config.checkpoint import MegatronNames
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.mpu.context import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSave:
    """One checkpoint that a running job saves, as one rank sees it.

    Attributes:
        num_chunks: virtual stages of each pipeline rank.
        padded_rows: rows of the vocabulary in the run, padding included.
        megatron_names: names of parameters in Megatron's files.
        live: returns the parts of the engine that DeepSpeed saves itself (`Engine.live`).
        background: for formats that can write in the background; None: the training waits.
    """

    folder: str
    snapshot: Snapshot
    iteration: int
    ctx: ParallelContext
    retention: Retention
    num_chunks: int
    padded_rows: int
    megatron_names: MegatronNames
    live: Callable[[], Live | None]
    background: BackgroundSaves | None


class PlannedRun(NamedTuple):
    """A run before it starts, for which a format checks whether it can hold its checkpoints."""

    config: RunConfig
    has_equal_stages: Callable[[], bool]  # whether all pipeline stages have as many layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One format of checkpoints.

    Attributes:
        name: what messages, `--format` of tools and `--checkpoint-format` call it.
        recognise: whether a folder is one checkpoint of this format, by the names in it; does not
            raise.
        open_source: opens such a folder for reading, without a process group.
        write: makes a checkpoint in the folder --save of a tool, tracker and all, and returns its
            own folder; holds no more than one tensor or shard in memory. None: it is only read.
        save_run: saves a running job, called by all ranks; returns None if it continues in the
            background. None: only tools write this format.
        refuse_run: the error where runs with these flags cannot be saved in this format.
        is_native: our own: with every flag of its run and digests of all files, also in object
            stores.
        has_optimizer: whether it holds the optimizer's state and progress beside the weights.
        saves_in_background: whether `save_run` can write in the background.
        for_transformers: whether Hugging Face's transformers opens its checkpoints.
        folder_tracker: the tracker file that holds the name of a checkpoint's folder beside it;
            None: its folders are named by iterations, as in our own tracker file.
    """

    name: str
    recognise: Callable[[Path], bool]
    open_source: Callable[[Path, SourceOptions], CheckpointSource]
    write: Callable[[CheckpointSource, Path, WriteOptions], Path] | None = None
    save_run: Callable[[RunSave], Saved | None] | None = None
    refuse_run: Callable[[PlannedRun], ConfigError | None] = lambda run: None
    is_native: bool = False
    has_optimizer: bool = True
    saves_in_background: bool = False
    for_transformers: bool = False
    folder_tracker: str | None = None
