"""EncoderDecoderConfig: what a model of an encoder and a decoder has beside one of one stack.

The encoder has the layers and the length that models of one stack have (`num_layers`,
`seq_length`). Only values of flags are stored; derived values are methods.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.fields import check_field, flag, raise_all, to_plain
from megatron.errors import ConfigError
from megatron.json_values import JsonValue

AS_ENCODER = 0  # decoder_num_layers of a decoder as deep as the encoder


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig:
    """Decoder and positions of an encoder-decoder model (pretrain_t5.py)."""

    decoder_num_layers: int | None = flag(
        None,
        help="transformer layers of the decoder, beside --num-layers of the encoder; 0: as many as "
        "those, which is the default of pretrain_t5.py; not set: there is no decoder of its own",
    )
    decoder_seq_length: int | None = flag(
        None,
        help="tokens of a row of the decoder; when not set as many as the targets of spans need "
        "with --noise-density, else seq-length",
    )
    relative_attention_num_buckets: int = flag(
        32, help="with --position-embedding-type relative, ranges of distances that share a bias"
    )
    relative_attention_max_distance: int = flag(
        128,
        help="with --position-embedding-type relative, tokens from which on all distances share "
        "one bias",
    )
    pipeline_model_parallel_split_rank: int | None = flag(
        None,
        help="pipeline stage, counted from 0, with which the decoder begins; when not set the "
        "layers of both are shared out evenly, wherever the border is",
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    def _problems(self) -> Iterator[ConfigError]:
        if self.decoder_num_layers is not None:
            yield from check_field(
                self.decoder_num_layers >= 0,
                "decoder_num_layers",
                self.decoder_num_layers,
                problem="a decoder has a negative number of layers",
                fix="use a whole number above 0, or 0 for as many as the encoder has",
            )
        if self.decoder_seq_length is not None:
            yield from check_field(
                self.decoder_seq_length > 1,
                "decoder_seq_length",
                self.decoder_seq_length,
                problem="a row of the decoder has no room for a token and its end",
                fix="use 2 or more, such as 128",
            )
        buckets, distance = (
            self.relative_attention_num_buckets,
            self.relative_attention_max_distance,
        )
        yield from check_field(
            buckets >= 4 and buckets % 2 == 0,
            "relative_attention_num_buckets",
            buckets,
            problem="the ranges of distances are not an even number from 4",
            fix="use 32, as T5 does",
        )
        if distance <= buckets // 2:
            yield ConfigError(
                "no distance is left for the ranges of distances beyond those of one token",
                found=f"--relative-attention-max-distance {distance}, "
                f"--relative-attention-num-buckets {buckets}",
                fix=f"use a distance of more than {max(2, buckets // 2)}, such as {4 * buckets}",
            )

    def meaning(self, num_layers: int) -> dict[str, JsonValue]:
        """Return the fields as plain values, with the depth beside `num_layers` resolved."""
        return to_plain(self) | {"decoder_num_layers": self.decoder_layers(num_layers) or None}

    def decoder_layers(self, num_layers: int) -> int:
        """Return the transformer layers of the decoder beside an encoder of `num_layers`."""
        given = self.decoder_num_layers
        return num_layers if given == AS_ENCODER else given or 0
