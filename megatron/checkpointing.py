"""save_checkpoint() and load_checkpoint(): what of a run goes into a checkpoint and comes back.

Random weights are only ever chosen, never fallen into: a run starts fresh when no --load was given,
or when --load is also --save and has never held a checkpoint. Everything else that is missing,
damaged or of another model is an error on every rank. How bytes are kept is left to `checkpoint`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron import log
from megatron.checkpoint import manifest, rng, source_formats, storage
from megatron.checkpoint.background import BackgroundSaves
from megatron.checkpoint.deepspeed_save import save_deepspeed
from megatron.checkpoint.folder import missing_iteration
from megatron.checkpoint.foreign import (
    OURS,
    ForeignCheckpoint,
    check_resumable,
    format_in,
    is_foreign,
    open_foreign,
)
from megatron.checkpoint.megatron_save import save_megatron
from megatron.checkpoint.retention import Retention
from megatron.checkpoint.saving import Saved
from megatron.checkpoint.selection import Selection, choose
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, Snapshot
from megatron.checkpoint.source import SourceOptions
from megatron.checkpoint.source_config import completed_config
from megatron.checkpoint.storage import OpenCheckpoint
from megatron.config.checkpoint import CheckpointConfig, CheckpointFormatName
from megatron.config.deepspeed_json import recorded_json
from megatron.config.engine import EngineConfig
from megatron.config.fields import from_plain, plain_default, to_plain
from megatron.config.model import ModelConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.run import GROUPS, RECORDED_JSON, RunConfig
from megatron.config.runtime import DeviceKind
from megatron.data.data_sources import changed_sources
from megatron.device import current
from megatron.engine.base import Engine
from megatron.engine.state import model_tensors
from megatron.errors import CheckpointError, ConfigError
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, reseed
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.pipeline.plan import pipeline_plan
from megatron.preflight.checkpoint import starts_fresh_if_empty
from megatron.preflight.checks import MODEL_CHECKS
from megatron.progress import Progress
from megatron.tokenizer.tokenizer import Tokenizer, padded_vocab_size, true_vocab_size

NO_SOURCES: Mapping[str, str] = MappingProxyType({})

# Groups whose changes are said when a run goes on.
_SAID_IF_CHANGED = (
    "training", "optimizer", "schedule", "precision", "data", "tokenizer", "engine",
)  # fmt: skip

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
    *,
    saves: BackgroundSaves | None = None,
    validation_loss: float | None = None,
) -> None:
    """Write the checkpoint of `progress.iteration`, if the run has a --save folder.

    `sources` is what the files of the data hold (`data.data_sources`), for whoever resumes.
    All ranks call this together; on return it is durable, or the same error is raised on all. Under
    --async-save it is only copied, and `saves` writes it beside the training.
    """
    flags = config.checkpoint
    if flags.save is None:
        return
    engine.check_replicas()  # replicas that have parted must not be saved as if they agreed
    state = engine.state(optimizer=flags.save_optim)
    snapshot = Snapshot(
        tensors=state.tensors,
        progress=progress.to_plain(),
        config=config.to_plain() | _recorded(config, runtime.context.dp.size),
        scalars=state.scalars,
        generators=rng.capture(runtime.streams) if flags.save_rng else None,
        data=sources,
        validation_loss=validation_loss,
    )
    at, rule = progress.iteration, Retention(flags.keep_last, flags.keep_every, flags.keep_best)
    if flags.checkpoint_format is CheckpointFormatName.MEGATRON:
        log.info(str(_save_as_megatron(flags.save, snapshot, at, runtime)))
    elif flags.checkpoint_format is CheckpointFormatName.DEEPSPEED:
        log.info(str(_save_as_deepspeed(flags.save, snapshot, at, engine, runtime)))
    elif flags.async_save and saves is not None:
        saves.start(flags.save, snapshot, iteration=at, retention=rule)
    else:
        context = runtime.context
        log.info(str(storage.save(flags.save, snapshot, iteration=at, ctx=context, retention=rule)))


def _save_as_megatron(folder: str, snapshot: Snapshot, at: int, runtime: Runtime) -> Saved:
    plan = pipeline_plan(runtime.config.parallel, runtime.config.model.num_layers)
    return save_megatron(
        folder,
        snapshot,
        iteration=at,
        ctx=runtime.context,
        num_chunks=plan.num_chunks,
        padded_rows=_vocabulary(runtime).padded,
    )


def _save_as_deepspeed(
    folder: str, snapshot: Snapshot, at: int, engine: Engine, runtime: Runtime
) -> Saved:
    live = getattr(engine, "live", None)
    if live is None:
        raise ConfigError(
            "only the DeepSpeed engine saves in DeepSpeed's layout",
            found="--checkpoint-format deepspeed without --deepspeed",
            fix="add --deepspeed, or drop --checkpoint-format",
        )
    return save_deepspeed(folder, snapshot, live(), iteration=at, ctx=runtime.context)


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
    opened = _opened(flags, runtime)
    selection = Selection(flags.load_only, flags.load_except)
    _refuse_another_model(opened, config, is_partial=selection.is_partial)
    with_optimizer = flags.load_optim and not flags.finetune
    prefixes = ("model/", "optimizer/") if with_optimizer else ("model/",)
    state = engine.state(optimizer=with_optimizer)
    if selection.is_partial:
        _read_part(opened, selection, state.tensors)
    else:
        cast = isinstance(opened, ForeignCheckpoint) and not with_optimizer
        opened.read_into(state.tensors, prefixes=prefixes, cast=cast)
    engine.restored(opened.manifest.scalars, optimizer=with_optimizer)
    if isinstance(opened, ForeignCheckpoint):
        opened.close()
    iteration = opened.manifest.iteration
    log.info(f"successfully loaded checkpoint from {opened.directory} at iteration {iteration}")
    if flags.finetune:
        return Progress()
    if flags.load_rng:
        _restore_generators(opened, runtime)
    _say_what_changed(opened, config, sources)
    return Progress.from_plain(dict(opened.manifest.progress))


def _opened(flags: CheckpointConfig, runtime: Runtime) -> OpenCheckpoint | ForeignCheckpoint:
    context = runtime.context
    if is_foreign(flags.load or "", flags.load_iteration, ctx=context):
        foreign = open_foreign(
            flags.load or "",
            flags.load_iteration,
            ctx=context,
            options=SourceOptions(vocab_size=_vocabulary(runtime).true),
            verification=flags.checkpoint_verify,
        )
        log.info(f"{foreign.directory} is a checkpoint of format {foreign.source.format_name}")
        if flags.load_fallback is not None:
            log.info("--load-fallback has no effect here: it is for our own format alone")
        if not flags.finetune:
            check_resumable(foreign)
        return foreign
    open_ = storage.open_checkpoint if flags.load_fallback is None else storage.open_or_previous
    return open_(
        flags.load or "", flags.load_iteration, ctx=context, verification=flags.checkpoint_verify
    )


def _read_part(
    opened: OpenCheckpoint | ForeignCheckpoint,
    selection: Selection,
    tensors: Sequence[ShardedTensor],
) -> None:
    """Fill what the patterns name, and say what became of every parameter."""
    choice = choose(selection, tensors, opened.manifest.tensors, ctx=opened.ctx)
    targets = [tensor for tensor in tensors if selection.takes(tensor.name)]
    cast = isinstance(opened, ForeignCheckpoint)  # weights alone, to begin with
    opened.read_into(targets, only=selection.takes, cast=cast)
    log.info(str(choice))


def _recorded(config: RunConfig, replicas: int) -> dict[str, Any]:
    """The complete JSON that DeepSpeed was given, beside the flags that it follows from."""
    given = recorded_json(config, data_parallel_size=replicas)
    return {RECORDED_JSON: given} if given else {}


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
    parallel = ParallelConfig(tensor_model_parallel_size=tensor_model_parallel_size)
    runtime = initialize_for_inference(folder, iteration, parallel=parallel, device=device)
    build = model_build(runtime)
    with torch.device(current()):
        model = GPTModel(runtime.config.model, build)
    load_weights(model, folder, iteration, runtime)
    model.eval()
    return LoadedModel(model, runtime.tokenizer, runtime.config, runtime.context)


def initialize_for_inference(
    folder: str | Path,
    iteration: int | None = None,
    *,
    parallel: ParallelConfig,
    device: str | None = None,
) -> Runtime:
    """Initialise this process for the model of a checkpoint, on a grid of its own.

    All ranks call this together; arguments and errors are those of `load_model_for_inference`.
    """
    stored = stored_config(folder, iteration)
    launch = replace(stored.launch, distributed_backend=None)
    if device is not None:
        launch = replace(launch, device=DeviceKind(device))
    config = replace(
        stored,
        parallel=parallel,
        checkpoint=CheckpointConfig(load=str(folder)),
        engine=EngineConfig(),
        launch=launch,
    )
    return initialize_megatron(config, checks=MODEL_CHECKS)


def load_weights(
    module: nn.Module, folder: str | Path, iteration: int | None, runtime: Runtime
) -> None:
    """Fill a model, or this rank's stage of it, from a checkpoint of any layout and format."""
    context = runtime.context
    opened: OpenCheckpoint | ForeignCheckpoint
    if is_foreign(folder, iteration, ctx=context):
        options = SourceOptions(vocab_size=_vocabulary(runtime).true)
        opened = open_foreign(folder, iteration, ctx=context, options=options)
    else:
        opened = storage.open_checkpoint(folder, iteration, ctx=context)
    opened.read_into(model_tensors(module, runtime.context), prefixes=("model/",))


def stored_config(folder: str | Path, iteration: int | None = None) -> RunConfig:
    """The flags of the run that wrote a checkpoint, read without touching its tensors.

    Of another format: what it knows of them, and our defaults for the rest.
    """
    folder = Path(folder)
    if format_in(folder, iteration) != OURS:
        with source_formats.open_source(folder, iteration) as source:
            return RunConfig.from_plain(completed_config(source))
    at = storage.latest_iteration(folder) if iteration is None else iteration
    directory = folder / storage.iteration_name(at)
    if not directory.is_dir():
        raise missing_iteration(folder, at)
    content, _ = manifest.load(directory)
    return RunConfig.from_plain(content.config)


def model_build(runtime: Runtime) -> ModelBuild:
    """What the layers of this rank are built from."""
    config = runtime.config
    splits_sequences = config.parallel.sequence_parallel and runtime.context.tp.size > 1
    if config.parallel.sequence_parallel and not splits_sequences:
        log.info(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: there is no "
            "other rank to share a sequence with"
        )
    return ModelBuild(
        ctx=runtime.context,
        vocab=_vocabulary(runtime),
        seq_length=config.data.seq_length,
        streams=runtime.streams,
        precision=config.precision,
        sequence_parallel=splits_sequences,
        activations=config.training.activations,
    )


def _vocabulary(runtime: Runtime) -> VocabSize:
    flags = runtime.config.tokenizer
    true = true_vocab_size(runtime.tokenizer.vocab_size, flags.true_vocab_size)
    padded = padded_vocab_size(
        true,
        divisible_by=flags.make_vocab_size_divisible_by,
        tp=runtime.context.tp.size,
        pad_to=flags.pad_vocab_size_to,
    )
    return VocabSize(true, padded)


def _refuse_another_model(
    opened: OpenCheckpoint | ForeignCheckpoint, config: RunConfig, *, is_partial: bool = False
) -> None:
    """Of a partial load other flags are only said: parts of another model are what it is for."""
    saved = opened.manifest.config
    if isinstance(opened, ForeignCheckpoint) and "num_layers" not in saved.get("model", {}):
        log.warning(
            f"{opened.directory} does not say which model it is of: only names and shapes are "
            "compared"
        )
        return
    differing = [
        f"--{name.replace('_', '-')} {theirs} in the checkpoint, {ours} here"
        for group in ("model", "data")
        for name, theirs, ours in _differences(opened, config, group)
        if name == "seq_length" or (group == "model" and name not in _FREE_MODEL_FIELDS)
    ]
    if differing and is_partial:
        log.warning(f"loading parts of another model: {'; '.join(differing)}")
    elif differing and not (config.checkpoint.finetune and _only_seq_length(differing)):
        raise CheckpointError(
            "the checkpoint is of another model than the flags describe",
            found="; ".join(differing),
            fix="use the flags of the run that saved it (tools/inspect_checkpoint.py shows them)",
        )


def _only_seq_length(differing: list[str]) -> bool:
    return all(text.startswith("--seq-length ") for text in differing)


def _say_what_changed(
    opened: OpenCheckpoint | ForeignCheckpoint, config: RunConfig, sources: Mapping[str, str]
) -> None:
    """A resumed run with other flags or data is allowed, and said, as its numbers will differ."""
    changed = [
        f"--{name.replace('_', '-')} {theirs} -> {ours}"
        for group in _SAID_IF_CHANGED
        for name, theirs, ours in _differences(opened, config, group)
    ]
    if changed:
        log.warning(f"resuming with other flags than the checkpoint's: {', '.join(changed)}")
    if files := changed_sources(opened.manifest.data, sources):
        log.warning(
            "resuming with files of the data that are not those the checkpoint was trained on, "
            f"so that samples may be repeated or left out: {'; '.join(files)}"
        )


def _differences(
    opened: OpenCheckpoint | ForeignCheckpoint, config: RunConfig, group: str
) -> list[tuple[str, Any, Any]]:
    """Fields of `group` whose saved and present values differ: (name, saved, present)."""
    theirs, ours = dict(opened.manifest.config.get(group, {})), config.to_plain()[group]
    if group == "model":
        saved = from_plain(ModelConfig, theirs)
        theirs = to_plain(saved)
        return [(n, theirs[n], ours[n]) for n in config.model.fields_that_differ(saved)]
    if isinstance(opened, ForeignCheckpoint):
        ours = {name: ours[name] for name in theirs}  # of other flags it knows nothing
    for name in ours.keys() - theirs.keys():
        # A version that did not have the flag behaved as its default says.
        theirs[name] = plain_default(GROUPS[group], name)
    return [
        (name, theirs.get(name), ours.get(name))
        for name in sorted(set(theirs) | set(ours))
        if theirs.get(name) != ours.get(name)
    ]


def _restore_generators(opened: OpenCheckpoint | ForeignCheckpoint, runtime: Runtime) -> None:
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
