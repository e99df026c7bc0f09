"""The page loads nothing from elsewhere, and can be used by keyboard and by ear.

It is read as HTML here: no browser is needed, and none is started.
"""

import base64
import hashlib
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

from tests.support.serving.calls import Reply, app_of, ask
from tests.support.serving.fake_engine import FakeEngine

MOST_BYTES = 60_000
VOID = {"meta", "link", "input", "br"}
Attributes = dict[str, str]


class Elements(HTMLParser):
    """All elements of a page with their attributes; unbalanced tags are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, Attributes]] = []
        self.open: list[str] = []
        self.labelled_inside: set[str] = set()  # ids of controls within a label

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.found.append((tag, attributes))
        if "label" in self.open and tag == "input":
            self.labelled_inside.add(attributes.get("id", attributes.get("value", "")))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def reply() -> Reply:
    return ask(app_of(FakeEngine()), "GET", "/")


@pytest.fixture(scope="module")
def html(reply: Reply) -> str:
    return reply.body.decode()


@pytest.fixture(scope="module")
def page(html: str) -> Elements:
    parsed = Elements()
    parsed.feed(html)
    assert parsed.open == []
    return parsed


@pytest.fixture(scope="module")
def script(html: str) -> str:
    (text,) = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    return str(text)


def with_attribute(page: Elements, name: str) -> Iterator[tuple[str, Attributes]]:
    return ((tag, attributes) for tag, attributes in page.found if name in attributes)


def test_the_policy_allows_the_pages_own_script_and_style_alone(reply: Reply, html: str) -> None:
    policy = reply.headers["content-security-policy"]
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy


def test_nothing_comes_from_elsewhere_and_the_page_is_small(page: Elements, html: str) -> None:
    for name in ("src", "href", "action"):
        for tag, attributes in with_attribute(page, name):
            value = attributes[name]
            assert value.startswith(("data:", "#")), f"{tag} {name}={value}"
    addresses = set(re.findall(r"https?://[^\s'\"]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert len(html.encode()) < MOST_BYTES


def test_no_element_has_a_handler_or_a_style_of_its_own(page: Elements) -> None:
    names = {name for _, attributes in page.found for name in attributes}
    assert not [name for name in names if name.startswith("on") or name == "style"]


def test_text_of_the_model_is_inserted_as_text(script: str) -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in script


def test_every_control_has_a_label(page: Elements) -> None:
    labels = {attributes["for"] for _, attributes in with_attribute(page, "for")}
    controls = [
        attributes.get("id", attributes.get("value", ""))
        for tag, attributes in page.found
        if tag in ("input", "textarea", "select")
    ]
    assert len(controls) > 15
    assert set(controls) - labels - page.labelled_inside == set()
    assert labels <= set(controls)


def test_names_of_elements_are_unique_and_those_that_are_used_exist(
    page: Elements, script: str
) -> None:
    names = [attributes["id"] for _, attributes in with_attribute(page, "id")]
    assert len(names) == len(set(names))
    used = set(re.findall(r'\$\("([\w-]+)"\)', script))
    fields = re.search(r"NUMBERS = \[(.*?)\]", script)
    assert fields is not None
    used |= set(re.findall(r'"(\w+)"', fields[1]))
    for reference in ("aria-labelledby", "aria-describedby", "for"):
        used |= {attributes[reference] for _, attributes in with_attribute(page, reference)}
    assert used - set(names) == set()


def test_what_happens_is_announced_once_and_tokens_are_not(page: Elements) -> None:
    live, roles = (
        {attributes["id"]: attributes[name] for _, attributes in with_attribute(page, name)}
        for name in ("aria-live", "role")
    )
    assert live == {"status": "polite", "log": "off", "probabilities": "polite"}
    assert roles == {"status": "status", "log": "log"}


def test_the_page_follows_the_readers_colours_width_and_motion(page: Elements, html: str) -> None:
    for query in ("prefers-color-scheme: dark", "max-width: 52rem", "prefers-reduced-motion"):
        assert f"({query}" in html
    assert ("html", {"lang": "en"}) in page.found
    metas = [attributes for tag, attributes in page.found if tag == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    tags = [tag for tag, _ in page.found]
    assert [tags.count(tag) for tag in ("header", "main", "aside", "footer", "h1")] == [1] * 5


def contrast(first: str, second: str) -> float:
    """The contrast ratio of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


def test_text_can_be_read_in_both_colour_schemes(html: str) -> None:
    schemes = re.findall(r":root \{(.*?)\}", html, flags=re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for text in ("text", "quiet", "accent", "bad"):
            for ground in ("page", "card"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        assert contrast(colours["on-accent"], colours["accent"]) >= 4.5


def test_the_fields_that_the_page_sends_are_known(script: str) -> None:
    body = {"prompt": "a", "stream": False, "max_tokens": 2, "temperature": 0.8, "seed": 1}
    body |= {"top_p": 0.9, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.1, "stop": ["x"]}
    body |= {"presence_penalty": 0.1, "frequency_penalty": 0.1, "n": 2, "logprobs": 5}
    assert all(name in script for name in body)
    reply = ask(app_of(FakeEngine()), "POST", "/v1/completions", body)
    assert reply.status == 200
    assert "x-ignored-fields" not in reply.headers
