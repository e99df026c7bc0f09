"""SIGKILL of each rank at each moment of a save: the former checkpoint or the new one, whole."""

import os
from contextlib import ExitStack

import pytest

from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.load import storage
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.checkpoints.save_faults import MOMENTS, kill_this_process, moments_of
from tests.support.ranks import run_on_ranks
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

RANKS = 2
SEEDS = {100: 1, 150: 2, 200: 3, 300: 4}


def save_all(folder, beside, iterations, moment, victim, sign):
    """Saves one after the other; the last one is hit at `moment` on rank `victim`."""
    ctx = ParallelContext.build(Topology(tp=1, dp=RANKS))
    for iteration in iterations:
        with ExitStack() as hit:
            if iteration == iterations[-1] and ctx.rank == victim:

                def act():
                    sign.touch()
                    kill_this_process()

                hit.enter_context(MOMENTS[moment].put_in(act))
            snapshot = snapshot_at(1, RANKS, ctx.rank, seed=SEEDS[iteration], iteration=iteration)
            if beside:
                with BackgroundSaves(ctx) as saves:
                    saves.start(folder, snapshot, iteration=iteration, retention=Retention(2))
                    saves.wait()
            else:
                storage.save_snapshot(
                    folder, snapshot, iteration=iteration, ctx=ctx, retention=Retention(2)
                )


def found_in(folder, ctx):
    """The iteration that a load takes, which has to be what was saved, bit for bit."""
    target = rank_at(1, 1, 0, seed=None)
    opened = storage.open_checkpoint(folder, ctx=ctx)
    opened.read_into(target.tensors)
    iteration = opened.manifest.iteration
    assert differences(target, rank_at(1, 1, 0, seed=SEEDS[iteration])) == []
    return iteration


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize("victim", range(RANKS))
def test_after_a_kill_at_any_moment_the_last_committed_checkpoint_is_loaded(tmp_path, victim, turn):
    """Saved while the training waits and beside it, in turn; both turns are both at each moment."""
    alone = ParallelContext.single()
    for at, moment in enumerate(moments_of(victim, beside=True)):
        beside = MOMENTS[moment].only_beside or (at + victim + turn) % 2 == 1
        folder, sign = tmp_path / str(at), tmp_path / f"{at}.hit"
        # Whether the victim's end or that of a rank waiting for it is reported first is random.
        with pytest.raises(AssertionError, match=r"died with exit code -9|Connection|Read error"):
            run_on_ranks(RANKS, save_all, folder, beside, (100, 150, 200), moment, victim, sign)
        assert sign.exists(), f"{moment} never came"
        expected = 200 if MOMENTS[moment].is_committed else 150
        if folders.never_held_a_checkpoint(folder):
            pytest.fail(f"{moment}: nothing is left")
        assert found_in(folder, alone) == expected, moment
        # Another number of ranks goes on, and tidies up.
        snapshot = snapshot_at(1, 1, 0, seed=SEEDS[300], iteration=300)
        storage.save_snapshot(folder, snapshot, iteration=300, ctx=alone, retention=Retention(2))
        assert found_in(folder, alone) == 300, moment
        assert [name for name in os.listdir(folder) if name.startswith(".")] == [], moment
        assert len(folders.iterations(folder)) == 2, moment


def test_there_are_enough_moments_and_every_one_comes():
    assert len(moments_of(0, beside=True)) >= 20
    assert len(moments_of(1, beside=True)) >= 12
    assert set(moments_of(0, beside=True)) == set(MOMENTS)
