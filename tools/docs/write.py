"""Writes the generated pages of docs/: `python -m tools.docs.write`, or `make docs`.

A test compares each page with what would be written, so no page is edited by hand.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.program import run_program
from tools.docs import assumptions, flags

FOLDER = Path(__file__).resolve().parents[2] / "docs"
PAGES: Mapping[str, Callable[[], str]] = {
    "assumptions.md": assumptions.page,
    "flags.md": flags.page,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Write all pages."""
    parser = argparse.ArgumentParser(description="Write the generated pages of docs/.")
    parser.add_argument("--output", type=Path, default=FOLDER, help="the folder of the pages")
    output = parser.parse_args(argv).output
    for name, page in PAGES.items():
        (output / name).write_text(page(), encoding="utf-8")
        print(f"wrote {output / name}")


if __name__ == "__main__":
    run_program(main)
