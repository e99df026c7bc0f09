"""Mutants of serving: experts that are shared out, starts, tools, and how much is proposed."""

from tests.mutants.mutant import Mutant

RANKS = "tests/distributed/serving/engine/test_model_engine.py"
START = "tests/unit/serving/ranks/test_replica_requests.py"
TOOLS = "tests/unit/serving/chat_tools"
GENERATE = "tests/unit/inference/test_generate.py"
CONTEXT = "tests/unit/mpu/test_context.py"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "serving": (
        Mutant(
            "tensor-parallel ranks share experts out where all have the same tokens",
            "megatron/model/experts/mixture.py",
            "            splits_tokens = self._split or build.repeats_tokens\n",
            "            splits_tokens = self._split\n",
            f"{RANKS}::test_ranks_serve_what_one_generates",
        ),
        Mutant(
            "each expert computes a token once, however many ranks have it",
            "megatron/model/experts/mixture.py",
            "        self._repeated = build.ctx.etp_ep if build.repeats_tokens else None\n",
            "        self._repeated = None\n",
            f"{RANKS}::test_each_token_is_computed_once_by_each_of_its_experts",
        ),
        Mutant(
            "each rank takes its own part of the tokens",
            "megatron/model/experts/mixture.py",
            ".chunk(group.size)[group.rank]",
            ".chunk(group.size)[0]",
            f"{RANKS}::test_ranks_serve_what_one_generates",
        ),
        Mutant(
            "the ranks of a model are the larger of its groups",
            "megatron/mpu/topology.py",
            "        smaller, larger = sorted((self.tp, self.expert_ranks))\n",
            "        smaller, larger = self.tp, self.expert_ranks\n",
            f"{CONTEXT}::test_the_ranks_of_a_whole_model_hold_dense_weights_and_experts",
        ),
        Mutant(
            "ranks whose groups of matrices and experts do not nest hold no whole model",
            "megatron/mpu/topology.py",
            "        if larger % smaller:\n",
            "        if False:\n",
            f"{CONTEXT}::test_ranks_that_hold_no_whole_model_are_refused",
        ),
        Mutant(
            "a replica has as many ranks as its experts need",
            "megatron/serving/engine/model_engine.py",
            "    replica = max(tp, ep * (tp if etp is None else etp)) * pp\n",
            "    replica = tp * pp\n",
            "tests/unit/serving/engine/test_model_engine.py::"
            "test_ranks_that_are_no_whole_replicas_are_refused",
        ),
        Mutant(
            "a request that follows an acknowledged start waits for it",
            "megatron/serving/engine/engine_thread.py",
            "            takes_requests = status.takes_requests or self._queued.takes_requests\n",
            "            takes_requests = status.takes_requests\n",
            f"{START}::test_a_request_that_comes_between_an_acknowledged_start_"
            "and_the_start_is_served_once",
        ),
        Mutant(
            "no request follows the task of a pause",
            "megatron/serving/ranks/engine_transitions.py",
            "self.takes_requests = self._state is ServingState.RUNNING and not ends\n",
            "self.takes_requests = self._state is ServingState.RUNNING\n",
            "tests/unit/serving/ranks/test_engine_transitions.py::"
            "test_requests_may_follow_the_task_of_a_start_and_not_that_of_a_pause",
        ),
        Mutant(
            "an engine has a task before its rank says so",
            "megatron/control/rank_connection.py",
            "        if output.tasks or output.requests:  # before anyone can know that they are "
            "acknowledged\n            self._on_output(output)\n"
            "        for data in output.data:\n"
            "            self.send(data)  # what is lost is repeated\n",
            "        for data in output.data:\n"
            "            self.send(data)\n"
            "        if output.tasks or output.requests:\n"
            "            self._on_output(output)\n",
            "tests/unit/control/test_rank_connection.py::"
            "test_an_engine_has_a_task_before_the_coordinator_hears_of_it",
        ),
        Mutant(
            "a grammar is read as such, and not as a regular expression",
            "megatron/serving/answer_grammars.py",
            "Grammar(GrammarKind.REGEX if is_regex else GrammarKind.LARK, value)",
            "Grammar(GrammarKind.REGEX, value)",
            "tests/unit/serving/test_answer_grammars.py::"
            "test_the_grammar_of_an_answer_is_said_in_any_of_the_usual_ways",
        ),
        Mutant(
            "a grammar that cannot be converted is refused",
            "megatron/inference/constraint.py",
            "        except ValueError as error:",
            "        except KeyError as error:",
            "tests/unit/inference/test_constraint.py::"
            "test_grammars_that_cannot_be_followed_are_refused",
        ),
        Mutant(
            "what stands behind the last call is not what stands between two",
            "megatron/serving/chat_tools/call_format.py",
            "    return second[0]\n",
            "    return one[2]\n",
            f"{TOOLS}/test_call_format.py::test_the_form_of_calls_is_that_of_the_template",
        ),
        Mutant(
            "the end of a message is no part of a call",
            "megatron/serving/chat_tools/call_format.py",
            "        after = _without_end(template, rest)\n",
            "        after = rest\n",
            f"{TOOLS}/test_call_format.py::test_the_form_of_calls_is_that_of_the_template",
        ),
        Mutant(
            "a template that ignores tools is refused",
            "megatron/serving/chat_tools/call_format.py",
            "        if prompt == without:\n",
            "        if False:\n",
            f"{TOOLS}/test_call_format.py::test_a_template_that_does_not_write_tools_is_refused",
        ),
        Mutant(
            "text that may begin a call is held back",
            "megatron/serving/chat_tools/call_reader.py",
            "        begun = next(fitting, 0)\n",
            "        begun = 0\n",
            f"{TOOLS}/test_call_reader.py::"
            "test_text_and_calls_do_not_depend_on_how_an_answer_is_cut",
        ),
        Mutant(
            "a function that is not among the tools is not called",
            "megatron/serving/chat_tools/call_reader.py",
            "        while opened is not None and opened[1] in self._names:\n",
            "        while opened is not None:\n",
            f"{TOOLS}/test_call_reader.py::test_an_answer_has_text_and_calls",
        ),
        Mutant(
            "arguments of a required call match their schema",
            "megatron/serving/chat_tools/tool_choice.py",
            "%json {json.dumps(schema)}",
            "%json {json.dumps(_NO_PARAMETERS)}",
            f"{TOOLS}/test_tool_choice.py::"
            "test_texts_of_a_required_choice_are_calls_whose_arguments_match",
        ),
        Mutant(
            "a named function is called once",
            "megatron/serving/chat_tools/tool_choice.py",
            '    is_one = chosen != "required" or body.parallel_tool_calls is False\n',
            "    is_one = body.parallel_tool_calls is False\n",
            f"{TOOLS}/test_tool_choice.py::"
            "test_a_named_function_is_called_once_and_parallel_calls_can_be_refused",
        ),
        Mutant(
            "the grammar of a required choice reaches the engine",
            "megatron/serving/conversion.py",
            "        grammar = answer.tools.grammar\n",
            "        grammar = None\n",
            "tests/unit/serving/test_server.py::"
            "test_the_official_client_calls_tools_whose_arguments_match_their_schema",
        ),
        Mutant(
            "tools may not imitate the template",
            "megatron/serving/served_model.py",
            '            self.template.check_contents([*contents, ("tools", ',
            '            self.template.check_contents(contents or [("tools", ',
            "tests/unit/serving/test_served_model.py::test_tools_may_not_imitate_the_template",
        ),
        Mutant(
            "rows of a static batch do not share a constraint",
            "megatron/inference/generate.py",
            "None if first_state is None else first_state.copy()",
            "first_state",
            f"{GENERATE}::test_each_row_follows_a_constraint_of_its_own",
        ),
        Mutant(
            "a constraint that breaks ends a static batch",
            "megatron/inference/generate.py",
            "            self._check_constraint(row)\n",
            "",
            f"{GENERATE}::test_each_row_follows_a_constraint_of_its_own",
        ),
        Mutant(
            "the package that follows grammars is looked for first",
            "tools/flags/grammar.py",
            '        check_packages(["llguidance"])\n',
            "        pass\n",
            "tests/programs/tools/flags/test_grammar.py::"
            "test_the_package_that_follows_grammars_is_missed_before_a_model_is_read",
        ),
        Mutant(
            "a draft model is whole on the rank that draws",
            "megatron/serving/engine/model_engine.py",
            "ForwardExecutor(draft.eval(), draft.build.ctx, blocks=limits.blocks)",
            "ForwardExecutor(draft.eval(), model.build.ctx, blocks=limits.blocks)",
            f"{RANKS}::test_ranks_serve_what_one_generates",
        ),
        Mutant(
            "a draft model is loaded on one rank",
            "megatron/trained_model.py",
            "    alone, streams = ParallelContext.single(), beside.model.build.streams\n",
            "    alone, streams = beside.ctx, beside.model.build.streams\n",
            "tests/unit/test_trained_model.py::"
            "test_a_draft_model_is_loaded_beside_a_model_of_the_same_tokenizer",
        ),
    ),
}
