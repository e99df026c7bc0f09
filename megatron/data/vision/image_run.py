"""What the flags of a run mean where its data are images: tokens of an image, and paths.

What a reader would get wrong: the run that is stored is the one that this returns, with the paths
of training and of validation images apart wherever a path held both.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron import log
from megatron.config.data import DataConfig
from megatron.config.fields import is_number, raise_all
from megatron.config.model import ModelConfig, PositionEmbedding, SoftmaxType
from megatron.config.run import RunConfig
from megatron.data.vision.image_source import splits_under
from megatron.errors import ConfigError

# The length of sequences where no flag gives one: it follows from the size of images.
NO_LENGTH = 1


def run_of_images(config: RunConfig) -> RunConfig:
    """Return the run with as many tokens as an image has, and with a path for each split.

    Raises:
        ConfigError: flags that a model of images does not have; all are named.
    """
    raise_all(_problems(config))
    tokens, given = config.vision.num_tokens, config.data.seq_length
    if given not in (NO_LENGTH, tokens):
        rows, columns = config.vision.patch_grid
        beside = " and a class token" if config.vision.has_class_token else ""
        log.info(
            f"--seq-length {given}: taken as {tokens}, because an image has {rows} x {columns} "
            f"patches{beside}"
        )
    return replace(
        config,
        data=replace(_with_splits(config.data), seq_length=tokens),
        model=replace(config.model, max_position_embeddings=tokens),
    )


def _with_splits(data: DataConfig) -> DataConfig:
    """Return the flags of data where --data-path may name two splits, or what holds both."""
    words = data.data_path
    if words is None or len(words) > 2:  # weights and paths
        return data
    if len(words) == 1:
        found = splits_under(words[0])
        if found is None:
            return data
        train, valid = found
    else:
        train, valid = words
        if is_number(train):
            return data
    log.info(
        f"--data-path {' '.join(words)}: taken as --train-data-path {train} --valid-data-path "
        f"{valid} --test-data-path {valid}"
    )
    paths = {"train_data_path": (train,), "valid_data_path": (valid,), "test_data_path": (valid,)}
    return replace(data, data_path=None, **paths)  # type: ignore[arg-type]


def _problems(config: RunConfig) -> Iterator[ConfigError]:
    yield from _model_problems(config.model)
    if config.data.has_weighted_splits:
        yield ConfigError(
            "groups of weighted ranges are of text",
            found="--train-, --valid- or --test-weighted-split-paths",
            fix="use --train-data-path and --valid-data-path, with weights before several paths",
        )
    if config.parallel.context_parallel_size > 1:
        yield ConfigError(
            "the tokens of an image are not shared over context-parallel ranks",
            found=f"--context-parallel-size {config.parallel.context_parallel_size}",
            fix="use --tensor-model-parallel-size, with --sequence-parallel where it divides "
            f"{config.vision.num_tokens} tokens",
        )
    tp, tokens = config.parallel.tensor_model_parallel_size, config.vision.num_tokens
    if config.parallel.sequence_parallel and tokens % tp:
        patches = config.vision.num_patches
        other = "" if patches % tp else f" or use --image-pooling mean for {patches} tokens,"
        yield ConfigError(
            "the tokens of an image do not divide over tensor-parallel ranks",
            found=f"{tokens} tokens, --tensor-model-parallel-size {tp}, --sequence-parallel",
            fix=f"leave --sequence-parallel out,{other} or choose another --img-dim",
        )
    if config.training.z_loss_coeff:
        yield ConfigError(
            "a flag about scores of a vocabulary was given, and there is none",
            found=f"--z-loss-coeff {config.training.z_loss_coeff}",
            fix="leave it out",
        )


def _model_problems(model: ModelConfig) -> Iterator[ConfigError]:
    kind = model.position_embedding_type
    if kind is not PositionEmbedding.LEARNED:
        yield ConfigError(
            "positions of patches are learned",
            found=f"--position-embedding-type {kind}",
            fix="leave it out",
        )
    for name, given in (
        ("--num-experts", model.has_experts),
        ("--sliding-window", model.sliding_window is not None),
        ("--softmax-type", model.softmax_type is not SoftmaxType.VANILLA),
        ("--embed-layernorm", model.embed_layernorm),
    ):
        if given:
            yield ConfigError(
                "a flag of language models was given that a ViT does not have",
                found=name,
                fix=f"leave {name} out",
            )
