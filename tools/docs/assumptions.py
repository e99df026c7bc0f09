"""The page docs/assumptions.md, and the registry docs/assumptions.toml that it is written from.

The registry stands beside its page: it is data about the whole repository, tests included, which
no program of the package reads.
"""

import enum
import posixpath
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from tools.docs import markdown

REGISTRY = Path(__file__).resolve().parents[2] / "docs" / "assumptions.toml"
SYSTEMS = {
    "M": "Megatron-DeepSpeed",
    "L": "Megatron-LM",
    "N": "GPT-NeoX",
    "A": "accelerate",
    "X": "Found further",
}
HEAD = """\
# What others leave unchecked

Written by `make docs` from [assumptions.toml](assumptions.toml); edit that.

Training systems rest on assumptions that nobody checks until they fail: that files stay as they
were, that ranks stay in step, that a disk has room. This page lists those that were found in four
systems (M: Megatron-DeepSpeed, L: Megatron-LM, N: GPT-NeoX, A: accelerate; X: found further), and
says what this version does about each.

- **held**: a check exists, and a test breaks the assumption and reads the message (or shows that
  nothing happens).
- **partly**: the statement says what is missing.
- **not yet**: nothing here checks it, or the feature that needs it does not exist.

A test fails when a check or a test that is named here does not exist.
"""


class State(enum.StrEnum):
    """How far an assumption is checked."""

    HELD = "held"
    PARTLY = "partly"
    NOT_YET = "not yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """One entry of the registry.

    Attributes:
        assumption: what others take for granted.
        statement: what is done here, and what is missing.
        checks: functions and classes, as `path:Name`.
        tests: those that break the assumption, as `path::test`.
    """

    assumption: str
    state: State
    statement: str
    checks: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


def read_registry(path: Path = REGISTRY) -> dict[str, Assumption]:
    """Return the entries of a registry by their ids.

    Raises:
        ConfigError: an entry has other fields, or a state that does not exist.
    """
    return {name: _entry(name, fields) for name, fields in tomllib.loads(path.read_text()).items()}


def page(registry: Mapping[str, Assumption] | None = None) -> str:
    """Return the whole page as Markdown."""
    entries = read_registry() if registry is None else registry
    states = [one.state for one in entries.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in State)
    rows = [
        (f"[{name}](#{name.lower()})", one.assumption, one.state) for name, one in entries.items()
    ]
    overview = markdown.table(("id", "assumed elsewhere", "here"), rows)
    summary = f"{len(entries)} assumptions: {counts}.\n\n{overview}"
    return "\n".join([HEAD, summary, *_sections(entries)])


def _entry(name: str, fields: Mapping[str, Any]) -> Assumption:
    try:
        lists = {key: tuple(fields.get(key, ())) for key in ("checks", "tests")}
        return Assumption(**{**fields, **lists, "state": State(fields["state"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "an entry of the registry of assumptions cannot be read",
            found=f"[{name}]: {error}",
            fix=f"give it assumption, statement, state ({', '.join(State)}), checks and tests",
        ) from error


def _sections(entries: Mapping[str, Assumption]) -> Iterator[str]:
    for letter, system in SYSTEMS.items():
        yield f"## {system}\n"
        for name, one in entries.items():
            if name.startswith(letter):
                yield "\n\n".join([f"### {name}", *_paragraphs(one)]) + "\n"


def _paragraphs(one: Assumption) -> Iterator[str]:
    yield f"*Assumed elsewhere: {one.assumption}.*"
    yield f"**{one.state.capitalize()}.** {one.statement}"
    if one.checks:
        yield f"Checked by {_names(one.checks, ':')}."
    if one.tests:
        yield "Broken by\n\n" + "\n".join(
            f"- {_link(path)}: {_sentences(tests)}" for path, tests in _by_file(one.tests, "::")
        )


def _names(checks: tuple[str, ...], separator: str) -> str:
    return ", ".join(
        f"{', '.join(f'`{name}`' for name in names)} in {_link(path)}"
        for path, names in _by_file(checks, separator)
    )


def _sentences(tests: list[str]) -> str:
    """Return the names of tests as the sentences that they are."""
    return "; ".join(test.removeprefix("test_").replace("_", " ") for test in tests)


def _by_file(names: tuple[str, ...], separator: str) -> list[tuple[str, list[str]]]:
    found: dict[str, list[str]] = {}
    for name in names:
        path, _, inside = name.partition(separator)
        found.setdefault(path, []).append(inside)
    return list(found.items())


def _link(path: str) -> str:
    return f"[{posixpath.basename(path)}](../{path})"
