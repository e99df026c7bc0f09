"""Background saves on several ranks: the same bytes, one result, no message between."""

import errno
import itertools
import json
import os
import re
import threading
import time
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron import log
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.load import storage
from megatron.checkpoint.save import background, host_copy
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.checkpoint.save.host_copy import copied_bytes
from megatron.checkpoint.save.saving import share_of
from megatron.errors import MegatronError
from megatron.mpu import collectives
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

SAVED_WITHIN_S = 30.0  # on a machine that does other things too; a look may take far below 1 ms


def looks():
    """Yield the numbers of looks at a save, as long as it may take."""
    until = time.monotonic() + SAVED_WITHIN_S
    for step in itertools.count():
        if time.monotonic() > until:
            return
        yield step


def context(tp, dp):
    return ParallelContext.build(Topology(tp=tp, dp=dp))


def snapshot(ctx, iteration, seed):
    return snapshot_at(ctx.tp.size, ctx.dp.size, ctx.rank, seed=seed, iteration=iteration)


def differing(folder, ctx, seed):
    target = rank_at(ctx.tp.size, ctx.dp.size, ctx.rank, seed=None)
    storage.open_checkpoint(folder, ctx=ctx).read_into(target.tensors)
    return differences(target, rank_at(ctx.tp.size, ctx.dp.size, ctx.rank, seed=seed))


def look_until_saved(saves, step_s=0.001):
    """Steps of a training that only looks; the save, and how many steps it took."""
    for step in looks():
        saved = saves.poll()
        if saved is not None:
            return saved, step
        time.sleep(step_s)
    raise AssertionError("never saved")


@contextmanager
def writes_that(do):
    """Every write to a file calls `do()` first."""
    real = durable.DurableFile.write

    def write(file, data):
        do()
        real(file, data)

    with patch.object(durable.DurableFile, "write", write):
        yield


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (2, 2)])
def test_every_byte_is_that_of_a_save_that_waits(tmp_path, tp, dp):
    run_on_ranks(tp * dp, save_both_ways, tmp_path, tp, dp)
    one, other = tmp_path / "waits" / "iter_0000100", tmp_path / "beside" / "iter_0000100"
    assert sorted(os.listdir(one)) == sorted(os.listdir(other))
    for name in os.listdir(one):
        if name != "manifest.json":
            assert (one / name).read_bytes() == (other / name).read_bytes(), name
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (one, other)]
    for fields in manifests:
        del fields["created"], fields["manifest_xxh3"]
    assert manifests[0] == manifests[1]


def save_both_ways(folder, tp, dp):
    ctx = context(tp, dp)
    storage.save_snapshot(folder / "waits", snapshot(ctx, 100, 1), iteration=100, ctx=ctx)
    given = snapshot(ctx, 100, 1)
    with BackgroundSaves(ctx) as saves:
        saves.start(folder / "beside", given, iteration=100)
        for tensor in given.tensors:  # the training goes on at once
            for part in tensor.parts:
                part.view.zero_()
        for state in given.generators.tensors.values():
            state.zero_()
        saves.wait()


def test_training_goes_on_while_a_slow_disk_is_written_to(tmp_path):
    for steps, stalled, seconds in run_on_ranks(2, step_beside_a_slow_disk, tmp_path):
        # The time of a poll on a busy machine is not bounded.
        assert steps >= 3
        assert stalled < seconds


def step_beside_a_slow_disk(folder):
    ctx = context(2, 1)
    with BackgroundSaves(ctx) as saves, writes_that(lambda: time.sleep(0.2)):
        saves.start(folder, snapshot(ctx, 100, 1), iteration=100)
        assert folders.never_held_a_checkpoint(folder)
        saved, steps = look_until_saved(saves, step_s=0.05)
    assert differing(folder, ctx, 1) == []
    assert "for" in str(saved)
    return steps, saved.stalled, saved.seconds


COLLECTIVES = ("all_reduce", "all_gather_object", "barrier", "broadcast_object_list", "broadcast")


def test_no_other_thread_communicates(tmp_path):
    """Messages are matched by their order in a group: another thread's would shift them all."""
    for threads, calls, saved in run_on_ranks(2, note_who_communicates, tmp_path):
        assert threads == {"MainThread"}
        assert calls > 5
        assert saved == [100, 200]


def note_who_communicates(folder):
    ctx, callers, calls = context(2, 1), set(), []

    def noting(real):
        def call(*args, **kwargs):
            callers.add(threading.current_thread().name)
            calls.append(real.__name__)
            return real(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, noting(getattr(dist, name)))
    saved = []
    with BackgroundSaves(ctx) as saves, writes_that(lambda: time.sleep(0.01)):
        for iteration in (100, 200):
            saves.start(folder, snapshot(ctx, iteration, 1), iteration=iteration)
            done = None
            for step in looks():
                # What a training step would do at the same time, with a result to compare.
                number = torch.tensor([float(step)])
                collectives.all_reduce(number, ctx.world)
                assert number.item() == 2 * step
                done = saves.poll()
                if done is not None:
                    break
            saved.append(done.iteration)
    return callers, len(calls), saved


def test_one_save_is_under_way_at_a_time_and_who_waits_says_so(tmp_path):
    for iterations, errors, messages in run_on_ranks(2, start_twice, tmp_path):
        assert iterations == [100, 200]
        assert errors == []
        assert len(messages) == 1
        assert (
            "100 was not written when that of iteration 200 was due: training stood" in messages[0]
        )


def start_twice(folder):
    ctx, messages = context(1, 2), []
    with (
        patch.object(log, "warning", messages.append),
        BackgroundSaves(ctx) as saves,
        writes_that(lambda: time.sleep(0.05)),
    ):
        saves.start(folder, snapshot(ctx, 100, 1), iteration=100)
        saves.start(folder, snapshot(ctx, 200, 2), iteration=200)
        assert folders.iterations(folder) == [100]
        assert saves.wait().iteration == 200
        assert saves.poll() is None
        assert saves.wait() is None
    return folders.iterations(folder), differing(folder, ctx, 2), messages


def verdict(step):
    try:
        step()
    except MegatronError as error:
        return str(error)
    return "no error"


def test_a_failure_is_the_next_look_on_every_rank_and_the_former_checkpoint_stays(tmp_path):
    results = run_on_ranks(2, fail_on_each_rank, tmp_path)
    assert results[0] == results[1], "all ranks say the same"
    for rank, (looked, waited, started) in enumerate(results[0]):
        for message in (looked, waited, started):
            assert message == looked
        assert f"rank {rank} of 2 failed while writing the checkpoint of iteration 200" in looked
        assert "ENOSPC at /save/full" in looked
        assert "free space there" in looked


def fail_on_each_rank(folder):
    ctx = context(2, 1)
    storage.save_snapshot(folder, snapshot(ctx, 100, 1), iteration=100, ctx=ctx)
    results = []
    for failing in range(2):

        def refuse(failing=failing):
            if ctx.rank == failing:
                raise OSError(errno.ENOSPC, "No space left on device", "/save/full")
            time.sleep(0.01)

        messages = []
        with writes_that(refuse):
            for finish in (look_until_saved, lambda s: s.wait(), start_again(folder, ctx)):
                saves = BackgroundSaves(ctx)
                saves.start(folder, snapshot(ctx, 200, 2), iteration=200)
                messages.append(verdict(lambda saves=saves, finish=finish: finish(saves)))
                assert saves.poll() is None, "it is over"
                dist.barrier()
                assert sorted(os.listdir(folder)) == ["iter_0000100", folders.TRACKER]
                dist.barrier()
        assert differing(folder, ctx, 1) == []
        results.append(tuple(messages))
    return results


def start_again(folder, ctx):
    return lambda saves: saves.start(folder, snapshot(ctx, 300, 3), iteration=300)


def test_a_rank_that_fails_early_does_not_wait_for_one_that_writes_for_long(tmp_path):
    for seconds, message in run_on_ranks(2, fail_early, tmp_path):
        assert "rank 1 of 2 failed while writing" in message
        assert "ECANCELED" not in message, "the rank that was told to stop has no error to tell"
        assert seconds < 5


def fail_early(folder):
    ctx = context(2, 1)

    def write():
        if ctx.rank == 1:
            raise OSError(errno.EIO, "Input/output error", "/save/bad")
        time.sleep(0.5)

    many = snapshot(ctx, 100, 1)
    started = time.monotonic()
    with BackgroundSaves(ctx) as saves, writes_that(write):
        saves.start(folder, many, iteration=100)
        message = verdict(lambda: look_until_saved(saves))
    return time.monotonic() - started, message


def test_what_goes_wrong_on_rank_0_at_the_commit_is_said_by_all(tmp_path):
    results = run_on_ranks(2, fail_to_commit, tmp_path)
    assert results[0] == results[1]
    described, tracked = results[0]
    assert "rank 0 of 2 failed while putting the checkpoint of iteration 200 in place" in described
    assert "No space left" in described
    assert "is whole, but is not named as the latest" in tracked
    assert re.search(r"echo 300 > \S+", tracked)


def fail_to_commit(folder):
    ctx = context(2, 1)
    storage.save_snapshot(folder, snapshot(ctx, 100, 1), iteration=100, ctx=ctx)
    full = OSError(errno.ENOSPC, "No space left on device", str(folder))
    messages = []
    for iteration, owner, name in (
        (200, "megatron.checkpoint.files.store", "write_object"),
        (300, "megatron.checkpoint.files.durable", "replace_file"),
    ):
        with patch(f"{owner}.{name}", side_effect=full):
            saves = BackgroundSaves(ctx)
            saves.start(folder, snapshot(ctx, iteration, 2), iteration=iteration)
            messages.append(verdict(saves.wait))
        dist.barrier()
        assert differing(folder, ctx, 1) == [], "the tracker names the former one"
        assert not [name for name in os.listdir(folder) if name.startswith(".")]
        dist.barrier()
    return messages


def test_a_run_that_fails_leaves_the_former_checkpoint_and_no_thread(tmp_path):
    assert run_on_ranks(2, leave_by_an_error, tmp_path) == [([], ["MainThread"])] * 2


def leave_by_an_error(folder):
    ctx = context(2, 1)
    storage.save_snapshot(folder, snapshot(ctx, 100, 1), iteration=100, ctx=ctx)
    saves, error = BackgroundSaves(ctx), ZeroDivisionError()
    with writes_that(lambda: time.sleep(0.02)):
        saves.start(folder, snapshot(ctx, 200, 2), iteration=200)
        with patch.object(log, "warning") as warned:
            saves.__exit__(type(error), error, None)
        assert "iteration 200 was being written and is given up" in warned.call_args.args[0]
    left = [t.name for t in threading.enumerate() if t.name in ("MainThread", "checkpoint")]
    found = differing(folder, ctx, 1)
    storage.save_snapshot(folder, snapshot(ctx, 300, 3), iteration=300, ctx=ctx)
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    return found + differing(folder, ctx, 3), left


def test_retention_follows_a_save_beside_the_training(tmp_path):
    assert run_on_ranks(2, retire_beside, tmp_path) == [((1,), [2, 3])] * 2


def retire_beside(folder):
    ctx = context(1, 2)
    with BackgroundSaves(ctx) as saves:
        for iteration in (1, 2, 3):
            saves.start(
                folder, snapshot(ctx, iteration, 1), iteration=iteration, retention=Retention(2)
            )
            saved = saves.wait()
    return saved.retired, folders.iterations(folder)


def test_memory_is_made_before_the_first_save_and_no_save_makes_any(tmp_path):
    for before, after, made, errors in run_on_ranks(2, save_into_reserved_memory, tmp_path):
        assert before == after
        assert len(made) == 1, "by the thread, before the save"
        assert errors == []


def save_into_reserved_memory(folder):
    ctx, made, real = context(1, 2), [], host_copy._touched
    given = snapshot(ctx, 100, 1)

    def noted(size):
        made.append(threading.current_thread().name)
        return real(size)

    with patch.object(host_copy, "_touched", noted), BackgroundSaves(ctx) as saves:
        saves.reserve(given.tensors)
        saves.wait_for_memory()
        before = saves._memory._bytes.data_ptr(), saves._memory._bytes.numel()
        for iteration, seed in ((100, 1), (200, 2)):
            saves.start(folder, snapshot(ctx, iteration, seed), iteration=iteration)
            saves.wait()
        after = saves._memory._bytes.data_ptr(), saves._memory._bytes.numel()
    assert made == ["checkpoint"]
    return before, after, made, differing(folder, ctx, 2)


def test_a_host_without_memory_for_its_ranks_is_refused_by_all(tmp_path):
    messages = run_on_ranks(2, reserve_too_much)
    assert messages[0] == messages[1]
    together, alone = messages[0]
    assert "no memory for the copy of the state that --async-save writes from" in together
    assert re.search(r"([\d,]+) bytes wanted by 2 of its ranks, ([\d,]+) free", together)
    assert "drop --async-save" in together
    assert alone == "no error", "of another host"


def reserve_too_much():
    ctx, messages = context(2, 1), []
    given = snapshot(ctx, 100, 1)
    size = copied_bytes(share_of(given, ctx=ctx))
    # Enough for either rank, and too little for both.
    with patch.object(background, "available_memory_bytes", lambda: size + size // 2):
        for hosts in (("a", "a"), ("a", "b")):
            with (
                patch.object(background, "this_host", lambda hosts=hosts: hosts[ctx.rank]),
                BackgroundSaves(ctx) as saves,
            ):
                messages.append(verdict(lambda saves=saves: saves.reserve(given.tensors)))
    return messages


def test_memory_that_a_rank_is_not_given_is_the_error_of_the_first_save_on_all(tmp_path):
    results = run_on_ranks(2, save_without_memory, tmp_path)
    assert results[0] == results[1]
    message, left = results[0]
    assert "rank 1 of 2 failed while copying the state to host memory" in message
    assert "gives no host memory for the copy" in message
    assert left == []


def save_without_memory(folder):
    ctx = context(2, 1)

    def refuse(size):
        if ctx.rank == 1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return torch.empty(size, dtype=torch.uint8)

    with patch.object(host_copy, "_touched", refuse), BackgroundSaves(ctx) as saves:
        saves.reserve(snapshot(ctx, 100, 1).tensors)
        message = verdict(lambda: saves.start(folder, snapshot(ctx, 100, 1), iteration=100))
    dist.barrier()
    return message, os.listdir(folder)


def test_a_run_that_ends_while_memory_is_made_leaves_no_thread():
    assert run_on_ranks(1, leave_while_memory_is_made) == [["MainThread"]]


def leave_while_memory_is_made():
    ctx = context(1, 1)
    with patch.object(host_copy, "_TOUCH_BYTES", 64), BackgroundSaves(ctx) as saves:
        saves.reserve(snapshot(ctx, 100, 1).tensors)
    return [t.name for t in threading.enumerate() if t.name in ("MainThread", "checkpoint")]
