"""Every line of the registry leads to a program; a missing package is named with its command."""

import inspect

import pytest

from megatron.errors import MachineError
from tasks.registry import TASKS, Task


@pytest.mark.parametrize("name", TASKS)
def test_every_line_leads_to_a_program(name: str) -> None:
    program = TASKS[name].load(name)
    assert list(inspect.signature(program).parameters) == ["name", "argv"]
    assert TASKS[name].about


def test_a_missing_package_is_named_when_its_task_is_chosen() -> None:
    lacking = Task("tasks.main:main", "", packages=(("sys", "sys"), ("no_such", "no-such-thing")))
    with pytest.raises(MachineError, match="needs a package that is not installed") as raised:
        lacking.load("X")
    assert "pip install no-such-thing" in str(raised.value)
