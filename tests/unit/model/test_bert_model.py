"""BERT against the one of transformers, and what must hold whatever the weights are."""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForPreTraining

from megatron.config.precision import PrecisionConfig
from megatron.model.bert_model import (
    BertModel,
    bert_carry,
    bert_layers,
    bert_loss,
    classification_layers,
)
from megatron.model.losses import LossSum
from megatron.model.stage import PipelineStage
from megatron.mpu.stage_plan import LayerRange
from tests.support.models import (
    TINY_VOCAB,
    roughen,
    tiny_bert,
    tiny_build,
    tiny_config,
    tiny_tokens,
)

# float64 on both sides: only the order of additions differs.
SAME = {"rtol": 1e-10, "atol": 1e-10}

ORIGINAL = {
    "apply_residual_connection_post_layernorm": True,  # norms after additions, as in the paper
    "onnx_safe": True,
    "layernorm_epsilon": 1e-12,
    "max_position_embeddings": 12,
}


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of two segments, the second with padding: tokens, types, padding mask."""
    tokens = tiny_tokens()
    types = torch.tensor([[0] * 4 + [1] * 5, [0] * 3 + [1] * 3 + [0] * 3])
    padding = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    return tokens, types, padding


def theirs(ours: BertModel) -> BertForPreTraining:
    """The same weights in the BERT of transformers, in float64."""
    config = ours.config
    model = BertForPreTraining(
        BertConfig(
            vocab_size=TINY_VOCAB.true,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            intermediate_size=config.ffn_width,
            hidden_act="gelu",
            max_position_embeddings=12,
            layer_norm_eps=config.layernorm_epsilon,
            attn_implementation="eager",
        )
    )
    missing, unexpected = model.double().load_state_dict(_renamed(ours), strict=False)
    assert not unexpected
    assert all("position_ids" in name or "decoder" in name for name in missing)
    model.tie_weights()
    return model.eval()


def _renamed(ours: BertModel) -> Mapping[str, Tensor]:
    state = {name: value.detach() for name, value in ours.state_dict().items()}
    names = {
        "embedding.word.weight": "bert.embeddings.word_embeddings.weight",
        "embedding.position.weight": "bert.embeddings.position_embeddings.weight",
        "embedding.tokentype.weight": "bert.embeddings.token_type_embeddings.weight",
        "pooler.dense.": "bert.pooler.dense.",
        "order_head.dense.": "cls.seq_relationship.",
        "lm_head.dense.": "cls.predictions.transform.dense.",
        "lm_head.norm.": "cls.predictions.transform.LayerNorm.",
        "output_bias.bias": "cls.predictions.bias",
        "layers.0.input_norm.": "bert.embeddings.LayerNorm.",
        "final_norm.": f"bert.encoder.layer.{ours.config.num_layers - 1}.output.LayerNorm.",
    }
    for i in range(ours.config.num_layers):
        block = f"bert.encoder.layer.{i}."
        if i:
            names[f"layers.{i}.input_norm."] = f"bert.encoder.layer.{i - 1}.output.LayerNorm."
        names |= {
            f"layers.{i}.post_attention_norm.": block + "attention.output.LayerNorm.",
            f"layers.{i}.attention.output.": block + "attention.output.dense.",
            f"layers.{i}.mlp.fc1.": block + "intermediate.dense.",
            f"layers.{i}.mlp.fc2.": block + "output.dense.",
        }
    heads = ours.config.num_attention_heads
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        if ".qkv." in name:
            layer, kind = name.split(".")[1], name.rpartition(".")[2]
            # Head by head, [q; k; v] of each.
            split = value.unflatten(0, (heads, 3, -1))
            for at, part in enumerate(("query", "key", "value")):
                to = f"bert.encoder.layer.{layer}.attention.self.{part}.{kind}"
                found[to] = split[:, at].flatten(0, 1)
            continue
        (old,) = (old for old in names if name.startswith(old))
        rows = TINY_VOCAB.true if name in ("embedding.word.weight", "output_bias.bias") else None
        found[names[old] + name[len(old) :]] = value[:rows]
    return found


def test_scores_are_those_of_the_original_network() -> None:
    ours = tiny_bert(tiny_config(**ORIGINAL)).eval()
    tokens, types, padding = pairs()
    carry = ours(tokens, types, padding)
    assert not isinstance(carry, LossSum)
    words, order = carry
    with torch.no_grad():
        expected = theirs(ours)(tokens, attention_mask=padding, token_type_ids=types)
    words = words.transpose(0, 1)[..., : TINY_VOCAB.true]
    real = padding.bool()
    torch.testing.assert_close(words[real], expected.prediction_logits[real], **SAME)
    torch.testing.assert_close(order, expected.seq_relationship_logits, **SAME)


def test_hidden_states_are_what_the_heads_take() -> None:
    ours = tiny_bert(tiny_config(**ORIGINAL)).eval()
    tokens, types, padding = pairs()
    with torch.no_grad():
        expected = theirs(ours).bert(tokens, attention_mask=padding, token_type_ids=types)
    hidden = ours.hidden_states(tokens, types, padding).transpose(0, 1)
    real = padding.bool()
    torch.testing.assert_close(hidden[real], expected.last_hidden_state[real], **SAME)


def test_the_losses_are_sums_over_guessed_words_and_over_rows() -> None:
    ours = tiny_bert(tiny_config(**ORIGINAL)).eval()
    tokens, types, padding = pairs()
    labels = torch.where(torch.rand(tokens.shape).lt(0.4) & padding.bool(), tokens, -1)
    labels[0, 1], swapped = tokens[0, 1], torch.tensor([1, 0])
    losses = ours(tokens, types, padding, labels, (labels >= 0).long(), swapped)
    assert isinstance(losses, LossSum)
    with torch.no_grad():
        reference = theirs(ours)(
            tokens,
            attention_mask=padding,
            token_type_ids=types,
            labels=torch.where(labels < 0, -100, labels),
            next_sentence_label=swapped,
        )
    assert losses.count.tolist() == [int((labels >= 0).sum()), 2]
    torch.testing.assert_close(losses.mean.sum(), reference.loss, **SAME)


@pytest.mark.parametrize("changes", [{}, ORIGINAL, {"position_embedding_type": "rope"}])
def test_what_stands_in_the_padding_changes_nothing(changes: Mapping[str, object]) -> None:
    model = tiny_bert(tiny_config(**changes)).eval()
    tokens, types, padding = pairs()
    other = torch.where(padding.bool(), tokens, (tokens + 7) % TINY_VOCAB.true)
    assert not torch.equal(tokens, other)
    first, second = (model.hidden_states(x, types, padding) for x in (tokens, other))
    real = padding.t().bool()
    torch.testing.assert_close(first[real], second[real], rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "alibi"])
def test_every_token_looks_at_what_follows_too(kind: str) -> None:
    model = tiny_bert(tiny_config(position_embedding_type=kind)).eval()
    tokens, types, padding = pairs()
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % TINY_VOCAB.true
    first, second = (model.hidden_states(x, types, padding) for x in (tokens, changed))
    assert (first[0, 0] != second[0, 0]).any()
    assert torch.equal(first[:, 1], second[:, 1])  # another row


def test_the_kind_of_segment_matters() -> None:
    model = tiny_bert(tiny_config()).eval()
    tokens, types, padding = pairs()
    first, second = (model.hidden_states(tokens, t, padding) for t in (types, 1 - types))
    assert (first != second).any(-1).all()


def test_without_an_order_head_there_is_one_loss() -> None:
    model = tiny_bert(tiny_config(), order_head=False)
    tokens, types, padding = pairs()
    loss = model(tokens, types, padding, tokens, padding, torch.tensor([0, 1]))
    assert isinstance(loss, LossSum)
    assert loss.total.shape == loss.count.shape == ()
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.startswith(("order_head", "pooler")) for name in names)


def test_labels_alone_say_what_counts() -> None:
    model = tiny_bert(tiny_config(), order_head=False)
    tokens, types, padding = pairs()
    labels = torch.where(padding.bool(), tokens, -1)
    by_labels = model(tokens, types, padding, labels)
    by_mask = model(tokens, types, padding, labels, padding)
    assert by_labels == by_mask


@pytest.mark.parametrize("tied", [True, False])
def test_stages_of_the_list_compute_what_the_whole_does(tied: bool) -> None:
    config = tiny_config(untie_embeddings_and_output_weights=not tied)
    build = tiny_build()
    whole = tiny_bert(config, build).eval()
    specs = bert_layers(config, build)
    cuts = [0, 1, 3, 5, len(specs)]
    carry = bert_carry(*pairs())
    for start, stop in pairwise(cuts):
        stage = PipelineStage(specs, [LayerRange(start, stop)]).eval()
        stage.load_state_dict({n: whole.state_dict()[n] for n in stage.state_dict()})
        carry = stage(carry)
    expected = whole(*pairs())
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(carry, expected))


def test_losses_of_half_precision_scores_are_in_fp32() -> None:
    build = dataclasses.replace(tiny_build(), precision=PrecisionConfig(bf16=True))
    model = tiny_bert(tiny_config(), build)
    tokens, types, padding = pairs()
    carry = model(tokens, types, padding)
    assert not isinstance(carry, LossSum)
    losses = bert_loss(build, carry, tokens, padding, torch.tensor([0, 1]))
    assert losses.total.dtype == losses.count.dtype == torch.float32


def test_a_classifier_scores_rows_by_the_pooled_first_token() -> None:
    config, build = tiny_config(), tiny_build()
    whole = tiny_bert(config, build).eval()
    specs = classification_layers(config, build, num_classes=3)
    classifier = PipelineStage(specs).eval()
    roughen(classifier, build.ctx)
    shared = {n: t for n, t in whole.state_dict().items() if n in classifier.state_dict()}
    own = set(classifier.state_dict()) - set(shared)
    assert own == {"classification_head.dense.weight", "classification_head.dense.bias"}
    classifier.load_state_dict(shared, strict=False)
    (scores,) = classifier(bert_carry(*pairs()))
    first = whole.hidden_states(*pairs())[0]
    pooler, head = whole.get_submodule("pooler.dense"), classifier.classification_head.dense
    torch.testing.assert_close(scores, head(torch.tanh(pooler(first))), **SAME)
    assert scores.shape == (2, 3)
