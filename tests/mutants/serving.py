"""Mutants of the server of text generation."""

from tests.mutants.mutant import Mutant

APP = "tests/unit/serving/test_app.py"
RANKS = "tests/unit/serving/ranks"
SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "server": (
        Mutant(
            "a request ends with its client",
            "megatron/serving/generation.py",
            "                        backend.engine.abort(request.id)\n",
            "                        pass\n",
            f"{APP}::test_a_client_that_leaves_ends_its_request",
        ),
        Mutant(
            "nothing is kept of a request that has ended",
            "megatron/serving/engine/running_requests.py",
            "            self._samples.pop(sequence, None)\n",
            "            self._samples.get(sequence)\n",
            "tests/unit/serving/test_server.py::test_requests_leave_no_objects_behind",
        ),
        Mutant(
            "a soak finds requests that never end",
            "tests/support/serving/mixed_load.py",
            '        return HUNG, f"no end in {deadline_s} s"\n',
            '        return EXPIRED, ""\n',
            "tests/faults/test_serving_soak.py::test_a_request_that_never_ends_is_found",
        ),
        Mutant(
            "latency counts from the arrival, not from the send",
            "benchmarks/inference/open_loop.py",
            '"first token": [each.first - each.arrival',
            '"first token": [each.first - each.sent',
            "tests/programs/benchmarks/test_serve_benchmark.py::"
            "test_a_request_that_is_sent_late_counts_from_its_arrival",
        ),
        Mutant(
            "an engine that died ends the requests that wait for it",
            "megatron/serving/generation.py",
            "        if not status.is_alive:\n",
            "        if False:\n",
            f"{APP}::test_a_job_whose_engine_dies_ends",
        ),
        Mutant(
            "a stream that broke off has no [DONE]",
            "megatron/serving/responses.py",
            "                end = event(error.body)\n",
            "                end = event(error.body) + _DONE\n",
            f"{APP}::test_a_request_that_ends_early_says_so",
        ),
        Mutant(
            "text that may begin a stop string is held back",
            "megatron/serving/stop_strings.py",
            "        most = min(len(text), self._longest - 1)\n",
            "        most = 0\n",
            f"{APP}::test_streamed_text_is_the_text_at_once",
        ),
        Mutant(
            "of several stop strings the one that ends first counts",
            "megatron/serving/stop_strings.py",
            "text[: min(matches)[1]]",
            "text[: min(at for _, at in matches)]",
            "tests/unit/serving/test_stop_strings.py::"
            "test_any_pieces_of_a_text_give_what_it_gives_letter_by_letter",
        ),
        Mutant(
            "an unfinished character is held back",
            "megatron/tokenizer/token_text.py",
            "        return self._decoder.decode(spelled)\n",
            '        return spelled.decode(errors="replace")\n',
            "tests/unit/tokenizer/test_token_text.py::"
            "test_a_character_of_several_tokens_appears_when_it_is_complete",
        ),
        Mutant(
            "what would change the answer is refused",
            "megatron/serving/bodies.py",
            "        if name in fields and fields[name] not in nothing:\n",
            "        if False:\n",
            "tests/unit/serving/test_bodies.py::"
            "test_what_would_change_the_answer_is_refused_unless_it_asks_for_nothing",
        ),
        Mutant(
            "every string of a body is looked at once",
            "megatron/serving/bodies.py",
            """_STRINGS = re.compile(rb'"(?:[^"\\\\]++|\\\\.)*+"?', re.DOTALL)""",
            """_STRINGS = re.compile(rb'"(?:[^"\\\\]++|\\\\.)*+"', re.DOTALL)""",
            "tests/unit/serving/test_bodies.py::test_the_time_of_a_body_grows_with_its_length",
        ),
        Mutant(
            "a request needs a whole key",
            "megatron/serving/guard.py",
            "not any(matches)",
            "not given",
            "tests/unit/serving/test_guard.py::test_a_request_without_a_valid_key_is_refused",
        ),
        Mutant(
            "other names lead nowhere without a key",
            "megatron/serving/guard.py",
            "_LOOPBACK.fullmatch(",
            "_LOOPBACK.match(",
            "tests/unit/serving/test_guard.py::"
            "test_a_page_elsewhere_cannot_use_the_server_by_a_name_of_its_own",
        ),
        Mutant(
            "half a header is closed",
            "megatron/serving/connection.py",
            "        self._restart(self.server_limits.header_timeout, self._refuse_slow_headers)\n",
            "        pass\n",
            "tests/unit/serving/test_connection.py::"
            "test_half_a_header_is_closed_at_its_deadline_also_the_second_one",
        ),
        Mutant(
            "a client that reads nothing is dropped",
            "megatron/serving/connection.py",
            "        super().pause_writing()\n        self._expect_reader()\n",
            "        super().pause_writing()\n",
            "tests/unit/serving/test_connection.py::"
            "test_a_client_that_reads_nothing_is_dropped_and_its_request_ended",
        ),
        Mutant(
            "a body that is too large is refused",
            "megatron/serving/responses.py",
            "(is_last and size > most)",
            "False",
            "tests/unit/serving/test_responses.py::"
            "test_a_body_that_is_too_large_or_too_slow_is_refused",
        ),
        Mutant(
            "a server that stops lets nothing in",
            "megatron/serving/admission.py",
            "        if self.is_draining:\n            raise stopping()\n",
            "",
            "tests/unit/serving/test_server.py::"
            "test_a_signal_lets_requests_finish_and_refuses_new_ones",
        ),
        Mutant(
            "the system does not choose another port",
            "megatron/serving/server.py",
            "    if not 0 <= port < 1 << 16:",
            "    if False:",
            "tests/unit/serving/test_server.py::test_an_address_that_is_not_here_is_refused",
        ),
        Mutant(
            "a failed step ends its requests",
            "megatron/serving/engine/engine_thread.py",
            "            self._fail_step(error)\n            return\n",
            "            raise\n",
            "tests/unit/serving/engine/test_engine_thread.py::"
            "test_a_step_that_fails_ends_its_requests_and_the_next_ones_work",
        ),
        Mutant(
            "a step that does not end is noticed",
            "megatron/serving/engine/engine_thread.py",
            "        if self._thread.is_alive() and silent_ns <= self._step_timeout_ns:\n",
            "        if self._thread.is_alive():\n",
            "tests/unit/serving/engine/test_engine_thread.py::test_a_step_that_does_not_end_is_noticed",
        ),
        Mutant(
            "requests that wait are ended with the engine",
            "megatron/serving/engine/engine_thread.py",
            "            for name in self._requests.names:\n"
            "                self._end(name, state, detail)\n",
            "            self._submitted.clear()\n",
            "tests/unit/serving/engine/test_engine_thread.py::"
            "test_a_full_queue_refuses_and_stopping_ends_what_waits",
        ),
        Mutant(
            "the page allows no script but its own",
            "megatron/serving/page.py",
            "script-src {parts['script']}",
            "script-src 'unsafe-inline'",
            "tests/unit/serving/test_page.py::"
            "test_the_policy_allows_the_pages_own_script_and_style_alone",
        ),
    ),
    "serving ranks": (
        Mutant(
            "a follower compares its plans",
            "megatron/serving/ranks/follower.py",
            "        plan = self._following.follow(record)\n",
            "        plan = self._scheduler.plan(record.now_ns)\n",
            f"{RANKS}/test_follower.py::test_a_follower_stops_where_its_plan_or_the_round_differs",
        ),
        Mutant(
            "an error that other ranks may not find ends the engine",
            "megatron/serving/engine/engine_thread.py",
            "if not self._ranks.has_followers or is_of_request:",
            "if True:",
            f"{RANKS}/test_follower.py::"
            "test_an_error_that_the_other_ranks_may_not_find_ends_the_engine",
        ),
        Mutant(
            "an idle engine gives signs of life",
            "megatron/serving/engine/engine_thread.py",
            "                    self._ranks.send(IdleRound())\n",
            "                    pass\n",
            f"{RANKS}/test_follower.py::test_an_idle_engine_sends_rounds",
        ),
        Mutant(
            "a frozen request waits",
            "megatron/serving/engine/engine_thread.py",
            "                if self._requests and not self._transitions.is_held:\n",
            "                if self._submitted:\n",
            f"{RANKS}/test_engine_transitions.py::"
            "test_a_frozen_request_waits_and_goes_on_with_the_same_tokens",
        ),
        Mutant(
            "what a rank refuses is undone on all",
            "megatron/serving/ranks/engine_transitions.py",
            "            self._on_all_ranks(TaskKind.UNDO, prepare)\n"
            "            self.settled_epoch = prepare.epoch\n",
            "            self.settled_epoch = prepare.epoch\n",
            f"{RANKS}/test_engine_transitions.py::"
            "test_weights_that_a_rank_refuses_are_undone_on_all_and_the_engine_stays_paused",
        ),
        Mutant(
            "a drain waits for requests",
            "megatron/serving/ranks/engine_transitions.py",
            "        if self._draining is not None and not self._engine.unfinished:\n",
            "        if self._draining is not None:\n",
            f"{RANKS}/test_engine_transitions.py::"
            "test_a_drain_waits_for_requests_and_takes_no_others",
        ),
        Mutant(
            "new weights are put in place when all have them",
            "megatron/serving/ranks/rank_model.py",
            "                self._loaded = self._load(prepare.source)\n",
            "                self._loaded = self._load(prepare.source)\n"
            "                self._model.load_state_dict(self._loaded.state_dict())\n",
            f"{RANKS}/test_rank_model.py::test_new_weights_take_their_place_when_all_have_them",
        ),
        Mutant(
            "new weights empty the cache",
            "megatron/serving/ranks/engine_transitions.py",
            "                self._engine.drop_cache(prepare.weights)\n",
            "                pass\n",
            f"{RANKS}/test_engine_transitions.py::"
            "test_new_weights_empty_the_cache_with_their_version",
        ),
        Mutant(
            "an offloaded block comes back",
            "megatron/inference/paged_cache.py",
            "            self.pool.index_copy_(2, at, saved.to(self.pool.device))\n",
            "            pass\n",
            f"{RANKS}/test_rank_model.py::"
            "test_an_offloaded_cache_comes_back_and_gives_its_memory_meanwhile",
        ),
        Mutant(
            "a verdict that comes early is not lost",
            "megatron/serving/ranks/votes.py",
            "                self._done[done.epoch] = done\n",
            "                pass\n",
            f"{RANKS}/test_votes.py::test_a_result_is_reported_when_both_are_there",
        ),
        Mutant(
            "strangers do not reach the coordinator",
            "megatron/control/coordinator_server.py",
            "            if not await self._knows_secret(reader):\n",
            "            if not await self._knows_secret(reader) and False:\n",
            "tests/unit/control/test_rank_thread.py::"
            "test_a_connection_without_the_secret_is_closed_and_changes_nothing",
        ),
        Mutant(
            "operators need a key where others can connect",
            "megatron/serving/ranks/operator_api.py",
            "    if not keys and (has_api_keys or not is_local):\n",
            "    if False:\n",
            f"{RANKS}/test_operator_api.py::"
            "test_operators_need_their_own_key_and_none_only_on_this_machine",
        ),
        Mutant(
            "an operator's answer waits for the engine",
            "megatron/serving/ranks/operator_api.py",
            "        while is_made and",
            "        while False and",
            f"{RANKS}/test_operator_api.py::"
            "test_an_answer_comes_when_the_engine_has_made_the_transition",
        ),
        Mutant(
            "a moved request comes with what it asks for",
            "megatron/scheduling/control/service.py",
            "            self._send_to_replica(other, request, RequestStart, payload=payload)\n",
            "            self._send_to_replica(other, request, RequestStart)\n",
            "tests/unit/scheduling/control/test_service.py::TestEightFailures::"
            "test_what_a_request_asks_for_comes_to_its_replica_and_to_the_next_one",
        ),
        Mutant(
            "a replica that lost a request sends nothing to its client",
            "megatron/scheduling/control/routing.py",
            "        if found is None or found.replica != replica:\n",
            "        if found is None:\n",
            "tests/unit/scheduling/control/test_routing.py::"
            "test_a_request_that_has_given_nothing_is_moved_and_others_fail",
        ),
        Mutant(
            "a replica answers a request that it cannot serve",
            "megatron/serving/ranks/replica_requests.py",
            'self._send(RequestDone(*place, "failed", first_line(error)[:_MOST_DETAIL]))',
            "return",
            f"{RANKS}/test_replica_requests.py::"
            "test_a_request_that_cannot_begin_fails_with_the_reason",
        ),
        Mutant(
            "new weights wait for all replicas",
            "megatron/serving/ranks/operator_api.py",
            "                if isinstance(read, WeightsBody) and self._plane.missing:\n",
            "                if False:\n",
            f"{RANKS}/test_operator_api.py::test_new_weights_are_refused_while_ranks_are_missing",
        ),
        Mutant(
            "a lost rank counts while the engine waits for it",
            "megatron/serving/engine/engine_thread.py",
            "        if self._lost is not None:\n",
            "        if False:\n",
            f"{RANKS}/test_engine_transitions.py::"
            "test_an_engine_whose_ranks_are_lost_has_failed_while_its_thread_waits_for_them",
        ),
    ),
}
