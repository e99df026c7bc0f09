"""The size report names what is larger than the guides; no function has too many parameters."""

from pathlib import Path

from tests.architecture.sizes import size_report, wide_functions
from tests.architecture.source_tree import MEGATRON, everything, sources, write_tree

MOST_PARAMETERS = 8  # beyond it, parameters that belong together become one value


def test_the_report_counts_every_package() -> None:
    total, *_ = size_report(MEGATRON)
    parts = {path.parent.name for path in MEGATRON.glob("*/__init__.py")}
    assert all(f"{part} " in total for part in parts)


def test_what_is_larger_than_the_guides_is_named(tmp_path: Path) -> None:
    long_function = "def long():\n" + "    x = 1\n" * 60
    wide_method = "class C:\n    def wide(self, a, b, c, d, e, f, g, *, h): ...\n"
    package = write_tree(
        tmp_path / "megatron", {"a.py": long_function, "data/b.py": wide_method + "x = 1\n" * 499}
    )
    assert size_report(package) == [
        "megatron/: 562 lines ((top) 61, data 501)",
        "megatron/a.py:1: long has 61 lines (guide 60)",
        "megatron/data/b.py: 501 lines (guide 500)",
        "megatron/data/b.py:2: wide has 8 parameters (guide 7)",
    ]


def test_no_function_has_more_parameters_than_a_caller_can_order() -> None:
    assert wide_functions(everything(), MOST_PARAMETERS) == []


def test_every_function_with_too_many_parameters_is_named(tmp_path: Path) -> None:
    wide = (
        "class C:\n    def fits(self, a, /, b, *, c): ...\n    def wide(self, a, b, *, c, d): ...\n"
    )
    nested = "def outer(a):\n    async def inner(a, b, c, d): ...\n"
    package = write_tree(tmp_path / "megatron", {"a.py": wide, "b.py": nested})
    assert wide_functions(sources(package), 3) == [
        "megatron/a.py: wide has 4 parameters",
        "megatron/b.py: inner has 4 parameters",
    ]
