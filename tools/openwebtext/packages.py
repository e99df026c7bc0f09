"""Packages that only the cleaning of web text needs: imported where one is used, never before."""

import importlib
from types import ModuleType

from megatron.errors import ConfigError


def package(module: str, *, pip: str, task: str, otherwise: str) -> ModuleType:
    """Return the module; ConfigError with the command to install it, or the flag to omit it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{task} is done by the package {pip}, which is not installed",
            found=str(error),
            fix=f"pip install {pip}, or {otherwise}",
        ) from error
