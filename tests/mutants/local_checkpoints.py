"""Mutants of local checkpoints: what a restart goes on from, and who holds whose state."""

from tests.mutants.mutant import Mutant

_UNIT = "tests/unit/checkpoint/local/test_checkpoints.py::"
_PLAN = "tests/unit/checkpoint/local/test_recovery.py::"
_NODES = "tests/distributed/checkpoint/local/test_checkpoints.py::"
_RUN = "megatron/checkpoint/local/checkpoints.py"
_RECOVERY = "megatron/checkpoint/local/recovery.py"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
    "local checkpoints": (
        Mutant(
            "one that is older than what is in --save does not serve",
            _RUN,
            "    if state.key.iteration < persistent:\n",
            "    if False:\n",
            _UNIT + "test_one_that_is_older_than_what_is_saved_is_passed_over",
        ),
        Mutant(
            "a run that was set back by hand begins there",
            _RUN,
            "    if state.persistent > persistent:\n",
            "    if False:\n",
            _UNIT + "test_a_run_that_was_set_back_by_hand_begins_where_it_was_set_to",
        ),
        Mutant(
            "flags are compared",
            _RUN,
            "        if values.get(name) != saved.get(group, {}).get(name)\n",
            "        if False\n",
            _UNIT + "test_a_run_with_other_flags_does_not_go_on_from_it",
        ),
        Mutant(
            "every byte is compared with its digest before a run goes on",
            _RUN,
            "state = verified_state(owner, directory, threads=self._threads)",
            "state = stored_state(owner, directory)",
            _UNIT + "test_a_damaged_one_is_passed_over_and_named",
        ),
        Mutant(
            "states of two saves are not mixed",
            _RUN,
            "lambda: Facts(0, secrets.token_hex(8), last",
            'lambda: Facts(0, "same", last',
            _NODES + "test_states_of_two_saves_of_one_iteration_are_not_mixed",
        ),
        Mutant(
            "former ones stay until all ranks have the new one",
            "megatron/checkpoint/local/folder.py",
            "        stage = self.stage(facts.owner, iteration)\n",
            "        stage = self.stage(facts.owner, iteration)\n"
            "        self.keep_only(facts.owner, iteration)\n",
            _NODES + "test_a_save_that_only_some_ranks_finished_is_not_gone_on_from",
        ),
        Mutant(
            "a node that comes back empty fetches the copies that it is to hold",
            _RECOVERY,
            "                for holder in holders_of[key.owner]\n",
            "                for holder in holders_of[key.owner][:1]\n",
            _PLAN + "test_a_lost_node_fetches_the_copies_that_it_held_too",
        ),
        Mutant(
            "a rank sends one copy at a time",
            _RECOVERY,
            "if all(other.source != one.source and other.target != one.target for other in step)",
            "if all(other.target != one.target for other in step)",
            _PLAN + "test_one_rank_that_holds_two_lost_states_sends_one_after_the_other",
        ),
        Mutant(
            "what arrives is compared with its digests",
            _RUN,
            "                verified_state(received.owner, stage, threads=self._threads)\n",
            "                pass\n",
            _NODES + "test_what_is_damaged_on_its_way_is_refused",
        ),
        Mutant(
            "a disk that is full keeps no peer waiting",
            "megatron/checkpoint/local/messages.py",
            "        except OSError as error:\n            self.error = error\n",
            "        except OSError as error:\n            raise error\n",
            "tests/distributed/checkpoint/local/test_messages.py::"
            "test_a_file_that_shrank_is_an_error_of_its_rank_and_no_peer_waits",
        ),
        Mutant(
            "a run that went on from one saves its last state in --save",
            "megatron/training.py",
            "local.persistent if local is not None and local.went_on else first",
            "first",
            "tests/laws/checkpoints/test_local.py::"
            "test_a_run_that_ends_where_it_went_on_saves_its_state",
        ),
    ),
}
