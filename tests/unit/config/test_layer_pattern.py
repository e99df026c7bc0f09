"""Patterns of layers: what Python would make of them, without running anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.layer_pattern import example, layers_of_pattern
from megatron.errors import ConfigError
from tests.support.examples import examples


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("1", "11111"),
        ("2", "10101"),
        (" 3 ", "10010"),
        ("9", "10000"),
        ("[0,1,1,0,1]", "01101"),
        ("([0]*1+[1]*4)", "01111"),
        ("[0] + [1] * 4", "01111"),
        ("2*[0,1]+[1,]", "01011"),
        ("([0]+[1])*2+[0]*1+[1]*0", "01010"),
    ],
)
def test_a_pattern_is_what_megatron_makes_of_it(text: str, layers: str) -> None:
    """The first of every N layers has experts, so the very first one does."""
    assert layers_of_pattern(text, 5) == tuple(one == "1" for one in layers)


def added(pair: tuple[tuple[str, list[int]], tuple[str, list[int]]]) -> tuple[str, list[int]]:
    (text, listed), (other, more) = pair
    return f"({text}+{other})", listed + more


def repeated(pair: tuple[tuple[str, list[int]], int]) -> tuple[str, list[int]]:
    (text, listed), times = pair
    return f"{text}*{times}", listed * times


PATTERNS = st.recursive(
    st.lists(st.integers(0, 1), max_size=3).map(lambda listed: (str(listed), listed)),
    lambda inner: (
        st.tuples(inner, inner).map(added) | st.tuples(inner, st.integers(0, 3)).map(repeated)
    ),
    max_leaves=4,
)


@given(PATTERNS)
@examples(100)
def test_sums_and_products_of_lists_are_pythons(pattern: tuple[str, list[int]]) -> None:
    text, listed = pattern
    assert layers_of_pattern(text, len(listed)) == tuple(map(bool, listed))
    with pytest.raises(ConfigError, match="not of as many layers"):
        layers_of_pattern(text, len(listed) + 1)


@pytest.mark.parametrize(
    "text",
    [
        *("", "every", "[0", "[0,1]]", "[2]*5", "[True]*5", "[1.0]*5", "[-1]*5", "'1'", "1.0"),
        *("[[1]]*5", "[0]+1", "[0]*[1]", "1+1", "2*2", "-1", "list((1,))", "[1 for i in range(5)]"),
        *("__import__('os').getcwd()", "[1]**5", "(" * 5000, "+".join(["[1]"] * 100_000), "\0"),
    ],
    ids=lambda text: text[:20],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no pattern of layers") as caught:
        layers_of_pattern(text, 5)
    assert "use 2 for every second layer, or a list such as ([0]*1+[1]*4)" in str(caught.value)


def test_steps_may_be_for_the_last_of_every_few_layers() -> None:
    assert layers_of_pattern("2", 5, last=True) == (False, True, False, True, False)
    assert layers_of_pattern("[1,0,0]", 3, last=True) == (True, False, False)
    with pytest.raises(ConfigError, match="--no-rope-freq 0"):
        layers_of_pattern("0", 5, flag="--no-rope-freq")


def test_other_steps_and_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"in such steps[\s\S]*--moe-layer-freq 0"):
        layers_of_pattern("0", 5)
    for text in ("[1]*4", "[1]*6", "[1]*1000000000*1000000000*1000000000"):
        with pytest.raises(ConfigError, match=r"not of as many layers[\s\S]*--num-layers 5"):
            layers_of_pattern(text, 5)
    assert layers_of_pattern(example(5), 5) == (False, True, True, True, True)
