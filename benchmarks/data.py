"""Our data path beside others': preprocessing, samples, blending, sample index, first batch.

`python benchmarks/data.py --peer-python PATH`: everything is measured in this one run, ours and
the peers' in turns, in CPU seconds and wall time. How to read it and how to make the peers' Python
is in benchmarks/README.md.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.data_preprocess import preprocess
from benchmarks.data_sections import Setting, blending, first_batch, sample_index, samples
from benchmarks.data_turns import table
from benchmarks.machine import machine
from megatron.errors import ConfigError
from megatron.program import run_program

SECTIONS = {
    "preprocess": preprocess,
    "samples": samples,
    "blending": blending,
    "sample-index": sample_index,
    "first-batch": first_batch,
}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every section, print its table, and write JSON if asked."""
    flags = _parser().parse_args(argv)
    _check(flags)
    if flags.folder is not None:
        flags.folder.mkdir(parents=True, exist_ok=True)
    results = []
    with nullcontext(flags.folder) if flags.folder else tempfile.TemporaryDirectory() as folder:
        setting = Setting(flags, Path(folder).resolve(), sys.executable)
        with setting.peer() as peer:
            peers = None if peer is None else peer.ask("versions")
        print(f"peers: {peers or 'none'}", flush=True)
        for name in flags.only:
            section = SECTIONS[name](setting)
            results.append(section)
            print(table(section), flush=True)
    report = {
        "benchmark": "data",
        "machine": machine(),
        "peers": peers,
        "flags": {
            name: value
            for name, value in vars(flags).items()
            if isinstance(value, int) or name == "only"
        },
        "sections": [
            asdict(section)
            | {"targets": [asdict(one) | {"reached": one.reached} for one in section.targets]}
            for section in results
        ],
    }
    print(f"{report['machine']}")
    if flags.json is not None:
        flags.json.parent.mkdir(parents=True, exist_ok=True)
        flags.json.write_text(json.dumps(report, indent=1) + "\n")


def _check(flags: argparse.Namespace) -> None:
    for name in ("repeats", "rounds", "samples", "turn_samples", "seq_length", "workers"):
        if getattr(flags, name) < 1:
            raise _too_small(name, getattr(flags, name), 1)
    if flags.tokens <= max(flags.documents, flags.index_documents, 2 * flags.seq_length):
        raise _too_small("tokens", flags.tokens, flags.documents * 2 + 2 * flags.seq_length)
    if (flags.vocab_file is None) != (flags.merge_file is None):
        raise ConfigError(
            "a GPT-2 vocabulary is two files",
            found=f"--vocab-file {flags.vocab_file}, --merge-file {flags.merge_file}",
            fix="give both, or neither and a small vocabulary is trained",
        )


def _too_small(name: str, found: int, fix: int) -> ConfigError:
    flag = "--" + name.replace("_", "-")
    return ConfigError(f"{flag} is too small", found=f"{flag} {found}", fix=f"use {fix} or more")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="data", description=__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=tuple(SECTIONS), default=list(SECTIONS), help="[all]")
    add("--peer-python", type=Path, help="a Python that has megatron-core [peers are left out]")
    add("--repeats", type=int, default=5, help="turns of each contestant [%(default)s]")
    add("--rounds", type=int, default=15, help="the same, of samples [%(default)s]")
    add("--seq-length", type=int, default=2048, help="[%(default)s]")
    add("--tokens", type=int, default=10**9, help="of a corpus [%(default)s]")
    add("--documents", type=int, default=10**6, help="in that corpus [%(default)s]")
    add("--index-documents", type=int, default=10**7, help="of sample-index [%(default)s]")
    add("--samples", type=int, default=10**8, help="of blending [%(default)s]")
    add("--turn-samples", type=int, default=20_000, help="read in one turn [%(default)s]")
    add("--text", type=Path, nargs="+", help=".jsonl and .txt files to preprocess [Python's own]")
    add("--megabytes", type=float, default=24.0, help="of that text at most [%(default)s]")
    add("--vocab-file", type=Path, help="GPT-2's vocab.json [a small one is trained]")
    add("--merge-file", type=Path, help="GPT-2's merges.txt")
    add("--tokenizer-json", type=Path, help="[the GPT-2 files as one]")
    add("--workers", type=int, default=1, help="of preprocessing, ours and the peer's [1]")
    add("--folder", type=Path, help="for corpora, kept for the next run [a temporary one]")
    add("--json", type=Path, metavar="FILE", help="write everything there, as JSON")
    return parser


if __name__ == "__main__":
    run_program(main)
