"""Says what a checkpoint holds and, with --verify, whether every byte is as it was written.

    python tools/inspect_checkpoint.py SAVE [--iteration N] [--verify] [--json]

Needs no torch and reads no tensor unless asked to verify. Exit code 66 when the checkpoint is
missing or damaged.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: its own folder is on the path, ours is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint import folder, manifest, verify
from megatron.checkpoint.manifest import Manifest
from megatron.program import run


def main() -> None:
    """Read the arguments, then print what the checkpoint holds."""
    arguments = _arguments()
    directory = _directory(arguments.folder, arguments.iteration)
    content, _ = manifest.load(directory)
    damages = verify.wrong_sizes(directory, content, content.files)
    if arguments.verify:
        damages = verify.wrong_digests(directory, content, content.files)
    if arguments.json:
        print(json.dumps(_plain(directory, content), indent=2))
    else:
        print("\n".join(_lines(directory, content)))
    if damages:
        raise verify.damage_error(directory, damages)
    if arguments.verify and not arguments.json:
        print(f"verified: {len(content.files)} files, {content.bytes:,} bytes")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="a --save folder, or one iteration's folder")
    parser.add_argument("--iteration", type=int, help="iteration to look at (default: the latest)")
    parser.add_argument("--verify", action="store_true", help="check every file's digest")
    parser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser.parse_args()


def _directory(path: Path, iteration: int | None) -> Path:
    if iteration is None and (path / manifest.NAME).is_file():
        return path
    wanted = folder.latest_iteration(path) if iteration is None else iteration
    directory = path / folder.iteration_name(wanted)
    if not directory.is_dir():
        raise folder.missing_iteration(path, wanted)
    return directory


def _plain(directory: Path, content: Manifest) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "iteration": content.iteration,
        "created": content.created,
        "written_by": dict(content.written_by),
        "layout": {**content.layout._asdict(), "world": content.layout.world},
        "progress": dict(content.progress),
        "scalars": dict(content.scalars),
        "config_fingerprint": content.config_fingerprint,
        "config": dict(content.config),
        "bytes": content.bytes,
        "files": {name: record._asdict() for name, record in content.files.items()},
        "generators": list(content.generators),
        "tensors": {
            name: {
                "dtype": tensor.dtype_code,
                "shape": tensor.global_shape,
                "bytes": tensor.bytes,
                "pieces": len(tensor.pieces),
            }
            for name, tensor in content.tensors.items()
        },
    }


def _lines(directory: Path, content: Manifest) -> list[str]:
    layout = content.layout
    writers = ", ".join(f"{name} {version}" for name, version in content.written_by.items())
    total = sum(tensor.bytes for tensor in content.tensors.values())
    lines = [
        f"{directory}",
        f"iteration {content.iteration}, written {content.created} by {writers}",
        f"layout: tp {layout.tp}, pp {layout.pp}, dp {layout.dp} ({layout.world} ranks)",
        f"config fingerprint: {content.config_fingerprint}",
        f"progress: {json.dumps(content.progress)}",
        f"scalars: {json.dumps(content.scalars)}",
        f"random states: {len(content.generators) or 'none'}",
        f"files: {len(content.files)}, {content.bytes:,} bytes",
        *(f"  {name}  {record.bytes:,}" for name, record in content.files.items()),
        f"tensors: {len(content.tensors)}, {total:,} bytes",
        *_tree(content),
    ]
    return lines


def _tree(content: Manifest) -> list[str]:
    """Names as a tree of their `/` parts; the last part has dots of its own and stays whole."""
    lines: list[str] = []
    former: list[str] = []
    for name, tensor in content.tensors.items():
        *parents, last = name.split("/")
        for depth, parent in enumerate(parents):
            if parents[: depth + 1] != former[: depth + 1]:
                lines.append(f"{'  ' * (depth + 1)}{parent}/")
        former = parents
        pieces = f"  in {len(tensor.pieces)} pieces" if len(tensor.pieces) > 1 else ""
        indent = "  " * (len(parents) + 1)
        shape = list(tensor.global_shape)
        lines.append(f"{indent}{last}  {tensor.dtype_code} {shape}  {tensor.bytes:,}{pieces}")
    return lines


if __name__ == "__main__":
    run(main)
