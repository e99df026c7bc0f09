"""Moments of a save at which something can be made to happen, in the order in which they come.

Each is a call of one named function of the library, so that it stays what it is when code moves;
where that is gone, putting it in fails. What a reader would get wrong: a moment of rank 0 alone
never comes on another rank.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron import atomic
from megatron.checkpoint.files import durable, safetensors_io, store, torch_file
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.formats.deepspeed import save as deepspeed_save
from megatron.checkpoint.formats.megatron import save as megatron_save
from megatron.checkpoint.formats.megatron import writer as megatron_writer
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.save import saving, sealed_save
from megatron.checkpoint.save.host_copy import HostMemory
from megatron.checkpoint.save.sealed_save import SealedSave

Act = Callable[[], None]


class Moment(NamedTuple):
    """How to enter the moment, and the latest checkpoint after it."""

    put_in: Callable[[Act], AbstractContextManager[Any]]
    on_first_alone: bool = False
    is_committed: bool = False
    only_beside: bool = False  # of a save beside the training alone


def kill_this_process() -> None:
    """What the kernel does to a rank that used too much memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(seconds: float) -> None:
    """The same at some later moment, whatever this process does then."""

    def wait_and_kill() -> None:
        time.sleep(seconds)
        kill_this_process()

    threading.Thread(target=wait_and_kill, daemon=True).start()


def _before(owner: Any, name: str) -> Callable[[Act], AbstractContextManager[Any]]:
    return _at(owner, name, after=False)


def _after(owner: Any, name: str, *, call: int = 1) -> Callable[[Act], AbstractContextManager[Any]]:
    return _at(owner, name, after=True, call=call)


def _at(
    owner: Any, name: str, *, after: bool, call: int = 1
) -> Callable[[Act], AbstractContextManager[Any]]:
    @contextmanager
    def put_in(act: Act) -> Iterator[None]:
        real, count = getattr(owner, name), 0

        def there(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if not after and count == call:
                act()
            value = real(*args, **kwargs)
            if after and count == call:
                act()
            return value

        with patch.object(owner, name, there):
            yield

    return put_in


def _half_of_a_write(is_meant: Callable[[Path], bool], *, call: int = 1) -> Any:
    """In the middle of a write to one of the files."""

    @contextmanager
    def put_in(act: Act) -> Iterator[None]:
        real, count = durable.DurableFile.write, 0

        def write(file: Any, data: Any) -> None:
            nonlocal count
            count += is_meant(file._path)
            if is_meant(file._path) and count == call:
                view = memoryview(data).cast("B")
                real(file, view[: len(view) // 2])
                act()
                real(file, view[len(view) // 2 :])
            else:
                real(file, data)

        with patch.object(durable.DurableFile, "write", write):
            yield

    return put_in


@contextmanager
def _half_of_a_deletion(act: Act) -> Iterator[None]:
    real = shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
        act()
        real(path, *args, **kwargs)

    with patch.object(shutil, "rmtree", rmtree):
        yield


def _is_shard(path: Path) -> bool:
    return path.name.startswith("shard")


def _is_manifest(path: Path) -> bool:
    return path.name == manifest.NAME


def _is_of_torch(path: Path) -> bool:
    return path.suffix == ".pt"


def _is_seal(path: Path) -> bool:
    return path.name == manifest.SEAL


# Where retention deletes.
_OLDER: Mapping[str, Moment] = {
    "an older one is hidden": Moment(
        _after(Path, "rename", call=2), on_first_alone=True, is_committed=True
    ),
    "half of an older one is deleted": Moment(
        _half_of_a_deletion, on_first_alone=True, is_committed=True
    ),
}
# Of our own format.
MOMENTS: Mapping[str, Moment] = {
    "before the ranks agree on a plan": Moment(_before(saving, "_agree_on_plan")),
    "the plan is made": Moment(_after(saving, "_agree_on_plan")),
    "the stage is made": Moment(_after(folders, "make_stage"), on_first_alone=True),
    "all know the stage": Moment(_after(folders, "stage_called")),
    "half of the state is copied": Moment(_after(HostMemory, "_at", call=3), only_beside=True),
    "the state is copied": Moment(_after(HostMemory, "copy_of"), only_beside=True),
    "before the first byte": Moment(_before(saving.StagedSave, "write")),
    "half of a header is written": Moment(_half_of_a_write(_is_shard)),
    "half of a tensor is written": Moment(_half_of_a_write(_is_shard, call=3)),
    "a shard is not synced yet": Moment(_before(durable.DurableFile, "__exit__")),
    "a shard is durable": Moment(_after(safetensors_io, "create")),
    "before the random states": Moment(_before(sharded, "write_generators")),
    "the part is written": Moment(_after(saving.StagedSave, "write")),
    "before the manifest": Moment(_before(manifest, "encode"), on_first_alone=True),
    "half of the manifest is written": Moment(_half_of_a_write(_is_manifest), on_first_alone=True),
    "the manifest is durable": Moment(_after(store, "write_object"), on_first_alone=True),
    "the stage is durable": Moment(_after(atomic, "sync_directory"), on_first_alone=True),
    "the checkpoint has its name": Moment(_after(Path, "rename"), on_first_alone=True),
    "the name is durable": Moment(_after(atomic, "sync_directory", call=2), on_first_alone=True),
    "the new tracker lies beside": Moment(_before(os, "replace"), on_first_alone=True),
    "the tracker names it": Moment(_after(os, "replace"), on_first_alone=True, is_committed=True),
    "the tracker is durable": Moment(
        _after(durable, "replace_file"), on_first_alone=True, is_committed=True
    ),
    **_OLDER,
    "older ones are gone": Moment(
        _after(saving.StagedSave, "retire"), on_first_alone=True, is_committed=True
    ),
}


# Of files of torch.save, which write a head, then every tensor.
_TORCH_FILE: Mapping[str, Moment] = {
    "half of a head is written": Moment(_half_of_a_write(_is_of_torch)),
    "half of a file is written": Moment(_half_of_a_write(_is_of_torch, call=20)),
    "a file is not synced yet": Moment(_before(durable.DurableFile, "__exit__")),
    "a file is durable": Moment(_after(torch_file, "save")),
}
MEGATRON_MOMENTS: Mapping[str, Moment] = {
    "before the ranks say what they hold": Moment(_before(megatron_save, "run_on_all_ranks")),
    "the plan is made": Moment(_after(megatron_save, "run_on_all_ranks", call=2)),
    "the stage is made": Moment(_after(folders, "make_stage"), on_first_alone=True),
    "before the first byte": Moment(_before(megatron_writer, "write_rank")),
    **_TORCH_FILE,
    "before the random states": Moment(_before(sealed_save, "write_generators")),
    "the part is written": Moment(_after(SealedSave, "write_part")),
    "all have written": Moment(_after(sealed_save, "run_on_all_ranks")),
    "half of the seal is written": Moment(_half_of_a_write(_is_seal), on_first_alone=True),
    "it is sealed": Moment(_after(SealedSave, "put"), on_first_alone=True),
    "before the stage is synced": Moment(_before(folders, "publish"), on_first_alone=True),
    "the checkpoint has its name": Moment(_after(Path, "rename"), on_first_alone=True),
    "the new tracker lies beside": Moment(_before(os, "replace"), on_first_alone=True),
    "the tracker names it": Moment(_after(os, "replace"), on_first_alone=True, is_committed=True),
    "the tracker is durable": Moment(
        _after(durable, "replace_file"), on_first_alone=True, is_committed=True
    ),
    **_OLDER,
    "older ones are gone": Moment(
        _after(sealed_save, "retire_older"), on_first_alone=True, is_committed=True
    ),
}
DEEPSPEED_MOMENTS: Mapping[str, Moment] = {
    "before the ranks say what they hold": Moment(_before(deepspeed_save, "run_on_all_ranks")),
    "the names are known": Moment(_after(deepspeed_save, "run_on_all_ranks", call=2)),
    "before DeepSpeed saves": Moment(_before(deepspeed_save, "_write_with_deepspeed")),
    "before the first byte": Moment(_before(deepspeed_save.DurableWriter, "save")),
    **_TORCH_FILE,
    "DeepSpeed has saved": Moment(_after(deepspeed_save, "_write_with_deepspeed")),
    "before the random states": Moment(_before(sealed_save, "write_generators")),
    "the part is written": Moment(_after(SealedSave, "write_part")),
    "all have written": Moment(_after(sealed_save, "run_on_all_ranks")),
    "before it is read back": Moment(
        _before(deepspeed_save, "_check_written"), on_first_alone=True
    ),
    "half of the seal is written": Moment(_half_of_a_write(_is_seal), on_first_alone=True),
    "it is sealed": Moment(_after(SealedSave, "put"), on_first_alone=True),
    "before the stage is synced": Moment(_before(folders, "publish"), on_first_alone=True),
    "the checkpoint has its name": Moment(_after(Path, "rename"), on_first_alone=True),
    "DeepSpeed's new tracker lies beside": Moment(_before(os, "replace"), on_first_alone=True),
    "DeepSpeed's tracker names it": Moment(_after(os, "replace"), on_first_alone=True),
    "DeepSpeed's tracker is durable": Moment(_after(durable, "replace_file"), on_first_alone=True),
    "our tracker names it": Moment(
        _after(os, "replace", call=2), on_first_alone=True, is_committed=True
    ),
    "our tracker is durable": Moment(
        _after(durable, "replace_file", call=2), on_first_alone=True, is_committed=True
    ),
    **_OLDER,
    "older ones are gone": Moment(
        _after(sealed_save, "retire_older"), on_first_alone=True, is_committed=True
    ),
}
# By the names of --checkpoint-format.
MOMENTS_OF: Mapping[str, Mapping[str, Moment]] = {
    "sharded": MOMENTS,
    "megatron": MEGATRON_MOMENTS,
    "deepspeed": DEEPSPEED_MOMENTS,
}


def moments_of(rank: int, *, beside: bool, of: str = "sharded") -> list[str]:
    """The moments that come on a rank, in a save of either kind and of the format `of`."""
    return [
        name
        for name, moment in MOMENTS_OF[of].items()
        if (rank == 0 or not moment.on_first_alone) and (beside or not moment.only_beside)
    ]
