"""Files that appear under their final name complete, or not at all.

A writer fills a temporary name beside the final one, forces it to disk and renames it. What a
reader would get wrong: the rename is only safe after the fsync, and only lasts after the folder
has been forced to disk too.
"""

import errno
import os
import secrets
from pathlib import Path

from megatron.errors import MachineError


def temporary_name(path: Path) -> Path:
    """Return a name beside `path` that is unique over all nodes of a shared file system."""
    return path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def publish_file(temporary: Path, final: Path) -> None:
    """Make the file `temporary`, already forced to disk, appear as `final`, replacing it."""
    os.replace(temporary, final)
    sync_directory(final.parent)


def sync_directory(path: Path) -> None:
    """Make the names in the folder `path` durable; before this call a rename is not."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    except OSError as error:
        # Some network file systems refuse to sync a folder; the rename itself has happened.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(folder)


def write_error(path: Path, error: OSError) -> MachineError:
    """Return the error to raise when the operating system refused to write `path`."""
    return MachineError(
        f"cannot write {path}",
        found=f"{error.strerror or error} (errno {error.errno})",
        fix=f"check free space, quota and permissions of {path.parent}; nothing half-written is "
        "left behind",
    )
