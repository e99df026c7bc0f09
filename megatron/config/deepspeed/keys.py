"""Every key of DeepSpeed's JSON, with what becomes of it here; DeepSpeed 0.19.

A key that is not in `KEYS` is an error. No default of DeepSpeed's is left in force for a key that
affects numbers: `Free` writes ours, `Only` the one value that a run can have. A test compares these
tables with what the installed DeepSpeed asks for.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.config.engine import RemoteDevice
from megatron.json_values import JsonObject, JsonValue

Kind = type | tuple[str, ...]  # bool, int, float, str, list, dict, or the words that are allowed


class Free(NamedTuple):
    """The user may choose; without a word of theirs DeepSpeed gets `default`."""

    default: JsonValue
    kind: Kind | None = None  # None: that of the default


class Only(NamedTuple):
    """There is one value; another one in the JSON is refused, with the reason."""

    value: JsonValue
    because: str


class Dropped(NamedTuple):
    """Accepted and not handed on to DeepSpeed; the reason is said in the log."""

    because: str
    instead: JsonValue = (
        None  # what DeepSpeed gets, where leaving the key out would not be the same
    )


class Off(NamedTuple):
    """A feature that is not here: accepted where it is turned off."""

    feature: str
    instead: str
    written: JsonObject | None = (
        None  # what turns it off, if DeepSpeed is to be told; else the key is left out
    )


Rule = Free | Only | Dropped | Off
Tree = Mapping[str, "Rule | Tree"]

_OF_NUMBERS = "the numbers of a run would not be those of its flags"
_LOADS_ANY = "checkpoints of every layout are recognised and loaded by --load"
_WIDE = "master weights and the optimizer's state are fp32"

_DISABLED: JsonObject = {"enabled": False}

_OFFLOADED = {
    "device": Free(RemoteDevice.NONE.value, tuple(device.value for device in RemoteDevice)),
    "nvme_path": Free(None, str),
    "pin_memory": Free(True),
}
OFFLOAD_PARAM: Tree = {
    **_OFFLOADED,
    "buffer_count": Free(5),
    "buffer_size": Free(100_000_000),
    "max_in_cpu": Free(1_000_000_000),
}
OFFLOAD_OPTIMIZER: Tree = {
    **_OFFLOADED,
    "buffer_count": Free(4),
    "pipeline_read": Free(False),
    "pipeline_write": Free(False),
    "fast_init": Free(False),
    "ratio": Only(1.0, "parts of the optimizer's state on two devices are not supported"),
    "super_offload": Only(False, "it replaces the optimizer that the flags describe"),
    "cpuadam_cores_perc": Free(0.8),
}

ZERO: Tree = {
    "stage": Free(0),
    "contiguous_gradients": Free(True),
    "reduce_scatter": Free(True),
    "reduce_bucket_size": Free(500_000_000),
    "use_multi_rank_bucket_allreduce": Free(True),
    "allgather_partitions": Free(True),
    "allgather_bucket_size": Free(500_000_000),
    "overlap_comm": Free(False),  # at stage 3 on, as DeepSpeed has it
    "compute_grad_norm": Only(True, "every step reports its gradient norm"),
    "load_from_fp32_weights": Free(True),
    "elastic_checkpoint": Dropped(_LOADS_ANY),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "zenflow": Off("ZenFlow, which delays a part of each update", "leave it out"),
    "sub_group_size": Free(1_000_000_000),
    "stage3_prefetch_bucket_size": Free(50_000_000),
    "stage3_param_persistence_threshold": Free(100_000),
    "stage3_model_persistence_threshold": Free(9_223_372_036_854_775_807),
    "stage3_max_live_parameters": Free(1_000_000_000),
    "stage3_max_reuse_distance": Free(1_000_000_000),
    "stage3_gather_16bit_weights_on_model_save": Free(False),
    "stage3_module_granularity_threshold": Free(0),
    "stage3_use_all_reduce_for_fetch_params": Free(False),
    "stage3_allgather_sequential": Free(False),
    "ignore_unused_parameters": Free(True),
    "legacy_stage1": Only(False, "DeepSpeed has removed it"),
    "round_robin_gradients": Free(False),
    "parameter_alignment": Only(False, "the shards are read by name, without gaps"),
    "zero_hpz_partition_size": Only(1, "no groups of the ranks of a node are made for it"),
    "zero_quantized_weights": Only(False, f"it rounds weights to 8 bits: {_OF_NUMBERS}"),
    "zero_quantized_nontrainable_weights": Only(False, "every weight is trained"),
    "zero_quantized_gradients": Only(False, f"it rounds gradients to 4 bits: {_OF_NUMBERS}"),
    "memory_efficient_linear": Dropped("it would replace torch's linear everywhere", False),
    "pipeline_loading_checkpoint": Free(False),
    "override_module_apply": Free(True),
    "log_trace_cache_warnings": Free(False),
    "enable_sanity_checks": Free(False),
    "save_muon_momentum_buffer_in_memory": Only(False, "there is no Muon optimizer here"),
    "leaf_module": {
        "classes": Free((), list),
        "names": Free((), list),
        "name_suffixes": Free((), list),
    },
    "mics_shard_size": Off("MiCS, which DeepSpeed has removed", "leave it out"),
    "mics_hierarchical_params_gather": Off("MiCS, which DeepSpeed has removed", "leave it out"),
    "zeropp_loco_param": Off("LoCo, which DeepSpeed has removed", "leave it out"),
}

KEYS: Tree = {
    "train_batch_size": Free(0),
    "train_micro_batch_size_per_gpu": Free(0),
    "gradient_accumulation_steps": Free(0),
    "managed_gradient_accumulation": Only(True, "the engine counts micro-batches by its plan"),
    "steps_per_print": Free(None, int),
    "dump_state": Free(False),
    "disable_python_gc": Free(False),
    "disable_allgather": Free(False),
    "communication_data_type": Free("fp32", ("fp32", "fp16", "bf16")),
    "seq_parallel_communication_data_type": Only("fp32", "there is no Ulysses parallelism here"),
    "prescale_gradients": Free(False),
    "gradient_predivide_factor": Free(1.0),
    "gradient_allreduce_op": Only("mean", f"with sums {_OF_NUMBERS}"),
    "gradient_clipping": Free(0.0),
    "zero_allow_untested_optimizer": Only(True, "the optimizer is torch's, built by the flags"),
    "zero_force_ds_cpu_optimizer": Dropped("CPUAdam is used where it builds", False),
    "vocabulary_size": Dropped("the vocabulary is the tokenizer's, padded by its flags"),
    "dataloader_drop_last": Dropped("batches are read by this program's own loader"),
    "use_data_before_expert_parallelism": Only(False, "there are no experts here"),
    "fp16": {
        "enabled": Free(False),
        "auto_cast": Only(False, "tokens are whole numbers, which are never cast"),
        "loss_scale": Free(0.0),
        "initial_scale_power": Free(16),
        "loss_scale_window": Free(1000),
        "hysteresis": Free(2),
        "consecutive_hysteresis": Only(False, "--hysteresis counts as it does natively"),
        "min_loss_scale": Free(1),
        "fp16_master_weights_and_grads": Only(False, _WIDE),
    },
    "bf16": {
        "enabled": Free(False),
        # DeepSpeed's default keeps every bf16 gradient beside its fp32 one: 2 bytes per parameter.
        "immediate_grad_update": Free(True),
        "check_grad_overflow": Only(True, "a gradient that is not finite is never applied"),
        "bf16_master_weights_and_grads": Only(False, _WIDE),
        "bf16_optimizer_states": Only(False, _WIDE),
    },
    "torch_autocast": {
        "enabled": Only(False, "--bf16 and --fp16 choose the precision"),
        "dtype": Dropped("autocast is off"),
        "lower_precision_safe_modules": Dropped("autocast is off"),
    },
    "data_types": {
        "grad_accum_dtype": Free("fp32", ("fp32", "fp16", "bf16")),
        "param_dtype": Free("fp32", ("fp32", "fp16", "bf16")),
        "buffer_dtype": Only(None, "tables of angles and the like keep their own precision"),
        "keep_in_fp32_modules": Free("auto", list),
    },
    "zero_optimization": ZERO,
    "optimizer": {  # compared with the flags, then left out: the optimizer is handed over
        "type": Free(None, str),
        "params": Free(None, dict),
        "legacy_fusion": Free(False),
    },
    "scheduler": {"type": Free(None, str), "params": Free(None, dict)},  # likewise
    "activation_checkpointing": {
        "partition_activations": Free(False),
        "cpu_checkpointing": Free(False),
        "contiguous_memory_optimization": Dropped("recomputed layers save one tensor each"),
        "number_checkpoints": Dropped("--recompute-num-layers says how many layers go together"),
        "synchronize_checkpoint_boundary": Dropped("nothing waits between layers"),
        "profile": Dropped("--log-timers-to-tensorboard times the steps"),
    },
    "pipeline": {
        "stages": Free("auto", int),
        "partition": Free("best"),
        "seed_layers": Only(False, "initial values depend on --seed and the parameter's name"),
        "activation_checkpoint_interval": Free(0),
        # DeepSpeed would send a part of each activation from each tensor-parallel rank as if all
        # had the same, which under sequence parallelism they have not, and of one tensor only.
        "pipe_partitioned": Dropped("stages hand over whole tensors", False),
        "grad_partitioned": Dropped("stages hand over whole tensors", False),
        "use_reentrant": Free(True),
    },
    "curriculum_learning": Free(None, dict),  # read by the loop, not by DeepSpeed
    "data_efficiency": {
        "enabled": Only(False, "curriculum_learning is what shortens sequences here"),
        "seed": Free(1234),
        "data_sampling": Off("DeepSpeed's data sampling", "use curriculum_learning", _DISABLED),
        "data_routing": Off("random layer-token dropping", "leave it out", _DISABLED),
    },
    "checkpoint": {
        "tag_validation": Free("WARN", ("WARN", "FAIL", "IGNORE")),
        "load_universal": Dropped(_LOADS_ANY, False),
        "use_node_local_storage": Only(False, "every rank reads the whole checkpoint's folder"),
        "parallel_write": {"pipeline_stage": Free(False)},
        "checkpoint_serialization": Free(True),
        "writer": Free(None, dict),
    },
    "aio": {
        "block_size": Free(1_048_576),
        "queue_depth": Free(8),
        "intra_op_parallelism": Free(1),
        "single_submit": Free(False),
        "overlap_events": Free(True),
        "use_gds": Free(False),
        "thread_count": Dropped("DeepSpeed calls it intra_op_parallelism"),
    },
    "wall_clock_breakdown": Free(False),
    "memory_breakdown": Free(False),
    "log_level": Free(None, str),
    "timers": {"throughput": {"enabled": Free(False), "synchronized": Free(True)}},
    "flops_profiler": {
        "enabled": Free(False),
        "recompute_fwd_factor": Free(0.0),
        "profile_step": Free(1),
        "module_depth": Free(-1),
        "top_modules": Free(1),
        "detailed": Free(True),
        "output_file": Free(None, str),
    },
    "comms_logger": {
        "enabled": Free(False),
        "verbose": Free(False),
        "prof_all": Free(True),
        "debug": Free(False),
        "prof_ops": Free((), list),
    },
    "tensorboard": {
        "enabled": Dropped("--tensorboard-dir receives the same numbers, over all replicas", False),
        "output_path": Dropped("it is part of --tensorboard-dir"),
        "job_name": Dropped("it is part of --tensorboard-dir"),
    },
    "csv_monitor": {
        "enabled": Free(False),
        "output_path": Free(""),
        "job_name": Free("DeepSpeedJobName"),
    },
    "wandb": {
        "enabled": Free(False),
        "group": Free(None, str),
        "team": Free(None, str),
        "project": Free("deepspeed"),
    },
    "comet": {
        "enabled": Free(False),
        "samples_log_interval": Free(100),
        "project": Free(None, str),
        "workspace": Free(None, str),
        "api_key": Off("a secret in a file that logs and checkpoints copy", "set COMET_API_KEY"),
        "experiment_name": Free(None, str),
        "experiment_key": Free(None, str),
        "online": Free(None, bool),
        "mode": Free(None, str),
    },
    "autotuning": Off("autotuning, which starts runs of its own", "leave it out", _DISABLED),
    "hybrid_engine": Off("the hybrid engine, which generates text", "leave it out", _DISABLED),
    "compile": Off("DeepCompile", "leave it out", {"deepcompile": False}),
    "tensor_parallel": Off("AutoTP", "use --tensor-model-parallel-size", {"autotp_size": 0}),
    "expert_parallel": Off("expert parallelism", "leave it out", _DISABLED),
    "weight_quantization": Off("quantised weights", "leave it out"),
    "datastates_ckpt": Off("DataStates checkpoints", "leave it out"),
    "sequence_parallel_size": Off("Ulysses parallelism", "use --sequence-parallel"),
    "gradient_accumulation_dtype": Off("a key of this name", "use data_types.grad_accum_dtype"),
    # DeepSpeed 0.19 ends with an error where one of these is there at all, even turned off.
    "amp": Off("Apex AMP, which DeepSpeed has removed", "use --bf16 or --fp16"),
    "nebula": Off("Nebula, which DeepSpeed has removed", "leave it out"),
    "compression_training": Off("compression, which DeepSpeed has removed", "leave it out"),
    "quantize_training": Off("MoQ, which DeepSpeed has removed", "leave it out"),
    "sparse_gradients": Off("sparse gradients, which DeepSpeed has removed", "leave it out"),
    "sparse_attention": Off("sparse attention, which DeepSpeed has removed", "leave it out"),
    "eigenvalue": Off("eigenvalues, which DeepSpeed has removed", "leave it out"),
    "elasticity": Off("elastic training, which DeepSpeed has removed", "set the batch sizes"),
    "graph_harvesting": Off("graph harvesting, which DeepSpeed has removed", "leave it out"),
    "progressive_layer_drop": Off("layer dropping, which DeepSpeed has removed", "leave it out"),
}

# Names of the same key in other versions of DeepSpeed, by the name that `KEYS` has.
RENAMED: Mapping[str, str] = {
    "bfloat16": "bf16",
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
        )
    },
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
}

# Not part of what DeepSpeed gets, because the program has read it, or hands over an object instead.
KEPT_BACK = frozenset({"optimizer", "scheduler", "curriculum_learning"})


def value_at(user: JsonObject, path: str) -> JsonValue:
    """What a JSON says at `path`, as in "fp16.enabled"; None where it leaves the choice open.

    Null and "auto" leave it open, like a key that is not there.
    """
    value: JsonValue = user
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return None if value == "auto" else value


def as_kind(value: JsonValue, rule: Free) -> JsonValue:
    """`value` as the kind that a key has: 5e8 as a whole number, "Warn" as the word "WARN".

    Raises:
        ValueError: it is of another kind; the message says which is wanted.
    """
    kind = type(rule.default) if rule.kind is None else rule.kind
    if isinstance(kind, tuple):
        for word in kind:
            if isinstance(value, str) and word.lower() == value.lower():
                return word
        raise ValueError(f"one of {', '.join(kind)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind is float:
            return float(value)
        if kind is int and value == int(value):
            return int(value)
    if kind in (list, tuple) and isinstance(value, list):
        return value
    if kind in (bool, str, dict) and isinstance(value, kind):
        return value
    raise ValueError(_KIND_WORDS[kind])


_KIND_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "an object in braces",
}
