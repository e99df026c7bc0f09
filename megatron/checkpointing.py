"""save_checkpoint() and load_checkpoint(): what of a run goes into a checkpoint and comes back.

Random weights are only ever chosen, never fallen into: a run starts fresh when no --load was given,
or when --load is also --save and has never held a checkpoint. Everything else that is missing,
damaged or of another model is an error on every rank. How bytes are kept is left to `checkpoint`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megatron import log
from megatron.checkpoint import manifest, rng, storage
from megatron.checkpoint.folder import missing_iteration
from megatron.checkpoint.sharded import GeneratorStates, Snapshot
from megatron.checkpoint.storage import OpenCheckpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.data.data_sources import changed_sources
from megatron.device import current
from megatron.engine.base import Engine
from megatron.engine.state import model_tensors
from megatron.errors import CheckpointError
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, reseed
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.preflight.checkpoint import starts_fresh_if_empty
from megatron.preflight.checks import MODEL_CHECKS
from megatron.progress import Progress
from megatron.tokenizer.tokenizer import Tokenizer, padded_vocab_size

NO_SOURCES: Mapping[str, str] = MappingProxyType({})

# Fields of the model that may differ between a checkpoint and the run that loads it: they change
# how it is trained or begun, not what its weights mean.
_FREE_MODEL_FIELDS = frozenset(
    {
        "hidden_dropout",
        "attention_dropout",
        "init_method_std",
        "init_method_xavier_uniform",
        "max_position_embeddings",  # where it matters, the table's shape differs and is refused
    }
)


def save_checkpoint(
    config: RunConfig,
    engine: Engine,
    progress: Progress,
    runtime: Runtime,
    sources: Mapping[str, str] = NO_SOURCES,
) -> None:
    """Write the checkpoint of `progress.iteration`, if the run has a --save folder.

    `sources` is what the files of the data hold (`data.data_sources`), for whoever resumes.
    All ranks call this together; on return it is durable, or the same error is raised on all.
    """
    flags = config.checkpoint
    if flags.save is None:
        return
    engine.check_replicas()  # replicas that have parted must not be saved as if they agreed
    state = engine.state(optimizer=flags.save_optim)
    snapshot = Snapshot(
        tensors=state.tensors,
        progress=progress.to_plain(),
        config=config.to_plain(),
        scalars=state.scalars,
        generators=rng.capture(runtime.streams) if flags.save_rng else None,
        data=sources,
    )
    saved = storage.save(
        flags.save,
        snapshot,
        iteration=progress.iteration,
        ctx=runtime.context,
        keep_last=flags.keep_last,
    )
    log.info(
        f"successfully saved checkpoint at iteration {progress.iteration} to {saved.directory} "
        f"({saved.bytes / 2**20:.1f} MiB in {saved.seconds:.1f} s)"
    )


def load_checkpoint(
    config: RunConfig, engine: Engine, runtime: Runtime, sources: Mapping[str, str] = NO_SOURCES
) -> Progress:
    """Fill the engine and the generators from --load, and say how far that run was.

    Other flags, and files of the data that hold something else now (`sources`), are said.

    Raises:
        CheckpointError: the same on every rank, before anything was touched where that is possible.
    """
    flags = config.checkpoint
    if flags.load is None:
        return Progress()
    if starts_fresh_if_empty(flags.load, flags.save) and storage.never_held_a_checkpoint(
        flags.load
    ):
        log.info(f"*** {flags.load} has never held a checkpoint: starting from random weights ***")
        return Progress()
    opened = storage.open_checkpoint(flags.load, ctx=runtime.context)
    _refuse_another_model(opened, config)
    with_optimizer = flags.load_optim and not flags.finetune
    prefixes = ("model/", "optimizer/") if with_optimizer else ("model/",)
    state = engine.state(optimizer=with_optimizer)
    opened.read_into(state.tensors, prefixes=prefixes)
    engine.restored(opened.manifest.scalars, optimizer=with_optimizer)
    iteration = opened.manifest.iteration
    log.info(f"successfully loaded checkpoint from {opened.directory} at iteration {iteration}")
    if flags.finetune:
        return Progress()
    if flags.load_rng:
        _restore_generators(opened, runtime)
    _say_what_changed(opened, config, sources)
    return Progress.from_plain(dict(opened.manifest.progress))


class LoadedModel(NamedTuple):
    """A model with the weights of a checkpoint, and what is needed to use it."""

    model: GPTModel
    tokenizer: Tokenizer
    config: RunConfig
    ctx: ParallelContext


def load_model_for_inference(
    folder: str | Path,
    iteration: int | None = None,
    *,
    tensor_model_parallel_size: int = 1,
    device: str | None = None,
) -> LoadedModel:
    """Build the GPT of a checkpoint from the flags stored in it, and fill in its weights.

    Initialises this process (all ranks call it together). Weights are in the precision they were
    trained in, whatever the layout was.

    Args:
        iteration: which checkpoint of `folder`; the latest when not given.
        device: "cpu" or "cuda"; as in training when not given.

    Raises:
        CheckpointError: missing, damaged, or the flags in it are not of this version.
    """
    stored = stored_config(folder, iteration)
    launch = replace(stored.launch, distributed_backend=None)
    if device is not None:
        launch = replace(launch, device=DeviceKind(device))
    config = replace(
        stored,
        parallel=ParallelConfig(tensor_model_parallel_size=tensor_model_parallel_size),
        checkpoint=CheckpointConfig(load=str(folder)),
        launch=launch,
    )
    runtime = initialize_megatron(config, checks=MODEL_CHECKS)
    build = model_build(runtime)
    with torch.device(current()):
        model = GPTModel(config.model, build)
    opened = storage.open_checkpoint(folder, iteration, ctx=runtime.context)
    opened.read_into(model_tensors(model, runtime.context), prefixes=("model/",))
    model.eval()
    return LoadedModel(model, runtime.tokenizer, config, runtime.context)


def stored_config(folder: str | Path, iteration: int | None = None) -> RunConfig:
    """The flags of the run that wrote a checkpoint, read without touching its tensors."""
    folder = Path(folder)
    at = storage.latest_iteration(folder) if iteration is None else iteration
    directory = folder / storage.iteration_name(at)
    if not directory.is_dir():
        raise missing_iteration(folder, at)
    content, _ = manifest.load(directory)
    return RunConfig.from_plain(content.config)


def model_build(runtime: Runtime) -> ModelBuild:
    """What the layers of this rank are built from."""
    config, true = runtime.config, runtime.tokenizer.vocab_size
    padded = padded_vocab_size(
        true,
        divisible_by=config.tokenizer.make_vocab_size_divisible_by,
        tp=runtime.context.tp.size,
        pad_to=config.tokenizer.pad_vocab_size_to,
    )
    splits_sequences = config.parallel.sequence_parallel and runtime.context.tp.size > 1
    if config.parallel.sequence_parallel and not splits_sequences:
        log.info(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: there is no "
            "other rank to share a sequence with"
        )
    return ModelBuild(
        ctx=runtime.context,
        vocab=VocabSize(true, padded),
        seq_length=config.data.seq_length,
        streams=runtime.streams,
        precision=config.precision,
        sequence_parallel=splits_sequences,
        activations=config.training.activations,
    )


def _refuse_another_model(opened: OpenCheckpoint, config: RunConfig) -> None:
    saved = opened.manifest.config
    differing = [
        f"--{name.replace('_', '-')} {theirs} in the checkpoint, {ours} here"
        for group in ("model", "data")
        for name, theirs, ours in _differences(saved, config, group)
        if name == "seq_length" or (group == "model" and name not in _FREE_MODEL_FIELDS)
    ]
    if differing and not (config.checkpoint.finetune and _only_seq_length(differing)):
        raise CheckpointError(
            "the checkpoint is of another model than the flags describe",
            found="; ".join(differing),
            fix="use the flags of the run that saved it (tools/inspect_checkpoint.py shows them)",
        )


def _only_seq_length(differing: list[str]) -> bool:
    return all(text.startswith("--seq-length ") for text in differing)


def _say_what_changed(
    opened: OpenCheckpoint, config: RunConfig, sources: Mapping[str, str]
) -> None:
    """A resumed run with other flags or data is allowed, and said, as its numbers will differ."""
    changed = [
        f"--{name.replace('_', '-')} {theirs} -> {ours}"
        for group in ("training", "optimizer", "schedule", "precision", "data", "tokenizer")
        for name, theirs, ours in _differences(opened.manifest.config, config, group)
    ]
    if changed:
        log.warning(f"resuming with other flags than the checkpoint's: {', '.join(changed)}")
    if files := changed_sources(opened.manifest.data, sources):
        log.warning(
            "resuming with files of the data that are not those the checkpoint was trained on, "
            f"so that samples may be repeated or left out: {'; '.join(files)}"
        )


def _differences(saved: Any, config: RunConfig, group: str) -> list[tuple[str, Any, Any]]:
    """Fields of `group` whose saved and present values differ: (name, saved, present)."""
    theirs, ours = saved.get(group, {}), config.to_plain()[group]
    return [
        (name, theirs.get(name), ours.get(name))
        for name in sorted(set(theirs) | set(ours))
        if theirs.get(name) != ours.get(name)
    ]


def _restore_generators(opened: OpenCheckpoint, runtime: Runtime) -> None:
    reason = rng.why_not_restorable(opened.manifest, runtime.context.topology)
    states: GeneratorStates | None = None
    if reason is None:
        states = opened.read_generators()
        reason = rng.device_mismatch(states)
    if reason is None and states is not None:
        rng.restore(states, runtime.streams)
        return
    iteration = opened.manifest.iteration
    reseed(runtime.streams, runtime.config.training.seed, runtime.context, at=iteration)
    log.warning(
        f"{reason}; dropout goes on from seeds made of --seed and iteration {iteration}, so it "
        "draws other numbers than an uninterrupted run would"
    )
