"""Reads the files that wandb writes offline: its messages, in the records of a LevelDB log."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wandb.proto import wandb_internal_pb2

_HEADER, _BLOCK, _RECORD = 7, 32768, 7  # bytes: of a file, a block, a record's header
_FULL, _LAST = 1, 4  # a message in one record, and the last of several


class OfflineStart(NamedTuple):
    """What one start of a run has written."""

    project: str
    run_id: str
    name: str
    config: dict[str, Any]
    points: list[dict[str, Any]]


def offline_runs(folder: Path) -> list[OfflineStart]:
    """Return every start below `folder`, in the order in which they began."""
    files = folder.rglob("run-*.wandb")
    return [_start(path) for path in sorted(files, key=lambda path: path.stat().st_ctime_ns)]


def _start(path: Path) -> OfflineStart:
    records = []
    for message in _messages(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        records.append(record)
    run = next(record.run for record in records if record.HasField("run"))
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    histories = (record.history.item for record in records if record.HasField("history"))
    points = [
        {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in history}
        for history in histories
    ]
    return OfflineStart(run.project, run.run_id, run.display_name, config, points)


def _messages(content: bytes) -> Iterator[bytes]:
    at, message = _HEADER, b""
    while at + _RECORD <= len(content):
        if _BLOCK - at % _BLOCK < _RECORD:  # what is left of a block holds no record
            at += _BLOCK - at % _BLOCK
            continue
        size, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        message += content[at + _RECORD : at + _RECORD + size]
        at += _RECORD + size
        if kind in (_FULL, _LAST):
            yield message
            message = b""
