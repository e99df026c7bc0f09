"""MegatronBert: BERT with a norm before each half of a layer and one at the end, as ours has them.

Shoeybi et al. 2019 (arXiv 1909.08053, section 3 and figure 7): so ordered, larger ones still train.
"""

from megatron.checkpoint.formats.huggingface.families import bert
from megatron.checkpoint.formats.huggingface.family import Family

MEGATRON_BERT = Family(
    model_type="megatron-bert",
    architecture="MegatronBertForPreTraining",
    prefix="bert.",
    head=(bert.WORD_HEAD,),
    supported={**bert.SUPPORTED, "apply_residual_connection_post_layernorm": (False,)},
    tensors=bert.encoder_tensors(
        {
            "layers.{}.input_norm": "encoder.layer.{}.attention.ln",
            "layers.{}.post_attention_norm": "encoder.layer.{}.ln",
            "final_norm": "encoder.ln",
        }
    ),
    buffers=bert.BUFFERS,
    read_config=bert.read_encoder,
    read_sizes=bert.read_bert_sizes,
    write_config=bert.write_config,
    plain_heads=True,
    kinds=bert.KINDS,
    above=bert.ABOVE,
    spellings=bert.SPELLINGS,
    copies=bert.COPIES,
    of_heads=bert.of_heads("MegatronBert"),
)
