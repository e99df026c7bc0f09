"""The record of Megatron-LM's format: a file for each model-parallel rank."""

from pathlib import Path

from megatron.checkpoint.files.store import place
from megatron.checkpoint.formats.format import Format, PlannedRun, RunSave
from megatron.checkpoint.formats.megatron.args import args_of_config, flags_without_core
from megatron.checkpoint.formats.megatron.files import is_megatron
from megatron.checkpoint.formats.megatron.save import save_megatron
from megatron.checkpoint.formats.megatron.source import MegatronSource
from megatron.checkpoint.formats.megatron.spellings import SPELLINGS
from megatron.checkpoint.formats.megatron.writer import write_megatron
from megatron.checkpoint.save.saving import Saved
from megatron.config.checkpoint import MegatronNames
from megatron.config.optimizer import OptimizerKind
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError, ConfigError


def _save_run(run: RunSave) -> Saved:
    return save_megatron(
        run.folder,
        run.snapshot,
        iteration=run.iteration,
        ctx=run.ctx,
        num_chunks=run.num_chunks,
        padded_rows=run.padded_rows,
        megatron_names=run.megatron_names,
        retention=run.retention,
    )


def _refuse_run(run: PlannedRun) -> ConfigError | None:
    """Return the error for a run whose ranks do not hold the content of Megatron's files."""
    config = run.config
    found = []
    if config.parallel.sharding.shards_state:
        found.append("--use-distributed-optimizer")  # state partitioned over replicas
    if config.engine.deepspeed:
        found.append("--deepspeed")
    if config.optimizer.optimizer is OptimizerKind.MUON:
        found.append("--optimizer muon")  # state of two kinds, of which files say one
    if not isinstance(place(config.checkpoint.save or ""), Path):
        found.append(f"--save {config.checkpoint.save}")
    try:
        args_of_config(config.to_plain())
    except CheckpointError as error:  # Megatron has no such model
        found.append(str(error.found))
    if SPELLINGS[config.checkpoint.megatron_names].is_core:
        chosen = f"--megatron-names {config.checkpoint.megatron_names}"
        found += [f"{flag} and {chosen}" for flag in flags_without_core(config.model)]
    if config.encoder_decoder.decoder_layers(config.model.num_layers):
        found += _not_of_a_t5(config)
    if not run.has_equal_stages():
        found.append("pipeline stages of unequal length")
    if not found:
        return None
    return ConfigError(
        "Megatron's files cannot hold this run as it is laid out",
        found=f"--checkpoint-format megatron with {', '.join(found)}",
        fix="save with --checkpoint-format sharded, and use tools/convert_checkpoint.py",
    )


def _not_of_a_t5(config: RunConfig) -> list[str]:
    """Return the flags of a T5 with which Megatron's T5 has other files, or there is none."""
    stages = config.parallel.pipeline_model_parallel_size
    chosen = config.checkpoint.megatron_names
    flags = (
        (stages > 1, f"--pipeline-model-parallel-size {stages} of a T5"),
        (chosen is not MegatronNames.LEGACY, f"--megatron-names {chosen} of a T5"),
        (not config.model.add_bias_linear, "--disable-bias-linear of a T5"),
    )
    return [flag for is_given, flag in flags if is_given]


FORMAT = Format(
    name=MegatronSource.format_name,
    recognise=is_megatron,
    open_source=MegatronSource,
    write=write_megatron,
    save_run=_save_run,
    refuse_run=_refuse_run,
)
