"""The ways of laying a checkpoint out in files, by name; adding one is a file and a line here."""

from collections.abc import Callable, Mapping

from megatron.checkpoint.files.store import Place
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.formats.base import CheckpointFormat
from megatron.checkpoint.formats.native.sharded import ShardedFormat
from megatron.errors import CheckpointError

REGISTRY: Mapping[str, Callable[[], CheckpointFormat]] = {
    "sharded": ShardedFormat,
}


def get(name: str) -> CheckpointFormat:
    """The format called `name`; CheckpointError when there is none."""
    if name not in REGISTRY:
        raise CheckpointError(
            "there is no such checkpoint format",
            found=repr(name),
            fix=f"use one of {', '.join(REGISTRY)}",
        )
    return REGISTRY[name]()


def recognise(directory: Place) -> CheckpointFormat:
    """The format of the checkpoint in `directory`; CheckpointError when it is none of ours."""
    for make in REGISTRY.values():
        candidate = make()
        if candidate.recognise(directory):
            return candidate
    raise manifest.missing(directory)
