"""WikiText's spaces around punctuation taken out again, so that a text is as it was once written.

The rules are those that GPT-2 was evaluated with and that Megatron-LM applies, in their order.
"""

import re

_DEGREE = "\N{DEGREE SIGN}"

_RULES: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    (r"/' ([0-9])/", r"/'\1/"),
    (r" @-@ ", "-"),
    (r" @,@ ", ","),
    (r" @\.@ ", "."),
    *((rf" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
    (r"\(\s*([^)]*?)\s*\)", r"(\1)"),
    (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
    (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'),
    (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="),
    (r"= = =", "==="),
    (r"= =", "=="),
    (rf" {_DEGREE} ", _DEGREE),
    (r" \n", "\n"),
    (r"\n ", "\n"),
    (r" N ", " 1 "),
    (r" 's", "'s"),
)


def wikitext(text: str) -> str:
    """Return WikiText's `text` without its tokenization, as it was originally."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    return text
