"""The size report names what is larger than the guides; conftest.py prints it."""

from pathlib import Path

from tests.architecture.sizes import size_report
from tests.architecture.source_tree import MEGATRON, write_tree


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
