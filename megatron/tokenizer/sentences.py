"""Where one sentence ends and the next begins, by rules that fit on this page.

No trained model: the rules contain the punctuation of the Latin, Greek, Cyrillic, Arabic, Indic and
East Asian scripts and a list of English abbreviations. They err towards too few boundaries, which
costs BERT's data a long sentence and never a broken one. No character is lost: with `keep_newlines`
the parts join to the text again; without, only white space between them goes.
"""

import regex

RULES_VERSION = 1  # to be raised with any change of a boundary: corpora record it

# After these a full stop does not end a sentence (lower case, without the stop). Words that are
# also whole words ("sat", "sun", "no") are not here: they would hide the end of many sentences.
_ABBREVIATIONS = frozenset(
    word
    for group in (
        "mr mrs ms dr prof rev hon gen col capt lt sgt sen rep gov st jr sr inc ltd co corp dept",
        "jan feb apr jun jul aug sep sept oct nov dec tue thu fri a.m p.m",
        "vs etc e.g i.e cf al eds est approx u.s u.k ph.d",
    )
    for word in group.split()
)
_BEFORE_NUMBERS = frozenset({"no", "nos", "vol", "vols", "fig", "figs", "p", "pp", "sec", "ch"})

# The look-behinds let a long run of spaces or stops be tried once, not once from each position.
_BLANK_LINE = r"(?<![^\S\n])(?:[^\S\n]*\n){2,}\s*"
_WESTERN_END = r"(?<![.!?\u2026])[.!?\u2026\u061f\u0964\u0965]+[\"'\u2019\u201d\u00bb)\]]*\s+"
_EAST_ASIAN_END = r"[\u3002\uff01\uff1f\uff61]+[\u300d\u300f\u201d\u2019\uff09]*\s*"
_END = regex.compile(f"{_BLANK_LINE}|{_EAST_ASIAN_END}|{_WESTERN_END}")
# What may open a sentence: a capital, a digit, a letter of a script without case, or a bracket,
# quotation mark or dash in front of one of them.
_OPENING = regex.compile(r"[\p{Ps}\p{Pi}\"'\u2019\-\u2013\u2014*#]*[\p{Lu}\p{Lt}\p{Lo}\p{N}]")
_LAST_WORD = regex.compile(r"[\p{L}\p{N}.]*$")


def split_sentences(text: str, *, keep_newlines: bool = False) -> list[str]:
    """Return the sentences of `text` in order, none of them blank.

    With `keep_newlines` each keeps the white space behind it (and the first what is before it).
    """
    parts = []
    start = 0
    for end in _END.finditer(text):
        if _is_boundary(text, start, end):
            parts.append(text[start : end.end()])
            start = end.end()
    parts.append(text[start:])
    if keep_newlines:
        return _without_blank_parts(parts)
    return [stripped for part in parts if (stripped := part.strip())]


def _is_boundary(text: str, start: int, end: "regex.Match[str]") -> bool:
    mark = end.group()
    if mark[0].isspace():  # a blank line ends a paragraph, whatever stands before it
        return True
    if mark[0] in "\u3002\uff01\uff1f\uff61" or "\n\n" in mark:
        return True
    if end.end() == len(text) or not _OPENING.match(text, end.end()):
        return bool(end.end() == len(text))
    if not mark.startswith(".") or mark.startswith(".."):
        return True
    # The word is searched in a short window: a text without any space must not cost quadratically.
    word: str = _LAST_WORD.search(text[max(start, end.start() - 24) : end.start()]).group()
    is_initial = len(word) == 1 and word.isalpha() and word.isupper()  # the J. of J. Smith
    if word.lower() in _BEFORE_NUMBERS and text[end.end()].isdigit():
        return False
    return not is_initial and word.lower() not in _ABBREVIATIONS


def _without_blank_parts(parts: list[str]) -> list[str]:
    """Return the parts with blank ones joined to a neighbour, so that no text is lost."""
    joined: list[str] = []
    for part in parts:
        if joined and (not part.strip() or not joined[-1].strip()):
            joined[-1] += part
        else:
            joined.append(part)
    return [part for part in joined if part.strip()]
