"""Parts of a model by patterns: each parameter loaded once or named, no pattern for nothing."""

import pytest
import torch

from megatron.checkpoint.load.selection import Selection, choose_states, folded
from megatron.checkpoint.sharded import ShardedTensor
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext

CTX = ParallelContext.single()
HERE = ["word", "layers.0.fc.weight", "layers.0.fc.bias", "layers.1.fc.weight", "head"]
SAVED = ["model/word", "model/layers.0.fc.weight", "model/old", "optimizer/exp_avg/word"]


def tensors(names=HERE):
    return [ShardedTensor.of(f"model/{name}", torch.zeros(1)) for name in names]


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (Selection(), HERE),
        (Selection(("layers.*",)), HERE[1:4]),
        (Selection(("layers.*", "word")), HERE[:4]),
        (Selection(("layers.*",), ("*.bias",)), [HERE[1], HERE[3]]),
        (Selection((), ("head",)), HERE[:4]),
        (Selection(("layers.?.fc.weight",)), [HERE[1], HERE[3]]),
        (Selection(("layers.[0]*",)), HERE[1:3]),
    ],
)
def test_names_are_taken_by_patterns(selection, taken):
    assert [name for name in HERE if selection.takes(f"model/{name}")] == taken
    assert not selection.takes("optimizer/exp_avg/word")
    assert selection.is_partial == (selection != Selection())


def test_every_parameter_is_named_exactly_once():
    choice = choose_states(Selection(("word", "layers.*"), ("*.1.*",)), tensors(), SAVED, ctx=CTX)
    assert choice.loaded == ("word", "layers.0.fc.weight", "layers.0.fc.bias")
    assert choice.left == ("layers.1.fc.weight", "head")
    assert choice.skipped == ("old",)
    assert sorted(choice.loaded + choice.left) == sorted(HERE)
    assert str(choice) == (
        "loaded 3 of 5 parameters: word, layers.0.fc.weight, layers.0.fc.bias\n"
        "  left at initial values: layers.1.fc.weight, head\n"
        "  skipped in the checkpoint: old"
    )


def test_a_pattern_may_name_what_only_the_checkpoint_has():
    choice = choose_states(Selection((), ("old", "head")), tensors(), SAVED, ctx=CTX)
    assert (choice.left, choice.skipped) == (("head",), ("old",))


@pytest.mark.parametrize("flag", ["--load-only", "--load-except"])
def test_a_pattern_that_fits_nothing_is_refused_with_what_is_near(flag):
    patterns = ("layer.0.fc.weight",)
    selection = Selection(patterns) if flag == "--load-only" else Selection((), patterns)
    with pytest.raises(CheckpointError, match="fits no parameter") as caught:
        choose_states(selection, tensors(), SAVED, ctx=CTX)
    assert f"{flag} layer.0.fc.weight; near: layers.0.fc.weight" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"there are word, layers\.\[0-1\]"):
        choose_states(Selection(("zzzz",)), tensors(), SAVED, ctx=CTX)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a", "b"], "a, b"),
        (["l.0.w", "l.1.w", "l.2.w", "l.5.w", "l.0.b"], "l.[0-2, 5].w, l.0.b"),
        (["l.0.e.3.w", "l.1.e.3.w"], "l.0.e.3.w, l.1.e.3.w"),
    ],
)
def test_names_that_differ_in_a_number_are_told_together(names, text):
    assert folded(names) == text
