"""ParallelConfig: how many ways the model is split over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError


class PipelineSchedule(StrEnum):
    """In which order pipeline stages work."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


class ContextExchange(StrEnum):
    """What ranks that share a sequence exchange for attention."""

    P2P = "p2p"  # keys and values, which go round the ranks
    ALL_GATHER = "all_gather"  # keys and values, which every rank gathers
    A2A = "a2a"  # tokens for heads, before attention and back after it


class ShardingStrategy(StrEnum):
    """What replicas share out among them: each value all that the ones before it do."""

    NO_SHARD = "no_shard"
    OPTIM = "optim"  # the optimizer's state and work: ZeRO stage 1
    OPTIM_GRADS = "optim_grads"  # gradients: stage 2
    OPTIM_GRADS_PARAMS = "optim_grads_params"  # parameters: stage 3, fully sharded

    @property
    def shards_state(self) -> bool:
        """Whether a replica updates a part of the parameters only."""
        return self is not ShardingStrategy.NO_SHARD

    @property
    def shards_gradients(self) -> bool:
        """Whether a replica keeps the gradients of its part only."""
        return self in (ShardingStrategy.OPTIM_GRADS, ShardingStrategy.OPTIM_GRADS_PARAMS)

    @property
    def shards_parameters(self) -> bool:
        """Whether a replica keeps its part of the parameters only."""
        return self is ShardingStrategy.OPTIM_GRADS_PARAMS


class PipelineBalance(StrEnum):
    """The quantity that is balanced over pipeline stages."""

    LAYERS = "layers"
    PARAMETERS = "parameters"  # embedding, final norm and head included


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How the model is split over ranks; the remaining factor is data parallelism."""

    tensor_model_parallel_size: int = flag(
        1, help="ranks that share each layer's matrices", aliases=("--tensor-parallel",)
    )
    sequence_parallel: bool = flag(
        False,
        help="give each tensor-parallel rank its own part of the sequence between its layers' "
        "matrices, instead of all of it on every rank: less memory, equal results",
    )
    tp_comm_overlap: bool = flag(
        False,
        help="multiply one part of a split sequence while the next one travels between "
        "tensor-parallel ranks; needs --sequence-parallel",
    )
    pipeline_model_parallel_size: int = flag(
        1, help="ranks that share the layers", aliases=("--pipeline-parallel",)
    )
    context_parallel_size: int = flag(
        1,
        help="ranks that share the tokens of every sequence, from the embedding to the loss: "
        "memory of activations falls with their number, and results are equal",
    )
    cp_comm_type: ContextExchange = flag(
        ContextExchange.P2P,
        help="what ranks that share a sequence exchange for attention: keys and values round a "
        "ring (p2p), or of all at once (all_gather), or tokens for heads (a2a, DeepSpeed-Ulysses)",
    )
    use_tp_pp_dp_mapping: bool = flag(
        False,
        help="number ranks so that pipeline stages are nearer to each other than replicas; without "
        "it replicas are",
    )
    expert_model_parallel_size: int = flag(
        1,
        help="ranks of a pipeline stage that share the experts of a layer out, each with whole "
        "ones; tokens go to the ranks of their experts and back",
        aliases=("--moe-expert-parallel-size",),
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        help="ranks of a pipeline stage that share each expert's matrices; when not set as many "
        "as those of tensor parallelism",
    )
    moe_shared_expert_overlap: bool = flag(
        False,
        help="compute the shared expert while tokens travel to experts that are shared out, and "
        "back; results are equal to the bit",
    )
    pipeline_schedule: PipelineSchedule | None = flag(
        None,
        help="in which order pipeline stages work; when not set 1f1b, and interleaved where ranks "
        "have several virtual stages",
    )
    overlap_p2p_communication: bool = flag(
        False,
        help="compute while messages between pipeline stages travel, until they are needed",
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None, help="parts of the model that each pipeline rank holds, one when not set"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, help="the same by the number of layers in each of those parts"
    )
    pipeline_layer_counts: tuple[int, ...] | None = flag(
        None,
        help="layers of each pipeline rank, or of each virtual stage in the order of the model; "
        "when not set as equal as they can be",
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, help="layers of the first pipeline rank; the others share the rest"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, help="layers of the last pipeline rank; the others share the rest"
    )
    pipeline_balance: PipelineBalance = flag(
        PipelineBalance.LAYERS,
        help="what pipeline stages have equally much of: transformer layers, or parameters with "
        "those of the embedding and the head",
    )
    pipeline_layer_costs: tuple[float, ...] | None = flag(
        None,
        help="what each layer of the model's list costs, embedding, final norm and head included, "
        "in any unit, as tools/planning/measure_layer_costs.py measures them: the costliest stage "
        "is made as cheap as it can be",
    )
    use_distributed_optimizer: bool = flag(
        False,
        help="share the optimizer's state and work out over replicas, each of which updates a part "
        "of the parameters: --data-parallel-sharding-strategy optim",
    )
    data_parallel_sharding_strategy: ShardingStrategy | None = flag(
        None,
        help="what replicas share out: nothing (no_shard), the optimizer's state and work (optim), "
        "gradients too (optim_grads), and parameters too (optim_grads_params), which are then "
        "whole one layer at a time; results are equal",
    )
    num_distributed_optimizer_instances: int = flag(
        1,
        help="parts of the replicas, each of which shares state, gradients or parameters out by "
        "itself: more memory, and gathers over fewer ranks (hybrid sharding)",
    )
    reshard_after_forward: bool = flag(
        True,
        help="under optim_grads_params give the parameters of a layer back after its forward pass; "
        "without it they stay until its backward pass, which takes more memory and fewer gathers",
        off=("--torch-fsdp2-no-reshard-after-forward",),
    )
    overlap_param_gather: bool = flag(
        False,
        help="gather parameters that replicas share out while others are computed with: updated "
        "ones during the next forward pass, or those of the next layer under optim_grads_params",
    )
    overlap_grad_reduce: bool = flag(
        False, help="reduce gradients over replicas while the backward pass goes on"
    )
    ddp_bucket_size: int | None = flag(
        None,
        help="gradients reduced in one collective, at least; when not set 40 million, or one "
        "million per replica where that is more",
    )

    check_collectives: bool = flag(
        False,
        help="for debugging: before each communication compare operation, shape and dtype over "
        "ranks, and name the rank that differs or is missing",
    )
    check_collectives_seconds: float = flag(
        60.0, help="how long a rank may be behind the others under --check-collectives"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def sharding(self) -> ShardingStrategy:
        """What replicas share out, by either of the two flags."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return (
            ShardingStrategy.OPTIM if self.use_distributed_optimizer else ShardingStrategy.NO_SHARD
        )

    @property
    def check_seconds(self) -> float | None:
        """How long ranks wait to compare their next communication; None: they do not."""
        return self.check_collectives_seconds if self.check_collectives else None

    def _problems(self) -> Iterator[ConfigError]:
        yield from check_field(
            self.check_collectives_seconds > 0,
            "check_collectives_seconds",
            self.check_collectives_seconds,
            problem="ranks cannot wait for each other for no time at all",
            fix="use --check-collectives-seconds 60",
        )
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "num_distributed_optimizer_instances",
        ):
            value = getattr(self, name)
            yield from check_field(
                value > 0,
                name,
                value,
                problem="a parallel size is not positive",
                fix="use 1 for no parallelism of that kind",
            )
        for name in (
            "num_virtual_stages_per_pipeline_rank",
            "num_layers_per_virtual_pipeline_stage",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ):
            value = getattr(self, name)
            if value is not None:
                yield from check_field(
                    value > 0, name, value, problem="it is not positive", fix="use 1 or more"
                )
        yield from self._contradictions()
        yield from self._sharding_problems()
        if self.ddp_bucket_size is not None:
            yield from check_field(
                self.ddp_bucket_size > 0,
                "ddp_bucket_size",
                self.ddp_bucket_size,
                problem="buckets of gradients are empty",
                fix="use a number such as 40000000, or leave it out",
            )

    def _sharding_problems(self) -> Iterator[ConfigError]:
        strategy = self.data_parallel_sharding_strategy
        if self.use_distributed_optimizer and strategy is ShardingStrategy.NO_SHARD:
            yield ConfigError(
                "the optimizer's state is to be shared out, and nothing is",
                found="--use-distributed-optimizer, --data-parallel-sharding-strategy no_shard",
                fix="drop one of the two",
            )
        elif self.overlap_param_gather and not self.sharding.shards_state:
            yield ConfigError(
                "parameters are gathered only where replicas share them or their updates out",
                found="--overlap-param-gather without --use-distributed-optimizer",
                fix="add --use-distributed-optimizer, or drop it",
            )
        if not (self.reshard_after_forward or self.sharding.shards_parameters):
            yield ConfigError(
                "parameters are whole all the time, and cannot be kept for the backward pass",
                found=f"--no-reshard-after-forward without --data-parallel-sharding-strategy "
                f"{ShardingStrategy.OPTIM_GRADS_PARAMS}",
                fix="add it, or drop --no-reshard-after-forward",
            )
        parts = self.num_distributed_optimizer_instances
        if parts > 1 and not self.sharding.shards_state:
            yield ConfigError(
                "replicas share nothing out, and cannot do so in parts",
                found=f"--num-distributed-optimizer-instances {parts} without "
                "--use-distributed-optimizer",
                fix="add --use-distributed-optimizer or a --data-parallel-sharding-strategy",
            )
        zero_bubble = self.pipeline_schedule is PipelineSchedule.ZERO_BUBBLE
        if self.sharding.shards_gradients and zero_bubble:
            yield ConfigError(
                "what replicas share out would be whole all the time: this schedule computes "
                "gradients of weights long after it has used them",
                found=f"--pipeline-schedule zero-bubble, --data-parallel-sharding-strategy "
                f"{self.sharding.value}",
                fix="use --pipeline-schedule 1f1b, or --data-parallel-sharding-strategy optim",
            )

    def _contradictions(self) -> Iterator[ConfigError]:
        """Yield an error for flags that are redundant or contradict each other."""
        chunks = self.num_virtual_stages_per_pipeline_rank
        size = self.num_layers_per_virtual_pipeline_stage
        if chunks is not None and size is not None:
            yield ConfigError(
                "the virtual pipeline stages are given twice",
                found=f"--num-virtual-stages-per-pipeline-rank {chunks}, "
                f"--num-layers-per-virtual-pipeline-stage {size}",
                fix="give one of the two",
            )
        if self.tp_comm_overlap and not self.sequence_parallel:
            yield ConfigError(
                "only parts of split sequences travel while others are computed with",
                found="--tp-comm-overlap without --sequence-parallel",
                fix="add --sequence-parallel, or drop it",
            )
        counts = self.pipeline_layer_counts
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        if counts is not None and (first is not None or last is not None):
            yield ConfigError(
                "the layers of a pipeline stage are given twice",
                found="--pipeline-layer-counts " + " ".join(map(str, counts)),
                fix="drop --decoder-first-pipeline-num-layers and "
                "--decoder-last-pipeline-num-layers",
            )
        has_costs = self.pipeline_layer_costs is not None
        balanced = self.pipeline_balance is not PipelineBalance.LAYERS
        if has_costs and balanced:
            yield ConfigError(
                "what stages are balanced by is given twice",
                found=f"--pipeline-balance {self.pipeline_balance.value}, --pipeline-layer-costs",
                fix="give one of the two",
            )
        if (has_costs or balanced) and (counts, first, last, size) != (None, None, None, None):
            yield ConfigError(
                "the layers of the stages are given, and what they are to be balanced by too",
                found="--pipeline-layer-costs or --pipeline-balance with flags that count layers",
                fix="drop the one or the others",
            )
        if size is not None and (counts, first, last) != (None, None, None):
            yield ConfigError(
                "stages of unequal length cannot be cut into virtual stages of one length",
                found=f"--num-layers-per-virtual-pipeline-stage {size} with flags that make "
                "stages unequal",
                fix="use --num-virtual-stages-per-pipeline-rank instead",
            )
