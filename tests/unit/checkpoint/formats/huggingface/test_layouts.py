"""Every rule maps each of our rows to exactly one place."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.huggingface.layouts import (
    OfExperts,
    QkvApart,
    QkvBlocks,
    Same,
    SavedTwice,
    Stacked,
    StackInOne,
    Strip,
    TensorRule,
    box_of,
    flat,
    their_shapes,
)
from megatron.config.model import ModelConfig

CONFIG = ModelConfig(
    num_layers=1, hidden_size=24, num_attention_heads=4, num_query_groups=2, kv_channels=3
)
QKV_ROWS = (4 + 2 * 2) * 3
RULES: Mapping[str, tuple[TensorRule, int]] = {
    "same": (Same("a"), 7),
    "stacked": (Stacked(("a", "b")), 10),
    "q k v apart": (QkvApart(("q", "k", "v")), QKV_ROWS),
    "q k v in blocks": (QkvBlocks("qkv"), QKV_ROWS),
}


@pytest.mark.parametrize("name", RULES)
def test_every_row_on_both_sides_is_in_one_strip(name: str) -> None:
    rule, rows = RULES[name]
    strips = list(rule.strips(CONFIG, rows, rule.keys))
    ours = [strip.start + row for strip in strips for row in range(strip.rows)]
    assert ours == list(range(rows))
    positions = [(strip.key, strip.at + row) for strip in strips for row in range(strip.rows)]
    shapes = their_shapes((rows, 5), strips, transposed=False)
    assert sorted(positions) == [
        (key, row) for key in sorted(shapes) for row in range(shapes[key][0])
    ]
    assert set(shapes) == set(rule.keys)


def test_heads_stand_group_by_group_with_their_key_and_value() -> None:
    strips = list(QkvApart(("q", "k", "v")).strips(CONFIG, QKV_ROWS, ("q", "k", "v")))
    assert strips == [
        Strip(0, 6, "q", 0),
        Strip(6, 3, "k", 0),
        Strip(9, 3, "v", 0),
        Strip(12, 6, "q", 6),
        Strip(18, 3, "k", 3),
        Strip(21, 3, "v", 3),
    ]
    blocks = [s.at for s in QkvBlocks("c").strips(CONFIG, QKV_ROWS, ("c",))]
    assert blocks == [0, 12, 18, 6, 15, 21]


def test_each_expert_has_tensors_of_its_own() -> None:
    config = ModelConfig(
        num_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        num_experts=2,
        ffn_hidden_size=3,
        swiglu=True,
        add_bias_linear=False,
    )
    shape, keys = (2, 6, 4), ("{expert}.gate", "{expert}.up")
    assert flat(shape) == (12, 4)
    strips = list(OfExperts(keys).strips(config, flat(shape)[0], keys))
    assert strips == [
        Strip(0, 3, "0.gate", 0),
        Strip(3, 3, "0.up", 0),
        Strip(6, 3, "1.gate", 0),
        Strip(9, 3, "1.up", 0),
    ]
    found = their_shapes(shape, strips, transposed=False)
    assert found == dict.fromkeys(("0.gate", "0.up", "1.gate", "1.up"), (3, 4))
    assert box_of(shape, strips[3]) == Box((1, 3, 0), (1, 3, 4))
    assert box_of((12, 4), strips[3]) == Box((9, 0), (3, 4))
    assert box_of((12,), strips[3]) == Box((9,), (3,))
    assert flat((5,)) == (5,)


def test_a_transposed_tensor_has_our_rows_as_columns() -> None:
    strips = list(Stacked(("a", "b")).strips(CONFIG, 10, ("a", "b")))
    assert their_shapes((10, 3), strips, transposed=True) == {"a": (3, 5), "b": (3, 5)}
    assert their_shapes((10,), strips, transposed=False) == {"a": (5,), "b": (5,)}


def test_a_tensor_may_begin_with_rows_that_are_none_of_ours() -> None:
    rule = Same("a", skipped=2)
    strips = list(rule.strips(CONFIG, 7, rule.keys))
    assert strips == [Strip(0, 7, "a", 2)]
    assert their_shapes((7, 3), strips, transposed=False) == {"a": (9, 3)}


def test_the_rows_of_a_stack_in_one_tensor_are_columns_there() -> None:
    plain, alternating = StackInOne("a"), StackInOne("a", alternating=True)
    assert plain.columns(4) == (0, 1, 2, 3)
    assert alternating.columns(6) == (0, 2, 4, 1, 3, 5)
    assert list(plain.strips(CONFIG, 12, plain.keys)) == [Strip(0, 12, "a", 0)]
    assert (plain.their_shape((3, 6, 4)), plain.their_shape((3, 6))) == ((3, 4, 6), (3, 6))


def test_what_an_untied_model_has_twice_is_whole_under_both_keys() -> None:
    rule, untied = SavedTwice("a", "b"), replace(CONFIG, untie_embeddings_and_output_weights=True)
    assert list(rule.strips(CONFIG, 7, rule.keys)) == [Strip(0, 7, "a", 0)]
    assert list(rule.strips(untied, 7, rule.keys)) == [Strip(0, 7, "a", 0), Strip(0, 7, "b", 0)]
