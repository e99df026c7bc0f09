"""Keys are read by their kinds, with neox's defaults."""

import pytest

from megatron.config.neox.reader import KeyReader, RefusedKeyError


def test_a_key_that_is_null_or_not_there_has_neoxs_default() -> None:
    reader = KeyReader({"rotary_pct": None}, str)
    assert (reader.number("rotary_pct"), reader.whole("mlp_multiple_of")) == (1.0, 1)
    assert reader.text("norm") == "layernorm"
    assert not reader.switch("checkpoint_activations")
    assert reader.block("fp16") == {}
    assert reader.is_null("rotary_pct")
    assert not reader.is_null("norm")
    assert not reader.has("norm")


@pytest.mark.parametrize(
    ("read", "key", "value", "fix"),
    [
        (KeyReader.number, "min_lr", "1e-5", "give a number"),
        (KeyReader.number, "min_lr", True, "give a number"),
        (KeyReader.whole, "num_layers", 2.5, "give a whole number"),
        (KeyReader.switch, "bias_gelu_fusion", "yes", "give true or false"),
        (KeyReader.text, "norm", 3, "give a text"),
        (KeyReader.block, "fp16", True, "give keys in braces"),
    ],
)
def test_a_value_of_another_kind_is_a_problem_with_its_place(
    read: object, key: str, value: object, fix: str
) -> None:
    reader = KeyReader({key: value}, lambda key: f"{key} stands here")  # type: ignore[dict-item]
    with pytest.raises(RefusedKeyError):
        read(reader, key)  # type: ignore[operator]
    (problem,) = reader.problems
    assert problem.found == f"{key}: {value!r} ({key} stands here)"
    assert problem.fix.startswith(fix)


def test_choices_ignore_the_case_of_letters() -> None:
    reader = KeyReader({"norm": "RMSnorm"}, str)
    assert reader.word("norm", {"rmsnorm": 1}, "") == 1
    with pytest.raises(RefusedKeyError):
        reader.word("pos_emb", {"rotary": 1}, "use rotary")
    assert reader.problems[0].found == "pos_emb: 'learned' (neox's default)"


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    reader = KeyReader({"hiden_size": 3, "xyzzy": 1}, str)
    assert reader.unknown("hiden_size").fix == "did you mean hidden_size?"
    assert reader.unknown("xyzzy").fix == "leave it out"
