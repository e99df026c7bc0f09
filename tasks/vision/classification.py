"""Fine-tune a pretrained ViT with a new head, and count right answers on validation images.

The flags are those of pretrain_vit.py. Training is that of pretraining, for `--epochs` passes over
the images; then every validation image is scored once. `--epochs 0` scores alone.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron import log
from megatron.arguments import parse_args
from megatron.checkpointing import load_checkpoint
from megatron.config.run import RunConfig
from megatron.data.data_utils import DocumentSlice, IndexPlace, parse_data_path, split_ranges
from megatron.data.kinds.program_data import ProgramData
from megatron.data.loading.loaders import read_batch
from megatron.data.vision.image_dataset import ImageDataset
from megatron.data.vision.image_run import run_of_images
from megatron.engine.base import PretrainTask, RawBatch
from megatron.engine.build import build_engine
from megatron.errors import ConfigError
from megatron.global_vars import Runtime
from megatron.initialize import initialize_megatron, launch_of_process, shutdown_megatron
from megatron.lengths import batch_schedule
from megatron.model.losses import LossSum
from megatron.model.specs import Carry
from megatron.model.vit_model import classes_ahead, image_losses
from megatron.model_build import model_build
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import ParallelContext
from megatron.preflight.checks import CHECKS
from megatron.preflight.data import splits_hold_enough_samples
from megatron.preflight.run import RunPlan
from megatron.training import run
from pretrain_vit import DEFAULTS, TOKENIZER_TYPE, vit_task
from tasks.finetune.order import batches_of_epoch, share_of_replica
from tasks.results import check_output, write_result

HEAD = "classification_head.*"
# Few images are enough to evaluate on: the last batch may be short.
_EVALUATION_CHECKS = tuple(one for one in CHECKS if one is not splits_hold_enough_samples)
_LENGTHS = ("--train-iters", "--train-samples", "--epochs")


class Answers(NamedTuple):
    """What a model says of all validation images.

    Attributes:
        ahead: how many classes each image's own stands behind.
        losses: cross entropy of each image, in nats.
    """

    ahead: list[int]
    losses: list[float]

    def share_of_top(self, k: int) -> float:
        """Return the share of the images whose class is among the `k` highest scores."""
        return sum(one < k for one in self.ahead) / len(self.ahead)


def main(name: str, argv: Sequence[str]) -> None:
    """Read flags, train if asked, and score the validation images."""
    own, config = _read_flags(name, argv)
    check_output(own.output)
    task = vit_task(config.vision)
    learns = own.epochs is None or own.epochs > 0
    if own.epochs:
        config = _with_length(config, task.reads, own.epochs)
    valid = _validation_images(config, task.reads)
    checks = CHECKS if learns else _EVALUATION_CHECKS
    runtime = initialize_megatron(config, reads=task.reads, checks=checks)
    try:
        if learns:
            progress = run(task, runtime)
            if progress.iteration < (config.training.train_iters or 0):
                log.info("stopped before the end; --load of the same --save goes on")
                return
        folder = config.checkpoint.save if learns else config.checkpoint.load
        answers = _scored(_loading(config, folder), task, runtime, valid)
        found = {
            "top-1": answers.share_of_top(1),
            "top-5": answers.share_of_top(5),
            "loss": math.fsum(answers.losses) / len(answers.losses),
        }
        shown = " | ".join(f"{key}: {value:.4f}" for key, value in found.items())
        log.info(f" {name} | images: {len(answers.ahead)} | {shown} |")
        if runtime.context.rank == 0:
            write_result(own.output, {"task": name, "images": len(answers.ahead), **found})
    finally:
        shutdown_megatron()


def _read_flags(name: str, argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    made = argparse.ArgumentParser(
        prog=f"tasks.main --task {name}",
        allow_abbrev=False,
        epilog="All flags of pretrain_vit.py go here too (--num-layers, --lr, --save ...).",
    )
    made.add_argument(
        "--epochs", type=int, help="passes over the training images; 0: evaluate --load only"
    )
    made.add_argument("--output", metavar="FILE", help="write the metrics there, as JSON")
    own, rest = made.parse_known_args(argv)
    defaults = {"tokenizer_type": TOKENIZER_TYPE, **DEFAULTS, "eval_iters": 0}
    if own.epochs is not None:
        defaults["train_iters"] = 1  # as many as the epochs have; known when the images are
    config = run_of_images(parse_args(rest, args_defaults=defaults))
    given = [flag for flag in _LENGTHS if flag in {word.partition("=")[0] for word in argv}]
    if own.epochs is not None and (own.epochs < 0 or len(given) > 1):
        raise ConfigError(
            "the length of the training is negative, or was given twice",
            found=f"--epochs {own.epochs}" + f", {given[0]}" * (len(given) > 1),
            fix="give --epochs alone, 0 to evaluate only",
        )
    checkpoint = config.checkpoint
    if own.epochs == 0 and checkpoint.load is None:
        raise ConfigError(
            "there is no model to evaluate", found="--epochs 0 without --load", fix="add --load"
        )
    if own.epochs != 0 and checkpoint.save is None:
        raise ConfigError(
            "what was trained is evaluated as it was saved",
            found="no --save",
            fix="add --save FOLDER, or --epochs 0 to evaluate --load",
        )
    is_partial = bool(checkpoint.load_only or checkpoint.load_except)
    if checkpoint.pretrained_checkpoint is not None and not is_partial:
        checkpoint = replace(checkpoint, load_except=(HEAD,))  # other classes than it was made for
    return own, replace(config, checkpoint=checkpoint)


def _with_length(config: RunConfig, reads: ProgramData, epochs: int) -> RunConfig:
    """Return the run with as many iterations as the epochs have."""
    images = _images(config, reads, "train")
    replicas = RunPlan(config, launch_of_process()).data_parallel_size or 1
    size = batch_schedule(config, replicas).global_batch_size
    iterations = math.ceil(epochs * len(images.source) / size)
    return replace(config, training=replace(config.training, train_iters=iterations))


def _validation_images(config: RunConfig, reads: ProgramData) -> ImageDataset:
    found = _images(config, reads, "valid")
    if not len(found.source):
        raise ConfigError(
            "there are no images to evaluate on",
            found=f"--split {config.data.split}",
            fix="give the second share of --split images, or use --valid-data-path",
        )
    return found


def _images(config: RunConfig, reads: ProgramData, split: str) -> ImageDataset:
    """Return one pass over the images of training or of validation."""
    data, number = config.data, ("train", "valid").index(split)
    words = data.data_path or (data.train_data_path, data.valid_data_path)[number]
    if words is None or len(parts := parse_data_path(words)) != 1:
        raise ConfigError(
            "passes over images and their evaluation are of one path",
            found=f"--{split}-data-path {' '.join(words or ()) or 'not given'}",
            fix=f"give --data-path FOLDER, or --{split}-data-path FOLDER",
        )
    maker = reads.maker(data, tokenizer=None, seed=config.training.seed, is_builder=True)
    corpus = maker.open(parts[0].prefix)
    start, stop = 0, corpus.num_documents
    if data.data_path is not None:
        start, stop = split_ranges(data.split, stop)[number : number + 2]
    made = maker.make(
        corpus,
        DocumentSlice(name=split, start=start, stop=stop),
        num_samples=max(1, stop - start),
        cache=IndexPlace().cache(parts[0].prefix),
    )
    assert isinstance(made, ImageDataset)  # noqa: S101  # invariant: the program reads images
    return made


def _scored(
    config: RunConfig, task: PretrainTask, runtime: Runtime, images: ImageDataset
) -> Answers:
    """Return what the model in --load says of every image; equal on all ranks."""
    engine = build_engine(config, task, model_build(runtime), runtime.tokenizer, runtime.timers)
    load_checkpoint(config, engine, runtime)
    size, context = config.training.micro_batch_size, runtime.context
    own_batches = _own_batches(len(images), size, context)
    padded = ([*batch, *[0] * (size - len(batch))] for batch in own_batches)
    found = engine.measure(_read(images, padded), len(own_batches), _answers_of)
    own: dict[int, tuple[int, float]] = {}
    if found and context.tp.is_first:
        for batch, (ahead, losses) in zip(own_batches, found, strict=True):
            own |= dict(zip(batch, zip(map(int, ahead.tolist()), losses.tolist())))
    everyone: dict[int, tuple[int, float]] = {}
    for part in all_gather_object(own, context.world):
        assert not everyone.keys() & part.keys()  # noqa: S101  # invariant: replicas share out
        everyone |= part
    ahead, losses = zip(*(everyone[at] for at in range(len(images))))
    return Answers(list(ahead), list(losses))


def _loading(config: RunConfig, folder: str | None) -> RunConfig:
    """Return the run with all of the weights in a folder to begin with."""
    checkpoint = replace(
        config.checkpoint,
        load=folder,
        finetune=True,
        pretrained_checkpoint=None,
        load_except=(),
        load_only=(),
    )
    return replace(config, checkpoint=checkpoint)


def _own_batches(count: int, size: int, context: ParallelContext) -> list[list[int]]:
    """Return the images of each micro-batch of this replica; the last ones may be short."""
    replicas = context.dp
    order = batches_of_epoch(count, batch_size=size * replicas.size, seed=0, epoch=None)
    return [
        share_of_replica(
            batch,
            micro_batch_size=size,
            replica=replicas.rank,
            replicas=replicas.size,
            num_microbatches=1,
        )[0]
        for batch in order
    ]


def _read(images: ImageDataset, batches: Iterator[list[int]]) -> Iterator[RawBatch]:
    for batch in batches:
        yield read_batch(images, batch).batch


def _answers_of(carry: Carry, labels: Carry) -> LossSum:
    """Return for each image [b] the classes ahead of its own, and its loss."""
    targets, shares = labels
    return LossSum(classes_ahead(carry[0], targets[:, 0]), image_losses(carry[0], targets, shares))
