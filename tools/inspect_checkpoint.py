"""Print the content of a checkpoint and, with --verify, check every byte.

    python tools/inspect_checkpoint.py SAVE [--iteration N] [--verify] [--json | --config]

SAVE is what --load takes: a folder, or an address such as s3://BUCKET/FOLDER. Checkpoints of our
own format need no torch, and no tensor is read without --verify. Those of other formats
(Megatron-LM, torch_dist, DeepSpeed, Hugging Face; in folders alone) are printed with the names and
shapes that they would have here. Exit code 66 when the checkpoint is missing or damaged.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file: its own folder is on the path, ours is not
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.files import store
from megatron.checkpoint.files.safetensors_header import tensor_bytes
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder import manifest, verify
from megatron.checkpoint.folder import run_folder as folder
from megatron.checkpoint.folder.manifest import Manifest
from megatron.config.files.printing import config_file
from megatron.errors import CheckpointError
from megatron.program import run_program


def main() -> None:
    """Read the arguments, then print the content of the checkpoint."""
    arguments = _arguments()
    location = store.place(arguments.folder)
    try:
        directory = _directory(location, arguments.iteration)
    except CheckpointError as error:
        if not isinstance(location, Path):  # other formats are read from folders alone
            raise
        _foreign(location, arguments, error)
    else:
        _ours(directory, arguments)


def _ours(directory: Place, arguments: argparse.Namespace) -> None:
    content, _ = manifest.load(directory)
    damages = verify.wrong_sizes(directory, content, content.files)
    if arguments.verify:
        damages = verify.wrong_digests(directory, content, content.files)
    if arguments.json:
        print(json.dumps(_plain(directory, content), indent=2))
    elif arguments.config:
        print(config_file(content.config), end="")
    else:
        print("\n".join(_lines(directory, content)))
    if damages:
        raise verify.damage_error(directory, damages)
    if arguments.verify and not (arguments.json or arguments.config):
        print(f"verified: {len(content.files)} files, {content.bytes:,} bytes")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", help="a --save folder or address, or that of one iteration in it")
    parser.add_argument("--iteration", type=int, help="iteration to look at (default: the latest)")
    parser.add_argument("--verify", action="store_true", help="check every file's digest")
    printed = parser.add_mutually_exclusive_group()
    printed.add_argument("--json", action="store_true", help="print JSON for programs")
    printed.add_argument(
        "--config",
        action="store_true",
        help="print the flags of its run as a file for --config of training programs",
    )
    return parser.parse_args()


def _directory(path: Place, iteration: int | None) -> Place:
    """Return the folder of a checkpoint of ours; CheckpointError if `path` has none."""
    if iteration is None and (path / manifest.NAME).is_file():
        return path
    wanted = folder.latest_iteration(path) if iteration is None else iteration
    directory = path / folder.iteration_name(wanted)
    if not directory.is_dir():
        raise folder.missing_iteration(path, wanted)
    if not (directory / manifest.NAME).is_file():
        raise manifest.missing(directory)
    return directory


def _foreign(path: Path, arguments: argparse.Namespace, not_native: CheckpointError) -> None:
    """Print the content of a checkpoint of another format, under our names."""
    try:
        from megatron.checkpoint.formats import registry  # needs torch, which ours does not
    except ModuleNotFoundError:
        raise not_native from None

    with registry.open_source(path, arguments.iteration) as source:
        if arguments.verify:
            source.verify()
        if arguments.config:
            print(config_file(source.config), end="")
            return
        described = source.tensors
        sizes = {name: tensor_bytes(*tensor) for name, tensor in described.items()}
        if arguments.json:
            facts = {
                "directory": str(source.directory),
                "format": source.format_name,
                "kind": source.kind,
                "progress": dict(source.progress),
                "scalars": dict(source.scalars),
                "config": {name: dict(group) for name, group in source.config.items()},
                "tensors": {
                    name: {
                        "dtype": tensor.dtype_code,
                        "shape": tensor.global_shape,
                        "bytes": sizes[name],
                    }
                    for name, tensor in described.items()
                },
            }
            print(json.dumps(facts, indent=2))
            return
        lines = [
            f"{source.directory}",
            f"format: {source.format_name}, as it would be loaded",
            f"kind of model: {source.kind}",
            f"progress: {json.dumps(dict(source.progress))}",
            f"scalars: {json.dumps(dict(source.scalars))}",
            f"model: {json.dumps(source.config.get('model', {}))}",
            f"tensors: {len(sizes)}, {sum(sizes.values()):,} bytes",
            *_tree((name, *described[name], sizes[name], 1) for name in described),
        ]
        print("\n".join(lines))
        if arguments.verify:
            print("verified, as far as the format can be")


def _plain(directory: Place, content: Manifest) -> dict[str, Any]:
    return {
        "directory": str(directory),
        "iteration": content.iteration,
        "kind": content.kind,
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


def _lines(directory: Place, content: Manifest) -> list[str]:
    layout = content.layout
    writers = ", ".join(f"{name} {version}" for name, version in content.written_by.items())
    total = sum(tensor.bytes for tensor in content.tensors.values())
    lines = [
        f"{directory}",
        f"iteration {content.iteration}, written {content.created} by {writers}",
        f"layout: {layout} ({layout.world} ranks)",
        f"kind of model: {content.kind}",
        f"config fingerprint: {content.config_fingerprint}",
        f"progress: {json.dumps(content.progress)}",
        f"scalars: {json.dumps(content.scalars)}",
        f"random states: {len(content.generators) or 'none'}",
        f"files: {len(content.files)}, {content.bytes:,} bytes",
        *(f"  {name}  {record.bytes:,}" for name, record in content.files.items()),
        f"tensors: {len(content.tensors)}, {total:,} bytes",
        *_tree(
            (name, tensor.dtype_code, tensor.global_shape, tensor.bytes, len(tensor.pieces))
            for name, tensor in content.tensors.items()
        ),
    ]
    return lines


def _tree(tensors: Iterable[tuple[str, str, tuple[int, ...], int, int]]) -> list[str]:
    """Return names as a tree of their `/` parts; the last part may contain dots."""
    lines: list[str] = []
    former: list[str] = []
    for name, dtype, shape, size, count in tensors:
        *parents, last = name.split("/")
        for depth, parent in enumerate(parents):
            if parents[: depth + 1] != former[: depth + 1]:
                lines.append(f"{'  ' * (depth + 1)}{parent}/")
        former = parents
        pieces = f"  in {count} pieces" if count > 1 else ""
        indent = "  " * (len(parents) + 1)
        lines.append(f"{indent}{last}  {dtype} {list(shape)}  {size:,}{pieces}")
    return lines


if __name__ == "__main__":
    run_program(main)
