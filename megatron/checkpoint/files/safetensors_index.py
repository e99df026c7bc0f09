"""`*.safetensors.index.json`: which file of a folder holds which tensor, read strictly.

An index comes from elsewhere, so the files it names must lie in its own folder. No torch here.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError
from megatron.json_values import parse_json

NAME = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")  # one folder, no way out of it


def read(path: Path, suffix: str = ".safetensors") -> dict[str, str]:
    """Return the file that holds each tensor, by name, in the order of the index at `path`.

    `suffix` is what the names of its files end with.

    Raises:
        CheckpointError: it is missing or not such an index; it names a file that leads out of its
            folder, or that is not there.
    """
    weight_map = _weight_map(path)
    for name, file in weight_map.items():
        plain = isinstance(file, str) and _FILE_NAME.fullmatch(file) and ".." not in file
        if not plain or not file.endswith(suffix):
            raise _bad(path, f"{name!r} in {file!r}, which may lead out of its folder")
    missing = sorted({file for file in weight_map.values() if not (path.parent / file).is_file()})
    if missing:
        raise CheckpointError(
            "a checkpoint lacks files that its index names",
            found=f"no {', '.join(missing[:4])}{' ...' if len(missing) > 4 else ''} beside {path}",
            fix="copy the folder whole",
        )
    return weight_map


def _weight_map(path: Path) -> dict[str, str]:
    try:
        fields = parse_json(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            "the index of a checkpoint is missing", found=str(path), fix="copy the folder whole"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _bad(path, f"not JSON: {error}") from error
    weight_map: Any = fields.get("weight_map") if isinstance(fields, Mapping) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise _bad(path, "no weight_map with names and files")
    return weight_map


def _bad(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        "the index of a checkpoint is damaged or was made up",
        found=f"{path}: {found}",
        fix="copy it again from where it is whole",
    )
