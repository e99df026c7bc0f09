"""Compares the files of a checkpoint with what was written: lengths, digests, who checks what.

Lengths cost one `stat` per file; digests read every byte, so ranks of one host share the files they
need between them. Damage is described by file and by affected tensors. No torch here.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import NamedTuple

import xxhash

from megatron.checkpoint.files import safetensors_header, store
from megatron.checkpoint.files.store import Place
from megatron.checkpoint.files.threads import in_threads
from megatron.checkpoint.folder.manifest import FileRecord, Manifest, entry_name
from megatron.errors import CheckpointError

_BLOCK_BYTES = 4 << 20
_SHOWN = 8  # damages and tensors listed before "and N more"


class DamagedFile(NamedTuple):
    """One file that is not as it was written; `tensors` are those whose own data differs."""

    file: str
    expected: str
    found: str
    tensors: tuple[str, ...] = ()


def wrong_sizes(directory: Place, manifest: Manifest, names: Iterable[str]) -> list[DamagedFile]:
    """Return files among `names` that are missing or of another length."""
    damages = []
    for name in names:
        expected = manifest.files[name].bytes
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            damages.append(DamagedFile(name, f"{expected} bytes", "no such file"))
            continue
        if size != expected:
            damages.append(DamagedFile(name, f"{expected} bytes", f"{size} bytes"))
    return damages


def wrong_digests(
    directory: Place, manifest: Manifest, names: Iterable[str], *, threads: int = 1
) -> list[DamagedFile]:
    """Return files among `names` whose length or content differs from what was written.

    As many as `threads` are read at the same time.
    """

    def compare(name: str) -> list[DamagedFile]:
        if bad := wrong_sizes(directory, manifest, [name]):
            return bad
        _, digest = store.digest_of(directory / name)
        expected = manifest.files[name].xxh3
        if digest == expected:
            return []
        hit = tuple(_damaged_tensors(directory, manifest, name))
        return [DamagedFile(name, f"xxh3 {expected}", f"xxh3 {digest}", hit)]

    return [bad for found in in_threads(compare, list(names), threads) for bad in found]


def _damaged_tensors(directory: Place, manifest: Manifest, file: str) -> Iterable[str]:
    """Return the tensors of `file` whose data has another digest; none if only the header has."""
    try:
        entries = safetensors_header.read(directory / file).entries
    except CheckpointError:
        return
    with (directory / file).open("rb") as stream:
        for name, tensor in manifest.tensors.items():
            for piece in tensor.pieces:
                label = entry_name(name, piece.box, tensor.global_shape)
                if piece.file != file or label not in entries:
                    continue
                digest, left = xxhash.xxh3_128(), entries[label].stop - entries[label].start
                stream.seek(entries[label].start)
                while left and (block := stream.read(min(left, _BLOCK_BYTES))):
                    digest.update(block)
                    left -= len(block)
                if digest.hexdigest() != piece.xxh3:
                    yield label


def read_back(directory: Place, files: Mapping[str, FileRecord]) -> None:
    """Compare files that were just written with their records, from the disk if possible.

    Raises:
        CheckpointError: the disk holds something else.
    """
    for name, record in files.items():
        found = FileRecord(*store.digest_of(directory / name, from_disk=True))
        if found != record:
            raise CheckpointError(
                "a file does not hold what was just written to it",
                found=f"{directory / name}: expected {record.bytes} bytes, xxh3 {record.xxh3}; "
                f"found {found.bytes} bytes, xxh3 {found.xxh3}",
                fix="the disk or the memory of this machine fails: use another one",
            )


def damage_error(directory: Place, damages: Sequence[DamagedFile]) -> CheckpointError:
    """Return one error that lists `damages`."""
    lines = []
    for damage in damages[:_SHOWN]:
        line = f"{directory / damage.file}: expected {damage.expected}, found {damage.found}"
        if damage.tensors:
            more = len(damage.tensors) - _SHOWN
            line += f"; hit: {', '.join(damage.tensors[:_SHOWN])}"
            line += f" and {more} more" if more > 0 else ""
        lines.append(line)
    if len(damages) > _SHOWN:
        lines.append(f"and {len(damages) - _SHOWN} more files")
    return CheckpointError(
        "the checkpoint is damaged",
        found="\n    ".join(lines),
        fix="load an older iteration, or copy this one again from where it is whole",
    )


def shares(
    files: Mapping[str, int], needs: Sequence[Set[str]], hosts: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return which files each rank checks, so that every host checks all that its ranks will read.

    `files` gives lengths; `needs[r]` and `hosts[r]` are rank r's. Hosts may see different disks, so
    every host checks its own files. Files that no rank needs are checked once, by any rank.
    Deterministic, and balanced by bytes.
    """
    loads = [0] * len(needs)
    result: list[list[str]] = [[] for _ in needs]
    everyone = range(len(needs))
    by_host = {host: [r for r in everyone if hosts[r] == host] for host in dict.fromkeys(hosts)}
    for name in sorted(files, key=lambda name: (-files[name], name)):
        wanting = [ranks for ranks in by_host.values() if any(name in needs[r] for r in ranks)]
        for ranks in wanting or [list(everyone)]:
            rank = min(ranks, key=lambda r: (loads[r], r))
            loads[rank] += files[name]
            result[rank].append(name)
    return [tuple(names) for names in result]
