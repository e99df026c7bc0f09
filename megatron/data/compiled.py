"""Finds the compiled modules of this package, and checks that they fit their Python callers.

Every compiled module has a Python twin with the same results, so a missing one costs speed only.
What a reader would get wrong: a module left over from older source would import too; the number
`INTERFACE` in both sources keeps it from being used.
"""

import importlib
from types import ModuleType

from megatron import log


def built_module(name: str) -> ModuleType | None:
    """Return the module `megatron.data._<name>`, or None where it was not built."""
    try:
        return importlib.import_module(f"megatron.data._{name}")
    except ImportError:
        return None


def is_current(module: ModuleType | None, interface: int) -> bool:
    """Return whether `module` exists and was built from the source that fits its caller."""
    return module is not None and getattr(module, "INTERFACE", None) == interface


def warn_of_python_twin(name: str, module: ModuleType | None) -> None:
    """Warn, once per name, that Python code is used in place of a faster compiled module."""
    what = "is not built" if module is None else "was built from other source"
    log.warning_once(
        f"compiled {name}",
        f"megatron.data._{name} {what}; its Python twin is used (same results, slower): "
        "python setup.py build_ext --inplace builds it",
    )
