from types import SimpleNamespace

import pytest

from megatron.data.compiled import built_module, is_current, warn_of_python_twin


def test_a_module_that_was_never_built_is_none():
    assert built_module("no_such_module") is None


@pytest.mark.parametrize("name", ["sample_maps", "token_reader"])
def test_the_modules_of_this_tree_are_built(name):
    assert built_module(name) is not None


@pytest.mark.parametrize(
    ("module", "current"),
    [
        (None, False),
        (SimpleNamespace(), False),
        (SimpleNamespace(INTERFACE=1), False),
        (SimpleNamespace(INTERFACE=2), True),
    ],
)
def test_only_a_module_of_this_interface_is_used(module, current):
    assert is_current(module, 2) is current


@pytest.mark.parametrize(
    ("module", "words"),
    [(None, "is not built"), (SimpleNamespace(), "was built from other source")],
)
def test_the_twin_is_announced_once(module, words, capsys):
    for _ in range(2):
        warn_of_python_twin(f"a module that {words}", module)
    output = capsys.readouterr()
    assert (output.out + output.err).count(f"a module that {words} {words}") == 1
