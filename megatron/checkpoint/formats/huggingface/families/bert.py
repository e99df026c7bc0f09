"""BERT (Devlin et al. 2018): norms after additions, optional heads.

What a reader would get wrong: a norm at the end of a layer there is the one at the beginning of the
next layer here, and the embedding's is that of layer 0. Dropout of the embedding is before that
norm here and after it there, which matters in training alone.
"""

from collections.abc import Callable

from megatron.checkpoint.bert_tensors import TOKEN_TYPES, WORD_BIAS, BertHeads
from megatron.checkpoint.formats.huggingface.families.gpt2 import (
    ACTIVATION_NAMES,
    GPT2,
    PLAIN_ACTIVATIONS,
)
from megatron.checkpoint.formats.huggingface.family import Family, Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.layouts import (
    QkvApart,
    Same,
    SavedTwice,
    TensorRule,
)
from megatron.checkpoint.model_kind import BERT as BERT_KIND
from megatron.checkpoint.model_kind import CLASSIFIER
from megatron.config.model import ModelConfig
from megatron.json_values import JsonValue

KINDS = (BERT_KIND, CLASSIFIER)
ABOVE = ("cls.", "classifier.")
# Of the release of 2018 for TensorFlow; transformers writes the second ones.
SPELLINGS = {".gamma": ".weight", ".beta": ".bias"}
BUFFERS = (r"embeddings\.position_ids$", r"embeddings\.token_type_ids$")
WORD_HEAD = "cls.predictions.decoder.weight"
_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias")
COPIES = dict.fromkeys(_BIASES, WORD_BIAS)
# As for GPT-2; a family adds the place of its norms.
SUPPORTED = {
    name: values
    for name, values in GPT2.supported.items()
    if name != "apply_residual_connection_post_layernorm"
}


def read_encoder(fields: Fields) -> dict[str, object]:
    """Return the fields of both kinds of BERT, except for the place of norms."""
    fields.must_be("position_embedding_type", "absolute", "absolute", why="relative positions")
    fields.must_be(
        "type_vocab_size", TOKEN_TYPES, TOKEN_TYPES, why="another number of kinds of segments"
    )
    fields.must_be("is_decoder", False, False, why="a causal decoder with BERT's weights")
    fields.must_be("add_cross_attention", False, False, why="attention to an encoder")
    fields.must_be("pruned_heads", {}, {}, why="layers with fewer heads than others")
    return {
        "num_layers": fields.integer("num_hidden_layers"),
        "hidden_size": fields.integer("hidden_size"),
        "num_attention_heads": fields.integer("num_attention_heads"),
        "ffn_hidden_size": fields.integer("intermediate_size"),
        "layernorm_epsilon": fields.number("layer_norm_eps", 1e-12),
        "hidden_dropout": fields.number("hidden_dropout_prob", 0.1),
        "attention_dropout": fields.number("attention_probs_dropout_prob", 0.1),
        "max_position_embeddings": fields.integer("max_position_embeddings", 512),
        "untie_embeddings_and_output_weights": not fields.boolean("tie_word_embeddings", True),
        **fields.choice("hidden_act", PLAIN_ACTIVATIONS, "gelu"),
    }


def read_bert_sizes(fields: Fields) -> Sizes:
    """Return the rows of both tables; the heads follow from the files."""
    return Sizes(fields.integer("vocab_size"), fields.integer("max_position_embeddings", 512))


def write_config(config: ModelConfig, sizes: Sizes) -> dict[str, JsonValue]:
    """Return the fields of both kinds of BERT."""
    classes = range(sizes.heads.classes if sizes.heads else 0)
    labels: dict[str, JsonValue] = {
        "id2label": {str(at): f"LABEL_{at}" for at in classes},
        "label2id": {f"LABEL_{at}": at for at in classes},
    }
    return {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_width,
        "max_position_embeddings": sizes.positions,
        "type_vocab_size": TOKEN_TYPES,
        "hidden_act": ACTIVATION_NAMES[config.activation],
        "layer_norm_eps": config.layernorm_epsilon,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": config.tied,
        **(labels if classes else {}),
    }


def encoder_tensors(norms: dict[str, str]) -> dict[str, TensorRule]:
    """Return the rules of both kinds of BERT; `norms` maps our norms between layers to HF's."""
    block, there = "layers.{}.", "encoder.layer.{}."
    rules: dict[str, TensorRule] = {
        "embedding.word.weight": Same("embeddings.word_embeddings.weight"),
        "embedding.position.weight": Same("embeddings.position_embeddings.weight"),
        "embedding.tokentype.weight": Same("embeddings.token_type_embeddings.weight"),
        "output.weight": Same(WORD_HEAD),
        WORD_BIAS: SavedTwice(*_BIASES),
    }
    same = {
        **norms,
        f"{block}attention.output": f"{there}attention.output.dense",
        f"{block}mlp.fc1": f"{there}intermediate.dense",
        f"{block}mlp.fc2": f"{there}output.dense",
        "pooler.dense": "pooler.dense",
        "order_head.dense": "cls.seq_relationship",
        "lm_head.dense": "cls.predictions.transform.dense",
        "lm_head.norm": "cls.predictions.transform.LayerNorm",
        "classification_head.dense": "classifier",
    }
    for leaf in ("weight", "bias"):
        rules |= {f"{ours}.{leaf}": Same(f"{hf_name}.{leaf}") for ours, hf_name in same.items()}
        query, key, value = (
            f"{there}attention.self.{part}.{leaf}" for part in ("query", "key", "value")
        )
        rules[f"{block}attention.qkv.{leaf}"] = QkvApart((query, key, value))
    return rules


def of_heads(family: str) -> Callable[[BertHeads], str]:
    """Return the class of transformers for some heads; `family` is what its name begins with."""

    def architecture(heads: BertHeads) -> str:
        if heads.classes:
            return f"{family}ForSequenceClassification"
        if heads.order:
            return f"{family}For{'PreTraining' if heads.words else 'NextSentencePrediction'}"
        return f"{family}ForMaskedLM" if heads.words else f"{family}Model"

    return architecture


BERT = Family(
    model_type="bert",
    architecture="BertForPreTraining",
    prefix="bert.",
    head=(WORD_HEAD,),
    supported={**SUPPORTED, "apply_residual_connection_post_layernorm": (True,)},
    tensors=encoder_tensors(
        {
            "layers.0.input_norm": "embeddings.LayerNorm",
            "layers.{}.input_norm": "encoder.layer.{before}.output.LayerNorm",
            "layers.{}.post_attention_norm": "encoder.layer.{}.attention.output.LayerNorm",
            "final_norm": "encoder.layer.{last}.output.LayerNorm",
        }
    ),
    buffers=BUFFERS,
    read_config=lambda fields: (
        read_encoder(fields) | {"apply_residual_connection_post_layernorm": True}
    ),
    read_sizes=read_bert_sizes,
    write_config=write_config,
    plain_heads=True,
    kinds=KINDS,
    above=ABOVE,
    spellings=SPELLINGS,
    copies=COPIES,
    of_heads=of_heads("Bert"),
)
