"""Counts from the config equal counts of the towers themselves."""

import pytest
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron.config.activations import ActivationPolicy
from megatron.config.models.retrieval import RetrievalConfig
from megatron.model.retrieval.accounting import (
    biencoder_flops_per_token,
    biencoder_parameter_count,
)
from megatron.model.retrieval.biencoder import biencoder_carry, biencoder_layers
from megatron.model.stage import PipelineStage
from tests.support.models import TINY_VOCAB, tiny_build, tiny_config, tiny_tokens

ONE = {"biencoder_shared_query_context_model": True}


@pytest.mark.parametrize(
    "flags", [{}, {"biencoder_projection_dim": 6}, ONE, {**ONE, "biencoder_projection_dim": 6}]
)
def test_parameters_are_those_of_the_model(flags: dict[str, int]) -> None:
    retrieval, config = RetrievalConfig(**flags), tiny_config()
    stage = PipelineStage(biencoder_layers(config, tiny_build(), retrieval))
    expected = sum(parameter.numel() for parameter in stage.parameters())
    assert biencoder_parameter_count(config, retrieval, TINY_VOCAB.padded, 12) == expected


def test_flops_are_those_of_two_tokens_whatever_the_number_of_towers() -> None:
    for retrieval in (RetrievalConfig(), RetrievalConfig(**ONE)):
        config, build = tiny_config(), tiny_build()
        stage = PipelineStage(biencoder_layers(config, build, retrieval)[:-1])
        texts = tiny_tokens(2, 12), tiny_tokens(2, 12, seed=1)
        mask = texts[0].new_ones(texts[0].shape)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            questions, blocks = stage(biencoder_carry(texts[0], mask, texts[1], mask))
            (questions.sum() + blocks.sum()).backward()
        flops = biencoder_flops_per_token(
            config, 12, recompute=ActivationPolicy(), virtual_stages=1
        )
        assert counter.get_total_flops() == flops.model * texts[0].numel()
        assert flops.model == flops.causal == flops.hardware
