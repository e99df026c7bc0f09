"""The flags of LM-EVAL. The harness itself is not needed to read them."""

import argparse
from typing import Any

from megatron import log
from tasks.zeroshot.program import add_row_flags
from tools.flags.model import add_model_flags

# Flags of bigscience's evaluation scripts, whose effects are the default here.
_NO_EFFECT = {
    "--adaptive_seq_len": "rows are as long as their texts",
    "--intermed_results": "results are written once, whole",
    "--micro_bs_multiplier": "a pipeline is filled with all rows there are",
}
_WITH_VALUE = ("--micro_bs_multiplier",)


def harness_parser(name: str) -> argparse.ArgumentParser:
    """Return the flags of the task LM-EVAL."""
    made = argparse.ArgumentParser(prog=f"tasks.main --task {name}", allow_abbrev=False)
    add_model_flags(made)
    add_row_flags(made)
    add = made.add_argument
    add(
        "--tasks",
        "--task_list",
        nargs="+",
        required=True,
        help="names of the harness's tasks, with spaces or commas between",
    )
    add("--include-path", "--include_path", metavar="FOLDER", help="tasks of your own: .yaml files")
    add("--only-included", action="store_true", help="do not look for the harness's own tasks")
    add(
        "--num-fewshot",
        "--num_fewshot",
        type=int,
        help="examples before each question; the task's own if not given",
    )
    add("--limit", type=float, help="only so many documents of each task, or below 1 their share")
    add(
        "--gen-kwargs",
        "--gen_kwargs",
        nargs="+",
        metavar="NAME=VALUE",
        help="settings of generation that override the task's: max_gen_toks=64 temperature=0",
    )
    add(
        "--apply-chat-template",
        "--apply_chat_template",
        metavar="chatml|plain|FOLDER",
        help="write questions as dialogues, as tools/preprocess_sft.py does",
    )
    add("--system-instruction", "--system_instruction", help="text that opens each question")
    add(
        "--bootstrap-iters",
        "--bootstrap_iters",
        type=int,
        default=0,
        help="samples that standard errors are estimated by; 0: none are [0]",
    )
    add(
        "--output",
        "--output_path",
        "--results_path",
        metavar="FILE",
        help="write results and samples there, as JSON",
    )
    add("--eval_fp32", dest="fp32", action="store_true", help=argparse.SUPPRESS)
    for word in _NO_EFFECT:
        add(word, nargs=1 if word in _WITH_VALUE else 0, action=_HarnessLog, help=argparse.SUPPRESS)
    return made


class _HarnessLog(argparse.Action):
    """An argparse action that logs that its flag has no effect."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        given = " ".join([str(option), *(values or ())])
        log.info(f"{given}: accepted, has no effect here because {_NO_EFFECT[str(option)]}")
