"""A trained model made ready for use without training: its checkpoint's flags, and those beside it.

The flags of a checkpoint's run are read before any process group is there, and flags given are
compared with it (`checkpoint.load.inference_config`); then this process is initialised for that
model on a grid of its own, and weights are read from whatever layout and format they have.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from megatron import log
from megatron.checkpoint import model_kind, reshard
from megatron.checkpoint.files.mapped_tensors import TensorRange
from megatron.checkpoint.load.inference_config import (
    PRECISIONS,
    TRAINING_ONLY_FIELDS,
    Values,
    inference_config,
)
from megatron.checkpoint.load.opened import OpenedCheckpoint, open_on_all_ranks
from megatron.checkpoint.load.stored_run import NOTHING_GIVEN, StoredRun, stored_run
from megatron.checkpoint.source import SourceOptions
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.device import current
from megatron.engine.cuts import stage_ranges
from megatron.engine.state import model_tensors, parameter_tensors
from megatron.errors import CheckpointError, ConfigError
from megatron.global_vars import Runtime, get_runtime
from megatron.inference.model_checks import check_inference_model
from megatron.inference.offload.offload_folder import content_digest
from megatron.inference.offload.place_model import PlacedModel, PlacementOptions, place_model
from megatron.inference.weight_quantization import quantize_weights
from megatron.initialize import initialize_megatron
from megatron.model.gpt_model import GPTModel, gpt_layers
from megatron.model.specs import ModelBuild
from megatron.model.t5_model import T5Model
from megatron.model_build import RunState, model_build, vocabulary
from megatron.mpu.context import ParallelContext
from megatron.mpu.random import RandomStreams
from megatron.mpu.stage_plan import LayerRange
from megatron.ops.quantized_products import StoredFormat
from megatron.optimizer.replicated_grads import check_replicated_agree
from megatron.pipeline.plan import plan_of_run
from megatron.preflight.checks import MODEL_CHECKS
from megatron.tokenizer import fingerprint
from megatron.tokenizer.tokenizer import Tokenizer

_PREFIX = "model/"  # of parameters, in the names of a checkpoint


class LoadedModel(NamedTuple):
    """A model with the weights of a checkpoint, and what is needed to use it."""

    model: GPTModel
    tokenizer: Tokenizer
    config: RunConfig
    ctx: ParallelContext
    placed: PlacedModel | None = None  # where its layers lie; None: all on this rank's device


def load_model_for_inference(
    folder: str | Path,
    iteration: int | None = None,
    *,
    tensor_model_parallel_size: int | None = None,
    device: str | None = None,
    given: Values = NOTHING_GIVEN,
    weight_quantization: StoredFormat | None = None,
    placement: PlacementOptions | None = None,
    shares_experts: bool = False,
) -> LoadedModel:
    """Build the GPT or prefix LM of a checkpoint from the flags in it, and fill in its weights.

    Initialises this process (all ranks call it together). Weights are in the precision they were
    trained in unless flags choose another, whatever the layout was.

    Args:
        iteration: which checkpoint of `folder`; the latest when not given.
        device: "cpu" or "cuda"; as in training when not given.
        given: flags beside the checkpoint's (`inference_config`).
        weight_quantization: store weights of linear layers in 8 bits (`quantize_weights`); they are
            in memory in their own precision first.
        placement: for a model that may be larger than the memory of the device.
        shares_experts: see `inference_config`.

    Raises:
        CheckpointError: missing, damaged, or the flags in it are not of this version.
        MachineError: the model does not fit.
        ConfigError: flags that this model, or a model that writes, cannot follow.
        NumericsError: the model is not ready (`check_inference_model`).
    """
    if placement is not None and weight_quantization is not None:
        raise ConfigError(
            "weights that come and go cannot be stored in 8 bits",
            found=f"--device-map, --weight-quantization {weight_quantization}",
            fix="leave one of them out",
        )
    if given.get("sequence_parallel"):
        log.info("--sequence-parallel has no effect on a model that writes token by token")
    flags = {**given, "sequence_parallel": False, "tp_comm_overlap": False}
    if tensor_model_parallel_size is not None:
        flags["tensor_model_parallel_size"] = tensor_model_parallel_size
    if device is not None:
        flags["device"] = DeviceKind(device)
    kind = stored_run(folder, iteration, given).kind
    is_prefix_lm = kind == model_kind.PREFIX_LM
    wanted = model_kind.PREFIX_LM if is_prefix_lm else model_kind.GPT
    runtime = initialize_for_inference(
        folder, iteration, kind=wanted, given=flags, shares_experts=shares_experts
    )
    placed = None
    if placement is None:
        model = _filled_model(runtime, folder, iteration, is_prefix_lm=is_prefix_lm)
    else:
        build = _build_to_place(model_build(runtime))
        with torch.device("meta"):
            model = GPTModel(runtime.config.model, build, prompt_is_prefix=is_prefix_lm)
        placed = _place_weights(model, folder, iteration, runtime, placement)
        _make_ready(model, runtime)
    if weight_quantization is not None:
        log.info(str(quantize_weights(model, weight_quantization)))
    return LoadedModel(model, runtime.tokenizer, runtime.config, runtime.context, placed)


class LoadedTextToText(NamedTuple):
    """A T5 with the weights of a checkpoint, and what is needed to use it."""

    model: T5Model
    tokenizer: Tokenizer
    config: RunConfig
    ctx: ParallelContext


def load_text_to_text_model(
    folder: str | Path, iteration: int | None = None, *, given: Values = NOTHING_GIVEN
) -> LoadedTextToText:
    """Build the T5 of a checkpoint from the flags in it, and fill in its weights.

    As `load_model_for_inference`, whose arguments and errors these are.
    """
    stages = given.get("pipeline_model_parallel_size", 1)
    if stages > 1:
        raise ConfigError(
            "a model of an encoder and a decoder generates no text over pipeline stages",
            found=f"--pipeline-model-parallel-size {stages}",
            fix="leave it out, or share layers out by --tensor-model-parallel-size",
        )
    flags = {**given, "sequence_parallel": False, "tp_comm_overlap": False}
    runtime = initialize_for_inference(folder, iteration, kind=model_kind.T5, given=flags)
    config, words = runtime.config, runtime.tokenizer
    with torch.device(current()):
        model = T5Model(config.model, model_build(runtime), config.encoder_decoder)
    load_weights(model, folder, iteration, runtime)
    model.eval().requires_grad_(False)
    check_replicated_agree(model.named_parameters(), runtime.context.tp)
    return LoadedTextToText(model, words, config, runtime.context)


def load_draft_model(folder: str | Path, beside: LoadedModel, *, given: Values) -> GPTModel:
    """Return a GPT that proposes tokens for a loaded one, whole on this rank alone.

    Args:
        given: flags beside the checkpoint of the loaded model; those of precision and device count.

    Raises:
        CheckpointError: missing, damaged, or the flags in it are not of this version.
        ConfigError: it is another kind of model, or was trained with another tokenizer.
        NumericsError: the model is not ready (`check_inference_model`).
    """
    flags = {name: given[name] for name in (*PRECISIONS, "device") if name in given}
    flags |= {"sequence_parallel": False, "tp_comm_overlap": False}
    stored = stored_run(folder, None, flags)
    model_kind.refuse_kind(stored.kind, model_kind.GPT, where=folder, wants="speculative decoding")
    present = fingerprint.fingerprint(beside.tokenizer)
    if stored.vocabulary not in (None, present):
        raise ConfigError(
            "the draft model was trained with another tokenizer than the model",
            found=f"{folder}: {stored.vocabulary}; the model's: {present}",
            fix="use a draft model of the same tokenizer, or --speculative ngram",
        )
    config = inference_config(stored.config, flags, load=str(folder)).config
    alone, streams = ParallelContext.single(), beside.model.build.streams
    run = _Run(config, alone, streams, beside.tokenizer)
    return _filled_model(run, folder, None)


def other_weights(folder: str | Path, given: Values = NOTHING_GIVEN) -> GPTModel:
    """Return the GPT of this process with the weights of another checkpoint, beside the one in use.

    All ranks call this together. The flags of the model have to be those of the one in use.

    Raises:
        CheckpointError: missing, damaged, or of another model.
        ConfigError: it was trained with another tokenizer.
        NumericsError: the model is not ready (`check_inference_model`).
    """
    runtime, stored = get_runtime(), stored_run(folder, None, given)
    model_kind.refuse_kind(stored.kind, model_kind.GPT, where=folder, wants="this program")
    differing = set(runtime.config.model.fields_that_differ(stored.config.model))
    if differing := differing - TRAINING_ONLY_FIELDS:
        raise CheckpointError(
            "the checkpoint is of another model than the one in use",
            found=f"{folder}: other values of {', '.join(sorted(differing))}",
            fix="start a program with it, or give a checkpoint of the same model",
        )
    _refuse_another_vocabulary(stored, runtime)
    return _filled_model(runtime, folder, None)


def _filled_model(
    run: RunState, folder: str | Path, iteration: int | None, *, is_prefix_lm: bool = False
) -> GPTModel:
    build = replace(model_build(run), repeats_tokens=True)
    layers = _own_layers(run, build)
    with torch.device(current()):
        model = GPTModel(run.config.model, build, prompt_is_prefix=is_prefix_lm, layers=layers)
    load_weights(model, folder, iteration, run)
    _make_ready(model, run)
    return model


def _own_layers(run: RunState, build: ModelBuild) -> LayerRange:
    """Return the layers of the stage of this rank, cut as in a training with the same flags.

    Raises:
        ConfigError: there is no such cut, or a stage is in several parts.
    """
    plan = plan_of_run(run.config)
    if plan.num_chunks > 1:
        raise ConfigError(
            "text generation does not support virtual pipeline stages",
            found=f"{plan.num_chunks} virtual stages on each rank",
            fix="leave --num-virtual-stages-per-pipeline-rank and "
            "--num-layers-per-virtual-pipeline-stage out: a checkpoint of a training with virtual "
            "stages is loaded at plain ones",
        )
    pp = build.ctx.pp
    return stage_ranges(gpt_layers(run.config.model, build), plan, pp.size)[pp.rank]


def _make_ready(model: GPTModel, run: RunState) -> None:
    model.eval().requires_grad_(False)
    words = run.tokenizer
    check_inference_model(model, run.context, vocabulary=words.vocab_size, eod=words.eod)


class _Run(NamedTuple):
    """A `RunState` beside that of the process."""

    config: RunConfig
    context: ParallelContext
    streams: RandomStreams
    tokenizer: Tokenizer


def initialize_for_inference(
    folder: str | Path,
    iteration: int | None = None,
    *,
    kind: str = model_kind.GPT,
    given: Values = NOTHING_GIVEN,
    shares_experts: bool = False,
) -> Runtime:
    """Initialise this process for the model of a checkpoint, with flags that override it.

    All ranks call this together; arguments and errors are those of `load_model_for_inference`.
    The grid is that of the flags, one rank if they name none. A checkpoint of another `kind` of
    model is refused.
    """
    stored = stored_run(folder, iteration, given)
    model_kind.refuse_kind(stored.kind, kind, where=folder, wants="this program")
    use = inference_config(stored.config, given, load=str(folder), shares_experts=shares_experts)
    runtime = initialize_megatron(use.config, checks=MODEL_CHECKS)
    for note in use.notes:
        log.info(note)
    _refuse_another_vocabulary(stored, runtime)
    return runtime


def load_weights(
    module: nn.Module,
    folder: str | Path,
    iteration: int | None,
    runtime: RunState,
    *,
    part: str = "",
) -> None:
    """Fill a model, or this rank's stage of it, from a checkpoint of any layout and format.

    Weights are rounded to the precision of the run: their own unless flags chose another.

    Args:
        part: the beginning of the names of parameters, of a model that is one part of several.
    """
    opened = _open(folder, iteration, runtime)
    prefixes = (_PREFIX + part,)
    opened.read_into(model_tensors(module, runtime.context), prefixes=prefixes, cast=True)
    opened.close()


def digest_of_checkpoint(folder: str | Path, iteration: int | None, runtime: RunState) -> str:
    """Return a digest of the content of a checkpoint; all ranks call this together."""
    opened = _open(folder, iteration, runtime)
    digest = content_digest(opened.manifest, Path(str(opened.directory)))
    opened.close()
    return digest


def _open(folder: str | Path, iteration: int | None, runtime: RunState) -> OpenedCheckpoint:
    return open_on_all_ranks(
        folder,
        iteration,
        ctx=runtime.context,
        options=SourceOptions(vocab_size=vocabulary(runtime.config, runtime.tokenizer).true),
        verification=runtime.config.checkpoint.checkpoint_verify,
    )


def _build_to_place(build: ModelBuild) -> ModelBuild:
    """Return what a model is built from whose weights come and go.

    Raises:
        ConfigError: there are several ranks.
    """
    if build.ctx.world.size > 1:
        raise ConfigError(
            "a model is placed by --device-map in one process, or split over ranks without it",
            found=f"--device-map, {build.ctx.world.size} ranks, --tensor-model-parallel-size "
            f"{build.ctx.tp.size}",
            fix="start it without torchrun, or leave --device-map out",
        )
    if build.compiler is not None:
        log.info("--compile has no effect with --device-map: its graphs keep weights")
    return replace(build, compiler=None)


def _place_weights(
    model: GPTModel,
    folder: str | Path,
    iteration: int | None,
    runtime: Runtime,
    options: PlacementOptions,
) -> PlacedModel:
    opened = _open(folder, iteration, runtime)
    own, inside = options.folder, Path(str(opened.directory)).resolve()
    if own is not None and own.resolve().is_relative_to(inside):
        raise ConfigError(
            "the offload folder lies in the checkpoint, whose content it would change",
            found=f"--offload-folder {own}, in {inside}",
            fix="give a folder of its own",
        )
    wanted = {tensor.name: tensor for tensor in model_tensors(model, runtime.context)}
    saved = opened.manifest.tensors
    problems = reshard.mismatches(saved, wanted, cast=True)
    if problems := problems or reshard.unexpected(saved, wanted, (_PREFIX,)):
        raise reshard.mismatch_error(problems)
    placed = place_model(model, runtime.context, _CheckpointWeights(opened), options)
    opened.close()
    return placed


class _CheckpointWeights:
    """A checkpoint as the source of a model's weights, for one rank."""

    def __init__(self, opened: OpenedCheckpoint) -> None:
        self._opened = opened

    def range_of(self, name: str) -> TensorRange | None:
        return self._opened.range_of(_PREFIX + name)

    def fill(self, parameters: Mapping[str, nn.Parameter]) -> None:
        targets = parameter_tensors(parameters.items(), self._opened.ctx)
        names = {target.name for target in targets}
        self._opened.read_into(targets, prefixes=(_PREFIX,), cast=True, only=names.__contains__)

    def verify(self) -> None:
        self._opened.verify_all()

    def content_digest(self) -> str:
        return content_digest(self._opened.manifest, Path(str(self._opened.directory)))


def _refuse_another_vocabulary(stored: StoredRun, runtime: Runtime) -> None:
    """Refuse a tokenizer with other tokens than the checkpoint's; other files may be named."""
    present = fingerprint.fingerprint(runtime.tokenizer)
    if stored.vocabulary is None or stored.vocabulary == present:
        return
    raise ConfigError(
        "the tokenizer is not the one that the model was trained with",
        found=f"{runtime.tokenizer.name}: {present}; the checkpoint's: {stored.vocabulary}",
        fix="give the files that the run was started with (tools/inspect_checkpoint.py shows them)",
    )
