"""What becomes of example scripts of other Megatrons, and the page that says so."""

import pytest

from tests.architecture.source_tree import ROOT
from tests.programs.tools.launch_scripts.scripts_of_other_megatrons import SYSTEMS, Script
from tools.launch_scripts.commands import Started
from tools.launch_scripts.verdicts import Kind, verdict_of

SCRIPTS = [script for scripts in SYSTEMS.values() for script in scripts]


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.path for script in SCRIPTS])
def test_a_script_works_or_is_answered_by_name(script: Script) -> None:
    found = verdict_of(Started(script.program, tuple(script.flags.split()), script.ranks))
    assert (found.kind, len(found.reasons)) == (script.kind, len(script.missing)), found.reasons
    assert all(part in reason for part, reason in zip(script.missing, found.reasons))


def test_the_page_says_what_becomes_of_them() -> None:
    rows = []
    for system, scripts in SYSTEMS.items():
        run = [script for script in scripts if script.kind is not Kind.REFUSED]
        refused = ", ".join(f"`{script.path}`" for script in scripts if script not in run)
        rows.append(f"| {system} | {len(run)} of {len(scripts)} | {refused} |\n")
    assert "".join(rows) in (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
