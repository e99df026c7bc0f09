"""Digests of the code that this process runs, so that ranks can compare them.

A version number does not show that a checkout was edited on one node and not on the others. What is
hashed is the text on disk: edits after a process began are not what it runs, and are hashed too.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import xxhash

import megatron


def source_digests() -> dict[str, str]:
    """Return digests of this package's Python files, and of the program's file if it has one."""
    package = Path(megatron.__file__).parent
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    return {
        "code of megatron": digest_of_source(package, package.rglob("*.py")),
        "code of the program": digest_of_source(Path(program).parent, [Path(program)])
        if program
        else "",
    }


def digest_of_source(root: Path, files: Iterable[Path]) -> str:
    """Return 16 hex digits over relative names and contents of `files`, in any order."""
    digest = xxhash.xxh3_64()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in files):
        text = path.read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
