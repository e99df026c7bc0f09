"""lm-eval: tasks of EleutherAI's harness on a GPT of ours, on any grid.

Tasks from local files work offline: give their folder with --include-path.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

from megatron import log
from megatron.errors import ConfigError
from megatron.initialize import shutdown_megatron
from tasks.eval_harness.adapter import MegatronLM, check_canary
from tasks.eval_harness.interface import check_interface, check_version
from tasks.loading import Grid, load_scorer
from tools.text_output import write_text_files


def main(name: str, argv: Sequence[str]) -> None:
    """Read the flags, check the harness, evaluate, and print the results on rank 0."""
    flags = _parser(name).parse_args(argv)
    check_version(lm_eval.__version__)
    check_interface(TemplateLM)
    manager = TaskManager(include_path=flags.include_path, include_defaults=not flags.only_included)
    known = set(manager.all_tasks)
    unknown = [task for task in flags.tasks if task not in known]
    if unknown:
        raise ConfigError(
            "the harness has no such task",
            found=f"--tasks {', '.join(unknown)}; {len(known)} are known",
            fix="give the folder of its .yaml with --include-path",
        )
    loaded = load_scorer(
        flags.load,
        flags.iteration,
        grid=Grid(flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size),
        micro_batch_size=flags.micro_batch_size,
        device=flags.device,
    )
    try:
        adapter = MegatronLM(loaded)
        check_canary(adapter)
        results = lm_eval.simple_evaluate(
            model=adapter,
            tasks=list(flags.tasks),
            num_fewshot=flags.num_fewshot,
            limit=flags.limit,
            task_manager=manager,
            bootstrap_iters=0,
            log_samples=flags.output is not None,
        )
        if loaded.ctx.rank == 0:
            _say(results, adapter, flags.output)
    finally:
        shutdown_megatron()


def _parser(name: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"tasks.main --task {name}", allow_abbrev=False)
    add = made.add_argument
    add("--load", required=True, metavar="FOLDER", help="folder of checkpoints of a GPT")
    add("--iteration", type=int, help="which of them; the newest when not given")
    add("--tasks", nargs="+", required=True, help="names of the harness's tasks")
    add("--include-path", metavar="FOLDER", help="tasks of your own: .yaml files")
    add("--only-included", action="store_true", help="do not look for the harness's own tasks")
    add(
        "--num-fewshot", type=int, help="examples before each question; the task's own if not given"
    )
    add("--limit", type=int, help="only so many documents of each task, for a trial")
    add("--micro-batch-size", type=int, default=8, help="rows that a replica reads together [8]")
    add("--tensor-model-parallel-size", type=int, default=1, help="ranks that share a layer [1]")
    add("--pipeline-model-parallel-size", type=int, default=1, help="ranks that share layers [1]")
    add("--device", choices=("cpu", "cuda"), help="as in training when not given")
    add("--output", metavar="FILE", help="write results and samples there, as JSON")
    return made


def _say(results: dict[str, Any], adapter: MegatronLM, output: str | None) -> None:
    for task, metrics in results["results"].items():
        said = " | ".join(
            f"{metric}: {value:.4f}"
            for metric, value in metrics.items()
            if isinstance(value, float)
        )
        log.info(f" {task} | {said} |")
    if adapter.truncated:
        log.warning(f"{adapter.truncated} rows were longer than the model and were cut in front")
    if output is not None:
        text = json.dumps(results, indent=1, default=str)
        write_text_files({Path(output): text + "\n"})
