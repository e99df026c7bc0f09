"""What a message looks like survives its header, and what does not fit into one is refused."""

import pytest
import torch

from megatron.errors import MegatronError
from megatron.pipeline.signature import (
    HEADER_NUMBERS,
    decode_signature,
    encode_signature,
    format_signature,
    signature_of,
)

CARRY = (
    torch.zeros(3, 2, 4, dtype=torch.bfloat16, requires_grad=True),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.zeros((), dtype=torch.bool),
)


def test_a_signature_comes_back_from_its_header() -> None:
    signature = signature_of(CARRY)
    numbers = encode_signature(signature)
    assert len(numbers) == HEADER_NUMBERS
    assert decode_signature(numbers) == signature
    assert [one.room(torch.device("cpu")).shape for one in signature] == [(3, 2, 4), (2, 3), ()]
    assert format_signature(signature) == "bfloat16[3, 2, 4] with gradient, int64[2, 3], bool[]"


def test_nothing_is_a_message_too() -> None:
    assert decode_signature(encode_signature(())) == ()
    assert format_signature(()) == "nothing"


@pytest.mark.parametrize("carry", [CARRY * 20, (torch.zeros(2, dtype=torch.complex64),)])
def test_what_a_header_cannot_say_is_refused(carry: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(MegatronError, match="more tensors than the header of a message"):
        encode_signature(signature_of(carry))
