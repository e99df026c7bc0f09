"""Every registered format has the methods of the protocol, with the same parameters."""

import inspect

import pytest

from megatron.checkpoint import formats
from megatron.checkpoint.formats.base import CheckpointFormat

METHODS = [name for name in vars(CheckpointFormat) if not name.startswith("_")]


@pytest.mark.parametrize("name", list(formats.REGISTRY))
def test_a_format_has_every_method_with_the_protocols_parameters(name):
    form = formats.get(name)
    assert len(METHODS) == 7
    for method in METHODS:
        expected = inspect.signature(getattr(CheckpointFormat, method)).parameters
        found = inspect.signature(getattr(type(form), method)).parameters
        assert [(p.name, p.kind) for p in found.values()] == [
            (p.name, p.kind) for p in expected.values()
        ]
