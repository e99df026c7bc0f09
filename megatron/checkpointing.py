"""save_checkpoint() and load_checkpoint(): what of a run goes into a checkpoint and comes back.

Random weights are only ever chosen, never fallen into: a run starts fresh when no --load was given,
or when --load is also --save and has never held a checkpoint. Everything else that is missing,
damaged or of another model is an error on every rank. How bytes are kept is left to `checkpoint`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from megatron import device, log
from megatron.checkpoint import model_kind, rng
from megatron.checkpoint.agreement import run_on_all_ranks
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.format import RunSave
from megatron.checkpoint.load import storage
from megatron.checkpoint.load.image_positions import with_saved_positions
from megatron.checkpoint.load.inference_config import (
    TRAINING_ONLY_FIELDS,
)
from megatron.checkpoint.load.opened import OpenedCheckpoint, open_on_all_ranks
from megatron.checkpoint.load.selection import PREFIX, Selection, choose_states
from megatron.checkpoint.load.start import flags_to_load
from megatron.checkpoint.local.checkpoints import LocalCheckpoints
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, Snapshot
from megatron.checkpoint.source import SourceOptions
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.deepspeed.plan import recorded_json
from megatron.config.fields import from_plain, plain_default, to_plain
from megatron.config.model import ModelConfig
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.run import GROUPS, RECENT_LOSSES, RECORDED_JSON, RUN_NAME, RunConfig
from megatron.data.corpus.sources import changed_sources
from megatron.engine.base import Engine, PretrainTask
from megatron.engine.state import FP8_SCALARS, HISTORY_PREFIX
from megatron.errors import CheckpointError
from megatron.global_vars import Runtime
from megatron.initialize import seed_default_generators
from megatron.model_build import vocabulary
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import hash_seed
from megatron.ops.library import kernels_in_use
from megatron.ops.scaled_matmul import scaled_matmul_kind
from megatron.pipeline.plan import plan_of_run
from megatron.progress import Progress
from megatron.tokenizer import fingerprint

NO_SOURCES: Mapping[str, str] = MappingProxyType({})

# Groups whose changes are logged when a run is resumed.
_WARN_IF_CHANGED = (
    "training", "optimizer", "schedule", "precision", "fp8", "data", "tokenizer", "engine",
    "retrieval",
)  # fmt: skip

# Fields of the model that may differ between a checkpoint and the run that loads it: they change
# how it is trained or begun, not what its weights mean.
_FREE_MODEL_FIELDS = frozenset(
    {
        *TRAINING_ONLY_FIELDS,
        "max_position_embeddings",  # where it matters, the table's shape differs and is refused
    }
)
# Fields of other groups that describe the model.
_SHAPE_FIELDS = frozenset(
    {
        *("seq_length", "decoder_num_layers"),
        *("relative_attention_num_buckets", "relative_attention_max_distance"),
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

    `sources` is the content of the data files (`data.corpus.sources`), compared on resume.
    All ranks call this together; on return it is durable, or the same error is raised on all. Under
    --async-save it is only copied, and `saves` writes it beside the training.
    """
    flags = config.checkpoint
    if flags.save is None:
        return
    snapshot = _snapshot(config, engine, progress, runtime, sources, validation_loss)
    plan = plan_of_run(runtime.config)
    form = registry.get(flags.checkpoint_format)
    assert form.save_run is not None, form.name  # noqa: S101  # invariant: flags name no other format
    saved = form.save_run(
        RunSave(
            folder=flags.save,
            snapshot=snapshot,
            iteration=progress.iteration,
            ctx=runtime.context,
            retention=Retention(flags.keep_last, flags.keep_every, flags.keep_best),
            num_chunks=plan.num_chunks,
            padded_rows=vocabulary(runtime.config, runtime.tokenizer).padded,
            megatron_names=flags.megatron_names,
            live=engine.live,
            background=saves if flags.async_save else None,
        )
    )
    if saved is not None:
        log.info(str(saved))


def _snapshot(
    config: RunConfig,
    engine: Engine,
    progress: Progress,
    runtime: Runtime,
    sources: Mapping[str, str],
    validation_loss: float | None = None,
) -> Snapshot:
    """Return what of the run is saved, once its replicas are found to agree."""
    engine.check_replicas()  # those that have parted must not be saved as if they agreed
    state = engine.state(optimizer=config.checkpoint.save_optim)
    return Snapshot(
        tensors=state.tensors,
        progress=progress.to_plain(),
        config=config.to_plain() | _recorded(config, runtime),
        scalars=state.scalars,
        generators=rng.capture() if config.checkpoint.save_rng else None,
        data={**sources, **_vocabulary_source(runtime)},
        validation_loss=validation_loss,
        model_kind=engine.task.name,
        arithmetic=_arithmetic(config),
    )


def local_checkpoints(config: RunConfig, ctx: ParallelContext) -> LocalCheckpoints | None:
    """Return the local checkpoints of a run that saves some; all ranks call this together.

    Raises:
        ConfigError: copies would lie beside what they are copies of. The same on every rank.
    """
    flags = config.checkpoint
    if flags.non_persistent_save_interval is None:
        return None
    folder, save = flags.non_persistent_local_ckpt_dir, flags.save
    assert folder is not None and save is not None  # noqa: S101, PT018  # invariant: flags are checked
    factor = flags.replication_factor if flags.replication else 1
    return LocalCheckpoints(
        Path(folder), place(save), ctx, jump=flags.replication_jump or 1, factor=factor
    )


def save_local_checkpoint(
    local: LocalCheckpoints,
    engine: Engine,
    runtime: Runtime,
    sources: Mapping[str, str],
    progress: Progress,
) -> None:
    """Save the state after `progress.iteration` on the nodes themselves.

    Raises:
        CheckpointError: the same on every rank; the former local checkpoint stays.
    """
    snapshot = _snapshot(runtime.config, engine, progress, runtime, sources)
    local.save(snapshot, progress.iteration)


def reserve_for_saves(
    config: RunConfig,
    engine: Engine,
    saves: BackgroundSaves,
    local: LocalCheckpoints | None = None,
) -> None:
    """Begin to allocate the host memory that --async-save copies to; check that for `local`.

    All ranks call this together, once the engine is built.

    Raises:
        ConfigError: a host has not so much left. The same on every rank.
    """
    flags = config.checkpoint
    if flags.async_save and flags.save is not None:
        saves.reserve(engine.state(optimizer=flags.save_optim).tensors)
    if local is not None:
        local.reserve(engine.state(optimizer=True).tensors)


def load_checkpoint(
    config: RunConfig,
    engine: Engine,
    runtime: Runtime,
    sources: Mapping[str, str] = NO_SOURCES,
    local: LocalCheckpoints | None = None,
) -> Progress:
    """Fill the engine and the generators from --load, and return the run's progress.

    Flags that changed, and data files whose content changed (`sources`), are logged.

    Args:
        local: what is loaded instead where it is newer.

    Raises:
        CheckpointError: the same on every rank, before anything was touched where that is possible.
    """
    found = _to_begin_with(config, runtime, local)
    if found is None:
        if config.retrieval.bert_load is not None:
            _begin_with_bert(config, engine, runtime, config.retrieval.bert_load)
        return Progress()
    opened, flags = found
    config = replace(config, checkpoint=flags)
    selection = Selection(flags.load_only, flags.load_except)
    _refuse_another_kind(
        opened, engine.task, is_partial=selection.is_partial, is_start=flags.finetune
    )
    is_any_model = selection.is_partial and not engine.task.begins_with
    _refuse_another_model(opened, config, is_partial=is_any_model)
    with_optimizer = flags.load_optim and not flags.finetune
    prefixes = ("model/", "optimizer/") if with_optimizer else ("model/",)
    state, scalars = engine.state(optimizer=with_optimizer), opened.manifest.scalars
    _refuse_other_heads(opened, selection, state.tensors)
    cast = not with_optimizer and _may_cast(opened, engine.task)
    wanted: Sequence[ShardedTensor] = state.tensors
    fill_positions: Callable[[], None] = lambda: None  # noqa: E731  # of images of another size
    if flags.finetune and engine.task.name == model_kind.VIT:
        wanted, fill_positions = with_saved_positions(opened, wanted, config.vision)
    if selection.is_partial:
        _read_part(opened, selection, wanted, cast=cast)
    else:
        tensors = _with_fitting_histories(opened, wanted)
        if len(tensors) < len(wanted):
            scalars = {name: value for name, value in scalars.items() if name != FP8_SCALARS}
        opened.read_into(tensors, prefixes=prefixes, cast=cast)
    fill_positions()
    engine.restored(scalars, optimizer=with_optimizer)
    opened.close()
    iteration = opened.manifest.iteration
    log.info(f"successfully loaded checkpoint from {opened.directory} at iteration {iteration}")
    if flags.finetune:
        return Progress()
    runtime.run_name.value = str(opened.manifest.config.get(RUN_NAME, {}).get("name", ""))
    runtime.recent.restore(opened.manifest.config.get(RECENT_LOSSES, {}).get("losses", ()))
    if flags.load_rng:
        _restore_generators(opened, runtime)
    _warn_of_changes(opened, config, {**sources, **_vocabulary_source(runtime)})
    return Progress.from_plain(dict(opened.manifest.progress))


def _to_begin_with(
    config: RunConfig, runtime: Runtime, local: LocalCheckpoints | None
) -> tuple[OpenedCheckpoint, CheckpointConfig] | None:
    """Open what the run begins with; return it with the flags of its load. None: random weights."""
    newest = None if local is None else local.newest(config.to_plain())
    if newest is not None:
        own = {"pretrained_checkpoint": None, "load_only": (), "load_except": ()}
        return newest, replace(config.checkpoint, **own)  # type: ignore[arg-type]
    given, flags = config.checkpoint.load, flags_to_load(config.checkpoint)
    if given is not None and (flags is None or flags.load != given):
        begins = "random weights" if flags is None else flags.load
        log.info(f"*** {given} has never held a checkpoint: starting from {begins} ***")
    if flags is None or flags.load is None:
        return None
    return _opened(flags, runtime), flags


def _opened(flags: CheckpointConfig, runtime: Runtime) -> OpenedCheckpoint:
    def open_at(iteration: int | None) -> OpenedCheckpoint:
        return open_on_all_ranks(
            folder,
            iteration,
            ctx=runtime.context,
            options=SourceOptions(vocab_size=vocabulary(runtime.config, runtime.tokenizer).true),
            verification=flags.checkpoint_verify,
        )

    folder, wanted = flags.load or "", flags.load_iteration
    if flags.load_fallback is None:
        opened = open_at(wanted)
    else:
        opened = storage.open_or_previous(folder, wanted, open_at, ctx=runtime.context)
    if not opened.is_native:
        log.info(f"{opened.directory} is a checkpoint of format {opened.format_name}")
    if not flags.finetune:
        opened.check_resumable()
    return opened


def _begin_with_bert(config: RunConfig, engine: Engine, runtime: Runtime, folder: str) -> None:
    """Fill each tower of a retriever with the encoder of a BERT; its heads are not read."""
    flags = replace(config.checkpoint, load=folder, finetune=True, load_iteration=None)
    opened = _opened(flags, runtime)
    if opened.manifest.kind not in (model_kind.BERT, model_kind.CLASSIFIER):
        model_kind.refuse_kind(opened.manifest.kind, model_kind.BERT, where=opened.directory)
    _refuse_another_model(opened, replace(config, checkpoint=flags))
    encoder = Selection(only=("embedding.*", "layers.*", "final_norm.*"))
    tensors = engine.state(optimizer=False).tensors
    for tower in dict.fromkeys(config.retrieval.towers):
        prefix = f"{PREFIX}{tower}."
        named = [
            replace(one, name=PREFIX + one.name.removeprefix(prefix))
            for one in tensors
            if one.name.startswith(prefix)
        ]
        targets = [one for one in named if encoder.takes(one.name)]
        opened.read_into(targets, only=encoder.takes, cast=True)
    engine.restored({}, optimizer=False)
    opened.close()
    log.info(f"each tower begins with the encoder of the BERT in {opened.directory}")


def _read_part(
    opened: OpenedCheckpoint,
    selection: Selection,
    tensors: Sequence[ShardedTensor],
    *,
    cast: bool,
) -> None:
    """Fill the parameters that the patterns name, and log what became of each parameter."""
    choice = choose_states(selection, tensors, opened.manifest.tensors, ctx=opened.ctx)
    targets = [tensor for tensor in tensors if selection.takes(tensor.name)]
    opened.read_into(targets, only=selection.takes, cast=cast)
    log.info(str(choice))


def _with_fitting_histories(
    opened: OpenedCheckpoint, tensors: Sequence[ShardedTensor]
) -> Sequence[ShardedTensor]:
    """Return `tensors`, without the histories of FP8 unless the checkpoint has them all."""
    saved = opened.manifest.tensors
    wanted = {one.name: one for one in tensors if one.name.startswith(HISTORY_PREFIX)}
    missing = [
        name
        for name, one in wanted.items()
        if name not in saved or saved[name].global_shape != one.global_shape
    ]
    if not missing:
        return tensors
    log.info(
        f"the checkpoint has no history of largest values of this length for {len(missing)} of "
        f"{len(wanted)} layers in FP8: all start empty, and the first step's scales come from its "
        "own values"
    )
    return [one for one in tensors if one.name not in wanted]


def _may_cast(opened: OpenedCheckpoint, task: PretrainTask) -> bool:
    """Return whether weights to begin with may be in another precision than this run's.

    A task that begins with another run's model has its own; elsewhere it would be a mistake.
    """
    return not opened.is_native or bool(task.begins_with)


def _recorded(config: RunConfig, runtime: Runtime) -> dict[str, Any]:
    """Return what is stored beside the flags: DeepSpeed's JSON, the run's name, its losses."""
    beside = {
        RECORDED_JSON: recorded_json(config, data_parallel_size=runtime.context.dp.size),
        RUN_NAME: {"name": runtime.run_name.value} if runtime.run_name.value else {},
        RECENT_LOSSES: {"losses": list(losses)} if (losses := runtime.recent.values) else {},
    }
    return {key: values for key, values in beside.items() if values}


def _vocabulary_source(runtime: Runtime) -> dict[str, str]:
    """Return the record of the tokenizer that a checkpoint stores."""
    return {fingerprint.KEY: fingerprint.fingerprint(runtime.tokenizer)}


def _refuse_another_kind(
    opened: OpenedCheckpoint, task: PretrainTask, *, is_partial: bool, is_start: bool
) -> None:
    saved = opened.manifest.kind
    if is_start and model_kind.has_same_parameters(saved, task.name):
        if saved != task.name:
            log.info(f"beginning with the weights of another kind of model: {saved}")
        return
    if is_partial and task.begins_with:
        if saved != task.name and saved not in task.begins_with:
            model_kind.refuse_kind(saved, task.begins_with[0], where=opened.directory)
        return
    if is_partial and model_kind.differ(saved, task.name):
        log.warning(f"loading parts of another kind of model: {saved} into {task.name}")
        return
    model_kind.refuse_kind(saved, task.name, where=opened.directory)


def _refuse_other_heads(
    opened: OpenedCheckpoint,
    selection: Selection,
    tensors: Sequence[ShardedTensor],
) -> None:
    """Refuse a checkpoint whose heads differ from those to be loaded on any rank.

    Every rank compares the heads of all ranks, since one pipeline rank holds only some of them.
    """
    own_names = [tensor.name for tensor in tensors if selection.takes(tensor.name)]
    heads_of_ranks = run_on_all_ranks(
        opened.ctx, "naming the heads of the model", lambda: model_kind.heads_of(own_names)
    )
    saved = filter(selection.takes, opened.manifest.tensors)
    model_kind.refuse_heads(saved, frozenset().union(*heads_of_ranks), where=opened.directory)


def _refuse_another_model(
    opened: OpenedCheckpoint, config: RunConfig, *, is_partial: bool = False
) -> None:
    """Check the model's flags; for a partial load, only warn about those that differ."""
    saved = opened.manifest.config
    if not opened.is_native and "num_layers" not in saved.get("model", {}):
        log.warning(
            f"{opened.directory} does not record its model's flags: only names and shapes are "
            "compared"
        )
        return
    differing = [
        f"--{name.replace('_', '-')} {stored} in the checkpoint, {present} here"
        for group in ("model", "encoder_decoder", "data")
        for name, stored, present in _differences(opened, config, group)
        if name in _SHAPE_FIELDS or (group == "model" and name not in _FREE_MODEL_FIELDS)
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


def _warn_of_changes(
    opened: OpenedCheckpoint, config: RunConfig, sources: Mapping[str, str]
) -> None:
    """Warn about changed flags, data and kernels: the run goes on, but its numbers will differ."""
    changed = [
        f"--{name.replace('_', '-')} {saved} -> {present}"
        for group in _WARN_IF_CHANGED
        for name, saved, present in _differences(opened, config, group)
    ]
    if changed:
        log.warning(f"resuming with other flags than the checkpoint's: {', '.join(changed)}")
    saved_with, kernels = opened.manifest.written_by.get("kernels"), kernels_in_use()
    if saved_with not in (None, kernels):
        log.warning(
            f"resuming with other kernels than the checkpoint's ({saved_with} -> {kernels}): "
            "numbers will differ in their last bits"
        )
    products = _arithmetic(config).get("fp8")
    if (before := opened.manifest.written_by.get("fp8")) != products and before and products:
        log.warning(
            f"resuming with other products in FP8 than the checkpoint's ({before} -> {products}): "
            "numbers will differ in their last bits"
        )
    if files := changed_sources(opened.manifest.data, sources):
        log.warning(
            "resuming with files of the data that are not those the checkpoint was trained on, "
            f"so that samples may be repeated or left out: {'; '.join(files)}"
        )


def _arithmetic(config: RunConfig) -> dict[str, str]:
    """Return how products in FP8 are computed, where there are any."""
    if config.fp8.fp8_format is None:
        return {}
    dtype: torch.dtype = getattr(torch, config.precision.precision.value)
    return {"fp8": scaled_matmul_kind(device.current().type, dtype)}


def _differences(
    opened: OpenedCheckpoint, config: RunConfig, group: str
) -> list[tuple[str, Any, Any]]:
    """Return fields of `group` whose saved and present values differ: (name, saved, present)."""
    stored, present = dict(opened.manifest.config.get(group, {})), config.to_plain()[group]
    if group == "model":
        saved = from_plain(ModelConfig, stored)
        stored = to_plain(saved)
        return [(n, stored[n], present[n]) for n in config.model.fields_that_differ(saved)]
    if group == "encoder_decoder":  # of the same number of layers, which another group compares
        layers = config.model.num_layers
        stored = from_plain(EncoderDecoderConfig, stored).meaning(layers)
        present = config.encoder_decoder.meaning(layers)
    if not opened.is_native:
        present = {name: present[name] for name in stored}  # it records no other flags
    for name in present.keys() - stored.keys():
        # A version without the flag behaved as its default does.
        stored[name] = plain_default(GROUPS[group], name)
    return [
        (name, stored.get(name), present.get(name))
        for name in sorted(set(stored) | set(present))
        if stored.get(name) != present.get(name)
    ]


def _restore_generators(opened: OpenedCheckpoint, runtime: Runtime) -> None:
    reason = rng.why_not_restorable(opened.manifest, runtime.context.topology)
    states: GeneratorStates | None = None
    if reason is None:
        states = opened.read_generators()
        reason = rng.device_mismatch(states)
    if reason is None and states is not None:
        rng.restore(states)
        return
    iteration = opened.manifest.iteration
    seed_default_generators(
        hash_seed(runtime.config.training.seed, "resumed", iteration), runtime.context
    )
    log.info(
        f"{reason}; a program's own code that draws from the default generators gets other numbers "
        f"than in an uninterrupted run, from seeds made of --seed and iteration {iteration}"
    )
