"""Mutants of checks that the registry of assumptions names (docs/assumptions.toml)."""

from tests.mutants.mutant import Mutant

_PROBE = "megatron/preflight/probe.py"
_DRAWN = "megatron/loop/drawn_samples.py"
_FROZEN = "tests/laws/test_frozen.py::"
_UNIT_DRAWN = "tests/unit/loop/test_drawn_samples.py::"
_LOOP = (
    "tests/distributed/loop/test_training_loop.py::"
    "test_what_differs_between_ranks_ends_the_run_at_the_step_where_it_is_compared"
)

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "assumptions": (
        Mutant(
            "a run probes its machine once the ranks have joined",
            "megatron/initialize.py",
            "        probe_machine(dtypes_of(config.precision), unchecked)\n",
            "",
            "tests/distributed/preflight/test_probe.py::"
            "test_a_rank_that_computes_or_communicates_wrongly_is_named_by_all",
        ),
        Mutant(
            "one wrong element of a product is found",
            _PROBE,
            '    if wrong:\n        return f"{name} in',
            '    if wrong > _SIDE:\n        return f"{name} in',
            "tests/unit/preflight/test_probe.py::test_one_wrong_element_is_found_and_named",
        ),
        Mutant(
            "a part that is missing in a sum is found",
            _PROBE,
            "(result != 1)",
            "(result > 1)",
            "tests/distributed/preflight/test_probe.py::"
            "test_a_rank_that_computes_or_communicates_wrongly_is_named_by_all",
        ),
        Mutant(
            "the dtype of the model is probed",
            _PROBE,
            "(precision.precision.value, precision.gradient_precision.value, ",
            "(precision.gradient_precision.value, ",
            "tests/unit/preflight/test_probe.py::test_the_dtypes_are_those_of_the_run",
        ),
        Mutant(
            "versions of a GPU's libraries are compared between ranks",
            "megatron/device.py",
            "    return versions\n",
            "    return {}\n",
            "tests/unit/test_device.py::test_versions_of_the_libraries_of_a_gpu_are_known",
        ),
        Mutant(
            "drawn samples are compared while training",
            "megatron/training.py",
            "            self.data.agree_on_samples(progress)\n",
            "",
            _LOOP,
        ),
        Mutant(
            "drawn samples are compared before a save",
            "megatron/training.py",
            "    data.check_unchanged()\n    data.agree_on_samples(progress)\n",
            "    data.check_unchanged()\n",
            _LOOP,
        ),
        Mutant(
            "a reader that draws other samples than planned is named",
            _DRAWN,
            "if report.drawn != report.planned:",
            "if False:",
            _UNIT_DRAWN + "test_one_other_sample_is_found_and_its_rank_named",
        ),
        Mutant(
            "all replicas together draw the plan",
            _DRAWN,
            "if together != (",
            "if together[0] != planned.size and together != (",
            _UNIT_DRAWN + "test_two_ranks_that_take_one_replicas_part_are_found",
        ),
        Mutant(
            "the content of batches is compared within a replica",
            _DRAWN,
            "self._checksum = zlib.crc32(values.numpy().data, self._checksum)",
            "zlib.crc32(values.numpy().data, self._checksum)",
            "tests/distributed/loop/test_drawn_samples.py::"
            "test_a_token_that_differs_within_a_replica_is_found",
        ),
        Mutant(
            "samples of earlier epochs are planned in their order",
            "megatron/data/data_samplers.py",
            "for epoch in range(start // total, ",
            "for epoch in range((stop - 1) // total, ",
            "tests/unit/loop/test_data_feed.py::test_what_a_feed_draws_is_what_was_planned",
        ),
        Mutant(
            "each module gets its own mode back",
            "megatron/model/evaluation_mode.py",
            "        for each in training:\n            each.training = True\n",
            "        if training:\n            module.train()\n",
            "tests/unit/model/test_evaluation_mode.py::test_every_module_gets_its_own_mode_back",
        ),
        Mutant(
            "a loaded model is checked before its first use",
            "megatron/trained_model.py",
            "    check_inference_model(model, run.context, ",
            "    len((model, build.ctx)), dict(",
            "tests/unit/test_trained_model.py::test_a_model_is_rebuilt_from_its_checkpoint_alone",
        ),
        Mutant(
            "ranks that share a model compute the same hidden states",
            "megatron/inference/model_checks.py",
            "(model.layer_range, _checksum(hidden))",
            "(model.layer_range, 0)",
            "tests/distributed/inference/test_model_checks.py::test_ranks_that_differ_are_found_by_all",
        ),
        Mutant(
            "an end of document is compared with the vocabulary at every generation",
            "megatron/inference/generate.py",
            "    check_end_id(eod, vocabulary)\n",
            "",
            "tests/unit/inference/test_generate.py::test_requests_without_a_meaning_are_refused",
        ),
        Mutant(
            "the default number of new tokens fits into memory",
            "megatron/inference/generate.py",
            "        here = min(here, blocks // len(prompts) * BLOCK_SIZE)\n",
            "",
            "tests/unit/inference/test_generate.py::"
            "test_without_a_number_the_cache_fits_into_the_free_memory",
        ),
        Mutant(
            "a run tells how many ranks share the memory of its host",
            "megatron/initialize.py",
            "launch.device_index, ranks_of_host=ranks_of_host)",
            "launch.device_index)",
            "tests/distributed/test_initialize.py::"
            "test_ranks_with_other_flags_are_named_and_a_retry_works",
        ),
        Mutant(
            "a peak is the kernel's mark and not what is in memory now",
            "megatron/host.py",
            'own = resident_bytes("VmHWM")',
            'own = resident_bytes("VmRSS")',
            "tests/unit/test_host.py::test_a_short_spike_is_seen_and_forgotten_after_a_reset",
        ),
        Mutant(
            "data workers count in the peak with children",
            "megatron/host.py",
            "    if not with_children:\n        return own\n",
            "    return own\n",
            "tests/unit/test_host.py::test_a_short_spike_is_seen_and_forgotten_after_a_reset",
        ),
        Mutant(
            "high-water marks begin anew",
            "megatron/host.py",
            '_CLEAR_HIGH_WATER_MARK = "5"',
            '_CLEAR_HIGH_WATER_MARK = "1"',
            "tests/unit/test_host.py::test_a_short_spike_is_seen_and_forgotten_after_a_reset",
        ),
        Mutant(
            "keys of DeepSpeed's monitors are looked for",
            "megatron/trackers/reporting.py",
            "*(monitors_of(config) if rank == 0 else ())",
            "*()",
            "tests/unit/preflight/test_trackers.py::"
            "test_a_monitor_of_deepspeed_needs_its_library_and_a_key_on_rank_0",
        ),
        Mutant(
            "frozen parameters are in no gradient buffer of a layout",
            "megatron/optimizer/replicated_grads.py",
            "if is_sequence_parallel(parameter) and parameter.requires_grad:",
            "if is_sequence_parallel(parameter):",
            _FROZEN + "test_every_layout_trains_the_same_and_leaves_the_same",
        ),
        Mutant(
            "frozen parameters are not shared out",
            "megatron/optimizer/sharded_parameters.py",
            "[parameter for parameter in parameters if parameter.requires_grad]",
            "list(parameters)",
            _FROZEN + "test_every_layout_trains_the_same_and_leaves_the_same",
        ),
    ),
}
