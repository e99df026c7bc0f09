"""The kind of a model follows from its parameters, and another one is refused with both names."""

from collections.abc import Sequence

import pytest

from megatron.checkpoint.model_kind import (
    BERT,
    CLASSIFIER,
    GPT,
    HEADS,
    PREFIX_LM,
    T5,
    VIT,
    differ,
    has_optional_heads,
    has_same_parameters,
    heads_of,
    kind_from_names,
    refuse_heads,
    refuse_kind,
)
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.config.models.vision import VisionConfig
from megatron.errors import CheckpointError
from megatron.model.bert_model import bert_layers, classification_layers
from megatron.model.gpt_model import gpt_layers
from megatron.model.specs import LayerSpec
from megatron.model.stage import PipelineStage
from megatron.model.t5_model import t5_layers
from megatron.model.vit_model import vit_layers
from megatron.mpu.stage_plan import LayerRange
from tests.support.models import tiny_build, tiny_config


def names_of(specs: Sequence[LayerSpec]) -> list[str]:
    stage = PipelineStage(specs, [LayerRange(0, len(specs))])
    return [f"model/{name}" for name, _ in stage.named_parameters()]


@pytest.mark.parametrize("untied", [True, False])
def test_the_kind_is_told_by_the_models_own_names(untied: bool) -> None:
    config = tiny_config(untie_embeddings_and_output_weights=untied)
    build = tiny_build()
    gpt = names_of(gpt_layers(config, build))
    whole = names_of(bert_layers(config, build))
    words = names_of(bert_layers(config, build, order_head=False))
    classes = names_of(classification_layers(config, build, num_classes=3))
    assert [kind_from_names(names) for names in (gpt, whole, words, classes)] == [
        GPT,
        BERT,
        BERT,
        CLASSIFIER,
    ]
    assert kind_from_names(name.removeprefix("model/") for name in words) == BERT
    assert heads_of(gpt) == frozenset()
    assert heads_of(whole) == {"pooler", "order_head", "lm_head", "output_bias"}
    assert heads_of(words) == {"lm_head", "output_bias"}
    assert heads_of(classes) == {"pooler", "classification_head"}
    t5 = names_of(t5_layers(config, build, EncoderDecoderConfig(decoder_num_layers=1)))
    assert kind_from_names(t5) == T5
    encoders = [kind for kind in (GPT, PREFIX_LM, T5, BERT, CLASSIFIER) if has_optional_heads(kind)]
    assert encoders == [BERT, CLASSIFIER]
    encoder = [name for name in whole if heads_of([name]) == frozenset()]
    assert kind_from_names(encoder) == BERT  # by its kinds of tokens alone


def test_a_prefix_lm_and_a_gpt_are_two_models_of_the_same_weights() -> None:
    assert has_same_parameters(GPT, PREFIX_LM)
    assert has_same_parameters(PREFIX_LM, GPT)
    assert not has_same_parameters(BERT, PREFIX_LM)
    with pytest.raises(CheckpointError, match="another kind of model than this run takes") as one:
        refuse_kind(PREFIX_LM, GPT, where="FOLDER")
    assert "begins with its weights by --finetune" in str(one.value)
    with pytest.raises(CheckpointError) as other:
        refuse_kind(BERT, PREFIX_LM, where="FOLDER")
    assert "this run takes a prefix LM (kind prefix_lm)" in str(other.value)
    assert "--finetune" not in str(other.value)


def test_kinds_that_a_program_made_up_are_compared_by_names_alone() -> None:
    assert differ(GPT, BERT)
    assert differ(CLASSIFIER, BERT)
    assert not differ(BERT, BERT)
    assert not differ("mine", BERT)
    refuse_kind("mine", GPT, where="FOLDER")


def test_another_kind_is_refused_by_both_names() -> None:
    with pytest.raises(CheckpointError, match="another kind of model than this run takes") as said:
        refuse_kind(BERT, GPT, where="FOLDER")
    assert "FOLDER holds a BERT (kind bert), and this run takes a GPT (kind gpt)" in str(said.value)


BOTH, WORDS = set(HEADS) - {"classification_head"}, {"lm_head", "output_bias"}


@pytest.mark.parametrize(
    ("saved", "wanted", "messages"),
    [
        (WORDS, BOTH, ["no pooler, order_head", "fix: add --bert-no-binary-head, or begin with"]),
        (BOTH, WORDS, ["it has pooler, order_head, which the", "drop --bert-no-binary-head, or"]),
        ({"pooler"}, BOTH, ["no order_head, lm_head", "--load-except 'order_head.*' 'lm_head.*'"]),
        (WORDS, {"pooler"}, ["begin with random values", "--load-except 'pooler.*' 'lm_head.*'"]),
        (BOTH, BOTH - {"lm_head"}, ["leave it out: --load-except 'lm_head.*'"]),
    ],
)
def test_other_heads_are_refused_with_the_flags_that_fit(
    saved: set[str], wanted: set[str], messages: list[str]
) -> None:
    with pytest.raises(CheckpointError, match="has other heads than this run") as caught:
        refuse_heads(saved, wanted, where="FOLDER")
    for text in messages:
        assert text in str(caught.value)


def test_equal_heads_are_no_difference() -> None:
    refuse_heads([f"model/{head}.dense.weight" for head in BOTH], BOTH, where="FOLDER")


def test_a_vit_is_known_by_its_patches() -> None:
    names = names_of(vit_layers(tiny_config(), tiny_build(), vision=VisionConfig()))
    assert kind_from_names(names) == VIT
    with pytest.raises(CheckpointError, match=r"holds a ViT \(kind vit\)"):
        refuse_kind(VIT, GPT, where="folder")
