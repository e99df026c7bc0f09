"""Ids outside of a vocabulary are refused, not skipped as the libraries do."""

import pytest

from megatron.errors import DataError
from megatron.tokenizer.protocol import checked_ids
from megatron.tokenizer.tokenizer import build_tokenizer


@pytest.mark.parametrize("token", [-1, 257])
def test_an_id_outside_of_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(DataError, match="outside of the vocabulary") as caught:
        build_tokenizer(tokenizer_type="ByteTokenizer").detokenize([65, token])
    assert f"id {token}, and the vocabulary has 257" in str(caught.value)


def test_numpy_integers_are_ids_too() -> None:
    import numpy as np

    assert checked_ids(np.array([1, 2], np.uint16), 3) == [1, 2]
