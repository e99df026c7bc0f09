"""Rules that cross config groups: shapes against ranks, batches against replicas, schedules.

Each function is one check; its name is its title in the report.
"""

from collections.abc import Iterator

from megatron.config.model import PositionEmbedding
from megatron.errors import ConfigError, MegatronError
from megatron.optimizer.schedule import schedule_problems
from megatron.preflight.lengths import batch_schedule, duration
from megatron.preflight.run import RunPlan
from megatron.tokenizer.tokenizer import padded_vocab_size


def ranks_divide_into_model_replicas(plan: RunPlan) -> Iterator[MegatronError]:
    """Parallel sizes are never clamped to the world: they fit it, or the run is refused."""
    if plan.data_parallel_size is None:
        parallel = plan.config.parallel
        world, need = plan.launch.world_size, plan.model_ranks
        yield ConfigError(
            "the ranks do not divide into whole model replicas",
            found=f"{world} ranks, --tensor-model-parallel-size "
            f"{parallel.tensor_model_parallel_size}, --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size}",
            fix=f"start a multiple of {need} ranks (torchrun --nproc-per-node {need}), or use "
            "smaller parallel sizes",
        )


def pipeline_stages_are_supported(plan: RunPlan) -> Iterator[MegatronError]:
    """The native engine runs one stage for now."""
    size = plan.config.parallel.pipeline_model_parallel_size
    if size > 1:
        yield ConfigError(
            "this version has no pipeline parallelism",
            found=f"--pipeline-model-parallel-size {size}",
            fix="use --pipeline-model-parallel-size 1, with a larger --tensor-model-parallel-size",
        )


def heads_split_over_tensor_parallel_ranks(plan: RunPlan) -> Iterator[MegatronError]:
    """Every tensor-parallel rank holds whole attention heads and whole key/value groups."""
    model, tp = plan.config.model, plan.config.parallel.tensor_model_parallel_size
    for flag, count in (
        ("--num-attention-heads", model.num_attention_heads),
        ("--num-query-groups", model.query_groups),
    ):
        if count % tp:
            yield ConfigError(
                "attention heads cannot be shared out evenly over the tensor-parallel ranks",
                found=f"{flag} {count}, --tensor-model-parallel-size {tp}",
                fix=f"use a tensor-parallel size that divides {count}",
            )
            return


def mlp_splits_over_tensor_parallel_ranks(plan: RunPlan) -> Iterator[MegatronError]:
    """The middle of the MLP is shared out evenly."""
    width, tp = plan.config.model.ffn_width, plan.config.parallel.tensor_model_parallel_size
    if width % tp:
        yield ConfigError(
            "the MLP cannot be shared out evenly over the tensor-parallel ranks",
            found=f"--ffn-hidden-size {width}, --tensor-model-parallel-size {tp}",
            fix=f"use --ffn-hidden-size {width // tp * tp or tp}",
        )


def vocabulary_pads_to_an_even_size(plan: RunPlan) -> Iterator[MegatronError]:
    """The padded vocabulary holds every token and splits over the tensor-parallel ranks."""
    if plan.tokenizer is not None:
        tokenizer = plan.config.tokenizer
        padded_vocab_size(
            plan.tokenizer.vocab_size,
            divisible_by=tokenizer.make_vocab_size_divisible_by,
            tp=plan.config.parallel.tensor_model_parallel_size,
            pad_to=tokenizer.pad_vocab_size_to,
        )
    yield from ()


def batch_splits_into_microbatches(plan: RunPlan) -> Iterator[MegatronError]:
    """Every global batch, at every step of a ramp, is whole micro-batches on every replica."""
    if plan.data_parallel_size is not None:
        batch_schedule(plan.config.training, plan.data_parallel_size)
    yield from ()


def sequence_fits_the_position_table(plan: RunPlan) -> Iterator[MegatronError]:
    """A learned position table has a row for every position of a sample."""
    model, seq_length = plan.config.model, plan.config.data.seq_length
    rows = model.max_position_embeddings
    learned = model.position_embedding_type is PositionEmbedding.LEARNED
    if learned and rows is not None and rows < seq_length:
        yield ConfigError(
            "samples are longer than the table of positions",
            found=f"--seq-length {seq_length}, --max-position-embeddings {rows}",
            fix=f"use --max-position-embeddings {seq_length}, or --seq-length {rows}",
        )


def schedule_fits_the_training(plan: RunPlan) -> Iterator[MegatronError]:
    """Warm-up, decay and training lengths agree, in one unit."""
    if plan.data_parallel_size is None:
        return
    training = plan.config.training
    try:
        batches = batch_schedule(training, plan.data_parallel_size)
    except ConfigError:
        return  # batch_splits_into_microbatches says so
    yield from schedule_problems(
        plan.config.schedule,
        total_samples=duration(training, batches).total_samples,
        global_batch_size=batches.global_batch_size,
        samples_based=training.train_samples is not None,
    )


def intervals_make_sense(plan: RunPlan) -> Iterator[MegatronError]:
    """A run that is to be continued can be: what is saved now and then is saved somewhere."""
    checkpoint = plan.config.checkpoint
    if checkpoint.keep_last is not None and checkpoint.save is None:
        yield ConfigError(
            "a number of checkpoints to keep was given, but no place for them",
            found=f"--keep-last {checkpoint.keep_last} without --save",
            fix="add --save FOLDER, or drop --keep-last",
        )


def tokenizer_can_be_built(plan: RunPlan) -> Iterator[MegatronError]:
    """The tokenizer's files are there and readable."""
    if plan.tokenizer_error is not None:
        yield plan.tokenizer_error


def tokenizer_knows_ends_of_documents(plan: RunPlan) -> Iterator[MegatronError]:
    """Flags about ends of documents need a tokenizer that has such a token."""
    data = plan.config.data
    wanted = [
        f"--{name.replace('_', '-')}"
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        if getattr(data, name)
    ]
    if wanted and plan.tokenizer is not None and plan.tokenizer.eod is None:
        yield ConfigError(
            "the tokenizer has no end-of-document token, which these flags look for",
            found=f"{' '.join(wanted)}; --tokenizer-type {plan.config.tokenizer.tokenizer_type}",
            fix=f"drop {' '.join(wanted)}, or use a tokenizer with an end-of-document token",
        )
