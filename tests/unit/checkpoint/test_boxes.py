"""Boxes against brute force over every element."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint.boxes import Box, flat_boxes, format_box, overlap, tiling_fault, whole

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes_in_a_shape(draw, count):
    shape = draw(SHAPES)
    boxes = []
    for _ in range(count):
        spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
        boxes.append(Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans)))
    return shape, boxes


def mask(shape, box):
    marked = np.zeros(shape, dtype=bool)
    marked[box.slices] = True
    return marked


@given(boxes_in_a_shape(2))
def test_an_overlap_is_the_elements_that_both_boxes_hold(case):
    shape, (a, b) = case
    common = overlap(a, b)
    both = mask(shape, a) & mask(shape, b)
    assert (common is None) == (not both.any())
    if common is not None:
        assert (mask(shape, common) == both).all()
        assert common.within(a).moved(a.offset) == common


@given(SHAPES, st.data())
def test_flat_boxes_hold_a_flat_range_in_order_and_are_few(shape, data):
    size = math.prod(shape)
    start, stop = sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size))))
    numbers = np.arange(size).reshape(shape)
    boxes = flat_boxes(shape, start, stop)
    found = [int(x) for box in boxes for x in numbers[box.slices].reshape(-1)]
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(boxes_in_a_shape(3))
def test_a_tiling_holds_every_element_exactly_once(case):
    shape, boxes = case
    counts = sum(mask(shape, box).astype(int) for box in boxes)
    assert (tiling_fault(boxes, shape) is None) == bool((counts == 1).all())


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([Box((0,), (4,))], "another number of dimensions"),
        ([Box((0, 0), (4, 5))], "reaches outside"),
        ([Box((0, 0), (4, 4)), Box((3, 3), (1, 1))], "overlap"),
        ([Box((0, 0), (4, 3))], "12 of 16 elements"),
        ([], "0 of 16 elements"),
    ],
)
def test_a_fault_in_a_tiling_is_named(boxes, message):
    assert message in tiling_fault(boxes, (4, 4))


def test_a_box_without_dimensions_holds_one_element():
    assert whole(()).size == 1
    assert overlap(whole(()), whole(())) == whole(())
    assert tiling_fault([whole(())], ()) is None
    assert "overlap" in tiling_fault([whole(()), whole(())], ())


def test_a_box_is_described_as_it_would_be_indexed():
    assert format_box(Box((2, 0), (3, 4))) == "[2:5, 0:4]"
