"""Checkpoints in a store of objects: a marker last, nothing overwritten, nothing foreign gone."""

import errno

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron.checkpoint.files import store
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import manifest, object_folder
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.load import storage
from megatron.errors import CheckpointError, MachineError
from megatron.mpu.context import ParallelContext
from tests.support.checkpoints.object_store import SECRET, object_store
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

pytestmark = pytest.mark.slow

CTX = ParallelContext.single()
MOST_STEPS = 200


@pytest.fixture(params=["memory", "s3"])
def run(request):
    """The address of a folder of checkpoints that holds nothing yet."""
    if request.param == "memory":
        MemoryFileSystem.store.clear()
        yield "memory://box/run"
        return
    with object_store() as server:
        yield f"{server.address}/run"


def save(run, iteration=100, *, seed=0, **more):
    snapshot = snapshot_at(1, 1, 0, seed=seed, iteration=iteration)
    return storage.save_snapshot(run, snapshot, iteration=iteration, ctx=CTX, **more)


def loaded(run, seeds, iteration=None):
    """The iteration that a load takes, which has to be what was saved with its seed."""
    opened = storage.open_checkpoint(run, iteration, ctx=CTX)
    target = rank_at(1, 1, 0, seed=None)
    opened.read_into(target.tensors)
    assert opened.read_generators().values == {"rank": 0}
    at = opened.manifest.iteration
    assert differences(target, rank_at(1, 1, 0, seed=seeds[at])) == []
    return at


def names(run):
    """All objects, without the marks of saves."""
    found = place(run)
    return sorted(
        f"{entry.name}/{part.name}" if entry.is_dir() else entry.name
        for entry in found.iterdir()
        for part in (entry.iterdir() if entry.is_dir() else [entry])
    )


def test_what_was_saved_is_loaded_bit_for_bit(run):
    assert folders.probe_writable(run) is None
    assert folders.never_held_a_checkpoint(run)
    assert str(save(run, 100, seed=3).directory) == f"{run}/iter_0000100"
    assert not folders.never_held_a_checkpoint(run)
    assert folders.latest_iteration(run) == 100
    assert loaded(run, {100: 3}) == 100
    save(run, 200, seed=4)
    assert loaded(run, {200: 4}) == 200
    assert loaded(run, {100: 3}, iteration=100) == 100


def test_the_same_iteration_is_saved_beside_its_predecessor_and_then_replaces_it(run, monkeypatch):
    save(run, 100, seed=1)
    before = names(run)
    real, seen = store.write_object, []

    def look(path, data):
        if path.name == manifest.NAME:
            seen.append(loaded(run, {100: 1}))
            assert set(names(run)) > set(before)
        real(path, data)

    monkeypatch.setattr(store, "write_object", look)
    save(run, 100, seed=2)
    assert seen == [100]
    assert loaded(run, {100: 2}) == 100
    after = names(run)
    assert len(after) == len(before)
    assert len(set(after) - set(before)) == 2, "a shard and random states under new names"


def test_retention_deletes_what_makes_it_a_checkpoint_first(run, monkeypatch):
    for iteration in (1, 2):
        save(run, iteration)
    deleted = []
    real = type(place(run)).unlink

    def unlink(path, missing_ok=False):
        deleted.append(path.name)
        real(path, missing_ok)

    monkeypatch.setattr(type(place(run)), "unlink", unlink)
    assert save(run, 3, retention=Retention(2)).retired == (1,)
    assert deleted[0] == manifest.NAME
    assert folders.iterations(place(run)) == [2, 3]
    assert not [name for name in names(run) if name.startswith("iter_0000001")]


def test_what_is_not_of_a_checkpoint_stays_with_it(run, capsys):
    save(run, 1)
    store.write_object(place(run) / "iter_0000001" / "notes.txt", b"mine")
    store.write_object(place(run) / "other.0123abcd.safetensors", b"mine")
    assert save(run, 2, retention=Retention(1)).retired == ()
    assert "is not deleted: it holds notes.txt" in capsys.readouterr().err
    assert loaded(run, {1: 0}, iteration=1) == 1
    assert "other.0123abcd.safetensors" in names(run)


class Crash(BaseException):
    """The process ends here; no handler of the library may run."""


def count_down(monkeypatch, steps, error):
    """Raise `error` at step `steps` of those that change the store; return the steps taken."""
    taken = []

    def wrap(owner, name):
        real = getattr(owner, name)

        def step(*args, **kwargs):
            taken.append(name)
            if len(taken) == steps:
                raise error
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, step)

    for name in ("write", "finish"):
        wrap(store._Upload, name)
    wrap(store.RemotePath, "unlink")
    return taken


DENIED = OSError(errno.EACCES, "Access denied", "s3://x")


@pytest.mark.parametrize(
    ("error", "again"),
    [
        pytest.param(Crash(), False, id="crash, next iteration"),
        pytest.param(DENIED, True, id="error, same iteration"),
        pytest.param(Crash(), True, id="crash, same iteration", marks=pytest.mark.wide),
        pytest.param(DENIED, False, id="error, next iteration", marks=pytest.mark.wide),
    ],
)
def test_an_end_at_any_step_leaves_the_former_checkpoint_or_the_new_one(
    monkeypatch, error, again, capsys
):
    new = 100 if again else 200
    for step in range(1, MOST_STEPS):
        MemoryFileSystem.store.clear()
        run = f"memory://box/{step}"
        save(run, 50, seed=9)
        save(run, 100, seed=1)
        ended = False
        with monkeypatch.context() as patch:
            taken = count_down(patch, step, error)
            try:
                save(run, new, seed=2, retention=Retention(2))
            except (Crash, CheckpointError):
                ended = True
        if not ended and len(taken) < step:
            break
        opened = storage.open_checkpoint(run, ctx=CTX)
        target = rank_at(1, 1, 0, seed=None)
        opened.read_into(target.tensors)
        matches = [not differences(target, rank_at(1, 1, 0, seed=seed)) for seed in (1, 2)]
        assert any(matches) if again else matches[opened.manifest.iteration == 200], (step, taken)
        save(run, 300, seed=3)
        assert loaded(run, {300: 3}) == 300
        for iteration in folders.iterations(place(run)):
            content, _ = manifest.load(place(run) / f"iter_{iteration:07d}")
            parts = {p.name for p in (place(run) / f"iter_{iteration:07d}").iterdir()}
            assert parts == {manifest.NAME, *content.files}, (step, iteration)
    assert step > 10


def test_a_manifest_that_arrived_though_the_answer_did_not_keeps_its_parts(monkeypatch, capsys):
    MemoryFileSystem.store.clear()
    run = "memory://box/run"
    save(run, 100, seed=1)
    real = store.write_object

    def lose_the_answer(path, data):
        real(path, data)
        if path.name == manifest.NAME:
            raise OSError(errno.ETIMEDOUT, "no answer", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_object", lose_the_answer)
        with pytest.raises(CheckpointError, match="no answer"):
            save(run, 200, seed=2)
    assert loaded(run, {100: 1}) == 100
    assert loaded(run, {200: 2}, iteration=200) == 200


def test_a_damaged_manifest_stops_every_deletion(run):
    save(run, 100, seed=1)
    there = place(run) / "iter_0000100"
    good = (there / manifest.NAME).read_bytes()
    store.write_object(there / "shard-0.0123abcd.safetensors", b"of a save that was cut short?")
    store.write_object(there / manifest.NAME, good[:-9])
    with pytest.raises(CheckpointError, match="damaged or was edited"):
        save(run, 200)
    store.write_object(there / manifest.NAME, good)
    assert loaded(run, {100: 1}) == 100


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda part: part.unlink(), "no such file"),
        (lambda part: store.write_object(part, part.read_bytes()[:-1]), "bytes"),
        (lambda part: store.write_object(part, part.read_bytes()[:-1] + b"?"), "xxh3"),
    ],
)
def test_damage_is_found_before_a_tensor_is_touched(run, fault, message):
    save(run)
    part = next(p for p in (place(run) / "iter_0000100").iterdir() if p.name.startswith("shard"))
    fault(part)
    target = rank_at(1, 1, 0, seed=None)
    with pytest.raises(CheckpointError, match="checkpoint is damaged") as caught:
        storage.open_checkpoint(run, ctx=CTX).read_into(target.tensors)
    assert message in str(caught.value)
    assert str(part) in str(caught.value)
    assert bool(target.memory["model/norm.weight"].isnan().all())


def test_a_bucket_that_is_not_there_is_found_at_the_start():
    with object_store():
        error = folders.probe_writable("s3://nobody/run")
    assert isinstance(error, MachineError)
    assert "bucket does not exist" in str(error)
    assert error.fix == "make the bucket first, and check the address"
    assert SECRET not in str(error)


def test_a_store_that_forgets_or_hides_is_found_at_the_start(monkeypatch):
    MemoryFileSystem.store.clear()
    there = place("memory://box/run")
    with monkeypatch.context() as patch:
        patch.setattr(type(there), "read_bytes", lambda path: b"other")
        assert "not what was just written" in str(folders.probe_writable(there))
    with monkeypatch.context() as patch:
        patch.setattr(type(there), "iterdir", lambda path: iter(()))
        assert "is not listed" in str(folders.probe_writable(there))
    with monkeypatch.context() as patch:
        patch.setattr(type(there), "read_bytes", lambda path: b"probe")
        assert "just replaced is read as it was" in str(folders.probe_writable(there))
    assert folders.probe_writable(there) is None
    assert list(there.iterdir()) == []
    assert folders.probe_writable("nowhere://x/y") is not None


def test_a_folder_without_objects_never_held_a_checkpoint(run):
    with pytest.raises(CheckpointError, match="does not exist"):
        folders.latest_iteration(run)
    store.write_object(place(run) / "iter_0000100" / "shard-0.0123abcd.safetensors", b"cut short")
    with pytest.raises(CheckpointError, match="tracker file is missing"):
        folders.latest_iteration(run)


def test_only_exact_names_of_parts_are_swept(run):
    kept = [
        "shard.safetensors",
        "a.0123abc.safetensors",
        "a.0123abcd.bin",
        ".x.0123abcd.safetensors",
    ]
    for name in ["shard-0.0123abcd.safetensors", *kept]:
        store.write_object(place(run) / "iter_0000007" / name, b"x")
    object_folder.sweep(place(run))
    assert names(run) == sorted(f"iter_0000007/{name}" for name in kept)
