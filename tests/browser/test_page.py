"""The page in Chromium, on a server that listens: text, chats, errors, keys, colours, widths."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from playwright.async_api import Browser, Page, expect

from tests.support.deadlines import HANG_S
from tests.support.serving.browser import Scheme, chromium, shown_page
from tests.support.serving.fake_engine import FULL, FakeEngine
from tests.support.serving.live import live

pytestmark = pytest.mark.slow

Use = Callable[[Page, FakeEngine], Awaitable[None]]


class Pages:
    """A browser and the event loop that it lives in, together with every server of these tests."""

    def __init__(self, runner: asyncio.Runner, browser: Browser) -> None:
        self._runner, self._browser = runner, browser

    def use(
        self, use: Use, engine: FakeEngine | None = None, *, keys: tuple[str, ...] = (), **show: Any
    ) -> None:
        """Serve an engine, show its page, and use it."""
        served = engine or FakeEngine()

        async def within() -> None:
            async with (
                asyncio.timeout(HANG_S),
                live(served, keys=keys) as server,
                shown_page(self._browser, server.url + "/", **show) as page,
            ):
                await use(page, served)

        self._runner.run(within())


@pytest.fixture(scope="module")
def pages(chromium_path: str) -> Iterator[Pages]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        browser = runner.run(stack.enter_async_context(chromium(chromium_path)))
        try:
            yield Pages(runner, browser)
        finally:
            runner.run(stack.aclose())


def waiting_engine() -> FakeEngine:
    """An engine that waits after three tokens, so that a test sees what is shown meanwhile."""
    engine = FakeEngine()
    engine.waits_after = 3
    return engine


def status(page: Page, text: str) -> Awaitable[None]:
    return expect(page.get_by_role("status")).to_contain_text(text)


def answer(page: Page) -> Any:
    return page.locator(".turn.answer .text").last


async def generate(page: Page, prompt: str = "Say it") -> None:
    await page.get_by_role("textbox", name="Text to continue").fill(prompt)
    await page.get_by_role("button", name="Generate").click()


def test_text_appears_while_it_is_generated_and_counts_follow(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await generate(page)
        await status(page, "Generating")
        await expect(answer(page)).to_have_text("Hel")
        await expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        engine.goes_on.set()
        await status(page, "Finished: 6 tokens of prompt, 14 new in ")
        await expect(answer(page)).to_have_text("Hello, world.")
        await expect(page.get_by_text("Ended: it came to its end.")).to_be_visible()
        await page.get_by_role("button", name="Undo").click()
        await expect(page.locator(".turn")).to_have_count(0)
        await expect(page.get_by_role("textbox", name="Text to continue")).to_have_value("Say it")

    pages.use(use, waiting_engine())


def test_escape_stops_and_the_engine_hears_of_it(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await page.get_by_role("textbox", name="Text to continue").fill("a")
        await page.keyboard.press("Control+Enter")
        await expect(answer(page)).to_have_text("Hel")
        await page.keyboard.press("Escape")
        await status(page, "Stopped: ")
        while not engine.aborted:
            await asyncio.sleep(0.01)
        assert engine.running == 0
        await expect(answer(page)).to_have_text("Hel")
        await expect(page.get_by_role("button", name="Generate")).to_be_enabled()

    pages.use(use, waiting_engine())


def test_a_chat_has_all_messages_before(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await page.get_by_text("Chat", exact=True).click()
        await page.get_by_label("Most new tokens").fill("5")  # what is left of the context
        for at, text in enumerate(("One?", "Two?")):
            await page.get_by_role("textbox", name="Your message").fill(text)
            await page.get_by_role("button", name="Generate").click()
            await expect(page.locator(".turn.answer")).to_have_count(at + 1)
            await status(page, "Finished")
        prompt = bytes(engine.requests[-1].prompt).decode()
        places = [prompt.index(text) for text in ("One?", "Yes.", "Two?")]
        assert places == sorted(places)

    pages.use(use, FakeEngine("Yes."))


def test_probabilities_are_shown_on_hover_and_by_keys(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await page.get_by_label("Show token probabilities").check()
        await generate(page)
        await status(page, "Finished")
        table = page.locator("#probabilities")
        await expect(table).to_be_hidden()
        await page.locator(".token").nth(1).hover()
        await expect(table).to_contain_text('Token "e": 60.7 %')
        await expect(table.get_by_role("row")).to_have_count(6)  # its own and five others
        await expect(table.locator(".own")).to_have_text('"e"60.7 %')
        await expect(answer(page)).to_have_text("Hello, world.<|endoftext|>")
        await expect(page.locator(".token.end")).to_have_text("<|endoftext|>")
        await page.get_by_role("log").focus()
        await page.keyboard.press("ArrowRight")
        await expect(table).to_contain_text('Token "l": 60.7 %')
        await page.keyboard.press("ArrowLeft")
        await expect(table).to_contain_text('Token "e": 60.7 %')

    pages.use(use)


def test_errors_are_shown_in_the_words_of_the_server(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await generate(page)
        await status(page, "Error: the queue is full")
        engine.error, engine.ends_after = None, (2, "failed")
        await generate(page)
        await status(page, "Error: the request could not be computed")
        await expect(answer(page)).to_have_text("He")
        await expect(page.get_by_text("Not finished.").last).to_be_visible()

    engine = FakeEngine()
    engine.error = FULL
    pages.use(use, engine, expected=("429",))


def test_a_key_is_asked_for_and_kept_until_the_tab_closes(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await expect(page.get_by_text("needs an API key")).to_be_visible()
        await page.get_by_label("API key").fill("a-key-of-some-length")
        await generate(page)
        await status(page, "Finished")
        await page.reload()
        await expect(page.locator("#s-engine")).to_have_text("running")

    pages.use(use, keys=("a-key-of-some-length",), expected=("401",))


def test_text_of_the_model_is_never_markup(pages: Pages) -> None:
    text = "<img src=x onerror=alert(1)><script>alert(2)</script>"

    async def use(page: Page, engine: FakeEngine) -> None:
        await generate(page)
        await status(page, "Finished")
        await expect(answer(page)).to_have_text(text)
        assert await page.locator("#log img, #log script").count() == 0

    pages.use(use, FakeEngine(text))


def test_what_is_not_the_pages_own_may_not_run(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        inline = "const s = document.createElement('script'); s.text = 'window.ran = 1';"
        await page.evaluate(inline + "document.body.append(s)")
        assert await page.evaluate("window.ran") is None

    pages.use(use, expected=("Content Security Policy",))


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window_and_colours_follow(
    pages: Pages, scheme: Scheme, width: int
) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await page.get_by_label("Show token probabilities").check()
        await generate(page, "a" * 60)
        await status(page, "Finished")
        await page.locator(".token").first.hover()
        await page.get_by_text("Penalties and more").click()
        wide = await page.evaluate(
            "[...document.querySelectorAll('main *, header *')]"
            ".filter(e => e.getBoundingClientRect().right > innerWidth).map(e => e.outerHTML)"
        )
        assert wide == []
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(",")))
        assert (light > 600) == (scheme == "light")

    pages.use(use, scheme=scheme, width=width)


def test_a_screen_reader_finds_every_part_by_name(pages: Pages) -> None:
    async def use(page: Page, engine: FakeEngine) -> None:
        await generate(page)
        await status(page, "Finished")
        await expect(page.get_by_role("main")).to_match_aria_snapshot(SNAPSHOT)
        await page.get_by_role("textbox", name="Text to continue").focus()
        for name in ("Generate", "Undo", "Clear"):
            await page.keyboard.press("Tab")
            await expect(page.get_by_role("button", name=name)).to_be_focused()
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("log")).to_be_focused()

    pages.use(use)


SNAPSHOT = """
- main:
  - region "Prompt":
    - heading "Prompt" [level=2]
    - group "Mode":
      - radio "Continue text" [checked]
      - radio "Chat"
    - textbox "Text to continue": Say it
    - button "Generate"
    - button "Stop" [disabled]
    - button "Undo"
    - button "Clear"
    - status: /Finished. 6 tokens of prompt, 14 new/
    - heading "Output" [level=2]
    - log "Output":
      - article:
        - heading "Prompt" [level=3]
        - paragraph: Say it
      - article:
        - heading "Answer" [level=3]
        - paragraph: Hello, world.
  - complementary "Sampling":
    - spinbutton "Most new tokens"
    - spinbutton "Temperature"
    - spinbutton "Top p"
    - 'spinbutton "Top k (0: all)"'
    - spinbutton "Seed"
    - spinbutton "Answers"
    - checkbox "Show token probabilities"
    - textbox "API key (kept in this tab)"
"""
