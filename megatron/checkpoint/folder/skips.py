"""Iterations that a run passes over because its loss had spiked, in a file of the --save folder.

The checkpoint that the run goes back to was saved before the spike, so the ranges stand beside the
checkpoints: whoever starts from one of them passes over the same iterations.
"""

import json
from pathlib import Path

from megatron.atomic import publish_file, temporary_name, write_error
from megatron.checkpoint.files.durable import DurableFile
from megatron.config.skips import skip_problems
from megatron.errors import CheckpointError

NAME = "skipped_iterations.json"
_RANGES = "ranges"


def recorded_skips(folder: Path) -> tuple[str, ...]:
    """Return the ranges that were recorded, as `--skip-train-iteration-range` takes them.

    Raises:
        CheckpointError: the file is there and holds something else.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        words = tuple(content[_RANGES])
        problem = next(skip_problems(words), None)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error
    if problem is not None:
        raise _unreadable(path, str(problem.found))
    return words


def record_skip(folder: Path, first: int, last: int) -> Path:
    """Add the iterations from `first` to `last` to those that are passed over; return the file.

    Raises:
        MachineError: it cannot be written.
    """
    path = folder / NAME
    words = (*recorded_skips(folder), f"{first}-{last}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary = temporary_name(path)
        with DurableFile(temporary) as file:
            file.write((json.dumps({_RANGES: words}) + "\n").encode())
        publish_file(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    return path


def _unreadable(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"the file of iterations to pass over cannot be read: {path}",
        found=found,
        fix='write it as {"ranges": ["100-120"]}, or delete it: the run then trains on them',
    )
