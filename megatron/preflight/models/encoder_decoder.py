"""Whether the flags of a decoder are those of a model that has one, and its rows fit.

What a reader would get wrong: the checks of other modules look at the encoder's rows, whose length
is the sequence length; these look at the decoder's.
"""

from collections.abc import Iterator

from megatron.config.fields import default_of, field_names, flag_name
from megatron.config.model import PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.data.kinds.t5_data import decoder_rows
from megatron.errors import ConfigError, MegatronError
from megatron.model.geometry import relative_positions_refused
from megatron.model.t5_model import no_decoder, unsupported_settings
from megatron.preflight.run import RunPlan

_RELATIVE = ("relative_attention_num_buckets", "relative_attention_max_distance")


def decoder_belongs_to_the_program(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that flags of a decoder, and relative positions, were given to a program with one."""
    config = plan.config
    if plan.reads.has_decoder:
        if config.encoder_decoder.decoder_num_layers is None:
            yield no_decoder()
        return
    if config.model.position_embedding_type is PositionEmbedding.RELATIVE:
        yield relative_positions_refused()
    for name in _given(config.encoder_decoder, field_names(EncoderDecoderConfig)):
        yield ConfigError(
            "a flag of a decoder was given to a program whose model has one stack",
            found=f"{flag_name(name)} {getattr(config.encoder_decoder, name)}",
            fix=f"leave {flag_name(name)} out, or use pretrain_t5.py",
        )


def decoder_has_what_the_flags_ask_for(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a model with a decoder is given nothing that only models of one stack have."""
    config = plan.config
    if not plan.reads.has_decoder:
        return
    yield from unsupported_settings(
        config.model,
        cp=config.parallel.context_parallel_size,
        distributes=config.training.activations.distribute,
    )
    stages = config.parallel.pipeline_model_parallel_size
    kind = config.model.position_embedding_type
    has_more = kind is PositionEmbedding.LEARNED or config.model.embed_layernorm
    if config.engine.deepspeed and stages > 1 and config.model.tied and has_more:
        yield ConfigError(
            "DeepSpeed's pipeline shares an embedding over stages as a whole or not at all, and "
            "the stage of the head has its table of words alone",
            found=f"--deepspeed, --pipeline-model-parallel-size {stages}, "
            + ("--embed-layernorm" if config.model.embed_layernorm else f"positions {kind}"),
            fix="leave --deepspeed out, or use --position-embedding-type relative without "
            "--embed-layernorm",
        )
    if kind is not PositionEmbedding.RELATIVE:
        for name in _given(config.encoder_decoder, _RELATIVE):
            yield ConfigError(
                "ranges of distances were given to a model without relative positions",
                found=f"{flag_name(name)} {getattr(config.encoder_decoder, name)}, "
                f"--position-embedding-type {kind}",
                fix=f"leave {flag_name(name)} out, or add --position-embedding-type relative",
            )


def decoder_rows_fit_positions_and_ranks(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a learned table has their positions, and that split rows divide over ranks."""
    config, model = plan.config, plan.config.model
    if not plan.reads.has_decoder:
        return
    try:
        length = decoder_rows(config.data, config.encoder_decoder).length
    except ConfigError:
        return  # a check of the flags of data reports it
    rows = model.max_position_embeddings or config.data.seq_length
    if model.position_embedding_type is PositionEmbedding.LEARNED and length > rows:
        yield ConfigError(
            "rows of the decoder are longer than the table of positions",
            found=f"{length} tokens of the decoder, {rows} positions",
            fix=f"use --max-position-embeddings {length}, or --decoder-seq-length {rows}",
        )
    tp = config.parallel.tensor_model_parallel_size
    if config.parallel.sequence_parallel and length % tp:
        yield ConfigError(
            "rows of the decoder cannot be shared out evenly over the tensor-parallel ranks",
            found=f"{length} tokens of the decoder, --tensor-model-parallel-size {tp}, "
            "--sequence-parallel",
            fix=f"use --decoder-seq-length {-(-length // tp) * tp}, or leave out "
            "--sequence-parallel",
        )


def _given(decoder: EncoderDecoderConfig, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        if getattr(decoder, name) != default_of(EncoderDecoderConfig, name):
            yield name


CHECKS = (
    decoder_belongs_to_the_program,
    decoder_has_what_the_flags_ask_for,
    decoder_rows_fit_positions_and_ranks,
)
