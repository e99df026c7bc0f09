"""Every key of gpt-neox is in the table, and every rule says what it has to."""

from pathlib import Path

from megatron.config.fields import field_names
from megatron.config.neox import course, mapping, network
from megatron.config.neox.keys import KEYS, IgnoredKey, JointKey, RefusedKey, SameKey
from megatron.config.run import GROUPS

_NEOX = """
    pipe_parallel_size model_parallel_size sequence_parallel pipe_partition_method world_size
    is_pipe_parallel num_layers hidden_size num_attention_heads num_kv_heads seq_length
    max_position_embeddings make_vocab_size_divisible_by intermediate_size expansion_factor
    mlp_multiple_of norm layernorm_epsilon rms_norm_epsilon scalenorm_epsilon use_qk_layernorm
    use_bias_in_norms layernorm_fusion rmsnorm_fusion pos_emb rotary_pct rotary_emb_base
    sliding_window_width opt_pos_emb_offset rotary_save_freqs_buffer rpe_num_buckets
    rpe_max_distance activation bias_gelu_fusion gpt_j_residual gpt_j_tied use_bias_in_attn_linear
    use_bias_in_mlp no_weight_tying hidden_dropout attention_dropout attention_config
    sparsity_config init_method output_layer_init_method init_method_std num_unique_layers
    param_sharing_style soft_prompt_tuning gmlp_attn_dim mamba_selective_scan_fusion dim_att
    head_size ffn_dim te_columnparallel online_dataserver_ips online_dataserver_ports
    serve_model_weights weight_server_port precision fp16_lm_cross_entropy
    attention_softmax_in_fp32 apply_query_key_layer_scaling use_cpu_initialization
    scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion output_layer_parallelism
    moe_num_experts moe_expert_interval moe_top_k moe_router_type moe_jitter_eps moe_lbl_in_fp32
    optimizer weight_decay lr_decay_style lr_decay_iters lr_decay_fraction min_lr warmup
    override_lr_scheduler use_checkpoint_lr_scheduler train_iters train_epochs eval_interval
    eval_iters exit_interval seed num_workers eod_mask_loss save load checkpoint_factor
    checkpoint_scale extra_save_iters keep_last_n_checkpoints no_save_optim no_save_rng
    no_load_optim no_load_rng finetune s3_path checkpoint_validation_with_forward_pass
    checkpoint_activations checkpoint_num_layers partition_activations checkpoint_in_cpu
    contiguous_checkpointing synchronize_each_layer profile_backward loss_scale loss_scale_window
    hysteresis min_scale fp16 data_path split train_data_paths valid_data_paths test_data_paths
    train_data_weights valid_data_weights test_data_weights weight_by_num_documents
    weighted_sampler_alpha data_impl use_shared_fs mmap_warmup pack_impl dataset_impl allow_chopped
    train_label_data_paths valid_reward_data_paths pos_train_data_paths neg_train_data_paths
    train_impl dpo_fp32 kto_beta z_loss use_mup mup_lr_scale coord_check save_base_shapes
    base_shapes_file tokenizer_type vocab_file merge_file log_interval tensorboard_dir log_dir
    use_wandb wandb_project wandb_group wandb_team wandb_run_name use_comet comet_project
    peak_theoretical_tflops profile profile_step_start profile_step_stop memory_profiling
    memory_profiling_path log_grad_norm log_param_norm log_grad_pct_zeros log_optimizer_states
    log_gradient_noise_scale gradient_noise_scale_n_batches train_batch_size
    train_micro_batch_size_per_gpu gradient_accumulation_steps gas batch_size gradient_clipping
    clip_grad zero_optimization bf16 scheduler curriculum_learning data_efficiency
    deepspeed_extra_args hostfile include exclude num_nodes num_gpus master_port master_addr
    launcher force_multi no_ssh_check comment account autotuning_run deepspeed_mpi deepspeed_slurm
    text_gen_type temperature top_p top_k maximum_tokens prompt_end sample_input_file
    sample_output_file num_samples recompute return_logits eval_tasks eval_results_prefix
    distributed_backend onnx_safe short_seq_prob char_level_ppl adlr_autoresume lazy_mpu_init
    iteration rank local_rank user_script do_train config_files git_hash global_num_gpus
    steps_per_print wall_clock_breakdown
"""


def test_every_key_of_gpt_neox_is_in_the_table() -> None:
    assert sorted(set(_NEOX.split()) - set(KEYS)) == []


def test_rules_name_fields_of_ours_and_say_why() -> None:
    fields = {name for group in GROUPS.values() for name in field_names(group)}
    for key, rule in KEYS.items():
        if isinstance(rule, SameKey):
            assert rule.field in fields, key
        elif isinstance(rule, IgnoredKey):
            assert len(rule.because) > 10, key
        elif isinstance(rule, RefusedKey):
            assert rule.feature, key
            assert rule.instead, key


def test_keys_that_are_read_together_are_read() -> None:
    """A key of a joint rule that no function reads would be dropped silently."""
    modules = (network, course, mapping)
    texts = [Path(str(module.__file__)).read_text(encoding="utf-8") for module in modules]
    joint = {key for key, rule in KEYS.items() if isinstance(rule, JointKey)}
    unread = {key for key in joint if not any(f'"{key}"' in text for text in texts)}
    by_use = {f"{use}_data_{part}" for use in ("train", "valid", "test") for part in _PARTS}
    assert unread == by_use
    assert all(f'_data_{part}"' in texts[1] for part in _PARTS)


_PARTS = ("paths", "weights")
