"""A token that no model can generate ends no text."""

import pytest

from megatron.errors import ConfigError
from megatron.inference.end_ids import check_end_id


@pytest.mark.parametrize("eod", [None, 0, 49])
def test_a_token_of_the_vocabulary_and_none_pass(eod: int | None) -> None:
    check_end_id(eod, 50)


@pytest.mark.parametrize("eod", [-1, 50])
def test_a_token_outside_of_the_vocabulary_is_refused(eod: int) -> None:
    with pytest.raises(ConfigError, match="ends a text is not in the vocabulary") as caught:
        check_end_id(eod, 50)
    assert caught.value.found == f"token {eod}, a vocabulary of 50"
