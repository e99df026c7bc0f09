"""Whether the checkpoint that a run is to continue from is there."""

from collections.abc import Iterator
from pathlib import Path

from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import run_folder as folder
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.format import PlannedRun
from megatron.checkpoint.load import storage
from megatron.checkpoint.load.start import flags_to_load, starts_fresh_if_empty
from megatron.checkpoint.local import recovery
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.training import SpikeAction
from megatron.data.data_utils import splits_without_share
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.errors import ConfigError, MegatronError
from megatron.pipeline.plan import plan_of_run
from megatron.preflight.run import RunPlan


def checkpoint_to_load_exists(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that --load holds a checkpoint, unless a run that resumes starts for the first time."""
    given = plan.config.checkpoint
    flags = flags_to_load(given)
    if flags is None or flags.load is None:
        if given.finetune and given.load is None:
            yield ConfigError(
                "fine-tuning needs weights to start from",
                found="--finetune without --load",
                fix="add --load FOLDER",
            )
        bert = plan.config.retrieval.bert_load
        if bert is not None and registry.format_of(bert).is_native:
            storage.latest_iteration(bert)
        return
    # What these raise is the finding.
    if not registry.format_of(flags.load, flags.load_iteration).is_native:
        return  # it can be opened as it is
    if flags.load_iteration is not None:
        _require_iteration(flags, flags.load_iteration)
    elif flags.load_fallback is None or not folder.saved_iterations(place(flags.load)):
        storage.latest_iteration(flags.load)
    yield from ()


def run_can_go_back_from_a_spike(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a run that goes back from a spike finds its own checkpoints."""
    config = plan.config
    flags = config.checkpoint
    if config.training.loss_spike_action is not SpikeAction.REWIND:
        return
    goes_on = flags.load is not None and starts_fresh_if_empty(flags.load, flags.save)
    on_disk = flags.save is not None and isinstance(place(flags.save), Path)
    if not goes_on or not on_disk or flags.finetune or not flags.save_interval:
        yield ConfigError(
            "a run that goes back has to find its own last checkpoint when it starts again",
            found=f"--loss-spike-action rewind with --save {flags.save} --load {flags.load} "
            f"--save-interval {flags.save_interval}" + (" --finetune" if flags.finetune else ""),
            fix="give one folder of a disk as --save and as --load, and a --save-interval; weights "
            "to begin with as --pretrained-checkpoint instead of --finetune",
        )


def local_checkpoints_have_holders(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the ranks form the groups in which they hold each other's local checkpoints."""
    flags = plan.config.checkpoint
    if flags.replication and flags.replication_jump is not None:
        recovery.holders(plan.launch.world_size, flags.replication_jump, flags.replication_factor)
    yield from ()


def _require_iteration(flags: CheckpointConfig, iteration: int) -> None:
    location = place(flags.load or "")
    present = folder.saved_iterations(location)
    can_fall_back = flags.load_fallback is not None and any(i < iteration for i in present)
    if iteration not in present and not can_fall_back:
        raise folder.missing_iteration(location, iteration)


def best_checkpoints_can_be_told(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that under --keep-best every checkpoint has a validation loss to compare."""
    flags, training = plan.config.checkpoint, plan.config.training
    if flags.keep_best is None:
        return
    evaluates = training.eval_iters and training.eval_interval and _has_validation_data(plan)
    if not evaluates or not flags.save_interval:
        yield ConfigError(
            "the best checkpoints cannot be determined",
            found=f"--keep-best {flags.keep_best} with --eval-iters {training.eval_iters}, "
            f"--eval-interval {training.eval_interval}, --save-interval {flags.save_interval}, "
            f"--split {plan.config.data.split}",
            fix="give --save-interval, --eval-iters, --eval-interval and validation a share in "
            "--split, or drop --keep-best",
        )
    elif flags.save_interval % training.eval_interval:
        yield ConfigError(
            "checkpoints would be saved whose validation loss is not known",
            found=f"--keep-best {flags.keep_best} with --save-interval {flags.save_interval}, "
            f"--eval-interval {training.eval_interval}",
            fix="use a --save-interval that is a multiple of --eval-interval",
        )


def _has_validation_data(plan: RunPlan) -> bool:
    data = plan.config.data
    try:
        return not data.is_split or "valid" not in splits_without_share(data.split)
    except ConfigError:
        return True  # corpora_open_and_are_whole reports the --split


# What Megatron's files are not written of, and the models that are made of it.
_NOT_IN_MEGATRON = {
    DatasetKind.ICT: ("two towers", "retriever"),
    DatasetKind.IMAGES: ("patches of images", "ViT"),
}


def checkpoint_format_can_hold_the_run(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that --checkpoint-format can store all that the run saves."""
    config = plan.config
    flags = config.checkpoint
    if flags.save is None:
        return

    def has_equal_stages() -> bool:
        pipeline = plan_of_run(config)
        is_even = not pipeline.by_parameters and pipeline.costs is None
        return is_even and len(set(pipeline.counts)) <= 1

    form = registry.get(flags.checkpoint_format)
    if (problem := form.refuse_run(PlannedRun(config, has_equal_stages))) is not None:
        yield problem
    kind = plan.reads.kind(config.data)
    if form.name == "megatron" and kind in _NOT_IN_MEGATRON:
        parts, model = _NOT_IN_MEGATRON[kind]
        yield ConfigError(
            f"Megatron's layout has names for a GPT, a BERT and a T5 here, and none for {parts}",
            found=f"--checkpoint-format {form.name} of a {model}",
            fix="leave it out",
        )
    if flags.async_save and not form.saves_in_background:
        yield ConfigError(
            "only checkpoints of our own format are written beside the training",
            found=f"--checkpoint-format {flags.checkpoint_format} with --async-save",
            fix="drop --async-save, or --checkpoint-format",
        )
