"""Whether ranks can share sequences (`--context-parallel-size`) beside the other flags."""

import math
from collections.abc import Iterator

from megatron.config.parallel import ContextExchange
from megatron.errors import ConfigError, MegatronError
from megatron.lengths import curriculum
from megatron.model.attention import sharing_problems
from megatron.mpu.context_parallel.shares import SequenceShare
from megatron.mpu.topology import Topology
from megatron.preflight.run import RunPlan


def sequences_split_over_context_parallel_ranks(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that samples, and every length of a curriculum, divide over the ranks that share them.

    With sequence parallelism tensor-parallel ranks divide each rank's share again.
    """
    config = plan.config
    parallel = config.parallel
    size = parallel.context_parallel_size
    if size <= 1:
        return
    parts = SequenceShare(0, size, parallel.cp_comm_type is not ContextExchange.A2A).parts
    given = f"--context-parallel-size {size} --cp-comm-type {parallel.cp_comm_type}"
    if parallel.sequence_parallel:
        tp = parallel.tensor_model_parallel_size
        parts = size * math.lcm(tp, parts // size)
        given += f", --sequence-parallel with --tensor-model-parallel-size {tp}"
    grows = curriculum(config)
    lengths = {f"--seq-length {config.data.seq_length}": config.data.seq_length}
    if grows is not None:
        lengths |= {f"{length} tokens of {grows}": length for length in grows.all_lengths}
    uneven = [name for name, length in lengths.items() if length % parts]
    if uneven:
        yield ConfigError(
            "a sequence cannot be shared out evenly over the context-parallel ranks",
            found=f"{uneven[0]}; {given}",
            fix=f"use lengths that are multiples of {parts}, or fewer context-parallel ranks",
        )


def attention_can_share_sequences(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that heads divide where they are exchanged, and that kernels can do what is asked."""
    config, parallel = plan.config, plan.config.parallel
    grid = Topology(tp=parallel.tensor_model_parallel_size, cp=parallel.context_parallel_size)
    yield from sharing_problems(
        config.model, grid, parallel.cp_comm_type, config.training.attention_backend
    )


def engine_can_share_sequences(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that neither DeepSpeed trains nor layers are compiled."""
    size = plan.config.parallel.context_parallel_size
    for flag, is_given, why in (
        ("--deepspeed", plan.config.engine.deepspeed, "only the native engine does it"),
        ("--compile", plan.config.training.compile, "the exchange of keys is not compiled"),
    ):
        if size > 1 and is_given:
            yield ConfigError(
                f"ranks cannot share sequences: {why}",
                found=f"--context-parallel-size {size}, {flag}",
                fix=f"leave {flag} out, or --context-parallel-size",
            )


CHECKS = (
    sequences_split_over_context_parallel_ranks,
    attention_can_share_sequences,
    engine_can_share_sequences,
)
