"""The plan between any two layouts, and the messages about mismatches."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.checkpoint import reshard
from megatron.checkpoint.boxes import Box, whole
from megatron.errors import CheckpointError


class Facts(NamedTuple):
    dtype_code: str
    global_shape: tuple[int, ...]


@st.composite
def tilings(draw, shape):
    """Any recursive cutting of a whole tensor into boxes."""
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 6))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, length in enumerate(box.shape) if length > 1]
        if not dims:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(dims))
        cut = draw(st.integers(1, box.shape[dim] - 1))
        for start, length in ((0, cut), (cut, box.shape[dim] - cut)):
            offset, lengths = list(box.offset), list(box.shape)
            offset[dim] += start
            lengths[dim] = length
            boxes.append(Box(tuple(offset), tuple(lengths)))
    return boxes


@st.composite
def two_layouts(draw):
    shape = draw(st.lists(st.integers(1, 7), max_size=3).map(tuple))
    return shape, draw(tilings(shape)), draw(tilings(shape))


@given(two_layouts())
def test_any_layout_reaches_any_other_with_every_element_filled_once(case):
    shape, saved, wanted = case
    source = np.arange(1, whole(shape).size + 1).reshape(shape)
    pieces = [source[box.slices].copy() for box in saved]
    targets = [np.zeros(box.shape, dtype=int) for box in wanted]
    counts = [np.zeros(box.shape, dtype=int) for box in wanted]
    for copy in reshard.plan("w", saved, wanted):
        place = copy.box.within(wanted[copy.wanted]).slices
        targets[copy.wanted][place] = pieces[copy.saved][copy.box.within(saved[copy.saved]).slices]
        counts[copy.wanted][place] += 1
    for box, target, count in zip(wanted, targets, counts):
        assert (target == source[box.slices]).all()
        assert (count == 1).all()


def test_pieces_that_leave_a_gap_are_refused():
    with pytest.raises(CheckpointError, match="do not make up") as caught:
        reshard.plan("w", [Box((0,), (3,))], [Box((0,), (4,))])
    assert "3 elements saved for the 4 of w[0:4]" in str(caught.value)


def test_every_mismatch_is_listed_with_the_nearest_name():
    saved = {"model/qkv.weight": Facts("F32", (4, 4)), "model/a": Facts("BF16", (2,))}
    wanted = {
        "model/qkv.wieght": Facts("F32", (4, 4)),
        "model/a": Facts("F32", (2,)),
        "model/qkv.weight": Facts("F32", (8, 4)),
    }
    problems = reshard.mismatches(saved, wanted)
    assert problems == [
        "missing: model/qkv.wieght (nearest: model/qkv.weight)",
        "dtype: model/a is BF16 in the checkpoint and F32 in this run",
        "shape: model/qkv.weight is [4, 4] in the checkpoint and [8, 4] in this run",
    ]
    assert len(reshard.mismatches(saved, wanted, cast=True)) == 2
    error = reshard.mismatch_error(problems * 4)
    assert "another model or optimizer" in str(error)
    assert "and 4 more" in str(error)


def test_saved_names_under_the_prefixes_that_nobody_wants_are_unexpected():
    saved = ["model/norm", "model/qkv", "optimizer/norm"]
    assert reshard.unexpected(saved, {"model/norm"}, ("model/",)) == ["unexpected: model/qkv"]
    assert len(reshard.unexpected(saved, {"model/norm"}, ("",))) == 2
