"""The log's lines without the part that differs between runs."""

import re

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
_AT_LINE_START = re.compile(rf"^{TIME}", flags=re.MULTILINE)


def without_times(text: str) -> str:
    """Return `text` without the times that stand at the start of its lines."""
    return _AT_LINE_START.sub("", text)
