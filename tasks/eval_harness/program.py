"""lm-eval: tasks of EleutherAI's harness on a GPT of ours, on any grid.

Tasks from local files work offline: give their folder with --include-path. Flags that the harness's
own program has are spelled as there too, with underscores.
"""

import argparse
import difflib
from collections.abc import Sequence
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from megatron import log
from megatron.data.samples.chat_template import template_of
from megatron.errors import ConfigError
from megatron.initialize import shutdown_megatron
from tasks.eval_harness.adapter import MegatronLM, check_canary
from tasks.eval_harness.interface import check_interface, check_version
from tasks.loading import load_scorer
from tasks.results import check_output, write_result
from tasks.zeroshot.program import add_row_flags
from tools.flags.model import add_model_flags, read_model_flags

# Flags of bigscience's evaluation scripts, whose effects are the default here.
_NO_EFFECT = {
    "--adaptive_seq_len": "rows are as long as their texts",
    "--intermed_results": "results are written once, whole",
    "--micro_bs_multiplier": "a pipeline is filled with all rows there are",
}
_WITH_VALUE = ("--micro_bs_multiplier",)


def main(name: str, argv: Sequence[str]) -> None:
    """Read the flags, check the harness, evaluate, and print the results on rank 0."""
    flags, choice = read_model_flags(_parser(name), argv)
    check_output(flags.output)
    check_version(lm_eval.__version__)
    check_interface(TemplateLM)
    manager = TaskManager(include_path=flags.include_path, include_defaults=not flags.only_included)
    tasks = _tasks(flags.tasks, set(manager.all_tasks))
    name_of_template = flags.apply_chat_template
    template = None if name_of_template is None else template_of(name_of_template)
    loaded = load_scorer(choice.folder, choice.iteration, given=choice.given)
    try:
        adapter = MegatronLM(loaded, template)
        check_canary(adapter)
        results = lm_eval.simple_evaluate(
            model=adapter,
            tasks=tasks,
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            task_manager=manager,
            bootstrap_iters=flags.bootstrap_iters,
            log_samples=flags.output is not None,
            gen_kwargs=",".join(flags.gen_kwargs) if flags.gen_kwargs else None,
            system_instruction=flags.system_instruction,
            apply_chat_template=template is not None,
            fewshot_as_multiturn=template is not None,
        )
        if loaded.ctx.rank == 0:
            _log_results(results, adapter)
            write_result(flags.output, results)
    finally:
        shutdown_megatron()


def _parser(name: str) -> argparse.ArgumentParser:
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


def _tasks(named: Sequence[str], available: set[str]) -> list[str]:
    """Return the chosen tasks; ConfigError when the harness lacks one."""
    tasks = [task for words in named for task in words.split(",") if task]
    unknown = [task for task in tasks if task not in available]
    if unknown:
        near = difflib.get_close_matches(unknown[0], available, n=3, cutoff=0.7)
        raise ConfigError(
            "the harness has no such task",
            found=f"--tasks {', '.join(unknown)}; {len(available)} are known",
            fix=(f"did you mean {' or '.join(near)}? " if near else "")
            + "give the folder of its .yaml with --include-path",
        )
    return tasks


def _log_results(results: dict[str, Any], adapter: MegatronLM) -> None:
    for task, metrics in results["results"].items():
        line = " | ".join(
            f"{metric}: {value:.4f}"
            for metric, value in metrics.items()
            if isinstance(value, float)
        )
        log.info(f" {task} | {line} |")
    if adapter.truncated:
        log.warning(f"{adapter.truncated} rows were longer than the model and were cut in front")
