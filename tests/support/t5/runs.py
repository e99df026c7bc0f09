"""Runs of a T5 that are small enough for a test; see `tests.support.tiny`."""

from collections.abc import Sequence
from typing import Any

from megatron.config.run import RunConfig
from pretrain_t5 import t5_task
from tests.support.t5.models import T5_1_0
from tests.support.tiny import Record, train
from tests.support.tiny_bert import TinySentences, tiny_bert_run

# Two layers and three, relative positions over all ranges, and RMSNorm as the published models.
_OF_T5: dict[str, Any] = {
    **T5_1_0,
    "decoder_num_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "vocab_extra_ids": 16,
}


def tiny_t5_run(corpus: TinySentences, **flags: Any) -> RunConfig:
    """A run on masked texts: rows of 24 tokens, and of 20 for the decoder."""
    return tiny_bert_run(corpus, **({**_OF_T5, "decoder_seq_length": 20} | flags))


def tiny_span_run(corpus: str, words: TinySentences, **flags: Any) -> RunConfig:
    """A run on windows that have lost spans: rows of 18 tokens, of 10 for targets of 9."""
    of_spans = {
        "seq_length": 18,
        "noise_density": 0.25,
        "decoder_seq_length": 10,
        "mean_noise_span_length": 2.0,
        "mask_prob": 0.15,
        "data_path": (corpus,),
    }
    return tiny_bert_run(words, **(_OF_T5 | of_spans | flags))


def train_t5_all(configs: Sequence[RunConfig]) -> list[Record]:
    """A body for `run_on_ranks`: several runs one after the other in the same processes."""
    return [train(each, t5_task(each.encoder_decoder, each.data)) for each in configs]
