"""Mutants of the server of text generation."""

from tests.mutants.mutant import Mutant

APP = "tests/unit/serving/test_app.py"
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
            "megatron/serving/engine_thread.py",
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
            "tests/unit/serving/test_bodies.py::test_the_depth_of_any_body_is_known_at_once",
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
            "megatron/serving/engine_thread.py",
            "            self._fail_step(error)\n            return\n",
            "            raise\n",
            "tests/unit/serving/test_engine_thread.py::"
            "test_a_step_that_fails_ends_its_requests_and_the_next_ones_work",
        ),
        Mutant(
            "a step that does not end is noticed",
            "megatron/serving/engine_thread.py",
            "        if self._thread.is_alive() and silent_ns <= self._step_timeout_ns:\n",
            "        if self._thread.is_alive():\n",
            "tests/unit/serving/test_engine_thread.py::test_a_step_that_does_not_end_is_noticed",
        ),
        Mutant(
            "requests that wait are ended with the engine",
            "megatron/serving/engine_thread.py",
            "            for name in list(self._submitted):\n"
            "                self._end(name, state, detail)\n",
            "            self._submitted.clear()\n",
            "tests/unit/serving/test_engine_thread.py::"
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
}
