"""The names of a corpus: a prefix `P` stands for `P.bin`, `P.idx` and the files beside them.

What a reader would get wrong: a prefix may contain dots, so suffixes are appended, never replaced.
"""

import difflib
import os
import stat
from pathlib import Path

from megatron.errors import DataError


def index_file_path(prefix: str) -> str:
    """Return the path of the index file of the corpus `prefix`."""
    return prefix + ".idx"


def data_file_path(prefix: str) -> str:
    """Return the path of the token file of the corpus `prefix`."""
    return prefix + ".bin"


def checksum_file_path(prefix: str) -> str:
    """Return the path of the checksums of the corpus `prefix`."""
    return prefix + ".sums"


def metadata_file_path(prefix: str) -> str:
    """Return the path of the sidecar of the corpus `prefix`."""
    return prefix + ".meta.json"


def corpus_files(prefix: str) -> tuple[Path, ...]:
    """Return the files that the corpus `prefix` may consist of, in the order of removal."""
    names = (index_file_path, data_file_path, metadata_file_path, checksum_file_path)
    return tuple(Path(name(prefix)) for name in names)


def both_files_exist(prefix: str) -> bool:
    """Return whether both files of the corpus `prefix` exist."""
    return os.path.isfile(index_file_path(prefix)) and os.path.isfile(data_file_path(prefix))


def pairing_doubts(prefix: str) -> list[str]:
    """Return signs that both files of the corpus `prefix`, which exist, are of two corpora.

    They prove nothing: files may have been copied in any order. Checksums do, where there are any.
    """
    index, data = Path(index_file_path(prefix)), Path(data_file_path(prefix))
    doubts = []
    if index.stat().st_mtime_ns < data.stat().st_mtime_ns:
        doubts.append(
            f"{index} is older than {data}, which writers finish first: they may be of two corpora"
        )
    if index.resolve().parent != data.resolve().parent:
        doubts.append(
            f"{index} and {data} are links into different folders, {index.resolve().parent} and "
            f"{data.resolve().parent}: they may be of two corpora"
        )
    return doubts


def refuse_suffix(prefix: str) -> None:
    """Raise DataError when a file name is given where a prefix should be."""
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            raise DataError(
                "a corpus is named by its prefix, without .bin or .idx",
                found=prefix,
                fix=f"use {prefix.removesuffix(suffix)}",
            )


def require_regular_file(prefix: str, path: str) -> None:
    """Raise DataError, with similar names, unless `path` is a file of some length."""
    try:
        status = os.stat(path)
    except OSError as error:
        near = _similar_prefixes(prefix)
        raise DataError(
            f"a file of the corpus {prefix} cannot be opened: {path}",
            found=f"{error.strerror}; similar names there: {', '.join(near) or 'none'}",
            fix=f"use {near[0]}" if near else "give the prefix of a .bin/.idx pair that exists",
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"not a regular file: {path}",
            found=stat.filemode(status.st_mode),
            fix="give the prefix of a .bin/.idx pair",
        )
    if status.st_size == 0:
        raise DataError(
            f"an empty file: {path}",
            found="0 bytes",
            fix="run tools/preprocess_data.py again: it stopped before it wrote anything",
        )


def _similar_prefixes(prefix: str) -> list[str]:
    """Return prefixes in the same folder that have both files and a similar name."""
    folder = Path(prefix).parent
    try:
        names = {path.stem for path in folder.iterdir() if path.suffix in (".idx", ".bin")}
    except OSError:
        return []
    complete = sorted(
        name for name in names if name != Path(prefix).name and both_files_exist(str(folder / name))
    )
    wanted = Path(prefix).name
    near = difflib.get_close_matches(wanted, complete, n=3, cutoff=0.6)
    longer = [name for name in complete if name.startswith(wanted) and name not in near]
    return [str(folder / name) for name in (near + longer)[:3]]
