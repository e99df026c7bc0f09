"""The law of kernels for AdamW: a step is what the reference means in fp64, or nothing at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.ops.adamw import adamw_step_reference
from tests.laws.kernels.updates import (
    DTYPES,
    KERNEL,
    NUMBERS,
    SPLIT_DTYPES,
    check,
    check_halves,
    check_some,
    draw,
    split,
)
from tests.support.examples import examples

PLAIN, MIXED = DTYPES[0], DTYPES[2]


def test_kernels_compute_what_the_reference_means():
    check_some()


@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=110),
    dtypes=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
@examples(40)
def test_kernels_compute_what_the_reference_means_for_any_sizes(sizes, dtypes, seed):
    check(draw(dtypes, sizes, seed))
    if dtypes in SPLIT_DTYPES:
        check_halves(draw(dtypes, sizes, seed))


@pytest.mark.parametrize("step", [KERNEL, adamw_step_reference], ids=["kernel", "reference"])
def test_a_step_that_does_not_count_changes_no_bit(step):
    for dtypes in DTYPES:
        operands = draw(dtypes)
        operands.scalars[1] = 0
        for grad in operands.grads:
            grad.fill_(torch.nan)
        each = [operands]
        if dtypes in SPLIT_DTYPES:
            each.append(split(operands))
        for case in each:
            before = case.moved(lambda tensor: tensor.clone())
            step(*case, NUMBERS)
            for name in ("weights", "means", "squares"):
                for now, then in zip(getattr(case, name), getattr(before, name), strict=True):
                    assert torch.equal(now, then)


def test_where_a_tensor_is_cut_makes_no_difference():
    for dtypes in (PLAIN, MIXED):
        at_once, cut = draw(dtypes, [9000]), draw(dtypes, [9000])
        KERNEL(*at_once, NUMBERS)
        for start, stop in ((0, 3), (3, 20), (20, 37), (37, 4100), (4100, 8999), (8999, 9000)):
            part = cut.moved(lambda x, within=slice(start, stop): x[within] if len(x) > 4 else x)
            KERNEL(*part, NUMBERS)
        for name in ("weights", "means", "squares", "published"):
            for one, other in zip(getattr(at_once, name), getattr(cut, name), strict=True):
                assert torch.equal(one, other)


def test_the_operator_keeps_the_promises_of_its_schema():
    for dtypes in (PLAIN, MIXED):
        torch.library.opcheck(KERNEL, (*draw(dtypes, [3, 5]), NUMBERS))
    torch.library.opcheck(KERNEL, (*split(draw(SPLIT_DTYPES[0], [3, 5])), NUMBERS))


def test_kernels_refuse_operands_that_they_would_read_out_of_bounds():
    def step(**changed):
        KERNEL(*draw(MIXED, [6, 4])._replace(**changed), NUMBERS)

    short, halves = [torch.zeros(6), torch.zeros(3)], [torch.zeros(6).half(), torch.zeros(4).half()]
    with pytest.raises(RuntimeError, match="lists of AdamW have different lengths"):
        step(means=[torch.zeros(6)])
    for wrong in ({"means": short}, {"weights": short}, {"scalars": torch.zeros(4)}):
        with pytest.raises(RuntimeError, match="another size, dtype or device"):
            step(**wrong)
    for wrong in ({"weights": halves}, {"means": halves}, {"published": short}):
        with pytest.raises(RuntimeError, match="no kernel of AdamW takes these dtypes"):
            step(**wrong)
    lower = [torch.zeros(6).short(), torch.zeros(4).short()]
    for published in ([], halves):
        with pytest.raises(RuntimeError, match="no kernel of AdamW takes these dtypes"):
            step(weights=lower, published=published)
    with pytest.raises(RuntimeError, match="is not contiguous"):
        step(weights=[torch.zeros(12)[::2], torch.zeros(4)])


def _without(index, value):
    def step(*operands):
        numbers = [*NUMBERS[:index], value, *NUMBERS[index + 1 :]]
        adamw_step_reference(*operands[:6], numbers)

    return step


def _factor_forgotten(*operands):
    scalars = operands[5].clone()
    scalars[0] = 1
    adamw_step_reference(*operands[:5], scalars, operands[6])


def _not_published(*operands):
    adamw_step_reference(*operands[:4], [], *operands[5:])


WRONG = {
    "no decay": _without(4, 0.0),
    "a large epsilon": _without(3, 1e-4),
    "one beta": _without(2, NUMBERS[1]),
    "no factor": _factor_forgotten,
    "not published": _not_published,
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_law_sees_a_wrong_kernel(wrong):
    check(draw(DTYPES[3]), step=adamw_step_reference)
    with pytest.raises(AssertionError):
        check(draw(DTYPES[3]), step=wrong)


def _halves_cut_off(*operands):
    KERNEL(*operands)
    for halves in operands[0]:
        halves.zero_()


def _halves_of_the_step_before(*operands):
    before = [published.clone() for published in operands[4]]
    KERNEL(*operands)
    for published, then in zip(operands[4], before, strict=True):
        published.copy_(then)


@pytest.mark.parametrize("wrong", [_halves_cut_off, _halves_of_the_step_before])
def test_the_law_sees_wrong_halves(wrong):
    for dtypes in SPLIT_DTYPES:
        check_halves(draw(dtypes))
        with pytest.raises(AssertionError):
            check_halves(draw(dtypes), step=wrong)
