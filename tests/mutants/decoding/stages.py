"""Mutants of generation by pipeline stages: what each holds, computes and sends, and when."""

from tests.mutants.mutant import Mutant

LINKS = "tests/distributed/inference/test_stage_links.py"
GRID = "tests/unit/mpu/test_topology.py"
TRAINED = "tests/unit/test_trained_model.py"
SCHEDULER = "megatron/scheduling/scheduler.py"
ENGINE = "megatron/serving/engine/engine_thread.py"
LOG = "megatron/serving/ranks/round_log.py"
STEPS = "tests/unit/scheduling/test_scheduler.py::TestSteps"
IN_FLIGHT = "tests/unit/serving/engine/test_steps_in_flight.py"
LOGS = "tests/unit/serving/ranks/test_round_log.py"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "stages that generate": (
        Mutant(
            "hidden states between stages have the dtype of the residual stream",
            "megatron/inference/stage_links.py",
            "model.build.stream_dtype",
            "model.build.dtype",
            f"{LINKS}::test_three_stages_generate_score_and_embed_what_one_does",
        ),
        Mutant(
            "a pool begins at the first layer of its stage",
            "megatron/inference/forward.py",
            "first_layer=model.blocks.start",
            "first_layer=0",
            f"{LINKS}::test_three_stages_generate_score_and_embed_what_one_does",
        ),
        Mutant(
            "a block takes the bytes of the layers of its stage",
            "megatron/inference/forward.py",
            "    layers = model.blocks.size\n",
            "    layers = config.num_layers\n",
            f"{LINKS}::test_a_stage_holds_and_caches_its_own_layers",
        ),
        Mutant(
            "a problem of one stage is found by all",
            "megatron/inference/model_checks.py",
            "all_gather_object(own, ctx.whole_model)",
            "all_gather_object(own, ctx.tp)",
            f"{LINKS}::test_a_problem_of_one_stage_is_found_by_all",
        ),
        Mutant(
            "a tied embedding is a matrix of products only where it is the head",
            "megatron/model/gpt_model.py",
            "is_tied = self.config.tied and self.has_head",
            "is_tied = self.config.tied",
            "tests/unit/model/test_gpt_model.py::"
            "test_a_stage_multiplies_by_the_embedding_only_where_it_is_the_head",
        ),
        Mutant(
            "the log of an engine reaches all stages",
            "megatron/serving/ranks/round_log.py",
            "return ctx.host_tp_cp if group.ranks == ctx.tp_cp.ranks else group",
            "return ctx.host_tp_cp",
            "tests/unit/serving/ranks/test_round_log.py::"
            "test_the_ranks_of_all_stages_are_one_engine",
        ),
        Mutant(
            "stages that share experts out hold the model together",
            "megatron/mpu/topology.py",
            "for stage in stages for rank in stage[first : first + larger]",
            "for stage in stages[:1] for rank in stage[first : first + larger]",
            f"{GRID}::test_the_ranks_of_a_whole_model_are_of_all_stages",
        ),
        Mutant(
            "a step that has no results has ended when the last stage has computed it",
            "megatron/inference/forward.py",
            "        if self._draws_alone and not _has_results(plan):\n",
            "        if False:\n",
            f"{LINKS}::test_a_step_has_ended_when_all_stages_have_computed_it",
        ),
        Mutant(
            "results go to the stage with the rank that draws",
            "megatron/inference/stage_links.py",
            "        leads = self._group.ranks[0] == self._ctx.whole_model.ranks[0]\n",
            "        leads = self._group.ranks[0] != self._ctx.whole_model.ranks[0]\n",
            f"{LINKS}::test_a_step_has_ended_when_all_stages_have_computed_it",
        ),
        Mutant(
            "virtual stages are refused",
            "megatron/trained_model.py",
            "    if plan.num_chunks > 1:\n",
            "    if False:\n",
            f"{TRAINED}::test_stages_are_cut_by_the_flags_and_generate_what_one_rank_does",
        ),
    ),
    "steps in flight": (
        Mutant(
            "a request is in one step at a time",
            SCHEDULER,
            "            if computed.isdisjoint(sample.id for sample in record.unfinished)\n",
            "",
            f"{STEPS}::test_alone_a_request_is_in_one_step_at_a_time",
        ),
        Mutant(
            "steps in flight have equally many decodes",
            SCHEDULER,
            "sum(decodes.values()) // self.limits.steps_in_flight)",
            "sum(decodes.values()) // 1)",
            f"{STEPS}::test_steps_in_flight_share_the_decodes_out",
        ),
        Mutant(
            "a request that is left out is so with all of its samples",
            SCHEDULER,
            "            if count == 0 or taken < share:\n",
            "            if count == 0 or taken + count <= share:\n",
            f"{STEPS}::test_a_request_has_all_of_its_samples_in_one_step",
        ),
        Mutant(
            "a request in flight keeps its blocks until its step has ended",
            SCHEDULER,
            "            for other in self._idle()\n            if other.seniority",
            "            for other in self._by_seniority()\n            if other.seniority",
            f"{STEPS}::test_a_request_in_flight_loses_its_blocks_after_its_step",
        ),
        Mutant(
            "the oldest step ends first",
            SCHEDULER,
            "self._in_flight[0] if self._in_flight else None",
            "self._in_flight[-1] if self._in_flight else None",
            f"{STEPS}::test_steps_in_flight_share_the_decodes_out",
        ),
        Mutant(
            "proposed tokens are counted with their own step",
            SCHEDULER,
            "        step = self._required(self._newest)\n",
            "        step = self._oldest()\n",
            f"{STEPS}::test_alone_a_request_is_in_one_step_at_a_time",
        ),
        Mutant(
            "the next step begins before the one of other requests has ended",
            ENGINE,
            "        if not begins or len(self._under_way) == ",
            "        if not begins or self._under_way or 0 == ",
            f"{IN_FLIGHT}::test_a_step_begins_before_the_one_of_other_requests_has_ended",
        ),
        Mutant(
            "what a step draws for a request that has ended is told to nobody",
            ENGINE,
            "        kept = [each for each in results if each.sequence in counting]\n",
            "        kept = list(results)\n",
            f"{IN_FLIGHT}::test_a_request_that_is_aborted_in_flight_gets_no_more_tokens_and_harms_no_other",
        ),
        Mutant(
            "scores of a request that has ended are not those of its neighbours",
            ENGINE,
            "            if not each.is_finite and each.sequence not in counting\n",
            "            if False\n",
            f"{IN_FLIGHT}::test_scores_of_an_ended_request_that_are_not_finite_concern_nobody",
        ),
        Mutant(
            "no step is in flight while ranks change their state",
            ENGINE,
            "        self._finish_all()\n        self._transitions.take(task)\n",
            "        self._transitions.take(task)\n",
            f"{IN_FLIGHT}::test_nothing_is_in_flight_when_all_ranks_do_something_else",
        ),
        Mutant(
            "no step is in flight when an engine stops",
            ENGINE,
            "        if self._under_way:\n            self._finish_all()\n            if",
            "        if self._under_way:\n            if",
            f"{IN_FLIGHT}::test_nothing_is_in_flight_when_all_ranks_do_something_else",
        ),
        Mutant(
            "a leader waits for messages that are no steps",
            LOG,
            "        if not isinstance(message, EngineStep):\n            self._messages.join()\n",
            "",
            f"{LOGS}::test_a_leader_goes_on_while_a_step_is_sent_and_waits_for_all_else",
        ),
        Mutant(
            "a leader does not wait for the others to come to a step",
            LOG,
            "        if not isinstance(message, EngineStep):\n            self._messages.join()\n",
            "        self._messages.join()\n",
            f"{LOGS}::test_a_leader_goes_on_while_a_step_is_sent_and_waits_for_all_else",
        ),
    ),
}
