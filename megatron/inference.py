"""A trained model made ready for use without training: its checkpoint's flags, and those beside it.

The flags of a checkpoint's run are read before any process group is there, and flags given are
compared with it (`checkpoint.load.inference_config`); then this process is initialised for that
model on a grid of its own, and weights are read from whatever layout and format they have.
"""

from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from megatron import log
from megatron.checkpoint import model_kind
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder.run_folder import missing_iteration
from megatron.checkpoint.formats import registry
from megatron.checkpoint.load import storage
from megatron.checkpoint.load.inference_config import (
    Values,
    inference_config,
    values_from_command_line,
)
from megatron.checkpoint.load.opened import open_on_all_ranks
from megatron.checkpoint.load.source_config import completed_config
from megatron.checkpoint.source import SourceOptions
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.device import current
from megatron.engine.state import model_tensors
from megatron.errors import ConfigError
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron
from megatron.model.gpt_model import GPTModel
from megatron.model_build import model_build, vocabulary
from megatron.mpu.context import ParallelContext
from megatron.preflight.checks import MODEL_CHECKS
from megatron.tokenizer import fingerprint
from megatron.tokenizer.tokenizer import Tokenizer

NOTHING_GIVEN: Values = MappingProxyType({})


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
    tensor_model_parallel_size: int | None = None,
    device: str | None = None,
    given: Values = NOTHING_GIVEN,
) -> LoadedModel:
    """Build the GPT of a checkpoint from the flags stored in it, and fill in its weights.

    Initialises this process (all ranks call it together). Weights are in the precision they were
    trained in unless flags choose another, whatever the layout was.

    Args:
        iteration: which checkpoint of `folder`; the latest when not given.
        device: "cpu" or "cuda"; as in training when not given.
        given: flags beside the checkpoint's (`inference_config`).

    Raises:
        CheckpointError: missing, damaged, or the flags in it are not of this version.
        ConfigError: flags that this model, or a model that writes, cannot follow.
    """
    if given.get("pipeline_model_parallel_size", 1) != 1:
        raise ConfigError(
            "text generation does not support pipeline parallelism",
            found=f"--pipeline-model-parallel-size {given['pipeline_model_parallel_size']}",
            fix="spread it with --tensor-model-parallel-size instead",
        )
    if given.get("sequence_parallel"):
        log.info("--sequence-parallel has no effect on a model that writes token by token")
    flags = {**given, "sequence_parallel": False, "tp_comm_overlap": False}
    if tensor_model_parallel_size is not None:
        flags["tensor_model_parallel_size"] = tensor_model_parallel_size
    if device is not None:
        flags["device"] = DeviceKind(device)
    runtime = initialize_for_inference(folder, iteration, given=flags)
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
    kind: str = model_kind.GPT,
    given: Values = NOTHING_GIVEN,
) -> Runtime:
    """Initialise this process for the model of a checkpoint, with flags that override it.

    All ranks call this together; arguments and errors are those of `load_model_for_inference`.
    The grid is that of the flags, one rank if they name none. A checkpoint of another `kind` of
    model is refused.
    """
    stored = _stored(folder, iteration, given)
    model_kind.refuse_kind(stored.kind, kind, where=folder, wants="this program")
    use = inference_config(stored.config, given, load=str(folder))
    runtime = initialize_megatron(use.config, checks=MODEL_CHECKS)
    for note in use.notes:
        log.info(note)
    _refuse_another_vocabulary(stored, runtime)
    return runtime


def load_weights(
    module: nn.Module, folder: str | Path, iteration: int | None, runtime: Runtime
) -> None:
    """Fill a model, or this rank's stage of it, from a checkpoint of any layout and format.

    Weights are rounded to the precision of the run: their own unless flags chose another.
    """
    opened = open_on_all_ranks(
        folder,
        iteration,
        ctx=runtime.context,
        options=SourceOptions(vocab_size=vocabulary(runtime.config, runtime.tokenizer).true),
        verification=runtime.config.checkpoint.checkpoint_verify,
    )
    opened.read_into(model_tensors(module, runtime.context), prefixes=("model/",), cast=True)
    opened.close()


def stored_config(folder: str | Path, iteration: int | None = None) -> RunConfig:
    """Return the flags of the run that wrote a checkpoint, read without touching its tensors.

    Of another format: the flags that it records, and our defaults for the rest.
    """
    return _stored(folder, iteration).config


class _Stored(NamedTuple):
    """The record of the run that wrote a checkpoint."""

    config: RunConfig
    kind: str  # of its model
    vocabulary: str | None = None  # the fingerprint of its tokenizer, where it is recorded


def _stored(folder: str | Path, iteration: int | None, given: Values = NOTHING_GIVEN) -> _Stored:
    """Return the record of a run; flags supply what another tool's checkpoint lacks."""
    location = place(folder)
    if isinstance(location, Path) and not registry.format_of(location, iteration).is_native:
        with registry.open_source(location, iteration) as source:
            config = RunConfig.from_plain(completed_config(source, values_from_command_line(given)))
            vocabulary = None if source.seal is None else source.seal.data.get(fingerprint.KEY)
            return _Stored(config, source.kind, vocabulary)
    at = storage.latest_iteration(location) if iteration is None else iteration
    directory = location / storage.iteration_name(at)
    if not directory.is_dir():
        raise missing_iteration(location, at)
    content, _ = manifest.load(directory)
    vocabulary = content.data.get(fingerprint.KEY)
    return _Stored(RunConfig.from_plain(content.config), content.kind, vocabulary)


def _refuse_another_vocabulary(stored: _Stored, runtime: Runtime) -> None:
    """Refuse a tokenizer with other tokens than the checkpoint's; other files may be named."""
    present = fingerprint.fingerprint(runtime.tokenizer)
    if stored.vocabulary is None or stored.vocabulary == present:
        return
    raise ConfigError(
        "the tokenizer is not the one that the model was trained with",
        found=f"{runtime.tokenizer.name}: {present}; the checkpoint's: {stored.vocabulary}",
        fix="give the files that the run was started with (tools/inspect_checkpoint.py shows them)",
    )
