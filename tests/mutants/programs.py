"""Mutants of checks before training, exit codes, generation and tasks."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "flags and scripts of other Megatrons": (
        Mutant(
            "programs that are called by their path are not run",
            "tools/launch_scripts/sandbox.py",
            """[[ "${words[0]-}" == */* ]] || return 1""",
            """[[ "${words[0]-}" == */none ]] || return 1""",
            "tests/programs/tools/launch_scripts/test_sandbox.py::"
            "test_nothing_is_deleted_overwritten_or_called",
        ),
        Mutant(
            "commands see the arguments of their function",
            "tools/launch_scripts/sandbox.py",
            """trap '! _is_replaced "$@"' DEBUG""",
            """trap '! _is_replaced' DEBUG""",
            "tests/programs/tools/launch_scripts/test_sandbox.py::"
            "test_variables_arrays_functions_and_arguments_are_expanded",
        ),
        Mutant(
            "a layout is checked against the ranks of the launcher",
            "tools/launch_scripts/verdicts.py",
            "    if world_size is None:\n        return []\n",
            "    if True:\n        return []\n",
            "tests/programs/tools/launch_scripts/test_verdicts.py::test_refusals_say_why",
        ),
        Mutant(
            "a layout of a fine-tuning is checked against the ranks of the launcher",
            "tools/launch_scripts/verdicts.py",
            "                errors = _layout_errors(config, started.world_size, BERT_DATA)\n",
            "                errors = []\n",
            "tests/programs/tools/launch_scripts/test_verdicts.py::"
            "test_flags_of_tasks_are_checked_as_well",
        ),
        Mutant(
            "a flag that a task refuses makes its script refused",
            "tools/launch_scripts/task_flags.py",
            "        return CheckedFlags(None, [finding.error for finding in several.findings])",
            "        return CheckedFlags(None, [])",
            "tests/programs/tools/launch_scripts/test_task_flags.py::"
            "test_what_a_program_refuses_is_an_error",
        ),
        Mutant(
            "a run in iterations reads the samples of its ramp",
            "megatron/progress.py",
            "        return self.batch_schedule.samples_before(self.total_iterations)",
            "        return self.total_iterations * self.batch_schedule.global_batch_size",
            "tests/unit/test_progress.py::test_a_run_in_iterations_is_the_run_in_as_many_samples",
        ),
        Mutant(
            "a program that srun starts is not one rank",
            "tools/launch_scripts/commands.py",
            "None if of_tasks else",
            "None if False else",
            "tests/programs/tools/launch_scripts/test_commands.py::"
            "test_tasks_of_slurm_are_an_unknown_number_unless_a_launcher_is_told",
        ),
        Mutant(
            "a script whose flags contradict its JSON is refused",
            "tools/launch_scripts/verdicts.py",
            "(*LAYOUT_CHECKS, flags_of_data_are_read, *deepspeed.FLAG_CHECKS)",
            "LAYOUT_CHECKS",
            "tests/programs/tools/launch_scripts/test_verdicts.py::"
            "test_flags_and_deepspeeds_json_are_compared",
        ),
        Mutant(
            "a script with experts gets Megatron-DeepSpeed's defaults",
            "megatron/config/dependent_flags.py",
            '    _ExpertDefault("moe_min_capacity", 4),\n',
            "",
            "tests/unit/config/test_dependent_flags.py::"
            "test_a_flag_has_the_meaning_that_it_has_elsewhere",
        ),
        Mutant(
            "defaults are not guessed where flags of two Megatrons are mixed",
            "megatron/config/dependent_flags.py",
            "    if deepspeed_flags and not other_flags:",
            "    if deepspeed_flags:",
            "tests/unit/config/test_dependent_flags.py::"
            "test_another_meaning_is_refused_by_name_with_a_fix",
        ),
        Mutant(
            "every flag of Megatron-LM is answered by name",
            "megatron/config/spellings/refused.py",
            "--langrl-env-config ",
            "",
            "tests/unit/config/spellings/test_refused.py::"
            "test_every_flag_of_other_megatrons_is_answered_by_name",
        ),
        Mutant(
            "a beginning of several flags stands for none of them",
            "megatron/arguments.py",
            "if len(meanings) == 1 and None not in meanings:",
            "if meanings and None not in meanings:",
            "tests/unit/test_arguments.py::"
            "test_a_beginning_of_several_flags_is_answered_with_all_of_them",
        ),
        Mutant(
            "a value of a missing feature is not accepted",
            "megatron/arguments.py",
            "if ignored.only and (not values or not set(values) <= set(ignored.only)):",
            "if ignored.only and not values:",
            "tests/unit/config/spellings/test_no_effect.py::"
            "test_a_value_that_asks_for_a_missing_feature_is_refused",
        ),
        Mutant(
            "values of a flag without effect belong to it",
            "megatron/config/spellings/usage.py",
            "    del rest[:taken]\n",
            "",
            "tests/unit/config/spellings/test_no_effect.py::"
            "test_flags_without_effect_change_nothing_and_are_said",
        ),
        Mutant(
            "a flag with an answer of its own is not answered as its family",
            "megatron/config/spellings/usage.py",
            "    if word in table:\n        return table[word]\n",
            "",
            "tests/unit/config/spellings/test_usage.py::"
            "test_a_flag_is_looked_up_by_its_name_before_the_longest_of_its_families",
        ),
        Mutant(
            "values of another Megatron are those of ours that mean the same",
            "megatron/config/spellings/aliases.py",
            '"--profile-step-start", start, "--profile-step-end", end',
            '"--profile-step-start", end, "--profile-step-end", start',
            "tests/unit/config/spellings/test_aliases.py::test_values_are_written_as_ours",
        ),
        Mutant(
            "values of another program's flags are those of ours",
            "tools/other_programs/words.py",
            "words += [*option.ours, *values]",
            "words += option.ours",
            "tests/programs/tools/other_programs/test_words.py::"
            "test_flags_are_spelled_as_ours_and_others_passed_on",
        ),
    ),
    "preflight": (
        Mutant(
            "heads that do not divide over ranks are refused",
            "megatron/preflight/config.py",
            "        if count % tp:\n",
            "        if count < tp:\n",
            "tests/unit/preflight/test_config.py::test_heads_are_not_cut",
        ),
        Mutant(
            "a position table holds the sequence",
            "megatron/preflight/config.py",
            "if learned and rows is not None and rows < seq_length:",
            "if learned and rows is not None and rows + 1 < seq_length:",
            "tests/unit/preflight/test_config.py::"
            "test_a_table_of_positions_has_a_row_for_every_position",
        ),
        Mutant(
            "a sequence splits over ranks",
            "megatron/preflight/config.py",
            "if parallel.sequence_parallel and length % tp:",
            "if parallel.sequence_parallel and length < tp:",
            "tests/unit/preflight/test_config.py::test_a_split_sequence_is_shared_out_evenly",
        ),
        Mutant(
            "an MLP splits over ranks",
            "megatron/preflight/config.py",
            "    if width % tp:\n",
            "    if width < tp:\n",
            "tests/unit/preflight/test_config.py::test_the_mlp_is_shared_out_evenly",
        ),
        Mutant(
            "experts' own width has to split",
            "megatron/preflight/config.py",
            "for flag, width in model.mlp_widths.items():",
            'for flag, width in {"--ffn-hidden-size": model.ffn_width}.items():',
            "tests/unit/preflight/test_config.py::test_each_expert_is_shared_out_evenly",
        ),
        Mutant(
            "flags about ends of documents need the token",
            "megatron/preflight/config.py",
            "if wanted and plan.tokenizer is not None and plan.tokenizer.eod is None:",
            "if wanted and plan.tokenizer is not None and not plan.tokenizer.eod_note:",
            "tests/unit/preflight/test_config.py::test_ends_of_documents_need_a_token",
        ),
        Mutant(
            "a curriculum stays within the samples",
            "megatron/preflight/config.py",
            "    if longest > seq_length:\n",
            "    if longest > 2 * seq_length:\n",
            "tests/unit/preflight/test_config.py::test_a_curriculum_that_does_not_fit_is_refused",
        ),
        Mutant(
            "a share of 0 is no data to evaluate on",
            "megatron/data/data_utils.py",
            "if data_path is not None and name in splits_without_share(split):",
            "if data_path is not None and not splits_without_share(split):",
            "tests/unit/data/test_data_utils.py::"
            "test_a_share_of_zero_says_that_there_is_no_such_data",
        ),
        Mutant(
            "weights to fine-tune are loaded from somewhere",
            "megatron/preflight/checkpoint.py",
            "        if given.finetune and given.load is None:\n",
            "        if given.finetune and given.save:\n",
            "tests/unit/preflight/test_checkpoint.py::test_fine_tuning_needs_weights",
        ),
        Mutant(
            "the tokenizer of a checkpoint is left to the flags where asked",
            "megatron/checkpoint/load/stored_run.py",
            'if given.get("use_tokenizer_model_from_checkpoint_args", True):',
            'if given.get("use_checkpoint_args", True):',
            "tests/unit/checkpoint/load/test_stored_run.py::"
            "test_a_folder_of_hugging_face_needs_no_flags_of_its_model",
        ),
        Mutant(
            "a run that began with pretrained weights goes on with its own",
            "megatron/checkpoint/load/start.py",
            "return pretrained if may_be_empty and never_held_a_checkpoint(load) else load",
            "return pretrained if may_be_empty else load",
            "tests/unit/test_checkpointing.py::"
            "test_a_run_begins_with_pretrained_weights_and_resumes_with_its_own",
        ),
        Mutant(
            "each checkpoint to choose from has a loss",
            "megatron/preflight/checkpoint.py",
            "elif flags.save_interval % training.eval_interval:",
            "elif flags.save_interval < training.eval_interval:",
            "tests/unit/preflight/test_checkpoint.py::"
            "test_the_best_checkpoints_need_losses_to_compare",
        ),
        Mutant(
            "Megatron's files hold no shared optimizer",
            "megatron/checkpoint/formats/megatron/format.py",
            "if config.parallel.sharding.shards_state:",
            "if config.parallel.use_distributed_optimizer and config.engine.deepspeed:",
            "tests/unit/checkpoint/formats/megatron/test_format.py::"
            "test_what_its_files_cannot_hold_is_refused_by_its_flag",
        ),
        Mutant(
            "a corpus of another vocabulary is refused",
            "megatron/preflight/data.py",
            "if metadata is not None and metadata.vocab_size not in "
            "_sizes_with_the_same_ids(tokenizer):",
            "if metadata is not None and metadata.vocab_size < 0:",
            "tests/unit/preflight/test_data.py::"
            "test_a_corpus_of_another_vocabulary_is_found_by_its_metadata",
        ),
        Mutant(
            "a split holds a global batch",
            "megatron/preflight/data.py",
            "    elif samples < global_batch_size:\n",
            "    elif samples < 1:\n",
            "tests/unit/preflight/test_data.py::test_a_split_smaller_than_a_batch_is_found",
        ),
        Mutant(
            "an empty split is refused",
            "megatron/preflight/data.py",
            "    if not documents:\n",
            "    if documents < 0:\n",
            "tests/unit/preflight/test_data.py::test_an_empty_split_that_is_used_is_found",
        ),
        Mutant(
            "ranks of a host share its memory",
            "megatron/preflight/memory.py",
            "    if ranks * needed <= room:\n",
            "    if needed <= room:\n",
            "tests/unit/preflight/test_memory.py::test_ranks_of_one_host_share_its_memory",
        ),
        Mutant(
            "a rank keeps its share of the model",
            "megatron/preflight/memory.py",
            "parameters_of_rank = (parameters - experts) // plan.model_ranks",
            "parameters_of_rank = parameters",
            "tests/unit/preflight/test_memory.py::test_ranks_of_one_host_share_its_memory",
        ),
        Mutant(
            "half precision keeps fp32 masters",
            "megatron/preflight/memory.py",
            " + (4 if precision.is_half else 0)",
            "",
            "tests/unit/preflight/test_memory.py::test_it_is_what_an_engine_of_these_flags_holds",
        ),
        Mutant(
            "a forgotten output is told by its storage, which has no address on meta",
            "megatron/mpu/recompute.py",
            "tensor.untyped_storage()._cdata != storage",
            "tensor.device.type != output.device.type",
            "tests/unit/preflight/test_activations.py::test_every_stage_of_a_rehearsed_step_takes_more",
        ),
        Mutant(
            "later stages hold fewer micro-batches",
            "megatron/preflight/activations.py",
            "min(plan.num_stages - stage, num_microbatches)",
            "min(plan.num_stages, num_microbatches)",
            "tests/unit/preflight/test_activations.py::test_every_stage_of_a_rehearsed_step_takes_more",
        ),
        Mutant(
            "tensor-parallel ranks share what stands between matrices",
            "megatron/preflight/activations.py",
            " + split // config.parallel.tensor_model_parallel_size",
            " + split",
            "tests/unit/preflight/test_activations.py::test_every_stage_of_a_rehearsed_step_takes_more",
        ),
        Mutant(
            "ranks that share sequences hold a part of their tokens",
            "megatron/preflight/activations.py",
            " * length // parallel.context_parallel_size",
            " * length",
            "tests/unit/preflight/test_activations.py::test_every_stage_of_a_rehearsed_step_takes_more",
        ),
        Mutant(
            "groups that wait in host memory save nothing on the device",
            "megatron/preflight/activations.py",
            "if not one.offloaded]",
            "if True]",
            "tests/unit/preflight/test_activations.py::"
            "test_layers_that_wait_in_host_memory_take_none_of_the_device",
        ),
        Mutant(
            "the estimate of a step recomputes the layers that the run recomputes",
            "megatron/model/accounting.py",
            "saved += stream if group.recomputed else of_layers",
            "saved += stream if policy.method else of_layers",
            "tests/programs/benchmarks/test_memory_table.py::"
            "test_the_estimate_is_what_a_step_allocates",
        ),
        Mutant(
            "recomputed groups keep one input each",
            "megatron/preflight/activations.py",
            "return len(groups) - recomputed, recomputed",
            "return len(groups) - recomputed, recomputed * policy.num_layers",
            "tests/unit/preflight/test_activations.py::test_layers_that_are_recomputed_together_save_one_input",
        ),
        Mutant(
            "recomputed parts of a block are not saved",
            "megatron/preflight/activations.py",
            "        return 0\n    before",
            "        pass\n    before",
            "tests/unit/preflight/test_activations.py::test_every_stage_of_a_rehearsed_step_takes_more",
        ),
        Mutant(
            "an average rank is compared with the memory",
            "megatron/preflight/memory.py",
            "activations=sum(saved) // len(saved)",
            "activations=0",
            "tests/unit/preflight/test_memory.py::test_memory_that_is_just_enough_is_enough",
        ),
        Mutant(
            "ZeRO 3 shares weights out",
            "megatron/preflight/memory.py",
            "zero.stage == int(ZeroStage.PARAMETERS)",
            "False",
            "tests/unit/preflight/test_memory.py::test_zero_shares_out_what_its_stage_says",
        ),
        Mutant(
            "what ZeRO offloads waits on the host",
            "megatron/preflight/memory.py",
            "waiting=waits * optimizer",
            "waiting=0 * optimizer",
            "tests/unit/preflight/test_memory.py::test_zero_shares_out_what_its_stage_says",
        ),
        Mutant(
            "of flags that are enough the cheapest is named",
            "megatron/preflight/memory.py",
            "    yield recompute, replace(config, training=training)\n",
            "",
            "tests/unit/preflight/test_memory.py::test_the_fix_is_what_costs_least_of_what_is_enough",
        ),
    ),
    "exits": (
        Mutant(
            "messages of a failure are masked before they leave the process",
            "megatron/program.py",
            "    reason = log.masked(reason)\n",
            "",
            "tests/unit/test_program.py::"
            "test_secrets_of_the_environment_are_not_in_what_a_failure_says",
        ),
        Mutant(
            "a secret that is the beginning of another is masked after it",
            "megatron/log.py",
            "sorted(_OUTPUT.secrets, key=len, reverse=True)",
            "sorted(_OUTPUT.secrets, key=len)",
            "tests/unit/test_log.py::test_a_hidden_value_is_in_no_message",
        ),
        Mutant(
            "a secret is found inside of a longer flag",
            "megatron/preflight/machine.py",
            "if secret in text)",
            "if secret == text)",
            "tests/unit/preflight/test_machine.py::test_a_secret_in_a_flag_is_named_and_not_shown",
        ),
        Mutant(
            "torchrun calls the rank that failed first the root cause",
            "megatron/launch.py",
            "int(time.time()) + (status == PeerError.exit_code)",
            "int(time.time())",
            "tests/programs/test_launchers.py::"
            "test_the_summary_of_torchrun_is_the_error_of_the_rank_that_failed_first",
        ),
        Mutant(
            "a report that cannot be written hides no failure",
            "megatron/program.py",
            "    except OSError as error:\n",
            "    except ValueError as error:\n",
            "tests/unit/test_program.py::"
            "test_a_report_to_torchrun_that_cannot_be_written_keeps_the_exit_code",
        ),
        Mutant(
            "one rank with a lasting error keeps a job from being queued again",
            "examples/is_retryable.py",
            "if all(map(is_retryable, statuses))",
            "if any(map(is_retryable, statuses))",
            "tests/programs/test_recipes.py::"
            "test_a_job_of_slurm_is_queued_again_after_failures_that_are_worth_it",
        ),
        Mutant(
            "our torchrun ends with the status of a rank, as a shell counts signals",
            "examples/torchrun.py",
            "return status if status >= 0 else _SIGNALS - status",
            "return status",
            "tests/programs/test_launchers.py::test_our_torchrun_ends_as_shells_count",
        ),
        Mutant(
            "manifests have the statuses that are worth another start",
            "megatron/errors.py",
            "        signal.SIGBUS,\n",
            "",
            "tests/programs/test_recipes.py::test_manifests_retry_what_is_worth_it",
        ),
        Mutant(
            "a record of a failure that is too long is not parsed",
            "megatron/peers/records.py",
            "if len(record) > _LONGEST_RECORD:",
            "if False:",
            "tests/unit/peers/test_records.py::test_a_record_is_bounded_in_size_and_in_depth",
        ),
        Mutant(
            "nonsense in the store does not end the thread that watches",
            "megatron/peers/records.py",
            "_WRONG = (ValueError, TypeError, KeyError, RecursionError)",
            "_WRONG = (TypeError, KeyError, RecursionError)",
            "tests/unit/peers/test_records.py::test_nonsense_is_the_failure_of_nobody",
        ),
        Mutant(
            "one process keeps off the network",
            "megatron/launch.py",
            "    if launch.world_size == 1:  # gloo",
            "    if launch.world_size == 0:  # gloo",
            "tests/unit/test_launch.py::test_libraries_are_told_the_local_rank_unless_they_know",
        ),
        Mutant(
            "a pickle remembers no more objects than its file has bytes",
            "megatron/checkpoint/files/unpickle.py",
            "if at > end or place > end:",
            "if at > end:",
            "tests/unit/checkpoint/files/test_unpickle.py::"
            "test_a_pickle_does_not_ask_for_more_memory_than_its_file_has_bytes",
        ),
        Mutant(
            "aliases of aliases do not multiply without end",
            "megatron/config/files/yaml_text.py",
            "if next(count, None) is None:",
            "if False:",
            "tests/unit/config/files/test_yaml_text.py::test_what_is_wrong_is_said_with_its_line",
        ),
        Mutant(
            "YAML that is nested too deep is an error with a fix",
            "megatron/config/files/yaml_text.py",
            "    except RecursionError:\n",
            "    except MemoryError:\n",
            "tests/unit/config/files/test_yaml_text.py::test_what_is_wrong_is_said_with_its_line",
        ),
        Mutant(
            "a lost machine is worth another start of the same command",
            "megatron/errors.py",
            "    return any(kind.retryable for",
            "    return any(not kind.retryable for",
            "tests/unit/test_errors.py::test_an_exit_code_is_retryable_as_its_class_is",
        ),
        Mutant(
            "an error without a message is named by its type",
            "megatron/errors.py",
            "splitlines()), type(error).__name__)",
            'splitlines()), "")',
            "tests/unit/test_errors.py::test_the_first_line_of_an_error_is_never_empty",
        ),
        Mutant(
            "a process that the kernel killed is started again",
            "megatron/errors.py",
            "        signal.SIGKILL,\n",
            "",
            "tests/unit/test_errors.py::"
            "test_a_killed_process_is_retryable_unless_a_person_or_its_program_ended_it",
        ),
        Mutant(
            "the page of errors has every status that a supervisor retries",
            "megatron/errors.py",
            "        signal.SIGTERM,\n",
            "        signal.SIGTERM,\n        signal.SIGPIPE,\n",
            "tests/architecture/test_docs.py::"
            "test_the_page_of_errors_says_of_every_status_whether_a_retry_makes_sense",
        ),
        Mutant(
            "wrong data end with 65",
            "megatron/errors.py",
            "    exit_code = 65\n",
            "    exit_code = 64\n",
            "tests/unit/test_errors.py::test_exit_codes_tell_apart_who_has_to_act",
        ),
        Mutant(
            "broken numbers end with 67",
            "megatron/errors.py",
            "    exit_code = 67\n",
            "    exit_code = 1\n",
            "tests/unit/test_errors.py::test_exit_codes_tell_apart_who_has_to_act",
        ),
        Mutant(
            "a machine's failure may be tried again",
            "megatron/errors.py",
            "    exit_code = 75\n    retryable = True\n",
            "    exit_code = 75\n    retryable = False\n",
            "tests/unit/test_errors.py::test_only_failures_of_machines_and_going_back_are_worth_starting_again",
        ),
        Mutant(
            "a report of one kind ends as that kind",
            "megatron/errors.py",
            "            self.exit_code, self.retryable = only.exit_code, only.retryable\n",
            "            self.retryable = only.retryable\n",
            "tests/unit/test_errors.py::"
            "test_findings_of_one_class_end_the_program_as_that_class_does",
        ),
        Mutant(
            "an error decides the exit code",
            "megatron/program.py",
            '_fail(f"{type(error).__name__}: {text}", error.exit_code)',
            '_fail(f"{type(error).__name__}: {text}", 1)',
            "tests/unit/test_program.py::test_a_known_error_is_said_once_without_a_traceback",
        ),
        Mutant(
            "a failure is told to the other ranks",
            "megatron/program.py",
            "    for notify in _ON_FAILURE:\n",
            "    for notify in ():\n",
            "tests/unit/test_program.py::test_others_are_told_of_a_failure_before_the_end",
        ),
        Mutant(
            "an unexpected failure ends with 1",
            "megatron/program.py",
            'trace[-_MOST_OF_A_TRACEBACK:]}", 1)',
            'trace[-_MOST_OF_A_TRACEBACK:]}", 0)',
            "tests/unit/test_program.py::test_a_bug_is_said_with_its_traceback",
        ),
        Mutant(
            "rank 0 speaks for findings before training",
            "megatron/program.py",
            "printed_by_rank0 = isinstance(error, PreflightError) and not log.is_rank_zero()",
            "printed_by_rank0 = False",
            "tests/unit/test_program.py::test_what_every_rank_finds_is_said_by_rank_zero_alone",
        ),
    ),
    "tasks": (
        Mutant(
            "overlapping windows score each token once",
            "tasks/zeroshot/windows.py",
            "first = 1 if at == 0 else length - step + 1",
            "first = 1",
            "tests/programs/tasks/zeroshot/test_windows.py::test_each_target_stands_in_one_window",
        ),
        Mutant(
            "a last window is filled with context",
            "tasks/zeroshot/windows.py",
            "first = start if stop - start == length or start == 0 else stop - length",
            "first = start",
            "tests/programs/tasks/zeroshot/test_windows.py::"
            "test_rolling_windows_score_every_token_once",
        ),
        Mutant(
            "a long context is cut in front",
            "tasks/zeroshot/pairs.py",
            "        tokens = tokens[-longest - 1 :]\n",
            "        tokens = tokens[: longest + 1]\n",
            "tests/programs/tasks/zeroshot/test_pairs.py::"
            "test_a_context_that_is_too_long_is_cut_in_front_and_a_continuation_is_not",
        ),
        Mutant(
            "a likelihood by length counts characters",
            "tasks/zeroshot/pairs.py",
            "value / len(choice) for value, choice",
            "value for value, choice",
            "tests/programs/tasks/zeroshot/test_pairs.py::"
            "test_the_likeliest_choice_and_the_likeliest_by_length",
        ),
        Mutant(
            "scores that are no probabilities are refused",
            "tasks/zeroshot/pairs.py",
            "if not score.log_likelihood <= 0",
            "if score.log_likelihood > 0",
            "tests/programs/tasks/zeroshot/test_pairs.py::test_pairs_are_added_up_over_tokens",
        ),
        Mutant(
            "spaces before an answer belong to it",
            "tasks/zeroshot/pairs.py",
            "given = pair.context.rstrip()",
            "given = pair.context",
            "tests/programs/tasks/zeroshot/test_pairs.py::"
            "test_a_pair_is_cut_where_its_context_ends",
        ),
        Mutant(
            "a gap of a question is filled with the answer",
            "tasks/finetune/race.py",
            'return question.replace("_", option) if "_" in question else',
            'return f"{question} {option}" if "_" in question else',
            "tests/programs/tasks/finetune/test_race.py::"
            "test_a_folder_of_passages_is_read_in_order",
        ),
        Mutant(
            "each epoch of fine-tuning has an order of its own",
            "tasks/finetune/order.py",
            'hash_seed(seed, "epoch", epoch)',
            'hash_seed(seed, "epoch", 0)',
            "tests/programs/tasks/finetune/test_order.py::"
            "test_epochs_and_seeds_have_orders_of_their_own",
        ),
        Mutant(
            "a decision is the likeliest answer",
            "tasks/finetune/predictions.py",
            "return float(max(range(len(row.probabilities)), key=row.probabilities.__getitem__))",
            "return float(min(range(len(row.probabilities)), key=row.probabilities.__getitem__))",
            "tests/programs/tasks/finetune/test_predictions.py::"
            "test_choices_are_letters_and_grades_have_no_probabilities",
        ),
        Mutant(
            "a wheel has the server's page",
            "pyproject.toml",
            'megatron = ["py.typed", "serving/page.html"]',
            'megatron = ["py.typed"]',
            "tests/programs/test_wheel.py::test_a_wheel_has_every_file_of_its_packages",
        ),
    ),
}
