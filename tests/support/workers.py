"""A plugin of pytest: what the workers of xdist would do once each is done once for all of them.

Workers are forked from the Python that has imported torch (tests/support/warm_python.py), as are
the ranks and programs that they start. Each worker rewrites the assertions of its share of the test
files, which takes longer than all else of collecting; pytest keeps them for the other workers.
"""

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import warm_python

SERVERS = "servers"  # the key under which a worker is told the folder of the servers


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Have workers forked, instead of started."""
    for spec in specs:
        spec.python = str(warm_python.server_folder(deepspeed=False) / "python")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker where the servers are."""
    node.workerinput[SERVERS] = str(warm_python.servers())


def pytest_sessionstart(session: pytest.Session) -> None:
    """Take the servers that the worker was told of, and import its share of the test files."""
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    warm_python.use_servers(Path(worker[SERVERS]))
    if sys.dont_write_bytecode:
        return
    number = int(worker["workerid"].removeprefix("gw"))
    for path in _test_files(session.config.args)[number :: worker["workercount"]]:
        # What fails here fails again when the file is collected.
        with suppress(Exception, pytest.skip.Exception):
            name = path.relative_to(warm_python.ROOT).with_suffix("")
            importlib.import_module(".".join(name.parts))


def _test_files(args: Sequence[str]) -> list[Path]:
    places = {Path(arg.partition("::")[0]).resolve() for arg in args}
    files = {path for place in places for path in (place, *place.rglob("test_*.py"))}
    return sorted(path for path in files if path.is_file())
