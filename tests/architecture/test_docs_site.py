"""The documentation site has every page and module, and its links lead into the repository."""

import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.architecture.source_tree import ROOT


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml without the environment."""


_Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])


@pytest.fixture
def config() -> Any:
    """What stands in mkdocs.yml."""
    return yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)  # noqa: S506  # a SafeLoader


@pytest.fixture
def hooks() -> ModuleType:
    """The hooks of the site; they import MkDocs only where they are called by it."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_navigation(config: Any) -> None:
    listed = [page for section in config["nav"] for pages in section.values() for page in pages]
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    pages += [*config["extra"]["pages"].values()]
    pages += [f"api/{name}.md" for name in config["extra"]["api"]]
    assert sorted(listed) == sorted(pages)


def test_api_pages_name_modules_that_exist(config: Any) -> None:
    names = [name for modules in config["extra"]["api"].values() for name in modules]
    missing = [
        name
        for name in names
        if not any((ROOT / name.replace(".", "/")).with_suffix(end).exists() for end in (".py", ""))
    ]
    assert missing == []


def test_nothing_comes_from_another_server(config: Any) -> None:
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert not {"extra_css", "extra_javascript"} & set(config)


@pytest.mark.parametrize(
    ("source", "link", "becomes"),
    [
        ("docs/data.md", "checkpoints.md#files", "checkpoints.md#files"),
        ("docs/data.md", "../CONTRIBUTING.md", "contributing.md"),
        ("docs/data.md", "../tests/laws", "repository-file:tests/laws"),
        ("README.md", "docs/data.md", "data.md"),
        ("README.md", "pretrain_gpt.py", "repository-file:pretrain_gpt.py"),
        ("examples/README.md", "finetune_bert.sh", "repository-file:examples/finetune_bert.sh"),
        ("README.md", "https://example.org/x", "https://example.org/x"),
        ("README.md", "#here", "#here"),
    ],
)
def test_links_are_rewritten_for_the_site(
    hooks: ModuleType, config: Any, source: str, link: str, becomes: str
) -> None:
    assert (
        hooks.relinked(f"a [b]({link}).", source, config["extra"]["pages"]) == f"a [b]({becomes})."
    )


def test_a_link_to_nothing_is_found(
    hooks: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "lastResort", logging.StreamHandler(sys.stderr))
    hooks.relinked("[a](../gone.py)", "docs/data.md", {})
    assert "docs/data.md links to ../gone.py, which does not exist" in capsys.readouterr().err
