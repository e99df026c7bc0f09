"""Tables that programs of tests keep in pages of the documentation, between two marks."""

from collections.abc import Sequence
from pathlib import Path


def write_between(
    page: Path, lines: Sequence[str], marks: tuple[str, str], *, what: str = "the table"
) -> None:
    """Put `lines` between the marks of a page; ValueError where the page has them not."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not (begin and end):
        raise ValueError(f"{page} has no place for {what}: {marks[0]} ... {marks[1]}")
    body = "\n".join([begin, "", *lines, "", end])
    page.write_text(f"{before}{body}{after}", encoding="utf-8")
