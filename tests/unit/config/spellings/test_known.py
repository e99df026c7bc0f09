"""Every table of other Megatrons' flags is asked."""

import pytest

from megatron.config.spellings.known import is_answered


@pytest.mark.parametrize(
    "flag",
    [
        "--checkpoint-activations",  # an alias
        "--ckpt-format",  # of other values
        "--group-query-attention",  # depends on others
        "--no-masked-softmax-fusion",  # without effect
        "--batch-size",  # removed
        "--rl-anything",  # refused, by its beginning
    ],
)
def test_flags_of_every_table_are_answered(flag: str) -> None:
    assert is_answered(flag)


def test_our_own_flags_and_mistakes_are_not() -> None:
    assert not is_answered("--seq-length")
    assert not is_answered("--batch-sise")
