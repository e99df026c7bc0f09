"""Flags of a decoder where there is none, and rows of a decoder that do not fit."""

from pathlib import Path
from typing import Any

import pytest

from megatron.data.kinds.t5_data import t5_data
from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.preflight.activations import least_activation_bytes
from megatron.preflight.checks import CHECKS, LAYOUT_CHECKS
from megatron.preflight.memory import even_share
from megatron.preflight.models.encoder_decoder import (
    decoder_belongs_to_the_program,
    decoder_has_what_the_flags_ask_for,
    decoder_rows_fit_positions_and_ranks,
)
from megatron.preflight.run import RunPlan
from tests.support.t5.models import T5_1_0
from tests.support.t5.runs import tiny_t5_run
from tests.support.tiny_bert import TinySentences, write_tiny_sentences
from tests.unit.preflight.plans import found, only, plan


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinySentences:
    return write_tiny_sentences(Path(tmp_path_factory.mktemp("sentences")), documents=4)


def t5_plan(corpus: TinySentences, *, world_size: int = 1, **flags: Any) -> RunPlan:
    config = tiny_t5_run(corpus, **flags)
    launch = Launch(world_size=world_size, local_world_size=world_size)
    return RunPlan(config, launch, tokenizer_of(config), reads=t5_data(config.encoder_decoder))


ALL = (
    decoder_belongs_to_the_program,
    decoder_has_what_the_flags_ask_for,
    decoder_rows_fit_positions_and_ranks,
)


def test_all_checks_run_before_training_and_before_a_plan(corpus: TinySentences) -> None:
    for check in ALL:
        assert check in CHECKS
        assert check in LAYOUT_CHECKS
        assert not found(check, t5_plan(corpus))
        assert not found(check, plan())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"decoder_num_layers": 2}, "--decoder-num-layers 2"),
        ({"decoder_seq_length": 20}, "--decoder-seq-length 20"),
        ({"relative_attention_max_distance": 64}, "--relative-attention-max-distance 64"),
        ({"pipeline_model_parallel_split_rank": 1}, "--pipeline-model-parallel-split-rank 1"),
    ],
)
def test_flags_of_a_decoder_are_refused_where_there_is_none(
    flags: dict[str, int], words: str
) -> None:
    errors = found(decoder_belongs_to_the_program, plan(**flags))
    only(errors, "to a program whose model has one stack", words, "or use pretrain_t5.py")


def test_relative_positions_are_refused_where_there_is_no_decoder() -> None:
    errors = found(decoder_belongs_to_the_program, plan(position_embedding_type="relative"))
    only(errors, "relative positions are those of an encoder and its decoder")


def test_a_decoder_has_layers(corpus: TinySentences) -> None:
    without = t5_plan(corpus, decoder_num_layers=None)
    only(found(decoder_belongs_to_the_program, without), "has no decoder", "0 for as many")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"use_parallel_residual": True}, "--use-parallel-residual"),
        (
            {
                "tensor_model_parallel_size": 2,
                "recompute_granularity": "full",
                "distribute_saved_activations": True,
            },
            "--distribute-saved-activations with --position-embedding-type relative",
        ),
        (
            {"deepspeed": True, "pipeline_model_parallel_size": 2, "embed_layernorm": True},
            "the stage of the head has its table of words alone",
        ),
        (
            {"position_embedding_type": "rope"},
            "ranges of distances were given to a model without relative positions",
        ),
    ],
)
def test_what_a_decoder_does_not_have_is_refused(
    corpus: TinySentences, flags: dict[str, Any], words: str
) -> None:
    if "position_embedding_type" in flags:
        flags = {**flags, "relative_attention_max_distance": 128}
    errors = found(decoder_has_what_the_flags_ask_for, t5_plan(corpus, world_size=2, **flags))
    only(errors, words)


def test_rows_longer_than_the_table_of_positions_are_refused_with_numbers(
    corpus: TinySentences,
) -> None:
    flags = {"position_embedding_type": "learned_absolute", "decoder_seq_length": 30}
    errors = found(decoder_rows_fit_positions_and_ranks, t5_plan(corpus, **flags))
    only(errors, "30 tokens of the decoder, 24 positions", "--max-position-embeddings 30")
    assert not found(
        decoder_rows_fit_positions_and_ranks,
        t5_plan(corpus, max_position_embeddings=30, **flags),
    )


def test_rows_that_do_not_divide_over_ranks_are_refused_with_a_length_that_does(
    corpus: TinySentences,
) -> None:
    flags = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    uneven = t5_plan(corpus, world_size=2, decoder_seq_length=21, **flags)
    errors = found(decoder_rows_fit_positions_and_ranks, uneven)
    only(errors, "21 tokens of the decoder", "use --decoder-seq-length 22")
    even = t5_plan(corpus, world_size=2, decoder_seq_length=22, **flags)
    assert not found(decoder_rows_fit_positions_and_ranks, even)


def test_lengths_that_another_check_refuses_are_no_finding_here(corpus: TinySentences) -> None:
    spans = {"noise_density": 0.25, "mask_prob": 0.15, "decoder_seq_length": 2}
    assert not found(decoder_rows_fit_positions_and_ranks, t5_plan(corpus, **spans))


def test_the_least_memory_is_that_of_both_stacks(corpus: TinySentences) -> None:
    two, three = (t5_plan(corpus, decoder_num_layers=n) for n in (2, 3))
    hidden, queries, ffn = 16, 4 * T5_1_0["kv_channels"], 64
    block = 3 * hidden + 8 * hidden * queries + 2 * hidden * ffn
    assert even_share(three)[0] - even_share(two)[0] == block
    short, shorter = (
        least_activation_bytes(t5_plan(corpus, decoder_seq_length=n).config, 1) for n in (20, 10)
    )
    assert short[0] == 2 * shorter[0]  # of the shorter rows of both stacks
