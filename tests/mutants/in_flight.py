"""Mutants of what a run notices while it trains: ranks that are slow, numbers that are wrong."""

from tests.mutants.mutant import Mutant

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "numbers that went wrong": (
        Mutant(
            "ranks are compared by all tensors that they computed, not by the bad ones",
            "megatron/engine/diagnosis.py",
            "            number, is_finite = next(numbers), torch.isfinite(tensor)\n",
            "            number, is_finite = len(findings), torch.isfinite(tensor)\n",
            "tests/distributed/engine/test_diagnosis.py::"
            "test_the_first_module_that_is_not_finite_is_named_on_all_ranks",
        ),
        Mutant(
            "a gradient comes first in the last layer",
            "megatron/engine/diagnosis.py",
            "-place if is_backward else place",
            "place",
            "tests/unit/engine/test_diagnosis.py::"
            "test_a_gradient_of_a_later_layer_comes_before_one_of_an_earlier",
        ),
        Mutant(
            "the step that went wrong is computed again, not the one after it",
            "megatron/loop/training_loop.py",
            "            steps.add(plan, report, used)\n",
            "            steps.add(plan, report, ())\n",
            "tests/distributed/engine/test_diagnosis.py::"
            "test_the_first_module_that_is_not_finite_is_named_on_all_ranks",
        ),
        Mutant(
            "tokens of experts that were counted again are forgotten",
            "megatron/engine/native.py",
            "                if counted is not None:\n                    counted.forget()\n",
            "                pass\n",
            "tests/unit/engine/test_diagnosis.py::test_computing_again_changes_nothing_of_the_run",
        ),
        Mutant(
            "a micro-batch that is computed again drops the same",
            "megatron/engine/native.py",
            "    return of(first + microbatch)\n",
            "    return of(microbatch)\n",
            "tests/unit/engine/test_diagnosis.py::"
            "test_a_micro_batch_is_computed_again_with_its_own_samples",
        ),
        Mutant(
            "gradients are compared too",
            "megatron/engine/diagnosis.py",
            "            if parameter.requires_grad:\n",
            "            if False:\n",
            "tests/unit/engine/test_diagnosis.py::"
            "test_one_bit_that_differs_the_second_time_is_found",
        ),
        Mutant(
            "one bit of a float64 counts",
            "megatron/engine/diagnosis.py",
            "bits.sum(dtype=torch.int64)",
            "bits.double().sum()",
            "tests/unit/engine/test_diagnosis.py::"
            "test_one_bit_that_differs_the_second_time_is_found",
        ),
        Mutant(
            "shares of gradients are complete before they are compared",
            "megatron/engine/native.py",
            "                    self._replica.finish(before=self._reduce_held)\n",
            "                    pass\n",
            "tests/distributed/engine/test_diagnosis.py::test_no_share_of_a_gradient_stays_under_way",
        ),
        Mutant(
            "the first of several skipped steps is searched",
            "megatron/loop/anomaly.py",
            "    if stop or too_many or progress.nonfinite_in_a_row == 1:\n",
            "    if stop or too_many:\n",
            "tests/unit/loop/test_anomaly.py::test_the_origin_is_part_of_the_message",
        ),
    ),
    "loss spikes": (
        Mutant(
            "a spike is measured by the median",
            "megatron/loop/spikes.py",
            "    return loss > factor * median(before)\n",
            "    return loss > factor * max(before)\n",
            "tests/unit/loop/test_spikes.py::"
            "test_a_spike_is_above_the_factor_times_the_median_of_those_before",
        ),
        Mutant(
            "the losses before a spike come with the checkpoint",
            "megatron/checkpointing.py",
            "        RECENT_LOSSES: {",
            "        RUN_NAME: {",
            "tests/distributed/loop/test_spikes.py::"
            "test_a_run_that_goes_back_is_one_that_passed_over_the_iterations",
        ),
        Mutant(
            "the next start passes over what is recorded",
            "megatron/training.py",
            "    config = with_recorded_skips(runtime.config, context)\n",
            "    config = runtime.config\n",
            "tests/distributed/loop/test_spikes.py::"
            "test_a_run_that_goes_back_is_one_that_passed_over_the_iterations",
        ),
        Mutant(
            "iterations are passed over from the checkpoint on",
            "megatron/loop/spikes.py",
            "        first, last = self._saved_iteration() + 1, progress.iteration\n",
            "        first, last = progress.iteration, progress.iteration\n",
            "tests/unit/loop/test_spikes.py::"
            "test_going_back_records_the_iterations_since_the_checkpoint",
        ),
        Mutant(
            "a loss that is not finite is not remembered",
            "megatron/loop/spikes.py",
            "        if math.isfinite(loss):\n",
            "        if True:\n",
            "tests/unit/loop/test_spikes.py::test_losses_that_are_not_finite_are_not_remembered",
        ),
        Mutant(
            "ranges that are there already stay",
            "megatron/checkpoint/folder/skips.py",
            "    words = (*recorded_skips(folder), ",
            "    words = (",
            "tests/unit/checkpoint/folder/test_skips.py::"
            "test_ranges_are_added_to_those_that_are_there",
        ),
        Mutant(
            "who goes back may be started again",
            "megatron/errors.py",
            "    exit_code = 68\n    retryable = True\n",
            "    exit_code = 68\n    retryable = False\n",
            "tests/unit/loop/test_spikes.py::"
            "test_going_back_records_the_iterations_since_the_checkpoint",
        ),
    ),
    "memory marks": (
        Mutant(
            "the memory of an evaluation is none of its steps",
            "megatron/peers/activity.py",
            "                self._mark(section)\n",
            "                pass\n",
            "tests/unit/peers/test_activity.py::"
            "test_memory_is_marked_where_it_rises_and_looked_at_outside_of_steps_alone",
        ),
        Mutant(
            "the marks are printed at the end",
            "megatron/training.py",
            "        announce_memory(runtime.activity, context.world)\n",
            "",
            "tests/programs/test_pretrain_gpt.py::test_two_ranks_train_evaluate_and_save",
        ),
        Mutant(
            "memory has a mark where it rose",
            "megatron/peers/activity.py",
            "        if peak > max(self._marks.values(), default=0):\n",
            "        if True:\n",
            "tests/unit/loop/test_memory_marks.py::test_marks_are_logged_where_there_are_any",
        ),
        Mutant(
            "steps do not look at memory",
            "megatron/peers/activity.py",
            "        if not self._iteration:\n",
            "        if True:\n",
            "tests/unit/peers/test_activity.py::"
            "test_memory_is_marked_where_it_rises_and_looked_at_outside_of_steps_alone",
        ),
        Mutant(
            "the rank that needed most is named",
            "megatron/loop/memory_marks.py",
            "        highest = max(marks)\n",
            "        highest = marks[0]\n",
            "tests/unit/loop/test_memory_marks.py::"
            "test_the_line_has_the_highest_mark_of_each_section",
        ),
    ),
    "stragglers": (
        Mutant(
            "waits for other ranks are no computing",
            "megatron/peers/activity.py",
            "return StepTimes(in_steps - peers, self._step_data, peers)",
            "return StepTimes(in_steps, self._step_data, peers)",
            "tests/distributed/loop/test_stragglers.py::"
            "test_the_rank_that_is_slow_in_its_own_work_is_named",
        ),
        Mutant(
            "waits in evaluations are none of a step",
            "megatron/peers/activity.py",
            "            if self._section == STEP:\n                self._step_peers",
            "            if self._section:\n                self._step_peers",
            "tests/unit/peers/test_activity.py::test_waits_are_counted_within_steps_alone",
        ),
        Mutant(
            "a wait between pipeline stages is a wait",
            "megatron/pipeline/p2p.py",
            "nullcontext(), waiting_for(self._group):",
            "nullcontext():",
            "tests/distributed/loop/test_stragglers.py::"
            "test_the_rank_that_is_slow_in_its_own_work_is_named",
        ),
        Mutant(
            "a rank is compared with the median, not with the fastest",
            "megatron/loop/stragglers.py",
            "return Slowest(rank, seconds[rank], median_low(seconds))",
            "return Slowest(rank, seconds[rank], min(seconds))",
            "tests/unit/loop/test_stragglers.py::"
            "test_a_rank_that_takes_longest_is_found_whatever_the_others_take",
        ),
        Mutant(
            "a report is of the steps since the one before",
            "megatron/loop/stragglers.py",
            "            self._steps, self._before = 0, times\n",
            "            self._steps = 0\n",
            "tests/unit/loop/test_stragglers.py::"
            "test_a_report_is_of_the_steps_since_the_one_before",
        ),
    ),
}
