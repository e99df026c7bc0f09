"""The formulas, at points that the papers or plain counting give; test_simulate.py has the grid."""

from fractions import Fraction

import pytest

from megatron.pipeline.theory import bubble_share, peak_activations


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "share"),
    [
        ("none", 1, 8, 1, Fraction(0)),
        ("gpipe", 4, 8, 1, Fraction(3, 11)),
        ("1f1b", 4, 8, 1, Fraction(3, 11)),
        ("1f1b", 8, 2, 1, Fraction(7, 9)),
        ("interleaved", 4, 8, 2, Fraction(3, 19)),
        ("interleaved", 4, 9, 2, Fraction(3, 21)),
        ("interleaved", 4, 1, 2, Fraction(6, 8)),  # one micro-batch through 8 virtual stages
        ("zero-bubble", 4, 8, 1, Fraction(3, 27)),
        ("zero-bubble", 2, 1, 1, Fraction(2, 5)),  # F, F, I, I, W
    ],
)
def test_the_share_of_the_bubble(name: str, p: int, m: int, v: int, share: Fraction) -> None:
    found = bubble_share(name, num_stages=p, num_microbatches=m, num_chunks=v)
    assert found == pytest.approx(float(share))


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "peaks"),
    [
        ("none", 1, 8, 1, (1,)),
        ("gpipe", 2, 8, 1, (8, 8)),
        ("1f1b", 4, 8, 1, (4, 3, 2, 1)),
        ("1f1b", 4, 2, 1, (2, 2, 2, 1)),
        ("zero-bubble", 4, 8, 1, (4, 4, 4, 4)),
        ("interleaved", 4, 8, 2, (11, 9, 7, 5)),
        ("interleaved", 4, 4, 2, (8, 8, 7, 5)),
    ],
)
def test_the_most_activations_alive(
    name: str, p: int, m: int, v: int, peaks: tuple[int, ...]
) -> None:
    found = peak_activations(name, num_stages=p, num_microbatches=m, num_chunks=v)
    assert found == peaks
