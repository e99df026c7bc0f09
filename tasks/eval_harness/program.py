"""lm-eval: tasks of EleutherAI's harness on a GPT of ours, on any grid.

Tasks from local files work offline: give their folder with --include-path. Flags that the harness's
own program has are spelled as there too, with underscores.
"""

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
from tasks.eval_harness.flags import harness_parser
from tasks.eval_harness.interface import check_interface, check_version
from tasks.loading import load_scorer
from tasks.results import check_output, write_result
from tools.flags.model import read_model_flags


def main(name: str, argv: Sequence[str]) -> None:
    """Read the flags, check the harness, evaluate, and print the results on rank 0."""
    flags, choice = read_model_flags(harness_parser(name), argv)
    check_output(flags.output)
    check_version(lm_eval.__version__)
    check_interface(TemplateLM)
    manager = TaskManager(include_path=flags.include_path, include_defaults=not flags.only_included)
    tasks = _tasks(flags.tasks, set(manager.all_tasks))
    name_of_template = flags.apply_chat_template
    template = None if name_of_template is None else template_of(name_of_template)
    loaded = load_scorer(
        choice.folder,
        choice.iteration,
        given=choice.given,
        weight_quantization=choice.weight_quantization,
    )
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
