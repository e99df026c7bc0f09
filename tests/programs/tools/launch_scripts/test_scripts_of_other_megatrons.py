"""What becomes of example scripts of other Megatrons, and the page that says so."""

from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT
from tests.support.example_scripts import SYSTEMS, lines_of_the_page, share
from tests.support.example_scripts.script import Script
from tools.launch_scripts.verdicts import Kind, verdict_of

SCRIPTS = {script.path: script for scripts in SYSTEMS.values() for script in scripts}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_works_or_is_answered_by_name(script: Script, tmp_path: Path) -> None:
    found = verdict_of(script.started(tmp_path))
    assert (found.kind, len(found.reasons)) == (script.kind, len(script.missing)), found.reasons
    assert all(part in reason for part, reason in zip(script.missing, found.reasons))
    assert (script.why != "") == (script.kind is Kind.REFUSED)


def test_the_page_says_what_becomes_of_them() -> None:
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    assert all(table in page for table in "\n".join(lines_of_the_page()).split("\n\n"))


def test_a_kind_of_scripts_counts_as_often_as_there_are_scripts() -> None:
    one, many = Script("a", "a.py", 1, "", Kind.WORKS), Script("b", "b.py", 1, "", Kind.NOTES)
    refused = Script("c", "c.py", 1, "", Kind.REFUSED, num_scripts=4)
    assert share((one, many._replace(num_scripts=3), refused)) == (4, 8)
