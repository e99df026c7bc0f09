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
}
