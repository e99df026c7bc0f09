"""The answer to every key of gpt-neox's configs; those read together are in `joint`.

Keys of DeepSpeed's JSON, which neox takes at the top level, are in `config.deepspeed.keys` too.
"""

from collections.abc import Mapping
from typing import NamedTuple

from megatron.json_values import JsonValue


class SameKey(NamedTuple):
    """A key that is one field of ours, with neox's default where a config lacks it."""

    field: str
    default: JsonValue = None  # None: the field is not given


class JointKey(NamedTuple):
    """A key that is read together with others, and its default."""

    default: JsonValue = None


class IgnoredKey(NamedTuple):
    """A key that changes no number, or nothing here."""

    because: str


class RefusedKey(NamedTuple):
    """A key of a feature that this version lacks, but for some values."""

    feature: str
    instead: str
    harmless: tuple[JsonValue, ...] = (None, False)


Rule = SameKey | JointKey | IgnoredKey | RefusedKey

_LEAVE = "leave it out"
_LAUNCHER = "the launcher, such as torchrun, is told"
_KERNELS = "kernels follow the device and the dtype"
_GENERATION = "programs that generate text read it"
_OTHER_TRAINING = "it belongs to another train_impl than normal"
_MUP = "it belongs to use_mup"
_REPORT = "DeepSpeed would only report more"
_SAME_NUMBERS = "results are equal with and without it"
_EVALUATION = "programs that evaluate read it"
_WANDB = "it belongs to use_wandb"


def _all(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _without(
    names: str, feature: str, instead: str = _LEAVE, *harmless: JsonValue
) -> dict[str, Rule]:
    return _all(RefusedKey(feature, instead, (None, False, *harmless)), names)


PARALLELISM: Mapping[str, Rule] = {
    "pipe_parallel_size": JointKey(0),
    "model_parallel_size": JointKey(1),
    "sequence_parallel": SameKey("sequence_parallel", False),
    "pipe_partition_method": JointKey("type:transformer|mlp"),
    **_all(IgnoredKey("it follows from the other sizes"), "world_size is_pipe_parallel"),
}

MODEL: Mapping[str, Rule] = {
    "num_layers": JointKey(),
    "hidden_size": JointKey(),
    "num_attention_heads": SameKey("num_attention_heads"),
    "num_kv_heads": SameKey("num_query_groups"),
    "seq_length": JointKey(),
    "max_position_embeddings": JointKey(),
    "make_vocab_size_divisible_by": SameKey("make_vocab_size_divisible_by", 128),
    "intermediate_size": JointKey(),
    "expansion_factor": JointKey(),
    "mlp_multiple_of": JointKey(1),
    "norm": JointKey("layernorm"),
    "layernorm_epsilon": JointKey(1e-5),
    "rms_norm_epsilon": JointKey(1e-8),
    "scalenorm_epsilon": IgnoredKey("it belongs to norm scalenorm"),
    **_without("use_qk_layernorm", "norms of queries and keys that heads do not share"),
    "use_bias_in_norms": JointKey(True),
    "pos_emb": JointKey("learned"),
    "rotary_pct": JointKey(1.0),
    "rotary_emb_base": JointKey(10000),
    "sliding_window_width": JointKey(),
    **_without("opt_pos_emb_offset", "an offset of positions", _LEAVE, 0),
    **_without("rotary_save_freqs_buffer", "rotary frequencies in checkpoints"),
    **_all(IgnoredKey("it belongs to pos_emb rpe"), "rpe_num_buckets rpe_max_distance"),
    "activation": JointKey("gelu"),
    "mlp_type": RefusedKey(  # of versions before gated activations
        "Llama's MLP by this key",
        "use activation swiglu, with intermediate_size",
        (None, "regular"),
    ),
    "bias_gelu_fusion": JointKey(False),
    "onnx_safe": JointKey(False),
    "gpt_j_residual": SameKey("use_parallel_residual", False),
    **_without("gpt_j_tied", "one norm for attention and MLP side by side"),
    "use_bias_in_attn_linear": JointKey(True),
    "use_bias_in_mlp": JointKey(True),
    "no_weight_tying": SameKey("untie_embeddings_and_output_weights", False),
    "hidden_dropout": SameKey("hidden_dropout", 0.0),
    "attention_dropout": SameKey("attention_dropout", 0.0),
    "attention_config": JointKey(),
    **_without("sparsity_config", "sparse attention", _LEAVE, {}),
    "init_method": JointKey("normal"),
    "output_layer_init_method": JointKey("scaled_normal"),
    "init_method_std": JointKey(0.02),
    **_without(
        "num_unique_layers param_sharing_style", "layers that share weights", _LEAVE, "grouped"
    ),
    **_without("soft_prompt_tuning", "prompts that are trained"),
    **_all(
        IgnoredKey("it belongs to gmlp, Mamba or RWKV in attention_config"),
        "gmlp_attn_dim mamba_selective_scan_fusion mamba_causal_conv_fusion "
        "mamba_inner_func_fusion mamba_selective_fp32_params mamba_use_bias_in_conv "
        "mamba_use_bias_in_linears dim_att head_size ffn_dim rwkv_fp32",
    ),
    **_without(
        "te_columnparallel te_rowparallel te_layernorm_mlp te_mha te_fp8_format te_fp8_wgrad "
        "te_fp8_amax_history_len te_fp8_amax_compute_algo te_fp8_margin te_fp8_mha",
        "layers of Transformer Engine",
        "leave it out, or give --fp8-format",
        "hybrid",
        True,
        1,
        0,
        "most_recent",
    ),
    **_without(
        "online_dataserver_ips online_dataserver_ports serve_model_weights weight_server_port",
        "training on what the model generates",
        _LEAVE,
        "localhost",
        10000,
        6000,
    ),
    "precision": JointKey(),
    "fp16_lm_cross_entropy": RefusedKey("a loss in fp16", "the loss in fp32: leave it out"),
    **_all(
        IgnoredKey(_KERNELS),
        "attention_softmax_in_fp32 apply_query_key_layer_scaling use_cpu_initialization "
        "scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion "
        "bias_dropout_fusion rope_fusion layernorm_fusion rmsnorm_fusion "
        "output_layer_parallelism use_flashattn_swiglu use_triton",
    ),
}

EXPERTS: Mapping[str, Rule] = {
    "moe_num_experts": RefusedKey(
        "neox's mixture of experts", "give the flags of experts (--num-experts ...)", (None, 1)
    ),
    **_all(
        IgnoredKey("there are no experts"),
        "moe_expert_interval moe_top_k moe_router_type moe_jitter_eps moe_lbl_in_fp32 "
        "moe_loss_coeff moe_aux_loss_coeff moe_expert_parallel_size "
        "enable_expert_tensor_parallelism "
        "moe_token_dropping moe_train_capacity_factor moe_eval_capacity_factor moe_min_capacity "
        "moe_use_residual",
    ),
}

OPTIMIZER: Mapping[str, Rule] = {
    "optimizer": JointKey(),
    "weight_decay": SameKey("weight_decay", 0.1),
    "gradient_clipping": SameKey("clip_grad", 1.0),
    "clip_grad": IgnoredKey("neox overwrites it by gradient_clipping"),
    **_all(IgnoredKey("neox overwrites it by the key optimizer"), "lr optimizer_type"),
    "lr_decay_style": JointKey("linear"),
    "lr_decay_iters": JointKey(),
    "lr_decay_fraction": JointKey(),
    "min_lr": JointKey(0.0),
    "warmup": SameKey("lr_warmup_fraction", 0.01),
    "override_lr_scheduler": IgnoredKey("the schedule is always the config's"),
    "use_checkpoint_lr_scheduler": RefusedKey(
        "a schedule of a checkpoint", "leave it out: the schedule is the config's"
    ),
    **_without("use_bnb_optimizer", "optimizer state of 8 bits"),
}

TRAINING: Mapping[str, Rule] = {
    "train_iters": JointKey(),
    **_without("train_epochs", "a length in epochs", "use train_iters"),
    "eval_interval": SameKey("eval_interval", 1000),
    "eval_iters": SameKey("eval_iters", 100),
    "exit_interval": SameKey("exit_interval"),
    "seed": SameKey("seed", 1234),
    "num_workers": SameKey("num_workers", 2),
    "save": SameKey("save"),
    "load": SameKey("load"),
    "checkpoint_factor": JointKey(),
    "checkpoint_scale": JointKey("linear"),
    "extra_save_iters": JointKey(),
    "save_interval": JointKey(),  # of versions before checkpoint_factor
    "save_iters": IgnoredKey("neox makes it of checkpoint_factor"),
    "keep_last_n_checkpoints": SameKey("keep_last"),
    "finetune": SameKey("finetune", False),
    **{
        key: JointKey(False)
        for key in ("no_save_optim", "no_save_rng", "no_load_optim", "no_load_rng")
    },
    "iteration": SameKey("load_iteration"),
    **_without(
        "s3_path s3_chunk_size", "copies in a store of objects", "use save: s3://...", 104857600
    ),
    "checkpoint_validation_with_forward_pass": IgnoredKey(
        "digests tell whether a checkpoint is whole"
    ),
    "checkpoint_activations": JointKey(False),
    "checkpoint_num_layers": JointKey(1),
    "partition_activations": JointKey(False),
    "checkpoint_in_cpu": JointKey(False),
    **_all(
        IgnoredKey(_SAME_NUMBERS),
        "contiguous_checkpointing synchronize_each_layer profile_backward activation_checkpointing",
    ),
    **_all(
        IgnoredKey("DeepSpeed reads the block fp16 instead"),
        "loss_scale loss_scale_window hysteresis min_scale dynamic_loss_scale",
    ),
    "fp16": JointKey(),
    "bf16": JointKey(),
    "train_batch_size": JointKey(),
    "train_micro_batch_size_per_gpu": JointKey(),
    "gradient_accumulation_steps": JointKey(1),
    "gas": IgnoredKey("neox overwrites it by gradient_accumulation_steps"),
    "batch_size": IgnoredKey("neox overwrites it by train_micro_batch_size_per_gpu"),
    "train_impl": RefusedKey("neox's post-training", "use --sft or --mtf", (None, "normal")),
    **_without("z_loss", "this loss of another train_impl", "use --z-loss-coeff", 0, 0.0),
    **_all(
        IgnoredKey(_OTHER_TRAINING),
        "dpo_beta dpo_fp32 dpo_reference_free dpo_label_smoothing kto_beta kto_fp32 "
        "kto_desirable_weight kto_undesirable_weight kl_div_beta kl_impl reinforce_leave_one_out "
        "reinforce_leave_one_out_ preference_loss_type",
    ),
    **_without("use_mup", "learning rates by width (muP)"),
    **_all(
        IgnoredKey(_MUP),
        "mup_init_scale mup_attn_temp mup_output_temp mup_embedding_mult mup_rp_embedding_mult "
        "mup_width_scale mup_lr_scale",
    ),
    **_without("coord_check save_base_shapes base_shapes_file", "muP", _LEAVE, "base-shapes"),
}

DATA: Mapping[str, Rule] = {
    "data_path": SameKey("data_path"),
    "split": JointKey("969, 30, 1"),
    **{
        f"{use}_data_{part}": JointKey()
        for use in ("train", "valid", "test")
        for part in ("paths", "weights")
    },
    **_without(
        "weight_by_num_documents",
        "weights by numbers of documents",
        "give train_data_weights",
    ),
    "weighted_sampler_alpha": IgnoredKey("it belongs to weight_by_num_documents"),
    **_without("data_impl", "this kind of corpus files", "use mmap", "infer", "mmap"),
    **_without("pack_impl", "samples that are no windows", "use packed", "packed"),
    **_without("dataset_impl", "pairs, or data from a server", "use gpt2", "gpt2"),
    **_without("allow_chopped", "samples that are no windows", _LEAVE, True),
    **_all(IgnoredKey("indexes wait for the rank that builds them"), "use_shared_fs mmap_warmup"),
    "eod_mask_loss": SameKey("eod_mask_loss", False),
    "reset_position_ids": SameKey("reset_position_ids", False),
    "reset_attention_mask": SameKey("reset_attention_mask", False),
    **_without(
        "train_label_data_paths valid_label_data_paths test_label_data_paths "
        "train_reward_data_paths valid_reward_data_paths test_reward_data_paths "
        "pos_train_data_paths neg_train_data_paths pos_valid_data_paths neg_valid_data_paths "
        "pos_test_data_paths neg_test_data_paths pos_train_label_data_paths "
        "neg_train_label_data_paths pos_valid_label_data_paths neg_valid_label_data_paths "
        "pos_test_label_data_paths neg_test_label_data_paths",
        "labels, rewards or pairs beside the text",
        "use --sft or --mtf",
    ),
    "tokenizer_type": JointKey("GPT2BPETokenizer"),
    "vocab_file": JointKey(),
    "merge_file": SameKey("merge_file"),
    "padded_vocab_size": IgnoredKey("it follows from the tokenizer"),
    "short_seq_prob": IgnoredKey("a GPT has no short samples"),
    "char_level_ppl": RefusedKey("perplexity by characters", _LEAVE),
}

LOGGING: Mapping[str, Rule] = {
    "log_interval": SameKey("log_interval", 100),
    "tensorboard_dir": SameKey("tensorboard_dir"),
    "log_dir": IgnoredKey("the log is what the program prints: redirect it"),
    "use_wandb": JointKey(),
    "wandb_project": JointKey("neox"),
    "wandb_team": JointKey(),
    "wandb_run_name": JointKey(),
    **_all(IgnoredKey(_WANDB), "wandb_group wandb_host wandb_init_all_ranks"),
    **_without("use_comet", "Comet with neox's options", "use --comet-project"),
    **_all(
        IgnoredKey("it belongs to use_comet"),
        "comet_workspace comet_project comet_experiment_name comet_tags comet_others "
        "comet_experiment",
    ),
    "peak_theoretical_tflops": SameKey("peak_tflops"),
    "profile": SameKey("profile", False),
    "profile_step_start": SameKey("profile_step_start", 10),
    "profile_step_stop": SameKey("profile_step_end", 12),
    **_without("memory_profiling", "records of allocations"),
    "memory_profiling_path": IgnoredKey("it belongs to memory_profiling"),
    "log_param_norm": SameKey("log_params_norm", False),
    "log_grad_pct_zeros": SameKey("log_num_zeros_in_grad", False),
    "log_grad_norm": IgnoredKey("the log has the norm of the gradient"),
    **_without("log_optimizer_states log_gradient_noise_scale", "this record"),
    **_all(
        IgnoredKey("it belongs to log_gradient_noise_scale"),
        "gradient_noise_scale_n_batches gradient_noise_scale_cpu_offload",
    ),
}

DEEPSPEED: Mapping[str, Rule] = {
    "deepspeed": IgnoredKey("the native engine gives the same numbers"),
    "zero_optimization": JointKey(),
    **_all(
        IgnoredKey("neox overwrites it by zero_optimization"),
        "zero_stage zero_reduce_scatter zero_contiguous_gradients zero_reduce_bucket_size "
        "zero_allgather_bucket_size",
    ),
    "zero_allow_untested_optimizer": IgnoredKey("every optimizer here is tested"),
    **_without("scheduler", "schedules of DeepSpeed", "use lr_decay_style"),
    **_without("curriculum_learning", "curricula in this block", "use --curriculum-schedule", {}),
    **_without("data_efficiency data_types deepspeed_extra_args", "this block", _LEAVE, {}),
    **_without("autotuning autotuning_run", "autotuning", "use tools/plan.py --search"),
    **_all(
        IgnoredKey(_REPORT),
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler "
        "comms_logger tensorboard csv_monitor wandb comet",
    ),
    **_all(
        IgnoredKey("gradients are accumulated and reduced in fp32"),
        "communication_data_type fp32_allreduce fp32_reduce_scatter prescale_gradients "
        "gradient_predivide_factor",
    ),
    **_without("sparse_gradients amp", "what DeepSpeed has removed"),
}

OTHERS: Mapping[str, Rule] = {
    "global_num_gpus": JointKey(),
    "distributed_backend": JointKey("nccl"),
    **_all(
        IgnoredKey(_LAUNCHER),
        "hostfile include exclude num_nodes num_gpus master_port master_addr launcher force_multi "
        "no_ssh_check comment account deepspeed_mpi deepspeed_slurm detect_nvlink_pairs rank "
        "local_rank lazy_mpu_init user_script launch_method",
    ),
    **_all(
        IgnoredKey(_GENERATION),
        "text_gen_type temperature top_p top_k maximum_tokens prompt_end sample_input_file "
        "sample_output_file num_samples recompute return_logits",
    ),
    **_all(IgnoredKey(_EVALUATION), "eval_tasks eval_results_prefix"),
    **_without("adlr_autoresume", "NVIDIA's own resubmission of jobs"),
    "adlr_autoresume_interval": IgnoredKey("it belongs to adlr_autoresume"),
    **_all(
        IgnoredKey("neox sets it itself"),
        "do_train do_valid do_test config_files git_hash",
    ),
}

KEYS: Mapping[str, Rule] = {
    **PARALLELISM, **MODEL, **EXPERTS, **OPTIMIZER, **TRAINING, **DATA, **LOGGING, **DEEPSPEED,
    **OTHERS,
}  # fmt: skip
