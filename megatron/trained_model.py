"""A trained model made ready for use without training: its checkpoint's flags, and those beside it.

The flags of a checkpoint's run are read before any process group is there, and flags given are
compared with it (`checkpoint.load.inference_config`); then this process is initialised for that
model on a grid of its own, and weights are read from whatever layout and format they have.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from megatron import log
from megatron.checkpoint import model_kind
from megatron.checkpoint.load.inference_config import (
    TRAINING_ONLY_FIELDS,
    Values,
    inference_config,
)
from megatron.checkpoint.load.opened import open_on_all_ranks
from megatron.checkpoint.load.stored_run import NOTHING_GIVEN, StoredRun, stored_run
from megatron.checkpoint.source import SourceOptions
from megatron.config.run import RunConfig
from megatron.config.runtime import DeviceKind
from megatron.device import current
from megatron.engine.state import model_tensors
from megatron.errors import CheckpointError, ConfigError
from megatron.global_vars import Runtime, get_runtime
from megatron.inference.model_checks import check_inference_model
from megatron.initialize import initialize_megatron
from megatron.model.gpt_model import GPTModel
from megatron.model_build import model_build, vocabulary
from megatron.mpu.context import ParallelContext
from megatron.preflight.checks import MODEL_CHECKS
from megatron.tokenizer import fingerprint
from megatron.tokenizer.tokenizer import Tokenizer


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
    shares_experts: bool = False,
) -> LoadedModel:
    """Build the GPT or prefix LM of a checkpoint from the flags in it, and fill in its weights.

    Initialises this process (all ranks call it together). Weights are in the precision they were
    trained in unless flags choose another, whatever the layout was.

    Args:
        iteration: which checkpoint of `folder`; the latest when not given.
        device: "cpu" or "cuda"; as in training when not given.
        given: flags beside the checkpoint's (`inference_config`).
        shares_experts: see `inference_config`.

    Raises:
        CheckpointError: missing, damaged, or the flags in it are not of this version.
        ConfigError: flags that this model, or a model that writes, cannot follow.
        NumericsError: the model is not ready (`check_inference_model`).
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
    kind = stored_run(folder, iteration, given).kind
    is_prefix_lm = kind == model_kind.PREFIX_LM
    wanted = model_kind.PREFIX_LM if is_prefix_lm else model_kind.GPT
    runtime = initialize_for_inference(
        folder, iteration, kind=wanted, given=flags, shares_experts=shares_experts
    )
    model = _ready_model(runtime, folder, iteration, prompt_is_prefix=is_prefix_lm)
    return LoadedModel(model, runtime.tokenizer, runtime.config, runtime.context)


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
    return _ready_model(runtime, folder, None, prompt_is_prefix=False)


def _ready_model(
    runtime: Runtime, folder: str | Path, iteration: int | None, *, prompt_is_prefix: bool
) -> GPTModel:
    build = model_build(runtime)
    with torch.device(current()):
        model = GPTModel(runtime.config.model, build, prompt_is_prefix=prompt_is_prefix)
    model.eval().requires_grad_(False)
    load_weights(model, folder, iteration, runtime)
    words = runtime.tokenizer
    check_inference_model(model, build.ctx, vocabulary=words.vocab_size, eod=words.eod)
    return model


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
