"""Evaluation mode for the length of a block, restored module by module."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode, and give each its own mode back, after an error too.

    A module that was in evaluation mode before, such as one that is not trained, stays in it.
    """
    training = [each for each in module.modules() if each.training]
    module.eval()
    try:
        yield
    finally:
        for each in training:
            each.training = True
