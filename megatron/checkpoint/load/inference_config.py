"""The config of inference: the flags of a checkpoint, changed by those of a command line.

Works on flags only. Flags about the weights must agree with the checkpoint; precision, layout,
tokenizer, window and device may differ; flags that only training reads are reported as without
effect. Flags supply what a checkpoint of another tool does not record.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import TokenizerConfig
from megatron.config.engine import EngineConfig
from megatron.config.fields import field_names, flag_name, to_plain
from megatron.config.fp8 import Fp8Config
from megatron.config.model import ModelConfig, PositionEmbedding
from megatron.config.parallel import ParallelConfig
from megatron.config.precision import PrecisionConfig
from megatron.config.run import RunConfig
from megatron.config.runtime import LaunchConfig
from megatron.errors import CheckpointError, ConfigError

Values = Mapping[str, Any]  # flags that were given, by the names of their fields

# Fields of the model for training or initialisation, without effect on what its weights mean.
TRAINING_ONLY_FIELDS = frozenset(
    {
        *("hidden_dropout", "attention_dropout", "init_method_std", "init_method_xavier_uniform"),
        *("moe_expert_capacity_factor", "moe_eval_capacity_factor", "moe_min_capacity"),
        *("moe_token_drop_policy", "output_layer_init_method_std"),
    }
)
PRECISIONS = ("fp16", "bf16", "fp64")
_TRAINING_ONLY_PARALLELISM = frozenset(
    {
        *("use_distributed_optimizer", "data_parallel_sharding_strategy", "reshard_after_forward"),
        *("overlap_param_gather", "overlap_grad_reduce", "num_distributed_optimizer_instances"),
        *("ddp_bucket_size", "context_parallel_size", "cp_comm_type"),
        "use_tp_pp_dp_mapping",
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "moe_shared_expert_overlap"),
    }
)
_SHARED_EXPERTS = {"expert_model_parallel_size", "expert_tensor_parallel_size"}
_TOKENIZER = (
    *("tokenizer_type", "vocab_file", "merge_file", "tokenizer_model", "tokenizer_name_or_path"),
    *("vocab_size", "vocab_extra_ids"),
)
# Evaluation scripts of bigscience give -1 for these: take the checkpoint's value.
PLACEHOLDER_FIELDS = frozenset(
    {"num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings"}
)


class Inference(NamedTuple):
    """The config of inference with a checkpoint."""

    config: RunConfig
    window: int | None  # --seq-length, which does not depend on the weights; None: not given
    notes: tuple[str, ...]  # to be logged once


def values_from_command_line(given: Values) -> dict[str, dict[str, Any]]:
    """Return config groups from flags, for what a checkpoint of another tool does not record."""
    values = {name: value for name, value in given.items() if not _is_placeholder(name, value)}
    groups = {
        "model": field_names(ModelConfig),
        "data": ("seq_length",),
        "tokenizer": field_names(TokenizerConfig),
        "precision": field_names(PrecisionConfig),
    }
    return {
        group: {name: values[name] for name in names if name in values}
        for group, names in groups.items()
    }


def inference_config(
    stored: RunConfig, given: Values, *, load: str, shares_experts: bool = False
) -> Inference:
    """Return `stored` changed by the flags of inference.

    Args:
        stored: the whole config of a checkpoint.
        given: flags beside it.
        load: the folder of the checkpoint.
        shares_experts: share experts out as a flag says; all ranks make the same passes then.

    Raises:
        CheckpointError: flags describe another model than the checkpoint's.
        ConfigError: flags contradict each other.
    """
    placeholders = [name for name, value in given.items() if _is_placeholder(name, value)]
    given = {name: value for name, value in given.items() if name not in placeholders}
    model = _model(stored, given, load)
    window = given.get("seq_length")
    _check_window(model, stored, window)
    notes = [*_note("taken from the checkpoint", {name: -1 for name in placeholders})]
    precision = _precision(stored.precision, given)
    if precision.precision is not stored.precision.precision:
        notes.append(
            f"computing in {precision.precision}; the checkpoint is of {stored.precision.precision}"
        )
    if stored.fp8.fp8_format is not None:
        notes.append("computing without FP8: scales would depend on what else is in the batch")
    if model.moe_expert_capacity_factor is not None:
        model = replace(model, moe_expert_capacity_factor=None, moe_eval_capacity_factor=None)
        notes.append("no token is dropped: later ones would change what is made of earlier ones")
    shared = _SHARED_EXPERTS if shares_experts else set()
    ignored = {
        name: value for name, value in given.items() if name not in INFERENCE_FIELDS | shared
    }
    notes += _note("without effect, as nothing is trained", ignored)
    launch = replace(stored.launch, distributed_backend=None)
    logging = ("log_level", "log_level_replica")
    config = replace(
        stored,
        model=model,
        precision=precision,
        fp8=Fp8Config(),
        tokenizer=tokenizer_beside(stored.tokenizer, given),
        # Which stage of the training began the decoder.
        encoder_decoder=replace(stored.encoder_decoder, pipeline_model_parallel_split_rank=None),
        parallel=ParallelConfig(
            **_subset(
                given, (set(field_names(ParallelConfig)) - _TRAINING_ONLY_PARALLELISM) | shared
            )
        ),
        checkpoint=CheckpointConfig(load=load, **_subset(given, {"checkpoint_verify"})),
        training=replace(stored.training, **_subset(given, {"micro_batch_size", "num_threads"})),
        launch=replace(launch, **_subset(given, set(field_names(LaunchConfig)))),
        logging=replace(stored.logging, **_subset(given, set(logging))),
        engine=EngineConfig(),
    )
    return Inference(config, window, tuple(notes))


# Flags that affect inference. All others are ignored, with a note.
INFERENCE_FIELDS = frozenset(
    {
        *(set(field_names(ModelConfig)) - TRAINING_ONLY_FIELDS),
        *(set(field_names(ParallelConfig)) - _TRAINING_ONLY_PARALLELISM),
        *field_names(TokenizerConfig),
        *field_names(LaunchConfig),
        *PRECISIONS,
        *("fp32_residual_connection", "seq_length", "micro_batch_size", "num_threads"),
        *("load", "load_iteration", "checkpoint_verify", "log_level", "log_level_replica"),
    }
)


def _model(stored: RunConfig, given: Values, load: str) -> ModelConfig:
    """Return the checkpoint's model; flags may only set its length, where no table does."""
    flags = _subset(given, set(field_names(ModelConfig)) - TRAINING_ONLY_FIELDS)
    longest = flags.pop("max_position_embeddings", None)
    differing = list(_differing(stored.model, flags))
    model = stored.model
    if longest is not None:
        if model.position_embedding_type is not PositionEmbedding.LEARNED:
            model = replace(model, max_position_embeddings=longest)
        elif longest != _rows_of_table(stored):
            differing.append(
                f"--max-position-embeddings {longest} given, {_rows_of_table(stored)} stored"
            )
    if differing:
        raise CheckpointError(
            "flags and checkpoint describe different models",
            found=f"{'; '.join(differing)}; in {load}",
            fix="leave out the flags of the model, which the checkpoint records, or load another",
        )
    return model


def _differing(stored: ModelConfig, flags: Values) -> Iterator[str]:
    stored_values = to_plain(stored)
    try:
        requested = replace(stored, **flags)
    except ConfigError:  # together they make no valid model: compared as they are spelled
        names = [name for name in flags if flags[name] != getattr(stored, name)]
    else:
        names = requested.fields_that_differ(stored)
    for name in names:
        value = flags.get(name, stored_values[name])
        yield f"{format_value(name, value)} given, {stored_values[name]} stored"


def _rows_of_table(stored: RunConfig) -> int:
    return stored.model.max_position_embeddings or stored.data.seq_length


def _check_window(model: ModelConfig, stored: RunConfig, window: int | None) -> None:
    longest = model.max_position_embeddings
    if model.position_embedding_type is PositionEmbedding.LEARNED:
        longest = _rows_of_table(stored)
    if window is None or (window > 0 and (longest is None or window <= longest)):
        return
    raise ConfigError(
        "the model cannot read rows of that length",
        found=f"--seq-length {window}, a model of {longest} positions",
        fix=f"use a whole number from 1 to {longest}" if longest else "use a whole number above 0",
    )


def _precision(stored: PrecisionConfig, given: Values) -> PrecisionConfig:
    """Return the precision of the flags, or without one that of the training."""
    wide = _subset(given, {"fp32_residual_connection"})
    if not any(name in given for name in PRECISIONS):
        return replace(stored, **wide)
    chosen = {name: given.get(name, False) for name in PRECISIONS}
    if chosen["fp16"] or chosen["bf16"]:
        wide = {"fp32_residual_connection": stored.fp32_residual_connection} | wide
    return PrecisionConfig(**chosen, **wide)


def tokenizer_beside(stored: TokenizerConfig, given: Values) -> TokenizerConfig:
    """Return the checkpoint's tokenizer with the files that flags give.

    A type that is given with files, or that differs, replaces the checkpoint's files.
    """
    flags = _subset(given, set(field_names(TokenizerConfig)))
    kind, named = flags.get("tokenizer_type"), [n for n in flags if n in _TOKENIZER[1:]]
    if kind is None or (kind == stored.tokenizer_type and not named):
        return replace(stored, **flags)
    cleared = {name: None for name in _TOKENIZER[1:-1]}
    return replace(stored, **({**cleared, "vocab_extra_ids": 0} | flags))


def _subset(given: Values, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _is_placeholder(name: str, value: Any) -> bool:
    return name in PLACEHOLDER_FIELDS and value == -1


def _note(what: str, values: Values) -> Iterator[str]:
    if values:
        yield f"{what}: {', '.join(format_value(name, value) for name, value in values.items())}"


def format_value(name: str, value: Any) -> str:
    """Return a field and its value as on a command line."""
    if isinstance(value, bool):
        return flag_name(name) if value else "--no-" + flag_name(name)[2:]
    if isinstance(value, tuple):
        return " ".join([flag_name(name), *map(str, value)])
    return f"{flag_name(name)} {value}"
