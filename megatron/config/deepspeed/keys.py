"""Every key of DeepSpeed's JSON, with its treatment here; DeepSpeed 0.19.

A key that is not in `KEYS` is an error. For keys that affect numbers no default of DeepSpeed's is
used: `FreeKey` writes ours, `FixedKey` the only possible value. A test compares these tables with
the keys that the installed DeepSpeed reads.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.config.engine import RemoteDevice
from megatron.json_values import JsonObject, JsonValue

Kind = type | tuple[str, ...]  # bool, int, float, str, list, dict, or the words that are allowed


class FreeKey(NamedTuple):
    """The user may choose; if left open DeepSpeed gets `default`."""

    default: JsonValue
    kind: Kind | None = None  # None: that of the default


class FixedKey(NamedTuple):
    """Only one value is possible; another one in the JSON is refused, with the reason."""

    value: JsonValue
    because: str


class DroppedKey(NamedTuple):
    """Accepted and not passed on to DeepSpeed; the reason is logged."""

    because: str
    instead: JsonValue = None  # the value that DeepSpeed gets, if omitting the key would differ


class UnsupportedKey(NamedTuple):
    """An unsupported feature: accepted if it is turned off."""

    feature: str
    instead: str
    written: JsonObject | None = (
        None  # the value that turns it off in DeepSpeed's JSON; None: the key is left out
    )


Rule = FreeKey | FixedKey | DroppedKey | UnsupportedKey
Tree = Mapping[str, "Rule | Tree"]

_CHANGES_NUMBERS = "the numbers of a run would not be those of its flags"
_LOADS_ANY_LAYOUT = "checkpoints of every layout are recognised and loaded by --load"
_FP32_STATE = "master weights and the optimizer's state are fp32"

_DISABLED: JsonObject = {"enabled": False}

_OFFLOADED = {
    "device": FreeKey(RemoteDevice.NONE.value, tuple(device.value for device in RemoteDevice)),
    "nvme_path": FreeKey(None, str),
    "pin_memory": FreeKey(True),
}
OFFLOAD_PARAM: Tree = {
    **_OFFLOADED,
    "buffer_count": FreeKey(5),
    "buffer_size": FreeKey(100_000_000),
    "max_in_cpu": FreeKey(1_000_000_000),
}
OFFLOAD_OPTIMIZER: Tree = {
    **_OFFLOADED,
    "buffer_count": FreeKey(4),
    "pipeline_read": FreeKey(False),
    "pipeline_write": FreeKey(False),
    "fast_init": FreeKey(False),
    "ratio": FixedKey(1.0, "parts of the optimizer's state on two devices are not supported"),
    "super_offload": FixedKey(False, "it replaces the optimizer that the flags describe"),
    "cpuadam_cores_perc": FreeKey(0.8),
}

ZERO: Tree = {
    "stage": FreeKey(0),
    "contiguous_gradients": FreeKey(True),
    "reduce_scatter": FreeKey(True),
    "reduce_bucket_size": FreeKey(500_000_000),
    "use_multi_rank_bucket_allreduce": FreeKey(True),
    "allgather_partitions": FreeKey(True),
    "allgather_bucket_size": FreeKey(500_000_000),
    "overlap_comm": FreeKey(False),  # at stage 3 on, as DeepSpeed has it
    "compute_grad_norm": FixedKey(True, "every step reports its gradient norm"),
    "load_from_fp32_weights": FreeKey(True),
    "elastic_checkpoint": DroppedKey(_LOADS_ANY_LAYOUT),
    "offload_param": OFFLOAD_PARAM,
    "offload_optimizer": OFFLOAD_OPTIMIZER,
    "zenflow": UnsupportedKey("ZenFlow, which delays a part of each update", "leave it out"),
    "sub_group_size": FreeKey(1_000_000_000),
    "stage3_prefetch_bucket_size": FreeKey(50_000_000),
    "stage3_param_persistence_threshold": FreeKey(100_000),
    "stage3_model_persistence_threshold": FreeKey(9_223_372_036_854_775_807),
    "stage3_max_live_parameters": FreeKey(1_000_000_000),
    "stage3_max_reuse_distance": FreeKey(1_000_000_000),
    "stage3_gather_16bit_weights_on_model_save": FreeKey(False),
    "stage3_module_granularity_threshold": FreeKey(0),
    "stage3_use_all_reduce_for_fetch_params": FreeKey(False),
    "stage3_allgather_sequential": FreeKey(False),
    "ignore_unused_parameters": FreeKey(True),
    "legacy_stage1": FixedKey(False, "DeepSpeed has removed it"),
    "round_robin_gradients": FreeKey(False),
    "parameter_alignment": FixedKey(False, "the shards are read by name, without gaps"),
    "zero_hpz_partition_size": FixedKey(1, "no groups of the ranks of a node are made for it"),
    "zero_quantized_weights": FixedKey(False, f"it rounds weights to 8 bits: {_CHANGES_NUMBERS}"),
    "zero_quantized_nontrainable_weights": FixedKey(False, "every weight is trained"),
    "zero_quantized_gradients": FixedKey(
        False, f"it rounds gradients to 4 bits: {_CHANGES_NUMBERS}"
    ),
    "memory_efficient_linear": DroppedKey("it would replace torch's linear everywhere", False),
    "pipeline_loading_checkpoint": FreeKey(False),
    "override_module_apply": FreeKey(True),
    "log_trace_cache_warnings": FreeKey(False),
    "enable_sanity_checks": FreeKey(False),
    "save_muon_momentum_buffer_in_memory": FixedKey(False, "there is no Muon optimizer here"),
    "leaf_module": {
        "classes": FreeKey((), list),
        "names": FreeKey((), list),
        "name_suffixes": FreeKey((), list),
    },
    "mics_shard_size": UnsupportedKey("MiCS, which DeepSpeed has removed", "leave it out"),
    "mics_hierarchical_params_gather": UnsupportedKey(
        "MiCS, which DeepSpeed has removed", "leave it out"
    ),
    "zeropp_loco_param": UnsupportedKey("LoCo, which DeepSpeed has removed", "leave it out"),
}

KEYS: Tree = {
    "train_batch_size": FreeKey(0),
    "train_micro_batch_size_per_gpu": FreeKey(0),
    "gradient_accumulation_steps": FreeKey(0),
    "managed_gradient_accumulation": FixedKey(True, "the engine counts micro-batches by its plan"),
    "steps_per_print": FreeKey(None, int),
    "dump_state": FreeKey(False),
    "disable_python_gc": FreeKey(False),
    "disable_allgather": FreeKey(False),
    "communication_data_type": FreeKey("fp32", ("fp32", "fp16", "bf16")),
    "seq_parallel_communication_data_type": FixedKey(
        "fp32", "there is no Ulysses parallelism here"
    ),
    "prescale_gradients": FreeKey(False),
    "gradient_predivide_factor": FreeKey(1.0),
    "gradient_allreduce_op": FixedKey("mean", f"with sums {_CHANGES_NUMBERS}"),
    "gradient_clipping": FreeKey(0.0),
    "zero_allow_untested_optimizer": FixedKey(True, "the optimizer is torch's, built by the flags"),
    "zero_force_ds_cpu_optimizer": DroppedKey("CPUAdam is used where it builds", False),
    "vocabulary_size": DroppedKey("the vocabulary is the tokenizer's, padded by its flags"),
    "dataloader_drop_last": DroppedKey("batches are read by this program's own loader"),
    "use_data_before_expert_parallelism": FixedKey(False, "there are no experts here"),
    "fp16": {
        "enabled": FreeKey(False),
        "auto_cast": FixedKey(False, "tokens are whole numbers, which are never cast"),
        "loss_scale": FreeKey(0.0),
        "initial_scale_power": FreeKey(16),
        "loss_scale_window": FreeKey(1000),
        "hysteresis": FreeKey(2),
        "consecutive_hysteresis": FixedKey(False, "--hysteresis counts as it does natively"),
        "min_loss_scale": FreeKey(1),
        "fp16_master_weights_and_grads": FixedKey(False, _FP32_STATE),
    },
    "bf16": {
        "enabled": FreeKey(False),
        # DeepSpeed's default keeps every bf16 gradient beside its fp32 one: 2 bytes per parameter.
        "immediate_grad_update": FreeKey(True),
        "check_grad_overflow": FixedKey(True, "a gradient that is not finite is never applied"),
        "bf16_master_weights_and_grads": FixedKey(False, _FP32_STATE),
        "bf16_optimizer_states": FixedKey(False, _FP32_STATE),
    },
    "torch_autocast": {
        "enabled": FixedKey(False, "--bf16 and --fp16 choose the precision"),
        "dtype": DroppedKey("autocast is off"),
        "lower_precision_safe_modules": DroppedKey("autocast is off"),
    },
    "data_types": {
        "grad_accum_dtype": FreeKey("fp32", ("fp32", "fp16", "bf16")),
        "param_dtype": FreeKey("fp32", ("fp32", "fp16", "bf16")),
        "buffer_dtype": FixedKey(None, "tables of angles and the like keep their own precision"),
        "keep_in_fp32_modules": FreeKey("auto", list),
    },
    "zero_optimization": ZERO,
    "optimizer": {  # compared with the flags, then left out: it is passed as an object
        "type": FreeKey(None, str),
        "params": FreeKey(None, dict),
        "legacy_fusion": FreeKey(False),
    },
    "scheduler": {"type": FreeKey(None, str), "params": FreeKey(None, dict)},  # likewise
    "activation_checkpointing": {
        "partition_activations": FreeKey(False),
        "cpu_checkpointing": FreeKey(False),
        "contiguous_memory_optimization": DroppedKey("recomputed layers save one tensor each"),
        "number_checkpoints": DroppedKey("--recompute-num-layers says how many layers go together"),
        "synchronize_checkpoint_boundary": DroppedKey("nothing waits between layers"),
        "profile": DroppedKey("--log-timers-to-tensorboard times the steps"),
    },
    "pipeline": {
        "stages": FreeKey("auto", int),
        "partition": FreeKey("best"),
        "seed_layers": FixedKey(False, "initial values depend on --seed and the parameter's name"),
        "activation_checkpoint_interval": FreeKey(0),
        # DeepSpeed would send a part of each activation from each tensor-parallel rank as if all
        # had the same, which under sequence parallelism they have not, and of one tensor only.
        "pipe_partitioned": DroppedKey("stages hand over whole tensors", False),
        "grad_partitioned": DroppedKey("stages hand over whole tensors", False),
        "use_reentrant": FreeKey(True),
    },
    "curriculum_learning": FreeKey(None, dict),  # read by the loop, not by DeepSpeed
    "data_efficiency": {
        "enabled": FixedKey(False, "curriculum_learning is what shortens sequences here"),
        "seed": FreeKey(1234),
        "data_sampling": UnsupportedKey(
            "DeepSpeed's data sampling", "use curriculum_learning", _DISABLED
        ),
        "data_routing": UnsupportedKey("random layer-token dropping", "leave it out", _DISABLED),
    },
    "checkpoint": {
        "tag_validation": FreeKey("WARN", ("WARN", "FAIL", "IGNORE")),
        "load_universal": DroppedKey(_LOADS_ANY_LAYOUT, False),
        "use_node_local_storage": FixedKey(False, "every rank reads the whole checkpoint's folder"),
        "parallel_write": {"pipeline_stage": FreeKey(False)},
        "checkpoint_serialization": FreeKey(True),
        "writer": FreeKey(None, dict),
    },
    "aio": {
        "block_size": FreeKey(1_048_576),
        "queue_depth": FreeKey(8),
        "intra_op_parallelism": FreeKey(1),
        "single_submit": FreeKey(False),
        "overlap_events": FreeKey(True),
        "use_gds": FreeKey(False),
        "thread_count": DroppedKey("DeepSpeed calls it intra_op_parallelism"),
    },
    "wall_clock_breakdown": FreeKey(False),
    "memory_breakdown": FreeKey(False),
    "log_level": FreeKey(None, str),
    "timers": {"throughput": {"enabled": FreeKey(False), "synchronized": FreeKey(True)}},
    "flops_profiler": {
        "enabled": FreeKey(False),
        "recompute_fwd_factor": FreeKey(0.0),
        "profile_step": FreeKey(1),
        "module_depth": FreeKey(-1),
        "top_modules": FreeKey(1),
        "detailed": FreeKey(True),
        "output_file": FreeKey(None, str),
    },
    "comms_logger": {
        "enabled": FreeKey(False),
        "verbose": FreeKey(False),
        "prof_all": FreeKey(True),
        "debug": FreeKey(False),
        "prof_ops": FreeKey((), list),
    },
    "tensorboard": {
        "enabled": DroppedKey(
            "--tensorboard-dir receives the same numbers, over all replicas", False
        ),
        "output_path": DroppedKey("it is part of --tensorboard-dir"),
        "job_name": DroppedKey("it is part of --tensorboard-dir"),
    },
    "csv_monitor": {
        "enabled": FreeKey(False),
        "output_path": FreeKey(""),
        "job_name": FreeKey("DeepSpeedJobName"),
    },
    "wandb": {
        "enabled": FreeKey(False),
        "group": FreeKey(None, str),
        "team": FreeKey(None, str),
        "project": FreeKey("deepspeed"),
    },
    "comet": {
        "enabled": FreeKey(False),
        "samples_log_interval": FreeKey(100),
        "project": FreeKey(None, str),
        "workspace": FreeKey(None, str),
        "api_key": UnsupportedKey(
            "a secret in a file that logs and checkpoints copy", "set COMET_API_KEY"
        ),
        "experiment_name": FreeKey(None, str),
        "experiment_key": FreeKey(None, str),
        "online": FreeKey(None, bool),
        "mode": FreeKey(None, str),
    },
    "autotuning": UnsupportedKey(
        "autotuning, which starts runs of its own", "leave it out", _DISABLED
    ),
    "hybrid_engine": UnsupportedKey(
        "the hybrid engine, which generates text", "leave it out", _DISABLED
    ),
    "compile": UnsupportedKey("DeepCompile", "leave it out", {"deepcompile": False}),
    "tensor_parallel": UnsupportedKey(
        "AutoTP", "use --tensor-model-parallel-size", {"autotp_size": 0}
    ),
    "expert_parallel": UnsupportedKey("expert parallelism", "leave it out", _DISABLED),
    "weight_quantization": UnsupportedKey("quantised weights", "leave it out"),
    "datastates_ckpt": UnsupportedKey("DataStates checkpoints", "leave it out"),
    "sequence_parallel_size": UnsupportedKey("Ulysses parallelism", "use --sequence-parallel"),
    "gradient_accumulation_dtype": UnsupportedKey(
        "a key of this name", "use data_types.grad_accum_dtype"
    ),
    # DeepSpeed 0.19 raises an error if one of these is present at all, even turned off.
    "amp": UnsupportedKey("Apex AMP, which DeepSpeed has removed", "use --bf16 or --fp16"),
    "nebula": UnsupportedKey("Nebula, which DeepSpeed has removed", "leave it out"),
    "compression_training": UnsupportedKey(
        "compression, which DeepSpeed has removed", "leave it out"
    ),
    "quantize_training": UnsupportedKey("MoQ, which DeepSpeed has removed", "leave it out"),
    "sparse_gradients": UnsupportedKey(
        "sparse gradients, which DeepSpeed has removed", "leave it out"
    ),
    "sparse_attention": UnsupportedKey(
        "sparse attention, which DeepSpeed has removed", "leave it out"
    ),
    "eigenvalue": UnsupportedKey("eigenvalues, which DeepSpeed has removed", "leave it out"),
    "elasticity": UnsupportedKey(
        "elastic training, which DeepSpeed has removed", "set the batch sizes"
    ),
    "graph_harvesting": UnsupportedKey(
        "graph harvesting, which DeepSpeed has removed", "leave it out"
    ),
    "progressive_layer_drop": UnsupportedKey(
        "layer dropping, which DeepSpeed has removed", "leave it out"
    ),
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

# Keys not passed on to DeepSpeed: the program reads them, or passes an object instead.
KEPT_BACK = frozenset({"optimizer", "scheduler", "curriculum_learning"})


def value_at(user: JsonObject, path: str) -> JsonValue:
    """Return the value at `path` of a JSON, such as "fp16.enabled"; None if left open.

    Null and "auto" leave it open, like a key that is not there.
    """
    value: JsonValue = user
    for key in path.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return None if value == "auto" else value


def as_kind(value: JsonValue, rule: FreeKey) -> JsonValue:
    """Return `value` as the kind of a key: 5e8 as a whole number, "Warn" as the word "WARN".

    Raises:
        ValueError: it is of another kind; the message names the expected kind.
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
