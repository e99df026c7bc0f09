"""What the loader yields of a BERT has a name for each of its uses."""

import torch

from megatron.data.loading.bert_batch import bert_batch


def test_every_tensor_of_a_sample_goes_where_its_name_says():
    names = ("text", "types", "padding_mask", "labels", "loss_mask", "is_random")
    raw = {name: torch.tensor([at]) for at, name in enumerate(names)}
    assert [int(tensor) for tensor in bert_batch(raw)] == [0, 1, 2, 3, 4, 5]
    assert bert_batch(raw)._fields == (
        "tokens",
        "types",
        "padding_mask",
        "labels",
        "loss_mask",
        "swapped",
    )
