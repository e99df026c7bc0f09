"""The inputs of building a run's layers: `ModelBuild` from its flags and its ranks."""

from typing import Protocol

from megatron import log
from megatron.config.run import RunConfig
from megatron.model.compilation import LayerCompiler
from megatron.model.specs import ModelBuild, VocabSize
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear_cross_entropy import LossState
from megatron.mpu.random import RandomStreams
from megatron.pipeline.plan import plan_of_run
from megatron.tokenizer.tokenizer import Tokenizer, padded_vocab_size, true_vocab_size


class RunState(Protocol):
    """The parts of a `Runtime` that a model depends on."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def context(self) -> ParallelContext: ...
    @property
    def streams(self) -> RandomStreams: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


def model_build(runtime: RunState) -> ModelBuild:
    """Return the dependencies of this rank's layers."""
    config, context = runtime.config, runtime.context
    splits_sequences = config.parallel.sequence_parallel and context.tp.size > 1
    if config.parallel.sequence_parallel and not splits_sequences:
        log.info(
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1: there is no "
            "other rank to share a sequence with"
        )
    pipeline = plan_of_run(config)
    return ModelBuild(
        ctx=context,
        vocab=vocabulary(config, runtime.tokenizer),
        seq_length=config.data.seq_length,
        streams=runtime.streams,
        precision=config.precision,
        sequence_parallel=splits_sequences,
        tp_comm_overlap=config.parallel.tp_comm_overlap,
        context_exchange=config.parallel.cp_comm_type,
        overlap_shared_expert=config.parallel.moe_shared_expert_overlap,
        activations=config.training.activations,
        virtual_stages=context.pp.size * pipeline.num_chunks,
        loss_state=LossState(
            z_loss_coeff=config.training.z_loss_coeff, soft_cap=config.model.logit_soft_cap
        ),
        fuse_loss=config.training.cross_entropy_loss_fusion,
        attention_backend=config.training.attention_backend,
        fuse_rope=config.training.rope_fusion,
        fuse_gated_units=config.training.bias_swiglu_fusion,
        fuse_dropout=config.training.bias_dropout_fusion,
        compiler=LayerCompiler() if config.training.compile else None,
        fp8=config.fp8 if config.fp8.fp8_format is not None else None,
    )


def vocabulary(config: RunConfig, tokenizer: Tokenizer) -> VocabSize:
    """Return the numbers of tokens and of table rows of a run's model.

    Raises:
        ConfigError: the rows do not split over the tensor-parallel ranks, or are fewer than tokens.
    """
    flags = config.tokenizer
    true = true_vocab_size(tokenizer.vocab_size, flags.true_vocab_size)
    padded = padded_vocab_size(
        true,
        divisible_by=flags.make_vocab_size_divisible_by,
        tp=config.parallel.tensor_model_parallel_size,
        pad_to=flags.pad_vocab_size_to,
    )
    return VocabSize(true, padded)
