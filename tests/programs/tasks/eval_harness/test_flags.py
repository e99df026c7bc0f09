"""The flags of LM-EVAL, in the harness's spelling and in that of bigscience's scripts."""

import pytest

from tasks.eval_harness.flags import harness_parser

WORDS = ["--load", "c", "--task_list", "a,b"]


def test_flags_are_spelled_as_in_the_harness_and_in_scripts() -> None:
    more = ["--results_path", "r", "--eval_fp32", "--num_fewshot", "3", "--batch-size", "8"]
    flags = harness_parser("LM-EVAL").parse_args([*WORDS, *more])
    assert (flags.tasks, flags.output, flags.fp32) == (["a,b"], "r", True)
    assert (flags.num_fewshot, flags.micro_batch_size) == (3, 8)


@pytest.mark.parametrize("more", ["--adaptive_seq_len", "--intermed_results"])
def test_a_flag_whose_effect_is_the_default_is_logged(
    more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    harness_parser("LM-EVAL").parse_args([*WORDS, more])
    assert f"{more}: accepted, has no effect here because" in capsys.readouterr().out
