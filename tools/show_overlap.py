"""Show how much of each group's communication ran beside computation, from traces of --profile."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.loop.overlap import overlaps, read_trace
from megatron.program import run_program


def main(argv: Sequence[str] | None = None) -> None:
    """Read traces and print a line for each of their groups."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="+", help="a .json.gz file of one rank")
    for path in parser.parse_args(argv).trace:
        print(path)
        for group in overlaps(read_trace(path)):
            print(f"  {group}")


if __name__ == "__main__":
    run_program(main)
