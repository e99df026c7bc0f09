"""Errors in plans of steps of ranks that are not there."""

from tests.mutants.mutant import Mutant

_UNIT = "tests/unit/planning/"
_LAYOUTS, _SEARCH = f"{_UNIT}test_layouts.py::", f"{_UNIT}test_search.py::"
_REAL = "tests/distributed/planning/test_rehearsal.py::test_a_plan_is_what_ranks_send_and_keep"
_OTHERS = (
    "tests/distributed/planning/test_rehearsal.py::"
    "test_a_plan_of_another_model_is_what_ranks_send_and_keep"
)
_REHEARSAL = f"{_UNIT}test_rehearsal.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "planning": (
        Mutant(
            "each stage receives what the one before it hands over",
            "megatron/planning/rehearsal.py",
            "self._headers = {header_into(at): carry for at, carry in enumerate(carries)}",
            "self._headers = {header_into(at): carries[1] for at in range(len(carries))}",
            f"{_OTHERS}[T5, the decoder begins with the third of four stages]",
        ),
        Mutant(
            "a search checks layouts with the data of the program",
            "megatron/planning/layouts.py",
            "run.tokenizer, reads=reads)",
            "run.tokenizer)",
            f"{_LAYOUTS}test_layouts_of_a_model_with_a_decoder_are_found",
        ),
        Mutant(
            "both towers of a retriever are counted",
            "megatron/model/retrieval/accounting.py",
            "return len(set(retrieval.towers)) * tower",
            "return tower",
            "tests/unit/preflight/test_memory.py::"
            "test_weights_and_state_are_those_of_a_rehearsed_step[ict]",
        ),
        Mutant(
            "a step saves activations of both towers",
            "megatron/preflight/activations.py",
            "[num_towers * sum(of_stages)",
            "[sum(of_stages)",
            "tests/unit/preflight/test_activations.py::"
            "test_every_stage_of_a_rehearsed_step_takes_more[two towers]",
        ),
        Mutant(
            "a ViT has no vocabulary",
            "megatron/preflight/memory.py",
            "    if kind is DatasetKind.IMAGES:\n",
            "    if kind is DatasetKind.MOCK:\n",
            "tests/unit/preflight/test_memory.py::"
            "test_weights_and_state_are_those_of_a_rehearsed_step[vit]",
        ),
        Mutant(
            "a checkpoint has the state of parameters that other replicas update",
            "megatron/planning/rehearsal.py",
            "for name, count in elements.items()}",
            "for name, count in list(elements.items())[:0]}",
            f"{_UNIT}test_saves.py::test_a_checkpoint_has_the_tensors_of_one_process",
        ),
        Mutant(
            "the save that is being written takes space beside those that are kept",
            "megatron/planning/saves.py",
            "        at_once = max(at_once, len(there))\n        gone",
            "        at_once = max(at_once, len(there) - 1)\n        gone",
            f"{_UNIT}test_saves.py::test_saves_are_counted_with_the_one_being_written",
        ),
        Mutant(
            "one rank of those that take the same samples reads",
            "megatron/planning/host_memory.py",
            "ranks_per_node // (grid.tp * grid.cp)",
            "ranks_per_node // grid.cp",
            f"{_UNIT}test_host_memory.py::test_one_rank_of_those_that_take_the_same_samples_reads",
        ),
        Mutant(
            "flags that make a run fit add up",
            "megatron/planning/fitting.py",
            "        together |= choice\n",
            "        together = dict(choice)\n",
            f"{_UNIT}test_fitting.py::test_flags_add_up_where_none_is_enough_alone",
        ),
        Mutant(
            "a layout fits only if every stage does",
            "megatron/planning/fitting.py",
            "peak = max(rank.bytes.peak for rank in ranks)",
            "peak = min(rank.bytes.peak for rank in ranks)",
            f"{_UNIT}test_fitting.py::test_the_first_flag_that_is_enough_is_the_last_that_is_tried",
        ),
        Mutant(
            "a training takes its split of a corpus alone",
            "megatron/preflight/supply.py",
            "    start, stop, *_ = split_ranges(data.split, corpus.num_documents)\n",
            "    start, _, _, stop = split_ranges(data.split, corpus.num_documents)\n",
            "tests/unit/preflight/test_supply.py::"
            "test_the_training_split_of_each_corpus_is_counted",
        ),
        Mutant(
            "files that are not on this machine are not reported as missing",
            "megatron/preflight/off_cluster.py",
            "    if absent:\n",
            "    if not absent:\n",
            "tests/unit/preflight/test_off_cluster.py::"
            "test_files_that_are_not_here_are_not_looked_into",
        ),
        Mutant(
            "a preflight ends with the flag that makes a step fit",
            "tools/preflight.py",
            "    if report.is_over_memory:\n        searched",
            "    if not report.is_over_memory:\n        searched",
            "tests/programs/tools/test_preflight.py::"
            "test_what_does_not_fit_ends_with_the_flag_that_makes_it_fit",
        ),
        Mutant(
            "the search misses no expert parallelism",
            "megatron/planning/layouts.py",
            '                choice["expert_tensor_parallel_size"] = 1\n',
            "                continue\n",
            f"{_LAYOUTS}test_whole_experts_are_shared_out_beside_tensor_parallelism",
        ),
        Mutant(
            "the search leaves out no micro-batch",
            "megatron/planning/layouts.py",
            "range(1, share + 1)",
            "range(1, share)",
            f"{_LAYOUTS}test_no_layout_is_missed_in_a_small_world",
        ),
        Mutant(
            "the flags of a proposed layout name whole experts",
            "megatron/planning/layouts.py",
            "(value != 1 or name not in (*_SIZES, _EP))",
            '(value != 1 or name == "micro_batch_size")',
            f"{_LAYOUTS}test_a_launch_takes_every_layout_as_its_flags_say[experts]",
        ),
        Mutant(
            "the bound of a search counts micro-batches that are in flight",
            "megatron/preflight/activations.py",
            "        in_flight = min(plan.num_stages - stage, num_microbatches)\n",
            "        in_flight = num_microbatches * plan.num_stages\n",
            f"{_LAYOUTS}test_the_bound_is_below_what_a_rehearsal_needs[dense]",
        ),
        Mutant(
            "a search proposes what every stage has memory for",
            "megatron/planning/search.py",
            "        if plan.bytes.peak > memory:\n",
            "        if plan.bytes.kept > memory:\n",
            f"{_SEARCH}test_every_layout_is_counted_once",
        ),
        Mutant(
            "flags that the user gave stay",
            "megatron/planning/layouts.py",
            "not fixed & set(group)",
            "True",
            f"{_LAYOUTS}test_given_flags_stay",
        ),
        Mutant(
            "a plan counts the messages that a rank sends",
            "megatron/planning/calls.py",
            "        if message.sends:\n            self.add",
            "        if not message.sends:\n            self.add",
            f"{_UNIT}test_calls.py::test_of_messages_those_count_that_are_sent",
        ),
        Mutant(
            "a planned rank knows which stages share a weight",
            "megatron/planning/calls.py",
            "return [stage[at] for stage in self._stages] or [obj] * len(ranks)",
            "return [obj] * len(ranks)",
            f"{_UNIT}test_calls.py::test_stages_that_are_not_there_gather_what_they_gave_before",
        ),
        Mutant(
            "memory of a tensor that is gone does not count",
            "megatron/planning/meter.py",
            "self._live -= self._held.pop(key)[1]",
            "self._held.pop(key)",
            f"{_UNIT}test_meter.py::test_bytes_count_while_a_tensor_is_alive_and_views_do_not[meta]",
        ),
        Mutant(
            "memory that a storage gets back counts",
            "megatron/planning/meter.py",
            "        for key in self._resized:\n            self._measure(key)\n",
            "",
            f"{_UNIT}test_meter.py::test_memory_that_comes_and_goes_is_followed",
        ),
        Mutant(
            "further micro-batches add as much as the last ones",
            "megatron/planning/rehearsal.py",
            "return first + int(times) * (second - first)",
            "return second + int(times) * (second - first)",
            f"{_REHEARSAL}test_few_microbatches_tell_of_all[1f1b]",
        ),
        Mutant(
            "a plan divides the tokens of experts over tensor-parallel ranks",
            "megatron/planning/rehearsal.py",
            "tokens = tokens // grid.tp * grid.expert_tp",
            "tokens = tokens * grid.expert_tp",
            f"{_REAL}[experts shared out, sequence parallel]",
        ),
        Mutant(
            "a plan starts from a step that has sent its headers",
            "megatron/planning/rehearsal.py",
            "run_step(engine, world, 1)  # the first step makes",
            "pass  # the first step makes",
            f"{_REAL}[zero-bubble]",
        ),
        Mutant(
            "stages that hand over different carries are not planned",
            "megatron/planning/rehearsal.py",
            "    if other:\n",
            "    if False:\n",
            f"{_REHEARSAL}test_stages_that_hand_over_something_else_are_refused",
        ),
        Mutant(
            "a gather moves the parts of all ranks",
            "megatron/planning/hardware.py",
            'whole = size * count if operation == "all_gather" else size',
            "whole = size",
            f"{_UNIT}test_hardware.py::test_the_time_of_a_call",
        ),
        Mutant(
            "reductions of replicas hide behind one micro-batch",
            "megatron/planning/step_time.py",
            "window = compute if every else compute / world.microbatches",
            "window = compute",
            f"{_UNIT}test_step_time.py::test_what_replicas_overlap_hides_behind_computation",
        ),
        Mutant(
            "on meta attention keeps no scores unless a kernel that does is chosen",
            "megatron/ops/attention.py",
            "if q.is_meta and _may_fuse() and not has_gradient:",
            "if q.is_meta and not has_gradient:",
            "tests/unit/ops/test_attention.py::"
            "test_scores_are_kept_on_meta_only_where_they_would_be_elsewhere",
        ),
        Mutant(
            "nothing is drawn for a parameter on meta",
            "megatron/model/init.py",
            "        if parameter.is_meta:\n            continue  # it has no values\n",
            "",
            "tests/unit/model/test_init.py::test_nothing_is_drawn_for_a_tensor_without_values",
        ),
    ),
}
