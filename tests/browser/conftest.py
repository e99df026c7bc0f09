"""The one place where tests of this folder are skipped: where no Chromium is installed."""

import pytest

from tests.support.serving.browser import find_chromium


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """Return the path of Chromium, or skip the test."""
    path = find_chromium()
    if path is None:
        pytest.skip("needs Chromium (apt-get install --no-install-recommends chromium)")
    return path
