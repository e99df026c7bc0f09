"""Where a fine-tuning begins, from the flags and from what lies in its folders; and how long it is.

A folder that fine-tuning saves in holds the best epoch, and in `last` the state to go on from.
`--load` of that same folder goes on; of another one it begins with the weights that are there.
"""

from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from megatron.checkpoint.load import storage
from megatron.checkpoint.load.start import starts_fresh_if_empty
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.launch import Launch
from megatron.lengths import batch_schedule
from megatron.preflight.run import RunPlan
from tasks.finetune.order import num_batches

# What a classifier has of a pretrained BERT; its head is new.
PRETRAINED = ("embedding.*", "layers.*", "final_norm.*", "pooler.*")
_LAST = "last"


class StartKind(StrEnum):
    """The state that is loaded before the first step."""

    PRETRAINED = "a pretrained BERT, with a new head"
    WEIGHTS = "the weights of a fine-tuned model"
    RESUMED = "an interrupted fine-tuning"


class Start(NamedTuple):
    """The start of a fine-tuning."""

    kind: StartKind
    folder: str
    load_except: tuple[str, ...] = ()  # patterns of what stays at initial values


def start_of(checkpoint: CheckpointConfig, *, epochs: int) -> Start:
    """Return the state to load, and its folder.

    Raises:
        ConfigError: nothing to begin with is named, or two things are.
        CheckpointError: there is nothing to go on from.
    """
    load, save, pretrained = checkpoint.load, checkpoint.save, checkpoint.pretrained_checkpoint
    if load is None:
        if pretrained is None:
            raise _nothing_given()
        # What judges has to be whole: a new head decides by chance.
        return Start(StartKind.PRETRAINED if epochs else StartKind.WEIGHTS, pretrained)
    goes_on = bool(epochs) and not checkpoint.finetune and starts_fresh_if_empty(load, save)
    if not goes_on:
        if pretrained is not None:
            raise ConfigError(
                "two models are given to begin with",
                found=f"--pretrained-checkpoint {pretrained}, --load {load}",
                fix="give one of the two; with --load of the folder of --save, fine-tuning goes on "
                "where it was interrupted",
            )
        return Start(StartKind.WEIGHTS, load)
    if not storage.never_held_a_checkpoint(last_of(load)):
        return Start(StartKind.RESUMED, last_of(load))
    if pretrained is not None:
        return Start(StartKind.PRETRAINED, pretrained)
    raise CheckpointError(
        "there is no interrupted fine-tuning to go on with",
        found=f"nothing in {last_of(load)}, without --pretrained-checkpoint",
        fix="add --pretrained-checkpoint FOLDER to begin anew, or --finetune to begin with the "
        f"weights that {load} holds",
    )


def last_of(save: str) -> str:
    """Return the subfolder of --save with the state from which training can resume."""
    return f"{save.rstrip('/')}/{_LAST}"


def finetuning_config(
    config: RunConfig, start: Start, *, launch: Launch, epochs: int, examples: int
) -> RunConfig:
    """Return the run's flags with the length and the --load of a fine-tuning.

    Without epochs it only evaluates, which the check of memory has to know.
    """
    replicas = RunPlan(config, launch).data_parallel_size or 1  # the checks report errors
    batches = batch_schedule(config, replicas)
    iterations = max(1, epochs * num_batches(examples, batches.global_batch_size))
    checkpoint = replace(
        config.checkpoint,
        load=start.folder,
        pretrained_checkpoint=None,
        finetune=True,
        load_except=start.load_except,
    )
    if start.kind is StartKind.PRETRAINED:
        checkpoint = replace(checkpoint, load_only=PRETRAINED)
    elif start.kind is StartKind.RESUMED:
        checkpoint = replace(checkpoint, finetune=False, load_except=())
    training = replace(config.training, train_iters=iterations, eval_only=epochs == 0)
    return replace(config, training=training, checkpoint=checkpoint)


def best_to_load(config: RunConfig) -> RunConfig:
    """Return the flags with --load of the best epoch in the folder of --save."""
    save = config.checkpoint.save
    checkpoint = replace(config.checkpoint, load=save, load_iteration=None, finetune=True)
    return replace(config, checkpoint=checkpoint)


def last_to_save(config: RunConfig) -> RunConfig:
    """Return the flags with --save of the last state, of which one is kept."""
    save = config.checkpoint.save or ""
    checkpoint = replace(config.checkpoint, save=last_of(save), keep_last=1)
    return replace(config, checkpoint=checkpoint)


def _nothing_given() -> ConfigError:
    return ConfigError(
        "fine-tuning begins with a model that was trained",
        found="neither --pretrained-checkpoint nor --load",
        fix="add --pretrained-checkpoint FOLDER, or --load FOLDER of a fine-tuned model",
    )
