"""Documents agree with the code, and their references exist."""

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron import errors
from megatron.config.dependent_flags import EXPLAINED
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from megatron.config.spellings.no_effect import NO_EFFECT
from megatron.config.spellings.refused import REFUSED, REMOVED
from megatron.preflight.machine import OLDEST_TORCH
from megatron.serving.limits import ServerLimits
from tests.architecture.layers import LAYERS
from tests.architecture.source_tree import MEGATRON, ROOT, programs, sources, write_tree
from tests.architecture.test_flags import every_flag
from tools.docs.write import FOLDER, PAGES

PASSED_OVER = {".git", ".venv", "build", "runs", "site", ".hypothesis", "__pycache__"}
TEXT_SUFFIXES = {".md", ".py", ".toml", ".yaml", ".yml", ".cpp", ".h", ".sh", ".cfg", ".txt"}
# mypy's, pip's, and an example of a typing error
FLAGS_OF_NOBODY = {"--strict", "--no-build-isolation", "--num-layrs"}
FLAGS_OF_DOCKER = {"--build-arg", "--gpus", "--rm", "--shm-size"}
# Folders of one person's machine; written so that this line is not one of them.
PRIVATE_PATH = re.compile(r"(?<![\w.~])/(?:root|home/\w+|Users/\w+)/")


def documents(root: Path = ROOT) -> list[Path]:
    """Every Markdown file of the project."""
    return [path for path in texts(root) if path.suffix == ".md"]


def texts(root: Path = ROOT) -> list[Path]:
    """Every file of the project that people read."""
    named = {"Makefile", ".gitignore", "run"}
    found: list[Path] = []
    for folder, folders, files in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in PASSED_OVER and not name.endswith(("_cache", ".egg-info"))
        ]
        paths = [Path(folder, name) for name in files]
        found += [path for path in paths if path.suffix in TEXT_SUFFIXES or path.name in named]
    return sorted(found)


def broken_links(document: Path, root: Path = ROOT) -> Iterator[str]:
    """Links and `paths/in/code.style` of a document that lead to nothing in the project."""
    text = document.read_text(encoding="utf-8")
    without_fences = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fences):
        path = target.partition("#")[0]
        if path and not re.match(r"[a-z]+:", path) and not (document.parent / path).exists():
            yield f"{document.name}: link to {target}"
    for name in re.findall(r"`([\w./-]+\.(?:py|md|toml|cpp|yaml))(?:::\w+)?`", without_fences):
        places = (root, document.parent, root / "megatron", root / "docs")
        is_there = any((place / name).exists() for place in places)
        if "/" not in name:  # a name alone may stand for the only file that is called so
            is_there = is_there or any(path.name == name for path in texts(root))
        if not is_there:
            yield f"{document.name}: `{name}` is not there"


def missing_tests(document: Path, root: Path = ROOT) -> Iterator[str]:
    """Tests that a document names (`tests/x/test_y.py::test_z`) and that do not exist."""
    text = document.read_text(encoding="utf-8")
    for name, test in re.findall(r"(tests/[\w/]+\.py)::(\w+)", text):
        path = root / name
        if not path.exists() or f"def {test}(" not in path.read_text(encoding="utf-8"):
            yield f"{document.name}: {name}::{test} is not there"


def unknown_flags(document: Path, known: set[str]) -> list[str]:
    """Flags that a document names and nothing takes."""
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]+", text))
    return [f"{document.name}: {name}" for name in sorted(named - known)]


def layer_table(text: str) -> list[frozenset[str]]:
    """The rows of docs/architecture.md's table of layers, lowest first."""
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", text, flags=re.MULTILINE)
    by_level = {int(level): frozenset(re.findall(r"`(\w+)`", names)) for level, names in rows}
    return [by_level[level] for level in sorted(by_level)]


def test_the_layers_of_the_architecture_page_are_those_of_the_gate() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert layer_table(text) == list(LAYERS)


def walk(text: str) -> list[tuple[str, str]]:
    """The numbered list of modules of a page, each with the first name that it mentions."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`: `(\w+)`", text, flags=re.MULTILINE)


def test_the_walk_from_a_raw_batch_to_the_loss_is_short_and_leads_through_the_code() -> None:
    steps = walk((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    assert 0 < len(steps) <= 7
    missing = [
        f"{path}: {name}"
        for path, name in steps
        if f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing


def test_links_and_paths_in_documents_exist() -> None:
    found = [line for document in documents() for line in broken_links(document)]
    assert not found, "\n".join(found)


def test_tests_that_documents_name_exist() -> None:
    found = [line for document in documents() for line in missing_tests(document)]
    assert not found, "\n".join(found)


def test_every_error_class_is_on_the_page_of_errors_with_its_code() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.MegatronError)
    ]
    for kind in kinds:
        again = "yes" if kind.retryable else "no"
        row = rf"^\| `{kind.__name__}` \| {kind.exit_code} \| {again} \|"
        assert re.search(row, text, flags=re.MULTILINE), f"no row `{row}`"


def test_the_page_of_errors_says_of_every_status_whether_a_retry_makes_sense() -> None:
    text = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (yes|no) \|", text, flags=re.MULTILINE)
    rows += re.findall(r"^\| `\w+` \| (\d+) \| (yes|no) \|", text, flags=re.MULTILINE)
    documented = {int(status): answer == "yes" for status, answer in rows}
    assert documented == {status: errors.is_retryable(status) for status in documented}
    missing = set(filter(errors.is_retryable, range(256))) - documented.keys()
    assert not missing


def test_flags_that_documents_name_are_taken_by_something() -> None:
    known = every_flag() | EXPLAINED | FLAGS_OF_NOBODY | FLAGS_OF_DOCKER
    for table in (ALIASES, CONVERTED, NO_EFFECT, REFUSED, REMOVED):
        known |= {word.rstrip("*") for word in table}
    # The tools declare theirs, and pass on those of other programs.
    supervisor = [source for source in sources(MEGATRON) if source.name.endswith("supervise.py")]
    for source in [*programs(), *supervisor]:
        known |= set(re.findall(r"--[a-z][a-z0-9_-]+", source.text))
    known |= {f"--{each.name.replace('_', '-')}" for each in fields(ServerLimits)}
    for law in (ROOT / "tests" / "laws").rglob("*.py"):  # some of which are programs too
        known |= set(re.findall(r"--[a-z][a-z0-9_-]+", law.read_text(encoding="utf-8")))
    for example in (ROOT / "examples").glob("*.sh"):  # which name those of launchers
        known |= set(re.findall(r"--[a-z][a-z0-9_-]+", example.read_text()))
    found = [line for document in documents() for line in unknown_flags(document, known)]
    assert not found, "\n".join(found)


def test_no_file_names_a_folder_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRIVATE_PATH.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("[a](there.md) [b](there.md#part) [c](https://example.org/x)", 0),
        ("[a](gone.md)", 1),
        ("`there.md` and `gone/away.py`", 1),
        ("```\n[a](gone.md)\n```\n", 0),
        ("| `tests/test_a.py::test_here` |", 0),
        ("| `tests/test_a.py::test_gone` |", 1),
    ],
)
def test_what_leads_nowhere_is_found(tmp_path: Path, text: str, count: int) -> None:
    files = {"there.md": "", "page.md": text, "tests/test_a.py": "def test_here() -> None: ...\n"}
    page = write_tree(tmp_path, files) / "page.md"
    found = [*broken_links(page, tmp_path), *missing_tests(page, tmp_path)]
    assert len(found) == count


def test_a_flag_that_nothing_takes_is_found(tmp_path: Path) -> None:
    page = (
        write_tree(tmp_path, {"page.md": "use --seed, not --sead; a--b is no flag\n"}) / "page.md"
    )
    assert unknown_flags(page, {"--seed"}) == ["page.md: --sead"]


def test_the_table_of_layers_is_read_from_the_page() -> None:
    text = "| layer | parts |\n|---|---|\n| 1 | `b` and `c` | x |\n| 0 | `a` | y |\n"
    assert layer_table(text) == [frozenset({"a"}), frozenset({"b", "c"})]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_a_private_folder_is_recognised() -> None:
    folders = [
        "".join(("/ro", "ot/x")),
        "".join(("cd /home/", "me/x")),
        "".join(("/Users/", "me/x")),
    ]
    assert all(PRIVATE_PATH.search(folder) for folder in folders)
    assert not PRIVATE_PATH.search("https://x.org/y and ../root/x and tests/root/")


def excluded_versions(text: str) -> list[tuple[str, str, str]]:
    """Package, accepted range and a version with a hole, of the table of SECURITY.md."""
    rows = re.findall(r"^\| (\w+) \| `([^`]+)` \| [^|]+ \| (.+) \|$", text, flags=re.MULTILINE)
    return [
        (package, accepted, version)
        for package, accepted, reasons in rows
        for version in re.findall(r"(\d[\d.]+): CVE-\d", reasons)
    ]


def test_versions_with_known_holes_cannot_be_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    asked = [Requirement(line) for line in [*project["dependencies"], *extras]]
    holes = excluded_versions((ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert {package for package, _, _ in holes} == {"torch", "deepspeed"}
    for package, accepted, version in holes:
        ranges = [one.specifier for one in asked if one.name == package]
        assert ranges
        for one in ranges:
            assert one == SpecifierSet(accepted)
            assert version not in one
    assert f">={'.'.join(map(str, OLDEST_TORCH))}" == holes[0][1], "checked before training"
