"""The mask of dropout: its words, its statistics, and what is saved; kernels are in tests/laws."""

import pytest
import torch

from megatron.ops.dropout import add_into, dropout_add, dropout_add_reference, is_kept, philox

ALL = 0xFFFFFFFF
# Counter, key and words, from the known answers that the authors of Philox publish with it.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL,) * 4, (ALL, ALL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def test_words_are_the_published_known_answers():
    for counter, key, words in KNOWN:
        found = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
        assert tuple(map(int, found)) == words


def test_elements_take_the_words_of_their_counter():
    seed = torch.tensor(0x299F31D0 << 32 | 0xA4093822)
    number, index, width = 5 << 32 | 9, 700, 4000
    quarter = 1008  # a fourth of the width, rounded up to 16
    counter = torch.tensor([index, 9, 5, 0])
    words = philox(tuple(counter), (torch.tensor(0xA4093822), torch.tensor(0x299F31D0)))
    for at, word in enumerate(words):
        element = at * quarter + index
        for probability in ((int(word) - 1) / 2**32, (int(word) + 1) / 2**32):
            kept = is_kept(width, probability, seed, torch.tensor([0, number]))
            assert kept.shape == (2, width)
            assert bool(kept[1, element]) == (probability < int(word) / 2**32)


def test_a_row_has_the_mask_of_its_number_wherever_it_stands():
    seed, numbers = torch.tensor(5), torch.tensor([7, 2**40 + 7, 7, 8])
    kept = is_kept(300, 0.5, seed, numbers)
    assert torch.equal(kept[0], kept[2])
    assert len({str(row.tolist()) for row in kept}) == 3
    assert torch.equal(is_kept(300, 0.5, seed, numbers[1:2]), kept[1:2])


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_the_rate_is_the_probability_and_masks_of_neighbouring_seeds_are_independent(probability):
    rows, width = 100, 4000
    elements, numbers = rows * width, torch.arange(rows)
    masks = torch.stack(
        [is_kept(width, probability, torch.tensor(s), numbers).flatten() for s in range(8)]
    )
    kept = masks.double() - (1 - probability)
    deviation = (probability * (1 - probability)) ** 0.5
    # Means and correlations of n draws have standard deviation 1/sqrt(n): five of them.
    assert (kept.mean(1).abs() < 5 * deviation / elements**0.5).all()
    correlations = kept @ kept.t() / (elements * deviation**2) - torch.eye(8)
    correlations.fill_diagonal_(0)
    assert correlations.abs().max() < 5 / elements**0.5
    for distance in (1, 2, 512, 1008, 4000):  # of elements of one mask
        along = (kept[:, distance:] * kept[:, :-distance]).mean(1) / deviation**2
        assert along.abs().max() < 5 / elements**0.5


@pytest.mark.parametrize("way", [dropout_add, dropout_add_reference], ids=["operator", "reference"])
def test_kept_elements_are_scaled_and_what_is_not_finite_is_not_hidden(way):
    x, names = torch.full((10, 100), 3.0), (torch.tensor(5), torch.arange(10))
    kept = is_kept(100, 0.25, *names)
    dropped = way(x, None, 0.25, *names)
    torch.testing.assert_close(dropped, torch.where(kept, 4.0, 0.0))
    torch.testing.assert_close(way(x, x, 0.25, *names), 3 + torch.where(kept, 4.0, 0.0))
    assert way(x / 0, None, 0.25, *names).isfinite().sum() == 0


def test_the_gradient_has_the_mask_of_the_forward_pass_and_nothing_but_names_is_saved():
    x = torch.randn(2, 3000, dtype=torch.bfloat16, requires_grad=True)
    residual = torch.randn(2, 3000, requires_grad=True)
    names = (torch.tensor(5), torch.arange(2))
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out = dropout_add(x, residual, 0.5, *names)
    assert [one.data_ptr() for one in saved] == [one.data_ptr() for one in names]
    grad = torch.randn_like(out)
    of_x, of_residual = torch.autograd.grad(out, (x, residual), grad)
    assert of_x.dtype == torch.bfloat16
    assert torch.equal(of_x, (2 * grad * is_kept(3000, 0.5, *names)).bfloat16())
    assert torch.equal(of_residual, grad)


def test_what_autograd_needs_is_not_added_into():
    x = torch.ones(3, requires_grad=True)
    residual = torch.ones(3, requires_grad=True)
    out = add_into(x * 2, residual)  # of which autograd needs no output
    out.sum().backward()
    assert (out.tolist(), x.grad.tolist(), residual.grad.tolist()) == (
        [3.0] * 3,
        [2.0] * 3,
        [1.0] * 3,
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        add_into(x.exp(), residual).sum().backward()


def test_operands_that_do_not_fit_are_refused():
    x, names = torch.zeros(4, 6), (torch.tensor(1), torch.arange(4))
    for wrong in (x[:3], x.half(), x.double()):
        with pytest.raises(ValueError, match=r"does not fit what is added to it\n  found: .*\n"):
            dropout_add(x, wrong, 0.5, *names)
    for probability in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"outside \[0, 1\)\n  found: .*\n  fix: use"):
            dropout_add(x, None, probability, *names)
