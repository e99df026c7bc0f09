"""Rules that cross config groups: shapes against ranks, batches against replicas, schedules.

Each function is one check; its name is its title in the report.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from megatron.config.activations import RecomputeModule
from megatron.config.model import PositionEmbedding
from megatron.config.optimizer import OptimizerKind, StateDtype
from megatron.config.precision import Precision
from megatron.errors import ConfigError, MegatronError
from megatron.lengths import batch_schedule, curriculum, duration, warmup_tokens
from megatron.model_build import vocabulary
from megatron.mpu.topology import Topology
from megatron.optimizer.schedule import learning_rate_problems
from megatron.pipeline.plan import encoder_stages, plan_problems
from megatron.preflight.run import RunPlan


def ranks_divide_into_model_replicas(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the ranks divide into whole model replicas; no size is ever clamped."""
    if plan.data_parallel_size is None:
        parallel = plan.config.parallel
        world, need = plan.launch.world_size, plan.replica_ranks
        context = parallel.context_parallel_size
        yield ConfigError(
            "the ranks do not divide into whole model replicas",
            found=f"{world} ranks, --tensor-model-parallel-size "
            f"{parallel.tensor_model_parallel_size}, --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size}"
            + (f", --context-parallel-size {context}" if context > 1 else ""),
            fix=f"start a multiple of {need} ranks (torchrun --nproc-per-node {need}), or use "
            "smaller parallel sizes",
        )


def pipeline_fits_the_model_and_the_batch(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that every stage has layers, and every step enough micro-batches."""
    fewest = None
    if plan.data_parallel_size is not None:
        # Ramps climb, so the first step has the fewest. Another check reports what does not divide.
        with suppress(ConfigError):
            batches = batch_schedule(plan.config, plan.data_parallel_size)
            fewest = batches.num_microbatches_at(0)
    yield from plan_problems(
        plan.config.parallel,
        num_layers=plan.config.num_blocks,
        fewest_microbatches=fewest,
        encoder=encoder_stages(plan.config),
    )


def replicas_share_out_in_equal_parts(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the replicas, and those of experts, divide into the parts that share state out."""
    parallel, dp = plan.config.parallel, plan.data_parallel_size
    parts = parallel.num_distributed_optimizer_instances
    if parts == 1 or dp is None:
        return
    with suppress(ConfigError):  # another check says it where experts cannot be shared out
        grid = Topology.of(
            replace(parallel, num_distributed_optimizer_instances=1), plan.launch.world_size
        )
        try:
            replace(grid, instances=parts)
        except ConfigError as error:
            yield error


def heads_split_over_tensor_parallel_ranks(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that tensor-parallel ranks hold whole attention heads and key/value groups."""
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
    """Check that the width of the MLP divides over the tensor-parallel ranks."""
    model, tp = plan.config.model, plan.config.parallel.tensor_model_parallel_size
    for flag, width in model.mlp_widths.items():
        if width % tp:
            yield ConfigError(
                "the MLP cannot be shared out evenly over the tensor-parallel ranks",
                found=f"{flag} {width}, --tensor-model-parallel-size {tp}",
                fix=f"use {flag} {width // tp * tp or tp}",
            )


def sequence_splits_over_tensor_parallel_ranks(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that sequences divide over the tensor-parallel ranks if they are split."""
    length, parallel = plan.config.data.seq_length, plan.config.parallel
    tp = parallel.tensor_model_parallel_size
    if parallel.sequence_parallel and length % tp:
        yield ConfigError(
            "the sequence cannot be shared out evenly over the tensor-parallel ranks",
            found=f"--seq-length {length}, --tensor-model-parallel-size {tp}, --sequence-parallel",
            fix=f"use --seq-length {length // tp * tp or tp}, or leave out --sequence-parallel",
        )


def activations_can_be_recomputed_as_asked(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that there are enough layers to recompute or offload, and ranks to split over."""
    training, parallel = plan.config.training, plan.config.parallel
    layers, tp = plan.config.num_blocks, parallel.tensor_model_parallel_size
    for flag, count in (
        ("--recompute-num-layers", training.recompute_num_layers or 0),
        ("--cpu-offloading-num-layers", training.cpu_offloading_num_layers),
    ):
        if count > layers:
            yield ConfigError(
                "more layers were named than the model has",
                found=f"{flag} {count}, --num-layers {layers}",
                fix=f"use {flag} {layers} for all of them",
            )
    if RecomputeModule.ACTIVATION in training.activations.modules and plan.config.model.has_experts:
        yield ConfigError(
            "the activation of experts cannot be recomputed by itself",
            found=f"--recompute-modules act, --num-experts {plan.config.model.num_experts}",
            fix="use --recompute-modules mlp",
        )
    place = plan.config.model.norm_placement
    if RecomputeModule.LAYERNORM in training.activations.modules and not place.is_before:
        yield ConfigError(
            "the norms that can be recomputed are those before attention and MLP",
            found=f"--recompute-modules layernorm, --norm-placement {place}",
            fix="leave layernorm out of --recompute-modules",
        )
    if not training.distribute_saved_activations:
        return
    if tp == 1:
        yield ConfigError(
            "there are no tensor-parallel ranks to split saved activations over",
            found="--distribute-saved-activations, --tensor-model-parallel-size 1",
            fix="leave --distribute-saved-activations out",
        )
    elif parallel.sequence_parallel:
        yield ConfigError(
            "under sequence parallelism saved activations are split already",
            found="--distribute-saved-activations, --sequence-parallel",
            fix="leave --distribute-saved-activations out",
        )


def vocabulary_pads_to_an_even_size(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the padded vocabulary holds every token and divides over tensor parallelism."""
    if plan.tokenizer is not None:
        vocabulary(plan.config, plan.tokenizer)
    yield from ()


def batch_splits_into_microbatches(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that every global batch of a ramp is whole micro-batches on every replica."""
    if plan.data_parallel_size is not None:
        batch_schedule(plan.config, plan.data_parallel_size)
    yield from ()


def sequence_fits_the_position_table(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a learned position table has a row for every position of a sample."""
    model, seq_length = plan.config.model, plan.config.data.seq_length
    rows = model.max_position_embeddings
    learned = model.position_embedding_type is PositionEmbedding.LEARNED
    if learned and rows is not None and rows < seq_length:
        yield ConfigError(
            "samples are longer than the table of positions",
            found=f"--seq-length {seq_length}, --max-position-embeddings {rows}",
            fix=f"use --max-position-embeddings {seq_length}, or --seq-length {rows}",
        )


def curriculum_fits_the_samples(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that samples can be cut to every length of a curriculum, and split over ranks."""
    grows = curriculum(plan.config)
    if grows is None:
        return
    data = plan.config.data
    kind, seq_length = plan.reads.kind(data), data.seq_length
    if not kind.can_be_cut:
        yield ConfigError(
            "a curriculum cuts the end off samples, where the answers of this kind of data stand",
            found=f"{grows}; the data are {kind}",
            fix="train on all of the sequence: leave the curriculum out",
        )
    longest = grows.all_lengths[-1]
    if longest > seq_length:
        yield ConfigError(
            "a curriculum needs longer samples than there are",
            found=f"{grows}; --seq-length {seq_length}",
            fix=f"let it end at {seq_length}, or use --seq-length {longest}",
        )
    parallel = plan.config.parallel
    tp = parallel.tensor_model_parallel_size
    uneven = [length for length in grows.all_lengths if length % tp]
    if parallel.sequence_parallel and uneven:
        yield ConfigError(
            "a length of the curriculum cannot be shared out evenly over the tensor-parallel ranks",
            found=f"{uneven[0]} tokens of {grows}; --tensor-model-parallel-size {tp}, "
            "--sequence-parallel",
            fix=f"let all lengths be multiples of {tp}, or leave out --sequence-parallel",
        )


def schedule_fits_the_training(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that warm-up, decay and training lengths agree, in one unit."""
    if plan.data_parallel_size is None:
        return
    training, schedule = plan.config.training, plan.config.schedule
    try:
        batches = batch_schedule(plan.config, plan.data_parallel_size)
        grows = curriculum(plan.config)
    except ConfigError:
        return  # batch_splits_into_microbatches or curriculum_fits_the_samples reports it
    yield from learning_rate_problems(
        schedule,
        total_samples=duration(plan.config, batches).total_samples,
        global_batch_size=batches.global_batch_size,
        samples_based=training.train_samples is not None,
        warmup_tokens=warmup_tokens(schedule, batches, grows, plan.config.data.seq_length),
    )


def intervals_make_sense(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that --keep-last is given with a folder to save to."""
    checkpoint = plan.config.checkpoint
    if checkpoint.keep_last is not None and checkpoint.save is None:
        yield ConfigError(
            "a number of checkpoints to keep was given, but no place for them",
            found=f"--keep-last {checkpoint.keep_last} without --save",
            fix="add --save FOLDER, or drop --keep-last",
        )


def profile_is_of_steps_and_ranks_of_the_run(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that --profile records steps that are trained, on ranks that there are."""
    flags, world_size = plan.config.logging, plan.launch.world_size
    iterations = plan.config.training.train_iters
    if not flags.profile:
        return
    if max(flags.profile_ranks) >= world_size:
        yield ConfigError(
            "a rank that is to be profiled is not there",
            found=f"--profile-ranks {' '.join(map(str, flags.profile_ranks))}; {world_size} ranks",
            fix=f"use ranks from 0 to {world_size - 1}",
        )
    if iterations is not None and flags.profile_step_end > iterations:
        yield ConfigError(
            "the profile ends after the training",
            found=f"--profile-step-end {flags.profile_step_end}, --train-iters {iterations}",
            fix=f"use --profile-step-start {max(0, iterations - 2)} "
            f"--profile-step-end {iterations}",
        )


def optimizer_state_is_as_exact_as_the_weights(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a float64 run has no bf16 optimizer state, which would make it inexact."""
    optimizer = plan.config.optimizer
    narrow = [
        f"{flag} bf16"
        for flag, dtype in (
            ("--exp-avg-dtype", optimizer.exp_avg_dtype),
            ("--exp-avg-sq-dtype", optimizer.exp_avg_sq_dtype),
        )
        if dtype is StateDtype.BF16
    ]
    if narrow and plan.config.precision.precision is Precision.FP64:
        yield ConfigError(
            "the optimizer's state would be far less exact than the float64 weights",
            found=f"{' '.join(narrow)} with --fp64",
            fix=f"drop {' and '.join(flag.split()[0] for flag in narrow)}, or use --bf16",
        )


def optimizer_updates_what_a_rank_holds(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that Muon, which updates whole matrices, finds them on the ranks."""
    config = plan.config
    if config.optimizer.optimizer is OptimizerKind.MUON and config.parallel.sharding.shards_state:
        yield ConfigError(
            "Muon updates whole matrices, of which replicas would have parts",
            found="--optimizer muon with --data-parallel-sharding-strategy "
            f"{config.parallel.sharding} (--use-distributed-optimizer is optim)",
            fix="leave --use-distributed-optimizer and --data-parallel-sharding-strategy out",
        )


def tokenizer_can_be_built(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the tokenizer's files are there and readable."""
    if plan.tokenizer_error is not None:
        yield plan.tokenizer_error


def tokenizer_knows_ends_of_documents(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the tokenizer has an end-of-document token where flags need one."""
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
