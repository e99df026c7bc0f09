"""One table for two stacks."""

import torch

from megatron.model.encoder_decoder.embedding import SharedEmbedding
from tests.support.models import roughen, tiny_build, tiny_config, tiny_tokens


def test_both_stacks_read_one_table_and_hand_on_what_they_do_not_read() -> None:
    build = tiny_build()
    made = SharedEmbedding(tiny_config(), build)
    roughen(made, build.ctx)
    tokens, padding = tiny_tokens(2, 5), torch.ones(2, 5)
    first, *others = made.encoder((tokens, padding, tokens))
    assert others == [padding, tokens]
    second, *others = made.decoder((first, padding, tokens))
    assert torch.equal(first, second)
    assert others == [first, padding]
    (plain,) = made((tokens,))
    assert torch.equal(first, plain)


def test_a_decoder_drops_other_elements_than_its_encoder() -> None:
    build = tiny_build()
    made = SharedEmbedding(tiny_config(hidden_dropout=0.5), build)
    roughen(made, build.ctx)
    tokens, padding = tiny_tokens(2, 5), torch.ones(2, 5)
    first, *_ = made.encoder((tokens, padding, tokens))
    second, *_ = made.decoder((first, padding, tokens))
    assert ((first == 0) != (second == 0)).any()
