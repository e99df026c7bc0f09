"""Tests of the projection and cross entropy as one operation, in one process, against torch's."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.errors import ConfigError, DataError
from megatron.mpu import linear_cross_entropy as module
from megatron.mpu import weight_gradients
from megatron.mpu.context import ParallelContext
from megatron.mpu.linear_cross_entropy import LossState, chunk_rows, linear_cross_entropy
from megatron.mpu.weight_gradients import GradientSum

ALONE = ParallelContext.single()
EXACT = {"rtol": 1e-12, "atol": 1e-12}  # fp64: a few dozen roundings of numbers near one
WIDTH, TRUE, HIDDEN = 16, 13, 6


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    token_weights: Tensor


Z_LOSS = 0.7  # large, so that its gradient is


class Result(NamedTuple):
    total: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens of fp64 at a time of ten, and blocks of four rows of the weight."""
    monkeypatch.setitem(module._CHUNK_BYTES, "cpu", 3 * WIDTH * 8)
    monkeypatch.setitem(weight_gradients._BLOCK_ELEMENTS, "cpu", 4 * HIDDEN)


def case(rows: int = 10, *, true: int = TRUE, dtype: torch.dtype = torch.float64) -> Case:
    """[rows / 2, 2] tokens (or [1, 1]) with an ignored one and fractional weights."""
    drawn = torch.Generator().manual_seed(1)
    shape = (rows // 2, 2) if rows > 1 else (1, 1)
    hidden = torch.randn(*shape, HIDDEN, dtype=torch.float64, generator=drawn)
    weight = torch.randn(WIDTH, HIDDEN, dtype=torch.float64, generator=drawn)
    labels = torch.randint(0, true, shape, generator=drawn)
    if rows > 1:
        labels[0, 1] = -1
    token_weights = torch.rand(shape, generator=drawn)
    return Case(hidden.to(dtype), weight.to(dtype), labels, token_weights)


def fused(
    given: Case, *, true: int = TRUE, factor: float = 1.0, state: LossState | None = None
) -> Result:
    hidden, weight = (one.clone().requires_grad_() for one in given[:2])
    total = linear_cross_entropy(
        *(hidden, weight, given.labels, given.token_weights),
        ctx=ALONE,
        true_vocab_size=true,
        state=state,
    )
    (factor * total).backward()
    return Result(total.detach(), hidden.grad, weight.grad)


def plain(
    given: Case, *, true: int = TRUE, factor: float = 1.0, z_loss_coeff: float = 0.0
) -> Result:
    """The same by torch's operations, one after the other; the z loss has a gradient alone."""
    hidden, weight = (one.clone().requires_grad_() for one in given[:2])
    logits = F.linear(hidden, weight)[..., :true].flatten(0, 1)
    losses = F.cross_entropy(logits, given.labels.flatten(), ignore_index=-1, reduction="none")
    total = (losses * given.token_weights.flatten()).sum()
    z_loss = z_loss_coeff * sum_of_squares(given, logits)
    (factor * (total + z_loss)).backward()
    return Result(total.detach(), hidden.grad, weight.grad)


def sum_of_squares(given: Case, logits: Tensor) -> Tensor:
    """The weighted sum of log^2 Z over tokens that have a label, of logits [n, columns]."""
    counted = given.token_weights.flatten() * (given.labels.flatten() >= 0)
    return (torch.logsumexp(logits, dim=-1).square() * counted).sum()


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [1, 2, 6, 8, 10])
@pytest.mark.parametrize("true", [WIDTH, TRUE, 1])
def test_loss_and_gradients_equal_those_of_separate_operations(rows: int, true: int) -> None:
    given = case(rows, true=true)
    found, expected = fused(given, true=true, factor=0.3), plain(given, true=true, factor=0.3)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, **EXACT)
    assert bool((found.grad_weight[true:] == 0).all())


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("true", [WIDTH, TRUE, 1])
@pytest.mark.parametrize("factor", [None, 0.25])
def test_a_z_loss_changes_the_gradients_alone(rows: int, true: int, factor: float | None) -> None:
    given, state = case(rows, true=true), LossState(factor, Z_LOSS)
    found = fused(given, true=true, factor=0.25, state=state)
    expected = plain(given, true=true, factor=0.25, z_loss_coeff=Z_LOSS)
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, **EXACT)
    assert torch.equal(found.total, fused(given, true=true).total)
    logits = F.linear(given.hidden, given.weight)[..., :true].flatten(0, 1)
    torch.testing.assert_close(state.taken_log_z(), sum_of_squares(given, logits), **EXACT)
    assert state.taken_log_z() is None
    without = plain(given, true=true, factor=0.25)
    assert not torch.allclose(found.grad_weight, without.grad_weight, rtol=0.01)


def test_a_z_loss_is_noted_only_with_a_gradient() -> None:
    given, state = case(), LossState(z_loss_coeff=Z_LOSS)
    with torch.no_grad():
        total = fused_total(given, state)
    assert torch.equal(total, fused(given).total)
    fused_total(given, state)  # no operand wants a gradient
    assert state.taken_log_z() is None


def fused_total(given: Case, state: LossState) -> Tensor:
    return linear_cross_entropy(*given, ctx=ALONE, true_vocab_size=TRUE, state=state)


@pytest.mark.usefixtures("small_chunks")
def test_gradients_are_those_of_differences() -> None:
    # By hand, since gradcheck runs the backward pass of one graph several times.
    given, step = case(6), 1e-5
    found = fused(given)
    for at in (0, 1):
        flat, differences = given[at].view(-1), []
        for element in range(len(flat)):
            before = flat[element].clone()
            totals = []
            for moved in (before + step, before - step):
                flat[element] = moved
                totals.append(fused(given).total)
            flat[element] = before
            differences.append((totals[0] - totals[1]) / (2 * step))
        expected = torch.stack(differences).view_as(given[at])
        # The truncation of central differences is of the order of step^2.
        torch.testing.assert_close(found[1 + at], expected, rtol=1e-8, atol=1e-8)


@pytest.mark.usefixtures("small_chunks")
def test_only_gradients_that_are_asked_for_are_computed() -> None:
    given = case()
    expected = plain(given)
    for at in (0, 1):
        leaves = [one.clone() for one in given[:2]]
        leaves[at].requires_grad_()
        linear_cross_entropy(
            *leaves, given.labels, given.token_weights, ctx=ALONE, true_vocab_size=TRUE
        ).backward()
        torch.testing.assert_close(leaves[at].grad, expected[1 + at], **EXACT)
        assert leaves[1 - at].grad is None


def test_without_token_weights_every_token_counts_once() -> None:
    given = case()
    expected = plain(given._replace(token_weights=torch.ones_like(given.token_weights)))
    total = linear_cross_entropy(*given[:3], None, ctx=ALONE, true_vocab_size=TRUE)
    torch.testing.assert_close(total, expected.total, **EXACT)


@pytest.mark.usefixtures("small_chunks")
def test_ignored_labels_alone_have_no_loss_and_no_gradient() -> None:
    given = case()
    found = fused(given._replace(labels=torch.full_like(given.labels, -100)))
    assert all(bool((one == 0).all()) for one in found)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [2, 10])
def test_no_tokens_have_no_loss_and_a_gradient_of_zeros(rows: int) -> None:
    given = case(rows)
    nothing = Case(given.hidden[:0], given.weight, given.labels[:0], given.token_weights[:0])
    found = fused(nothing)
    assert found.total == 0
    assert found.grad_hidden.shape == (0, 2, HIDDEN)
    assert bool((found.grad_weight == 0).all())


@pytest.mark.usefixtures("small_chunks")
def test_a_non_finite_input_gives_a_non_finite_loss() -> None:
    for bad in (torch.nan, torch.inf):
        given = case()
        given.hidden[4, 0, 2] = bad
        assert not fused(given).total.isfinite()


def test_a_label_among_the_padding_is_refused() -> None:
    given = case()
    given.labels[0, 0] = TRUE
    with pytest.raises(DataError, match="a token id is outside the vocabulary"):
        fused(given)


@pytest.mark.parametrize("factor", [None, torch.tensor(1.0)])
def test_the_inputs_are_not_changed_and_a_second_backward_is_refused(factor: Tensor | None) -> None:
    given = case()
    hidden, weight = (one.clone().requires_grad_() for one in given[:2])
    total = linear_cross_entropy(
        *(hidden, weight, given.labels, given.token_weights),
        ctx=ALONE,
        true_vocab_size=TRUE,
        state=LossState(factor),
    )
    total.backward(retain_graph=True)
    assert torch.equal(hidden, given.hidden)
    assert torch.equal(weight, given.weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def announced(given: Case, factor: Tensor, *, true: int = TRUE, buffer: bool) -> Result:
    """`fused`, where the factor is known before; the gradient of the weight in a buffer or not."""
    hidden, weight = (one.clone().requires_grad_() for one in given[:2])
    place = GradientSum(torch.full_like(weight, torch.nan, dtype=wide(weight.dtype)))
    if buffer:
        place.accept_products(weight, arrived=lambda: None)
    total = linear_cross_entropy(
        hidden,
        weight,
        given.labels,
        given.token_weights,
        ctx=ALONE,
        true_vocab_size=true,
        state=LossState(factor),
    )
    (factor * total).backward()
    assert (weight.grad is None) == buffer
    return Result(total.detach(), hidden.grad, place.total if buffer else weight.grad)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("rows", [1, 10])
@pytest.mark.parametrize("buffer", [False, True])
def test_a_factor_that_is_known_before_gives_the_same(rows: int, buffer: bool) -> None:
    given = case(rows)
    found = announced(given, torch.tensor(0.3), buffer=buffer)
    for one, other in zip(found, plain(given, factor=float(torch.tensor(0.3)))):
        torch.testing.assert_close(one, other, **EXACT)


def test_another_factor_than_the_announced_one_is_refused() -> None:
    given = case()
    hidden = given.hidden.clone().requires_grad_()
    total = linear_cross_entropy(
        hidden,
        *given[1:],
        ctx=ALONE,
        true_vocab_size=TRUE,
        state=LossState(torch.tensor(0.5)),
    )
    with pytest.raises(ConfigError, match="multiplied by another factor"):
        (0.25 * total).backward()


def test_memory_for_logits_is_kept_where_it_is_large_enough() -> None:
    state, fp32, fp64 = LossState(), torch.empty(0), torch.empty(0, dtype=torch.float64)
    first = state.memory_for(fp32, (3, 4))
    assert first.shape == (3, 4)
    assert state.memory_for(fp32, (2, 5)).data_ptr() == first.data_ptr()
    assert state.memory_for(fp64, (3, 4)).dtype == torch.float64
    assert state.memory_for(fp64, (4, 4)).shape == (4, 4)
    assert state.memory_for(torch.empty(0, device="meta"), (3, 4)).is_meta


def test_logits_lie_in_memory_that_is_lent() -> None:
    asked, like = [], torch.empty(0)
    room = torch.zeros(64, dtype=torch.uint8)

    def lend(size: int, besides: GradientSum | None) -> Tensor | None:
        asked.append((size, besides))
        return room[:size] if size <= len(room) else None

    state, own = LossState(lend=lend), GradientSum(torch.empty(1))
    state.memory_for(like, (3, 4), own).fill_(1.0)
    assert room.count_nonzero() == 24  # 1.0 is two bytes that are not zero
    assert state.kept_bytes == 0
    assert state.memory_for(like, (5, 4)).untyped_storage().data_ptr() != room.data_ptr()
    assert asked == [(48, own), (80, None)]
    state.end_step()
    state.memory_for(like, (3, 4))
    assert len(asked) == 2


def test_a_factor_is_of_no_interest_without_gradients() -> None:
    given = case()
    with torch.no_grad():
        total = linear_cross_entropy(*given, ctx=ALONE, true_vocab_size=TRUE, state=LossState(0.5))
    torch.testing.assert_close(total, plain(given).total, **EXACT)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def errors(dtype: torch.dtype) -> list[list[float]]:
    """Relative errors of (total, gradients) of 2048 tokens in 32 chunks.

    Fused, by separate operations, and fused with the factor known and a sum of gradients in fp32.
    """
    drawn = torch.Generator().manual_seed(2)
    hidden = torch.randn(1024, 2, 64, generator=drawn).to(dtype)
    weight = (0.05 * torch.randn(512, 64, generator=drawn)).to(dtype)
    labels = (100 * torch.randn(1024, 2, generator=drawn).abs()).long().clamp(max=511)
    given = Case(hidden, weight, labels, torch.ones(1024, 2))
    exact = Case(hidden.double(), weight.double(), labels, given.token_weights.double())
    expected = plain(exact, true=512, factor=3.0)
    found = [
        fused(given, true=512, factor=3.0),
        plain(given, true=512, factor=3.0),
        announced(given, torch.tensor(3.0), true=512, buffer=True),
    ]
    return [[error(*pair) for pair in zip(one, expected)] for one in found]


# The factor of the loss is applied to gradients that are rounded already, so they are rounded once
# more than those of separate operations: sqrt(2) times the error, and a tenth for chance.
ONE_MORE_ROUNDING = 1.1 * 2**0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_accurate_as_separate_operations(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(module._CHUNK_BYTES, "cpu", 64 * 512 * 2)
    found, expected, direct = errors(dtype)
    for one, other in zip(found[1:], expected[1:]):
        assert one < ONE_MORE_ROUNDING * other
    assert found[0] < 1e-5  # the loss is summed in fp32, over chunks as well
    # With the factor known before, nothing is rounded once more, and a sum in fp32 not at all.
    assert direct[1] < 1.1 * expected[1]
    assert direct[2] < expected[2]
    # Added up in half precision, the gradient of the weight would not be.
    monkeypatch.setattr(module, "add_product", in_half_precision)
    assert errors(dtype)[0][2] > ONE_MORE_ROUNDING * expected[2]


def in_half_precision(total: Tensor, rows_out: Tensor, rows_in: Tensor, *, is_first: bool) -> None:
    product = rows_out.t() @ rows_in
    total.copy_(product if is_first else total.to(product.dtype) + product)


@pytest.mark.parametrize("rows", [1, 7, 256, 1000, 1024, 4096])
def test_chunks_hold_a_bounded_number_of_logits(rows: int) -> None:
    limit = module._CHUNK_BYTES["cpu"]
    for itemsize in (2, 4):
        for columns in (1, 13, 50304, 2 * limit):
            size = chunk_rows(rows, (columns, rows // 3), itemsize, "cpu")
            assert 1 <= size <= rows
            assert size * columns * itemsize <= max(limit, columns * itemsize)
            # No more chunks than it takes, and of nearly one size.
            chunks = -(-rows // size)
            assert chunks == -(-rows // max(1, limit // itemsize // columns))
            assert size == -(-rows // chunks)
    assert chunk_rows(1024, (50304, 512), 4, "cpu") == 342


def test_twice_as_many_tokens_as_channels_are_one_chunk_in_half_precision() -> None:
    assert chunk_rows(16384, (50304, 8192), 2, "cpu") == 16384
    assert chunk_rows(16385, (50304, 8192), 2, "cpu") < 2000
    assert chunk_rows(16384, (50304, 8192), 4, "cpu") < 1000


def test_a_gradient_that_is_added_to_a_sum_anyway_takes_small_chunks_on_a_cpu() -> None:
    assert chunk_rows(1024, (50304, 512), 2, "cpu", has_sum=True) == 512
    assert chunk_rows(1024, (50304, 512), 2, "cuda", has_sum=True) == 1024
    assert chunk_rows(1024, (50304, 512), 2, "cpu") == 1024


class Operations(TorchDispatchMode):
    """Records the elements of the largest tensor that is made, and counts matrix products."""

    largest = 0
    products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [one.numel() for one in tree_leaves(result) if isinstance(one, Tensor)]
        self.largest = max([self.largest, *made])
        self.products += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return result


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._CHUNK_BYTES, "cpu", 8 * 50 * 4)
    given = Case(
        torch.randn(32, 2, 4),
        torch.randn(50, 4),
        torch.arange(64).view(32, 2) % 50,
        torch.ones(32, 2),
    )
    with Operations() as seen:
        fused(given, true=50)
    assert seen.largest == 8 * 50  # a chunk's logits; those of all tokens would be 64 * 50
    assert seen.products == 3 * 8
    with Operations() as seen:
        plain(given, true=50)
    assert seen.largest == 64 * 50


@pytest.mark.usefixtures("small_chunks")
def test_without_gradients_only_the_loss_is_computed() -> None:
    given = case()
    hidden, weight = (one.clone().requires_grad_() for one in given[:2])
    with torch.no_grad(), Operations() as seen:
        total = linear_cross_entropy(
            hidden, weight, given.labels, given.token_weights, ctx=ALONE, true_vocab_size=TRUE
        )
    assert seen.products == 4  # one for each chunk
    assert not total.requires_grad
    torch.testing.assert_close(total, fused(given).total, **EXACT)
