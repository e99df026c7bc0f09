"""WikiText's spaces go, and nothing else does."""

import pytest

from tasks.zeroshot.detokenize import wikitext


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("a @-@ b 1 @,@ 000 2 @.@ 5", "a-b 1,000 2.5"),
        ("one , two . three ; four : five ! six ? ", "one, two. three; four: five! six? "),
        ("( in ) [ in ] { in }", "(in) [in] {in}"),
        ('" said "', '"said"'),
        (" = = = Title = = = \n text", " === Title ===\ntext"),
        ("it 's N degrees", "it's 1 degrees"),
        ("the boys ' hats", "the boys' hats"),
        ("5 \N{DEGREE SIGN} north", "5\N{DEGREE SIGN}north"),
        ("a plain text, as it is.", "a plain text, as it is."),
    ],
)
def test_a_rule_each(given: str, expected: str) -> None:
    assert wikitext(given) == expected
