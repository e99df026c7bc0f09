"""Depth and lengths of a decoder, and the ranges of relative positions."""

import pytest

from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.errors import ConfigError


def test_a_decoder_is_as_deep_as_its_flag_or_as_its_encoder() -> None:
    assert EncoderDecoderConfig().decoder_layers(6) == 0
    assert EncoderDecoderConfig(decoder_num_layers=0).decoder_layers(6) == 6
    assert EncoderDecoderConfig(decoder_num_layers=2).decoder_layers(6) == 2


@pytest.mark.parametrize(
    ("flags", "problem", "found", "fix"),
    [
        (
            {"decoder_num_layers": -1},
            "a decoder has a negative number of layers",
            "--decoder-num-layers -1",
            "0 for as many as the encoder has",
        ),
        (
            {"decoder_seq_length": 1},
            "a row of the decoder has no room for a token and its end",
            "--decoder-seq-length 1",
            "use 2 or more",
        ),
        (
            {"relative_attention_num_buckets": 7},
            "the ranges of distances are not an even number from 4",
            "--relative-attention-num-buckets 7",
            "use 32",
        ),
        (
            {"relative_attention_max_distance": 16},
            "no distance is left for the ranges of distances beyond those of one token",
            "--relative-attention-max-distance 16, --relative-attention-num-buckets 32",
            "more than 16, such as 128",
        ),
    ],
)
def test_what_a_decoder_cannot_be_is_refused(
    flags: dict[str, int], problem: str, found: str, fix: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        EncoderDecoderConfig(**flags)
    assert found in str(error.value)
    assert fix in str(error.value)
