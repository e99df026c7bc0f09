"""Builds the compiled parts; everything else about the package is in pyproject.toml.

Each extension is optional: without a C++ compiler the package installs and its Python twins give
the same results more slowly. That is said once, loudly, never passed over.
"""

import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from pybind11 import setup_helpers as pybind11
except ImportError:
    pybind11 = None

# The blending order compares sums of products: contracting them would change the order.
SAME_ROUNDING = [] if sys.platform == "win32" else ["-O3", "-ffp-contract=off"]


def extensions() -> list[Extension]:
    """Every compiled module, or none where pybind11 itself is missing."""
    if pybind11 is None:
        say_what_serves_instead("all compiled modules", "pybind11 is not installed")
        return []
    return [
        pybind11.Pybind11Extension(
            f"megatron.data._{name}",
            [f"csrc/data/{name}.cpp"],
            cxx_std=17,
            extra_compile_args=SAME_ROUNDING,
            optional=True,
        )
        for name in ("sample_maps", "token_reader")
    ]


class BuildWhatCanBeBuilt(build_ext):
    """Builds each extension and goes on without those that cannot be built."""

    def build_extension(self, ext: Extension) -> None:
        """Compile `ext`; an `optional` one that fails is announced and left out."""
        try:
            super().build_extension(ext)
        except Exception as error:
            say_what_serves_instead(ext.name, f"{type(error).__name__}: {error}")
            raise  # setuptools goes on, because the extension is optional


def say_what_serves_instead(name: str, reason: str) -> None:
    """Print the one loud notice about a module that will be missing."""
    print(
        f"{'=' * 88}\nNOT BUILT: {name}\n  {reason}\n"
        f"  The Python twin gives the same results, more slowly. To build it: install a C++17\n"
        f"  compiler and pybind11, then run `python setup.py build_ext --inplace`.\n{'=' * 88}",
        file=sys.stderr,
        flush=True,
    )


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildWhatCanBeBuilt})
