"""The run that wrote a checkpoint: its flags, as they are recorded, without touching its tensors.

--use-checkpoint-args takes the flags of the model and of its tokenizer from there. What a reader
would get wrong: flags beside it win, and loading refuses those that contradict the checkpoint.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from megatron import log
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder.run_folder import missing_iteration
from megatron.checkpoint.formats import registry
from megatron.checkpoint.load import storage
from megatron.checkpoint.load.inference_config import (
    Values,
    format_value,
    tokenizer_beside,
    values_from_command_line,
)
from megatron.checkpoint.load.source_config import completed_config
from megatron.checkpoint.load.start import begins_in
from megatron.config.fields import default_of, field_names
from megatron.config.model import ModelConfig
from megatron.config.run import GROUPS, RunConfig
from megatron.errors import ConfigError
from megatron.tokenizer import fingerprint

NOTHING_GIVEN: Values = MappingProxyType({})
_SHAPES = ("seq_length", "bert_binary_head")  # of a table of positions, of a BERT's heads
_DECODER = (
    *("decoder_num_layers", "decoder_seq_length"),
    *("relative_attention_num_buckets", "relative_attention_max_distance"),
)
_LAYOUT = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "pipeline_layer_counts"),
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "pipeline_balance"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
)


class StoredRun(NamedTuple):
    """The record of the run that wrote a checkpoint."""

    config: RunConfig
    kind: str  # of its model
    vocabulary: str | None = None  # the fingerprint of its tokenizer, where it is recorded
    is_native: bool = True  # of our own format, which records every flag


def stored_run(
    folder: str | Path, iteration: int | None = None, given: Values = NOTHING_GIVEN
) -> StoredRun:
    """Return the record of a run, with our defaults for flags that another tool lacks.

    Args:
        iteration: which checkpoint of `folder`; the latest when not given.
        given: flags that are taken before our defaults for what is not recorded.

    Raises:
        CheckpointError: missing, damaged, or of too little record.
    """
    location = place(folder)
    if isinstance(location, Path) and not registry.format_of(location, iteration).is_native:
        with registry.open_source(location, iteration) as source:
            config = RunConfig.from_plain(completed_config(source, values_from_command_line(given)))
            vocabulary = None if source.seal is None else source.seal.data.get(fingerprint.KEY)
            return StoredRun(config, source.kind, vocabulary, is_native=False)
    at = storage.latest_iteration(location) if iteration is None else iteration
    directory = location / storage.iteration_name(at)
    if not directory.is_dir():
        raise missing_iteration(location, at)
    content, _ = manifest.load(directory)
    vocabulary = content.data.get(fingerprint.KEY)
    return StoredRun(RunConfig.from_plain(content.config), content.kind, vocabulary)


def flags_of_checkpoint(given: Mapping[str, object]) -> dict[str, object]:
    """Return the flags of --use-checkpoint-args that a command line leaves out, and log them.

    They are those of the model, of its tokenizer and --seq-length, and with
    --use-mp-args-from-checkpoint-args of the layout; none without a checkpoint to begin with.

    Args:
        given: the flags of the command line, by the names of their fields.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not record the shape of its model.
        ConfigError: the layout of another tool's checkpoint is asked for.
    """
    load, save, pretrained = (
        None if value is None else str(value)
        for value in (given.get(name) for name in ("load", "save", "pretrained_checkpoint"))
    )
    folder = begins_in(load, save, pretrained)
    if folder is None:
        log.info("--use-checkpoint-args: there is no checkpoint yet, so all flags are those given")
        return {}
    iteration = given.get("load_iteration") if folder == load else None
    run = stored_run(folder, iteration if isinstance(iteration, int) else None, given)
    stored = run.config
    taken = _fields(stored, "model", field_names(ModelConfig)) | _fields(stored, "data", _SHAPES)
    taken |= _fields(stored, "encoder_decoder", _DECODER)
    if given.get("use_tokenizer_model_from_checkpoint_args", True):
        tokenizer = tokenizer_beside(stored.tokenizer, given)
        taken |= {name: getattr(tokenizer, name) for name in field_names(type(tokenizer))}
    if given.get("use_mp_args_from_checkpoint_args"):
        if not run.is_native:
            raise ConfigError(
                "this checkpoint does not record the layout of its run",
                found=f"--use-mp-args-from-checkpoint-args with {folder}",
                fix="leave it out, and give --tensor-model-parallel-size and its like: any layout "
                "loads it",
            )
        taken |= _fields(stored, "parallel", _LAYOUT)
        taken |= _fields(stored, "encoder_decoder", ("pipeline_model_parallel_split_rank",))
    taken = {name: value for name, value in taken.items() if name not in given}
    plain = {n: default_of(g, n) for g in GROUPS.values() for n in field_names(g) if n in taken}
    shown = [format_value(name, taken[name]) for name in taken if taken[name] != plain[name]]
    log.info(f"from the checkpoint in {folder}: {', '.join(shown) or 'nothing but defaults'}")
    return taken


def _fields(stored: RunConfig, group: str, names: Collection[str]) -> dict[str, object]:
    return {name: getattr(getattr(stored, group), name) for name in names}
