"""Writes the arithmetic mean of the weights of several checkpoints of one model.

    python tools/average_checkpoints.py --load SAVE --iterations 900 950 1000 --save AVERAGED
    python tools/average_checkpoints.py --load RUN_A RUN_B --save AVERAGED --format huggingface

Each --load is a folder of any format that this program reads. Memory: one tensor and its sum. The
result has no optimizer state: load it with --finetune. Exit code 66 when the checkpoints are
damaged or of different models.
"""

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path

if __package__ in (None, ""):  # started as a file: its own folder is on the path, ours is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.average import AveragedSource
from megatron.checkpoint.formats import registry
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import ConfigError
from megatron.program import run_program


def main() -> None:
    """Open all checkpoints, compare their models, and write the mean."""
    arguments = _arguments()
    form = registry.get(arguments.format)
    if form.write is None:
        raise ConfigError(
            "checkpoints of this format are read, not written",
            found=f"--format {form.name}",
            fix="use one of " + ", ".join(registry.writable()),
        )
    for path in arguments.load:
        registry.refuse_overlap(path, arguments.save)
    options = SourceOptions(vocab_size=arguments.true_vocab_size)
    with ExitStack() as opened:
        averaged = AveragedSource(
            [
                opened.enter_context(registry.open_source(path, iteration, options=options))
                for path, iteration in _wanted(arguments)
            ]
        )
        averaged.verify()
        written = form.write(averaged, arguments.save, WriteOptions(optimizer=False))
    print(f"averaged {len(_wanted(arguments))} checkpoints: {written}")


def _wanted(arguments: argparse.Namespace) -> list[tuple[Path, int | None]]:
    if not arguments.iterations:
        return [(path, None) for path in arguments.load]
    if len(arguments.load) > 1:
        raise ConfigError(
            "iterations were named, but not of which folder",
            found=f"--iterations with {len(arguments.load)} folders after --load",
            fix="give one --load folder with --iterations, or the folders of iterations themselves",
        )
    return [(arguments.load[0], iteration) for iteration in arguments.iterations]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--load", type=Path, nargs="+", required=True, help="folders of checkpoints")
    add("--iterations", type=int, nargs="+", help="iterations of the one --load folder")
    add("--save", type=Path, required=True, help="folder to write to, as --save of a run")
    add("--format", default="sharded", help="one of " + ", ".join(registry.writable()))
    add("--true-vocab-size", type=int, help="tokens, where the sources do not mark padding rows")
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
