"""Mutants of config files."""

from tests.mutants.mutant import Mutant

_WORDS = "tests/unit/config/files/test_words.py::"

SUBJECTS: dict[str, tuple[Mutant, ...]] = {
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
