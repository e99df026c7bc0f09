"""The towers of a retriever beside the BERT that they are, and what each of them may see."""

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.errors import ConfigError
from megatron.model.retrieval.biencoder import (
    CONTEXT,
    QUERY,
    biencoder_carry,
    biencoder_layers,
    tower_carry,
    tower_layers,
)
from megatron.model.specs import ModelBuild
from megatron.model.stage import PipelineStage
from megatron.mpu.random import Samples
from megatron.mpu.stage_plan import LayerRange
from tests.support.models import roughen, tiny_bert, tiny_build, tiny_config, tiny_tokens

SHARED = RetrievalConfig(biencoder_shared_query_context_model=True)
# float64 on both sides: only the order of additions differs.
SAME = {"rtol": 1e-12, "atol": 1e-12}


def texts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two questions and four blocks, of other lengths, each with a row that has padding."""
    questions, blocks = tiny_tokens(2, 7, seed=1), tiny_tokens(4, 9, seed=2)
    masks = torch.ones_like(questions), torch.ones_like(blocks)
    masks[0][1, 5:] = 0
    masks[1][2, 4:] = 0
    return questions, masks[0], blocks, masks[1]


def stage_of(
    retrieval: RetrievalConfig, config: ModelConfig | None = None, build: ModelBuild | None = None
) -> PipelineStage:
    build = build or tiny_build()
    specs = biencoder_layers(config or tiny_config(), build, retrieval)[:-1]  # without scores
    stage = PipelineStage(specs)
    roughen(stage, build.ctx)
    return stage


@pytest.mark.parametrize("retrieval", [RetrievalConfig(), SHARED])
def test_a_vector_is_the_class_token_of_a_bert_with_the_weights_of_the_tower(
    retrieval: RetrievalConfig,
) -> None:
    stage, bert = stage_of(retrieval), tiny_bert(tiny_config())
    questions, question_mask, blocks, block_mask = texts()
    found = stage(biencoder_carry(questions, question_mask, blocks, block_mask))
    rows = ((questions, question_mask), (blocks, block_mask))
    for tower, (tokens, mask), vectors in zip(retrieval.towers, rows, found, strict=True):
        weights = {
            name.removeprefix(f"{tower}."): values
            for name, values in stage.state_dict().items()
            if name.startswith(f"{tower}.")
        }
        bert.load_state_dict(weights, strict=False)
        expected = bert.hidden_states(tokens, torch.zeros_like(tokens), mask)[0]
        torch.testing.assert_close(vectors, expected, **SAME)


def test_a_projection_is_applied_to_that_state() -> None:
    plain, projected = (
        stage_of(SHARED),
        stage_of(
            RetrievalConfig(biencoder_shared_query_context_model=True, biencoder_projection_dim=5)
        ),
    )
    carry = biencoder_carry(*texts())
    head = projected.get_submodule("shared.head.projection")
    for state, vectors in zip(plain(carry), projected(carry), strict=True):
        assert vectors.shape == (len(state), 5)
        torch.testing.assert_close(vectors, head(state), **SAME)


def test_padding_and_the_other_text_change_no_vector() -> None:
    stage = stage_of(RetrievalConfig())
    questions, question_mask, blocks, block_mask = texts()
    before = stage(biencoder_carry(questions, question_mask, blocks, block_mask))
    changed = torch.where(block_mask == 0, 3, blocks)
    changed[0] = 1
    after = stage(biencoder_carry(questions, question_mask, changed, block_mask))
    assert torch.equal(before[0], after[0])
    torch.testing.assert_close(before[1][1:], after[1][1:], **SAME)
    assert not torch.allclose(before[1][0], after[1][0])


@pytest.mark.parametrize("retrieval", [RetrievalConfig(), SHARED])
def test_the_list_may_be_cut_anywhere(retrieval: RetrievalConfig) -> None:
    specs = biencoder_layers(tiny_config(), tiny_build(), retrieval)[:-1]
    whole = stage_of(retrieval)
    carry = biencoder_carry(*texts())
    expected = whole(carry)
    for cut in range(1, len(specs)):
        parts = [
            PipelineStage(specs, [LayerRange(*part)]) for part in ((0, cut), (cut, len(specs)))
        ]
        for part in parts:
            part.load_state_dict(whole.state_dict(), strict=False)
        for one, other in zip(parts[1](parts[0](carry)), expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("text", [QUERY, CONTEXT])
def test_a_tower_alone_is_that_of_the_pair(text: int) -> None:
    config, build = tiny_config(), tiny_build()
    pair = stage_of(RetrievalConfig(), config, build)
    alone = PipelineStage(tower_layers(config, build, RetrievalConfig(), text=text))
    alone.load_state_dict(pair.state_dict(), strict=False)
    rows = texts()[2 * text : 2 * text + 2]
    (vectors,) = alone(tower_carry(*rows))
    assert torch.equal(vectors, pair(biencoder_carry(*texts()))[text])


def test_a_question_and_its_block_have_other_masks_of_dropout() -> None:
    build = tiny_build()
    stage = stage_of(SHARED, tiny_config(hidden_dropout=0.5, attention_dropout=0.5), build)
    tokens = tiny_tokens(3, 7)
    mask = torch.ones_like(tokens)
    with build.streams.of(Samples(0, 3)):
        one, other = stage(biencoder_carry(tokens, mask, tokens, mask))
        again, _ = stage(biencoder_carry(tokens, mask, tokens, mask))
    assert torch.equal(one, again)
    assert not torch.allclose(one, other)
    stage.eval()
    one, other = stage(biencoder_carry(tokens, mask, tokens, mask))
    assert torch.equal(one, other)


def test_a_retriever_with_experts_is_refused() -> None:
    config = tiny_config(num_experts=2, add_bias_linear=False)
    with pytest.raises(ConfigError, match="the towers of a retriever have no experts"):
        biencoder_layers(config, tiny_build(), RetrievalConfig())
