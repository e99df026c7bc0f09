"""MegatronBert is the BERT with norms at the places of our default."""

from pathlib import Path

from megatron.checkpoint.formats.huggingface.families.bert import BERT
from megatron.checkpoint.formats.huggingface.families.megatron_bert import MEGATRON_BERT
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.source import SourceOptions
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from tests.support.checkpoints.hf_bert import save_bert
from tests.support.models import tiny_config


def test_norms_decide_which_family_holds_a_bert() -> None:
    pre, post = (
        tiny_config(onnx_safe=True, apply_residual_connection_post_layernorm=after)
        for after in (False, True)
    )
    assert list(MEGATRON_BERT.lacks(pre)) == []
    assert list(BERT.lacks(post)) == []
    expected = "--apply-residual-connection-post-layernorm True (megatron-bert has False)"
    assert list(MEGATRON_BERT.lacks(post)) == [expected]


def test_every_norm_is_of_the_layer_that_it_stands_in() -> None:
    config = tiny_config()
    assert MEGATRON_BERT.rule("layers.1.input_norm.bias", config)[1] == (
        "bert.encoder.layer.1.attention.ln.bias",
    )
    assert MEGATRON_BERT.rule("final_norm.bias", config)[1] == ("bert.encoder.ln.bias",)
    assert BERT.rule("layers.0.input_norm.bias", config)[1] == ("bert.embeddings.LayerNorm.bias",)
    assert BERT.rule("layers.1.input_norm.bias", config)[1] == (
        "bert.encoder.layer.0.output.LayerNorm.bias",
    )
    assert BERT.rule("final_norm.bias", config)[1] == (
        "bert.encoder.layer.1.output.LayerNorm.bias",
    )


def test_a_folder_is_a_model_with_the_norms_before(tmp_path: Path) -> None:
    folder = save_bert("megatron", tmp_path / "m")
    with HuggingFaceSource(folder, SourceOptions()) as source:
        model = from_plain(ModelConfig, source.config["model"])
    assert not model.apply_residual_connection_post_layernorm
    assert not model.use_parallel_residual
