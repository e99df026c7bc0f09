"""A headless Chromium that shows the page of a server, and what it complains of meanwhile."""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

from playwright.async_api import Browser, Page, Request, async_playwright

Scheme = Literal["light", "dark"]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_WAIT_MS = 10_000  # until something is there; it takes milliseconds
# No sandbox: Chromium refuses to start as root with one. Small machines have a small /dev/shm.
_FLAGS = ("--disable-dev-shm-usage", "--disable-gpu")


def find_chromium() -> str | None:
    """Return the path of an installed Chromium; None where there is none."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


@asynccontextmanager
async def chromium(path: str) -> AsyncIterator[Browser]:
    """Start a browser, and end it."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=path, chromium_sandbox=False, args=list(_FLAGS)
        )
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def shown_page(
    browser: Browser,
    url: str,
    *,
    scheme: Scheme = "light",
    width: int = 1280,
    height: int = 900,
    expected: tuple[str, ...] = (),
) -> AsyncIterator[Page]:
    """Show a page; at the end it may have complained of nothing, and asked no other server.

    Args:
        expected: words of those complaints of the browser that are no fault of the page.
    """
    context = await browser.new_context(
        color_scheme=scheme,
        viewport={"width": width, "height": height},
        permissions=["clipboard-read", "clipboard-write"],
        reduced_motion="reduce",
    )
    complaints: list[str] = []
    context.set_default_timeout(_WAIT_MS)

    def requested(request: Request) -> None:
        if not request.url.startswith((url, "data:")):
            complaints.append(f"a request to {request.url}")

    page = await context.new_page()
    page.on("request", requested)
    page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: complaints.append(f"an error: {error}"))
    page.on("dialog", lambda dialog: complaints.append(f"a dialog: {dialog.message}"))
    try:
        await page.goto(url)
        await page.get_by_text("running", exact=True).first.wait_for()
        yield page
        left = [each for each in complaints if not any(word in each for word in expected)]
        assert not left, left
    finally:
        await context.close()
