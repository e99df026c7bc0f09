"""A test run that tested nothing, or passed over what it must not, is red."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source_tree import ROOT, write_tree

pytestmark = pytest.mark.slow

OURS = {  # with workers that are started as xdist does it
    "tests/conftest.py": (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"),
    **dict.fromkeys(("tests/__init__.py", "tests/support/__init__.py"), ""),
    "tests/support/workers.py": "",
}
SKIPS = "import pytest\n\n@pytest.mark.skip(reason='no such thing here')\ndef test_a(): ...\n"
FILE_SKIPS = "import pytest\npytest.importorskip('a_module_that_is_not')\n"
PASSES = "def test_b(): ...\n"


def run_pytest(
    folder: Path, files: dict[str, str], *flags: str
) -> subprocess.CompletedProcess[str]:
    """A pytest of its own over `files`, with this project's conftest.py."""
    settings = "[pytest]\nmarkers = wide\n"
    write_tree(folder, {"pytest.ini": settings} | OURS | files)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags, "tests"],
        cwd=folder,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},  # some take a second to import
        capture_output=True,
        text=True,
        timeout=240,  # a deadline, far above what it takes on a busy machine
        check=False,
    )


def test_no_tests_is_red(tmp_path: Path) -> None:
    assert run_pytest(tmp_path, {}).returncode == pytest.ExitCode.NO_TESTS_COLLECTED


def test_a_skip_for_want_of_a_gpu_or_a_browser_is_green_and_said(tmp_path: Path) -> None:
    files = {"tests/gpu/test_a.py": SKIPS, "tests/browser/test_c.py": SKIPS}
    run = run_pytest(tmp_path, files | {"tests/unit/test_b.py": PASSES})
    assert run.returncode == 0, run.stdout
    assert "2 skipped" in run.stdout
    assert "2 x no such thing here" in run.stdout


@pytest.mark.parametrize("text", [SKIPS, FILE_SKIPS], ids=["test", "file"])
def test_any_other_skip_is_red_and_said(tmp_path: Path, text: str) -> None:
    files = {"tests/distributed/test_a.py": text, "tests/unit/test_b.py": PASSES}
    run = run_pytest(tmp_path, files)
    assert run.returncode == 1, run.stdout
    assert "1 x RED, only tests/gpu/, tests/browser/ may skip: " in run.stdout


@pytest.mark.parametrize("flags", [(), ("-p", "xdist", "-n", "2")], ids=["alone", "xdist"])
def test_slow_tests_folders_and_what_was_left_out_are_said(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    sleeps = "import time\n\ndef test_slow():\n    time.sleep(0.3)\n"
    wide = "import pytest\n\n@pytest.mark.wide\ndef test_c(): ...\n"
    many = "".join(f"def test_{at}(): ...\n" for at in range(12))
    files = {
        "tests/laws/layouts/test_a.py": sleeps,
        "tests/unit/deep/er/test_b.py": wide + many,
    }
    run = run_pytest(tmp_path, files, "-m", "not wide", *flags)
    assert run.returncode == 0, run.stdout
    lines = run.stdout.splitlines()
    (first,) = (at for at, line in enumerate(lines) if "the 10 slowest tests" in line)
    assert re.fullmatch(r" +0\.[3-9] s tests/laws/layouts/test_a\.py::test_slow", lines[first + 1])
    assert all(" s tests/" in line for line in lines[first + 1 : first + 11])
    assert "time by folder" in lines[first + 11]
    assert re.fullmatch(r" +0\.[3-9] s +\d+% +1 tests/laws/layouts", lines[first + 12])
    assert re.fullmatch(r" +0\.\d s +\d+% +12 tests/unit", lines[first + 13])
    assert lines[first + 14].startswith("1 tests were left out of this run")
    assert re.fullmatch(
        r"\d+ s; processors of this machine: \d+ s computing, \d+ s idle, \d+ s taken away",
        lines[first + 15],
    )


def test_only_one_thread_computes_in_each_process() -> None:
    probe = "import os; print(os.environ['OMP_NUM_THREADS'])"
    run = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert int(run.stdout) >= 1
