"""Files of results: their folder is looked at before the work, and they appear whole."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError
from tools.preprocessing.text_output import write_text_files


def check_output(output: str | None, flag: str = "--output") -> None:
    """Raise ConfigError if the file cannot be written, before hours of work."""
    if output is None:
        return
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        is_folder = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(
            "results cannot be written there",
            found=f"{flag} {output}: {is_folder}",
            fix="give the name of a file in a folder that exists",
        )


def write_result(output: str | None, result: Mapping[str, Any]) -> None:
    """Write a result as JSON, with non-finite numbers as text; nothing for None."""
    if output is not None:
        text = json.dumps(_plain(result), indent=1, allow_nan=False, default=str)
        write_text_files({Path(output): text + "\n"})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
