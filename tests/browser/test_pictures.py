"""The pictures of the documentation can be drawn again, and are small."""

import asyncio
from pathlib import Path

import pytest

from tests.browser.pictures import DOCS, draw_all

MOST_BYTES = 150_000


@pytest.mark.wide
def test_pictures_are_drawn_and_small(chromium_path: str, tmp_path: Path) -> None:
    asyncio.run(draw_all(chromium_path, tmp_path))
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in DOCS.glob("serving-page*.png"))
    assert all(path.stat().st_size < MOST_BYTES for path in tmp_path.iterdir())
