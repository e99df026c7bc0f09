"""Mutants of what the loop and a save call, of untested errors that were found, of config files."""

from tests.mutants.mutant import Mutant

_WORDS = "tests/unit/config/files/test_words.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "wiring": (
        Mutant(
            "a batch is looked at on one rank too",
            "megatron/mpu/data.py",
            "    entries = None if batch is None else [",
            "    if group.size == 1 and batch is not None:\n        return batch\n"
            "    entries = None if batch is None else [",
            "tests/unit/mpu/test_data.py::test_a_lone_process_refuses_what_several_would",
        ),
        Mutant(
            "the functions of a program take what they are called with",
            "megatron/engine/base.py",
            "signature.bind(*arguments)",
            "pass",
            "tests/unit/engine/test_base.py::test_a_part_in_the_place_of_another_is_named",
        ),
        Mutant(
            "training doubts a pair of files that may not be one",
            "megatron/training.py",
            "    announce_doubtful_pairs(config.data)\n",
            "",
            "tests/programs/test_data_faults.py::"
            "test_a_run_resumed_with_another_content_of_its_files_is_told",
        ),
        Mutant(
            "replicas are compared before a save",
            "megatron/checkpointing.py",
            "    engine.check_replicas()",
            "    pass",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "the state of ranks is compared before the first step",
            "megatron/loop/training_loop.py",
            "        agree_on_state(state_of(progress, engine), context.world)\n",
            "",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "a profile's recording is ended by the loop",
            "megatron/loop/training_loop.py",
            "            self.profile,\n",
            "",
            "tests/unit/loop/test_training_loop.py::"
            "test_a_profile_has_whole_steps_and_ends_before_the_next_one",
        ),
        Mutant(
            "a recording begins while no step runs",
            "megatron/loop/profile.py",
            "done == flags.profile_step_start or done >= flags.profile_step_end",
            "done >= flags.profile_step_end",
            "tests/unit/loop/test_profile.py::test_no_step_runs_at_both_ends_of_a_recording",
        ),
        Mutant(
            "a communication lasts until it is done, and not as long as its call",
            "megatron/mpu/collectives.py",
            "    spans.last_until(begun, end)\n",
            "",
            "tests/distributed/loop/test_profile.py::"
            "test_what_is_computed_before_a_result_is_there_overlaps",
        ),
        Mutant(
            "a wait is no computation",
            "megatron/loop/overlap.py",
            "without(union(intervals), union(others.get(thread, ())))",
            "without(union(intervals), ())",
            "tests/unit/loop/test_overlap.py::"
            "test_operators_run_beside_communication_and_waits_do_not",
        ),
        Mutant(
            "calls of a group that run at once count once",
            "megatron/loop/overlap.py",
            "            found[-1] = Interval(found[-1].start, max(found[-1].stop, stop))",
            "            found.append(Interval(start, stop))",
            "tests/unit/loop/test_overlap.py::test_stretches_of_time_are_sets",
        ),
        Mutant(
            "the state of ranks is compared while training",
            "megatron/loop/training_loop.py",
            "            AgreeOnState(self.engine, self.world, flags.check_agreement_interval),\n",
            "",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "the comparison of state is made",
            "megatron/loop/hooks.py",
            "            agree_on_state(state_of(progress, self.engine), self.world)",
            "            pass",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "each step's numbers are checked",
            "megatron/loop/training_loop.py",
            "            CheckNumbers(flags, self.engine),\n",
            "",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "data files are looked at again while training",
            "megatron/training.py",
            "                CheckData(data, config.training.check_agreement_interval),\n",
            "",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "validation is among the hooks",
            "megatron/training.py",
            "                Validate(loop, data),\n",
            "",
            "tests/unit/test_training.py::test_intervals_stop_save_and_evaluate",
        ),
        Mutant(
            "saving is among the hooks",
            "megatron/loop/training_loop.py",
            "            save,\n            KeepAccount(",
            "            KeepAccount(",
            "tests/unit/test_training.py::test_intervals_stop_save_and_evaluate",
        ),
        Mutant(
            "what was not saved is saved at the end",
            "megatron/loop/training_loop.py",
            "        save.save_unsaved(progress)\n",
            "",
            "tests/unit/test_training.py::test_intervals_stop_save_and_evaluate",
        ),
        Mutant(
            "the norm of parameters is reported when asked for",
            "megatron/loop/training_loop.py",
            "self.config.logging.log_params_norm",
            "False",
            "tests/programs/tasks/finetune/test_training.py::"
            "test_the_norm_of_the_parameters_is_reported",
        ),
        Mutant(
            "a save on separate disks is refused",
            "megatron/training.py",
            "agree_on_files(config.checkpoint.save,",
            "agree_on_files(None,",
            "tests/distributed/loop/test_training_loop.py::"
            "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "fine-tuning refuses a save on separate disks",
            "tasks/finetune/training.py",
            "agree_on_files(config.checkpoint.save,",
            "agree_on_files(None,",
            "tests/programs/tasks/finetune/test_training.py::"
            "test_what_differs_between_ranks_ends_it_at_the_step_where_it_is_compared",
        ),
        Mutant(
            "DeepSpeed's JSON is announced",
            "megatron/loop/training_loop.py",
            "            announce_deepspeed(config, replicas=context.dp.size)",
            "            pass",
            "tests/programs/tasks/finetune/test_training.py::"
            "test_the_json_of_deepspeed_is_announced_and_stored",
        ),
        Mutant(
            "a tracker that fails does not end the run",
            "megatron/trackers/reporting.py",
            "            self._opened.pop(title, None)\n",
            "            raise\n",
            "tests/unit/trackers/test_reporting.py::"
            "test_a_tracker_that_fails_is_said_once_and_the_others_go_on",
        ),
        Mutant(
            "a tracker that failed is said once",
            "megatron/trackers/reporting.py",
            "            self._opened.pop(title, None)\n",
            "",
            "tests/unit/trackers/test_reporting.py::"
            "test_a_tracker_that_fails_is_said_once_and_the_others_go_on",
        ),
        Mutant(
            "a tracker that does not open does not end the run",
            "megatron/trackers/reporting.py",
            "        except Exception as error:\n            _say_failure(",
            "        except AssertionError as error:\n            _say_failure(",
            "tests/unit/trackers/test_reporting.py::"
            "test_a_tracker_that_does_not_open_is_said_and_the_others_do",
        ),
        Mutant(
            "configs are recorded without secrets",
            "megatron/loop/startup.py",
            "{title: redacted(values) for",
            "{title: dict(values) for",
            "tests/unit/loop/test_startup.py::test_flags_and_the_json_of_deepspeed_are_stored",
        ),
        Mutant(
            "a failure is said without the password in an address",
            "megatron/trackers/reporting.py",
            "words = redacted_failure(error)",
            "words = repr(error)",
            "tests/unit/trackers/test_reporting.py::"
            "test_a_tracker_that_fails_is_said_once_and_the_others_go_on",
        ),
        Mutant(
            "a resumed run keeps its name in trackers",
            "megatron/checkpointing.py",
            'get(RUN_NAME, {}).get("name", "")',
            'get(RUN_NAME, {}).get("", "")',
            "tests/distributed/trackers/test_reporting.py::"
            "test_a_resumed_run_is_one_run_and_its_key_stays_with_the_rank_that_writes",
        ),
        Mutant(
            "ranks that do not write forget keys",
            "megatron/initialize.py",
            "forget_variables(secrets_not_needed(",
            "tuple(secrets_not_needed(",
            "tests/distributed/trackers/test_reporting.py::"
            "test_a_resumed_run_is_one_run_and_its_key_stays_with_the_rank_that_writes",
        ),
        Mutant(
            "keys are looked for on the rank that writes alone",
            "megatron/trackers/reporting.py",
            "if rank == writing_rank(config.trackers, world_size) else ()",
            "",
            "tests/unit/preflight/test_trackers.py::"
            "test_a_key_is_looked_for_on_the_rank_that_writes_alone",
        ),
        Mutant(
            "only offline a run of Weights & Biases needs no key",
            "megatron/trackers/wandb.py",
            "mode in _WITHOUT_KEY or wandb.login(verify=False, prompt=False)",
            "mode or wandb.login(verify=False, prompt=False)",
            "tests/unit/trackers/test_wandb.py::"
            "test_a_key_that_is_absent_or_misshapen_is_said_without_the_key",
        ),
        Mutant(
            "Comet's messages do not repeat its key",
            "megatron/trackers/comet.py",
            "            handler.addFilter(_WithoutKey(key))",
            "            del handler",
            "tests/unit/trackers/test_comet.py::test_its_messages_do_not_repeat_the_key",
        ),
        Mutant(
            "a password on the command line is refused",
            "megatron/config/trackers.py",
            'if "@" in parts.netloc:',
            'if "@" in parts.path:',
            "tests/unit/config/test_trackers.py::"
            "test_a_password_on_the_command_line_is_refused_and_not_repeated",
        ),
        Mutant(
            "tokens per second count all replicas",
            "megatron/loop/report.py",
            "        tokens = plan.global_batch_size * plan.seq_length\n        self.iterations",
            "        tokens = plan.num_microbatches * plan.seq_length\n        self.iterations",
            "tests/distributed/loop/test_training_loop.py::"
            "test_throughput_is_that_of_the_global_batch",
        ),
        Mutant(
            "samples per second count all replicas",
            "megatron/loop/report.py",
            "        self.samples += plan.global_batch_size",
            "        self.samples += plan.num_microbatches",
            "tests/distributed/loop/test_training_loop.py::"
            "test_throughput_is_that_of_the_global_batch",
        ),
        Mutant(
            "FLOPs are shared out over ranks",
            "megatron/loop/report.py",
            "elapsed / self._world_size / 1e12",
            "elapsed / 1e12",
            "tests/distributed/loop/test_training_loop.py::"
            "test_throughput_is_that_of_the_global_batch",
        ),
        Mutant(
            "pauses are not counted as training",
            "megatron/loop/report.py",
            "        self._window.started += time.perf_counter() - self._stopped",
            "        pass",
            "tests/distributed/loop/test_training_loop.py::"
            "test_throughput_is_that_of_the_global_batch",
        ),
        Mutant(
            "a batch ramp counts in integers",
            "megatron/progress.py",
            "consumed_samples * steps // samples)",
            "int(consumed_samples / (samples / steps)))",
            "tests/unit/test_progress.py::test_no_step_of_a_ramp_comes_early_or_late_by_rounding",
        ),
        Mutant(
            "a component of a blend that is one sample short is refused",
            "megatron/data/blendable_dataset.py",
            "if wanted > len(dataset):",
            "if wanted > len(dataset) + 1:",
            "tests/unit/data/test_blendable_dataset.py::"
            "test_a_component_that_lacks_one_sample_is_refused_and_one_that_just_suffices_is_not",
        ),
        Mutant(
            "a component of a blend that just suffices is taken",
            "megatron/data/blendable_dataset.py",
            "if wanted > len(dataset):",
            "if wanted >= len(dataset):",
            "tests/unit/data/test_blendable_dataset.py::"
            "test_a_component_that_lacks_one_sample_is_refused_and_one_that_just_suffices_is_not",
        ),
        Mutant(
            "correct passages of strict LAMBADA are counted",
            "tasks/zeroshot/lambada.py",
            "LambadaResult(sum(score.is_greedy for score in scores)",
            "LambadaResult(0 if strict else sum(score.is_greedy for score in scores)",
            "tests/programs/tasks/zeroshot/test_program.py::"
            "test_the_last_token_alone_counts_unless_it_is_strict",
        ),
        Mutant(
            "a word of strict LAMBADA begins with its space",
            "tasks/zeroshot/lambada.py",
            'tokenizer.tokenize(" " + words[-1])',
            "tokenizer.tokenize(words[-1])",
            "tests/programs/tasks/zeroshot/test_program.py::"
            "test_the_last_token_alone_counts_unless_it_is_strict",
        ),
        Mutant(
            "the clock goes on after a pause",
            "megatron/loop/training_loop.py",
            "        self._step_log.resume_clock()\n",
            "",
            "tests/distributed/loop/test_training_loop.py::"
            "test_throughput_is_that_of_the_global_batch",
        ),
        Mutant(
            "the report of a step is read before a save",
            "megatron/loop/training_loop.py",
            "if any(hook.precedes_next_step(self.started) for hook in self._hooks):",
            "if False:",
            "tests/unit/loop/test_training_loop.py::"
            "test_what_needs_the_weights_of_a_step_comes_before_the_next_one",
        ),
        Mutant(
            "the report of the last step is read before the end",
            "megatron/loop/training_loop.py",
            "        progress = steps.read()\n",
            "        progress = steps.read_up_to\n",
            "tests/unit/loop/test_training_loop.py::"
            "test_a_signal_travels_with_the_next_step_and_all_is_read_before_the_end",
        ),
        Mutant(
            "the report of a step is read once the next one runs",
            "megatron/loop/training_loop.py",
            "        self.signals = self._read()\n        self._running = plan, report, batches\n",
            "        self._running = plan, report, batches\n        self.signals = self._read()\n",
            "tests/unit/loop/test_training_loop.py::test_a_report_is_read_while_the_next_step_runs",
        ),
        Mutant(
            "a signal travels with a step",
            "megatron/loop/training_loop.py",
            "self.engine.start_step(_noted(raw, used), plan, self.stop.signals())",
            "self.engine.start_step(_noted(raw, used), plan, ())",
            "tests/unit/loop/test_training_loop.py::"
            "test_a_signal_travels_with_the_next_step_and_all_is_read_before_the_end",
        ),
        Mutant(
            "kernels wait for the batch that they read",
            "megatron/device.py",
            "    compute.wait_stream(stream)\n",
            "",
            "tests/unit/test_device.py::test_tensors_go_to_a_gpu_on_a_stream_of_their_own",
        ),
        Mutant(
            "batches go over a group that sends tensors of the host",
            "megatron/mpu/context.py",
            "return self.gloo_tp_cp or self.tp_cp",
            "return self.tp",
            "tests/distributed/mpu/test_context.py::"
            "test_batches_have_a_group_of_their_own_beside_nccl",
        ),
        Mutant(
            "tensor parallelism orders kernels on a GPU",
            "megatron/launch.py",
            'os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")',
            'os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")',
            "tests/unit/test_launch.py::"
            "test_tensor_parallelism_orders_kernels_unless_a_variable_contradicts_it",
        ),
        Mutant(
            "a background save is polled",
            "megatron/loop/training_loop.py",
            "            self.saves.poll()\n",
            "",
            "tests/distributed/loop/test_training_loop.py::"
            "test_a_save_beside_the_training_is_put_in_place_while_it_goes_on",
        ),
        Mutant(
            "a run waits for its last background save",
            "megatron/loop/training_loop.py",
            "        self.saves.wait()\n",
            "",
            "tests/laws/checkpoints/test_saves.py::"
            "test_saves_beside_the_training_change_no_bit_of_it_and_of_what_is_saved",
        ),
        Mutant(
            "a run listens to SIGTERM",
            "megatron/loop/training_loop.py",
            "        resources.enter_context(stop.listening())\n",
            "",
            "tests/programs/tasks/finetune/test_resume.py::"
            "test_a_signal_saves_the_state_and_the_next_start_goes_on",
        ),
        Mutant(
            "fine-tuning keeps its best weights",
            "tasks/finetune/epochs.py",
            "            self.save_best(progress)\n",
            "",
            "tests/programs/tasks/finetune/test_resume.py::"
            "test_a_run_that_is_complete_judges_its_best_epoch",
        ),
        Mutant(
            "ranges of iterations are skipped",
            "megatron/training.py",
            "    if skipped is not None:",
            "    if False:",
            "tests/laws/schedules/test_skips.py::test_what_is_skipped_is_read_and_not_trained_on",
        ),
        Mutant(
            "samples are cut to a curriculum's length",
            "megatron/training.py",
            "        return map(partial(truncate_batch, length=plan.seq_length), batches)",
            "        pass",
            "tests/laws/schedules/test_curriculum.py::"
            "test_samples_have_the_length_of_their_iteration",
        ),
    ),
    "config files": (
        Mutant(
            "the command line wins over config files",
            "megatron/arguments.py",
            "_translate([*files.words, *files.typed], parser, problems)",
            "_translate([*files.typed, *files.words], parser, problems)",
            _WORDS + "test_flags_win_over_later_files_over_earlier_ones_whatever_stands_first",
        ),
        Mutant(
            "a later config file wins over an earlier one",
            "megatron/config/files/words.py",
            "    for path in paths:\n",
            "    for path in reversed(paths):\n",
            _WORDS + "test_flags_win_over_later_files_over_earlier_ones_whatever_stands_first",
        ),
        Mutant(
            "two spellings of a flag in a config file are one",
            "megatron/config/files/words.py",
            "return flag if action is None else action.dest",
            "return flag",
            _WORDS + "test_null_and_an_empty_list_unset_what_a_file_before_sets",
        ),
        Mutant(
            "a key that stands twice in YAML is refused",
            "megatron/config/files/yaml_text.py",
            "            if key in values:\n",
            "            if key is None:\n",
            "tests/unit/config/files/test_yaml_text.py::test_what_is_wrong_is_said_with_its_line",
        ),
        Mutant(
            "a preset that is named later replaces the shape of files before it",
            "megatron/config/files/words.py",
            "    if preset := newer.get(_PRESET):\n",
            "    if (preset := newer.get(_PRESET)) and not merged:\n",
            _WORDS + "test_a_preset_named_later_wins_over_shapes_of_files_before",
        ),
        Mutant(
            "a printed run is read back as it is, whatever flags beside each other mean",
            "megatron/arguments.py",
            " and meaning.field in files.places:",
            " and not files:",
            "tests/unit/config/files/test_printing.py::"
            "test_a_weight_that_was_left_out_is_not_one_of_0_that_was_given",
        ),
    ),
    "configs of gpt-neox": (
        Mutant(
            "accumulation is derived only where a config says null",
            "megatron/config/neox/mapping.py",
            """    if reader.is_null("gradient_accumulation_steps"):\n""",
            """    if not reader.has("gradient_accumulation_steps"):\n""",
            "tests/unit/config/neox/test_mapping.py::test_what_cannot_be_taken_is_refused_by_name",
        ),
        Mutant(
            "batches that do not agree are refused",
            "megatron/config/neox/batches.py",
            " or train != micro * steps * replicas:",
            " or train < micro * steps * replicas:",
            "tests/unit/config/neox/test_batches.py::test_sizes_that_do_not_agree_are_refused",
        ),
        Mutant(
            "a gated MLP has two thirds of the width, rounded up",
            "megatron/config/neox/network.py",
            "math.ceil(width / (2 * multiple))",
            "round(width / (2 * multiple))",
            "tests/unit/config/neox/test_network.py::test_widths_are_those_of_neoxs_rule",
        ),
        Mutant(
            "a linear decay that neox clips is refused",
            "megatron/config/neox/course.py",
            """    if style == "linear" and floor:\n""",
            """    if style == "linear" and not style:\n""",
            "tests/unit/config/neox/test_course.py::test_what_has_no_counterpart_is_refused",
        ),
        Mutant(
            "iterations that are named are saved",
            "megatron/loop/hooks.py",
            "return is_due or progress.iteration in self._also",
            "return is_due",
            "tests/unit/loop/test_hooks.py::"
            "test_a_checkpoint_is_saved_at_each_interval_and_the_last_step_once",
        ),
        Mutant(
            "neox's defaults hold where a config says nothing",
            "megatron/config/neox/mapping.py",
            "rule.default if value is None else value, key",
            "value, key",
            "tests/unit/config/neox/test_mapping.py::test_neoxs_defaults_hold_where_ours_differ",
        ),
        Mutant(
            "a key in two files is one, with dashes too",
            "megatron/config/neox/mapping.py",
            """        key = spelled.replace("-", "_")\n        if key in config:\n""",
            """        key = spelled.replace("-", "_")\n        if spelled in config:\n""",
            "tests/unit/config/neox/test_mapping.py::"
            "test_a_key_in_two_files_is_refused_in_whatever_spelling",
        ),
        Mutant(
            "a window of neox counts the tokens before a token",
            "megatron/config/neox/network.py",
            "width + 1,",
            "width,",
            "tests/unit/config/neox/test_network.py::test_keys_become_fields",
        ),
    ),
}
