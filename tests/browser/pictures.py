"""Draws the pictures of the page in docs/serving.md: `python -m tests.browser.pictures`.

No model writes their text: an engine that spells a given one does, with probabilities that are
computed from the letters of its tokens.
"""

import asyncio
import math
import time
from pathlib import Path

from playwright.async_api import Page, expect

from megatron.serving.engine_client import TokenScore
from megatron.serving.served_model import ServedModel
from megatron.tokenizer.huggingface import LibraryTokenizer
from megatron.tokenizer.protocol import END_OF_TEXT
from megatron.tokenizer.token_text import text_rules
from tests.support.serving.browser import chromium, find_chromium, shown_page
from tests.support.serving.fake_engine import FakeEngine
from tests.support.serving.live import live
from tests.support.serving.models import served_model
from tools.train_tokenizer import train

DOCS = Path(__file__).resolve().parents[2] / "docs"
PROMPT = "The lighthouse keeper opened the door and"
STORY = (
    " looked at the grey sea. There had been no ship for nine days. He lit the lamp, wrote the hour"
    " into his book, and waited for the wind to turn."
)
QUESTION = "Why is the sky blue?"
ANSWER = (
    "Air scatters short waves of light more than long ones. Of sunlight, blue is scattered most, so"
    " it comes to us from every part of the sky. At sunset the way through the air is longer, and"
    " what is left is red."
)


def word_model() -> ServedModel:
    """Return a model whose tokens are the words of the texts."""
    texts = [PROMPT, STORY, QUESTION, ANSWER] * 4
    core = train(lambda: iter(texts), vocab_size=800)
    size = core.get_vocab_size()
    tokenizer = LibraryTokenizer(
        name="words", vocab_size=size, core=core, eod=core.token_to_id(END_OF_TEXT)
    )
    return served_model(
        name="lighthouse-1b",
        tokenizer=tokenizer,
        rules=text_rules(tokenizer),
        vocab_size=size,
        context_length=2048,
    )


def engine_of(model: ServedModel, text: str) -> FakeEngine:
    """Return an engine that spells a text in words, each with others that are less likely."""
    engine = FakeEngine(tokens=tuple(model.tokenizer.tokenize(text)))
    words = sorted({*model.tokenizer.tokenize(STORY), *model.tokenizer.tokenize(ANSWER)})

    def score(token: int, count: int) -> TokenScore:
        own = 0.25 + 0.74 * (token * 2654435761 % 997 / 997)
        others = [words[(token * 7 + 31 * at) % len(words)] for at in range(1, count)]
        shares = [(1 - own) * 0.38 * 0.6**at for at in range(len(others))]
        pairs = [(token, own), *((each, share) for each, share in zip(others, shares))]
        return TokenScore(math.log(own), tuple((each, math.log(share)) for each, share in pairs))

    engine.score = score
    return engine


async def draw_text(page: Page, path: Path) -> None:
    """Draw a continued text with the probabilities of one of its tokens."""
    await page.get_by_label("Show token probabilities").check()
    await page.get_by_label("Seed").fill("17")
    await page.get_by_role("textbox", name="Text to continue").fill(PROMPT)
    await page.keyboard.press("Control+Enter")
    await expect(page.get_by_role("status")).to_contain_text("Finished")
    await page.get_by_role("log").focus()
    for _ in range(5):
        await page.keyboard.press("ArrowRight")
    await page.screenshot(path=path)


async def draw_chat(page: Page, path: Path) -> None:
    """Draw a chat while its answer is being generated."""
    await page.get_by_text("Chat", exact=True).click()
    await page.get_by_role("textbox", name="Your message").fill(QUESTION)
    await page.keyboard.press("Control+Enter")
    await expect(page.locator(".turn.answer .text")).to_contain_text("short waves")
    await page.wait_for_timeout(2200)  # the state of the engine is asked for every two seconds
    await page.screenshot(path=path)


async def draw_all(path: str, folder: Path = DOCS) -> None:
    """Draw both pictures into a folder."""
    model = word_model()
    async with chromium(path) as browser:
        async with (
            live(engine_of(model, STORY), model=model) as server,
            shown_page(browser, server.url + "/", width=1120, height=800) as page,
        ):
            await draw_text(page, folder / "serving-page.png")
        engine = engine_of(model, ANSWER)
        engine.waits_after = 24
        narrow = {"width": 390, "height": 860}
        async with (
            live(engine, model=model) as server,
            shown_page(browser, server.url + "/", scheme="dark", **narrow) as page,
        ):
            await draw_chat(page, folder / "serving-page-dark.png")
            engine.goes_on.set()


if __name__ == "__main__":
    if (found := find_chromium()) is None:
        raise SystemExit("no Chromium is found: apt-get install --no-install-recommends chromium")
    start = time.monotonic()
    asyncio.run(draw_all(found))
    print(f"wrote two pictures into {DOCS} in {time.monotonic() - start:.1f} s")
