"""Parameters and floating-point operations of the two towers of a retriever, from the config alone.

The conventions are those of `model/accounting.py`. What a reader would get wrong: one tower that
reads both texts has its parameters once and computes twice.
"""

from dataclasses import replace

from megatron.config.activations import ActivationPolicy
from megatron.config.model import ModelConfig
from megatron.config.models.retrieval import RetrievalConfig
from megatron.model.accounting import flops_per_token, parameter_count
from megatron.model.bert_model import NUM_TOKENTYPES
from megatron.model.specs import TokenFlops


def biencoder_parameter_count(
    config: ModelConfig, retrieval: RetrievalConfig, vocab_rows: int, seq_length: int
) -> int:
    """Return the number of parameters of both towers with `vocab_rows` rows of vocabulary.

    `seq_length` is the size of a position table that the config leaves open.
    """
    headless = replace(config, untie_embeddings_and_output_weights=False)
    tower = parameter_count(headless, vocab_rows, seq_length) + NUM_TOKENTYPES * config.hidden_size
    tower += retrieval.biencoder_projection_dim * (config.hidden_size + 1)
    return len(set(retrieval.towers)) * tower


def biencoder_flops_per_token(
    config: ModelConfig, seq_length: int, *, recompute: ActivationPolicy, virtual_stages: int
) -> TokenFlops:
    """Return the FLOPs of the two tokens that a sample has at each place of a row.

    Projections and scores look at one vector of a row and are left out.
    """
    of_one = flops_per_token(
        config,
        0,  # there is no output projection
        seq_length,
        recompute=recompute,
        virtual_stages=virtual_stages,
    )
    return TokenFlops(2 * of_one.model, 2 * of_one.model, 2 * of_one.hardware)
