"""Whether the checkpoint that a run is to continue from is there."""

from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import run_folder as folder
from megatron.checkpoint.formats import registry
from megatron.checkpoint.load import storage
from megatron.checkpoint.load.foreign import OURS
from megatron.config.checkpoint import CheckpointConfig, CheckpointFormatName
from megatron.errors import CheckpointError, ConfigError, MegatronError
from megatron.pipeline.plan import pipeline_plan
from megatron.preflight.run import RunPlan


def checkpoint_to_load_exists(plan: RunPlan) -> Iterator[MegatronError]:
    """A missing checkpoint is an error, unless this is the first start of a run that resumes."""
    flags = plan.config.checkpoint
    if flags.load is None:
        return
    if starts_fresh_if_empty(flags.load, flags.save) and storage.never_held_a_checkpoint(
        flags.load
    ):
        return
    # What these raise is the finding.
    if _is_foreign(flags):
        return
    if flags.load_iteration is not None:
        _require_iteration(flags, flags.load_iteration)
    elif flags.load_fallback is None or not folder.saved_iterations(place(flags.load)):
        storage.latest_iteration(flags.load)
    yield from ()


def _is_foreign(flags: CheckpointConfig) -> bool:
    """Whether --load is a checkpoint of another format, which can be opened as it is."""
    there = place(flags.load or "")
    if not isinstance(there, Path):
        return False
    try:
        found = registry.recognise(registry.locate(there, flags.load_iteration))
    except CheckpointError:
        return False
    return found is not None and found.name != OURS


def _require_iteration(flags: CheckpointConfig, iteration: int) -> None:
    there = place(flags.load or "")
    present = folder.saved_iterations(there)
    can_fall_back = flags.load_fallback is not None and any(i < iteration for i in present)
    if iteration not in present and not can_fall_back:
        raise folder.missing_iteration(there, iteration)


def best_checkpoints_can_be_told(plan: RunPlan) -> Iterator[MegatronError]:
    """--keep-best compares validation losses, so some checkpoint has to have one."""
    flags, training = plan.config.checkpoint, plan.config.training
    if flags.keep_best is None:
        return
    evaluates = training.eval_iters and training.eval_interval
    if not evaluates or not flags.save_interval:
        yield ConfigError(
            "the best checkpoints cannot be told from others",
            found=f"--keep-best {flags.keep_best} with --eval-iters {training.eval_iters}, "
            f"--eval-interval {training.eval_interval}, --save-interval {flags.save_interval}",
            fix="give --save-interval, --eval-iters and --eval-interval, or drop --keep-best",
        )
    elif flags.save_interval % training.eval_interval:
        yield ConfigError(
            "checkpoints would be saved whose validation loss is not known",
            found=f"--keep-best {flags.keep_best} with --save-interval {flags.save_interval}, "
            f"--eval-interval {training.eval_interval}",
            fix="use a --save-interval that is a multiple of --eval-interval",
        )


def megatron_files_can_hold_the_run(plan: RunPlan) -> Iterator[MegatronError]:
    """--checkpoint-format megatron writes each rank's file from what that rank holds."""
    config = plan.config
    flags = config.checkpoint
    if flags.save is None or flags.checkpoint_format is not CheckpointFormatName.MEGATRON:
        return
    found = []
    if config.parallel.use_distributed_optimizer:
        found.append("--use-distributed-optimizer")  # state shared out over replicas
    if config.engine.deepspeed:
        found.append("--deepspeed")
    if not isinstance(place(flags.save), Path):
        found.append(f"--save {flags.save}")
    if config.model.has_experts:
        found.append(f"--num-experts {config.model.num_experts}")
    pipeline = pipeline_plan(config.parallel, config.model.num_layers)
    if len(set(pipeline.counts)) > 1 or pipeline.by_parameters or pipeline.costs is not None:
        found.append("pipeline stages of unequal length")
    if found:
        yield ConfigError(
            "Megatron's files cannot hold this run as it is laid out",
            found=f"--checkpoint-format megatron with {', '.join(found)}",
            fix="save with --checkpoint-format sharded, and use tools/convert_checkpoint.py",
        )


def deepspeed_files_can_hold_the_run(plan: RunPlan) -> Iterator[MegatronError]:
    """--checkpoint-format deepspeed lets DeepSpeed's engine write what it always writes."""
    config = plan.config
    flags = config.checkpoint
    if flags.save is None or flags.checkpoint_format is not CheckpointFormatName.DEEPSPEED:
        return
    found = []
    if not config.engine.deepspeed:
        found.append("no --deepspeed")
    if not flags.save_optim:
        found.append("--no-save-optim")
    if not isinstance(place(flags.save), Path):
        found.append(f"--save {flags.save}")
    if found:
        yield ConfigError(
            "DeepSpeed cannot write the checkpoints of this run",
            found=f"--checkpoint-format deepspeed with {', '.join(found)}",
            fix="train with --deepspeed and save to a folder with the optimizer's state, or use "
            "--checkpoint-format sharded",
        )


def starts_fresh_if_empty(load: str, save: str | None) -> bool:
    """Whether a run whose --load has never held a checkpoint may start from random weights."""
    if save is None:
        return False
    there, here = place(load), place(save)
    if isinstance(there, Path) and isinstance(here, Path):
        return there.resolve() == here.resolve()
    return there == here
