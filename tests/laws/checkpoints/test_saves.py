"""The law of saves: whatever ends a run, it goes on from the last committed checkpoint, exactly.

Real training on two ranks, saved beside it or not; killed, terminated, out of room, gone on with at
other sizes, from damaged checkpoints and from parts of them.
"""

import dataclasses
import errno
import os
import shutil
import signal
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron import log
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.save import host_copy, saving
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError, MegatronError
from megatron.loop import training_loop
from tests.support.checkpoints.save_faults import MOMENTS, kill_this_process
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    Record,
    assert_went_on,
    tiny_run,
    train,
    train_all,
    whole,
    write_tiny_corpus,
)

STEPS = 6
RANKS = 2
GRID = {
    "tensor_model_parallel_size": 2,
    "hidden_dropout": 0.1,
    "train_iters": STEPS,
    "micro_batch_size": 4,
}


def run_of(corpus: str, folder: Path | str, **flags: Any) -> RunConfig:
    """A run that saves every second iteration and goes on from what it saved."""
    given = {"save": str(folder), "load": str(folder), "save_interval": 2, **GRID, **flags}
    return tiny_run(corpus, **given)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def straight(corpus: str) -> list[Record]:
    """What is trained without a checkpoint, on each rank."""
    records = run_on_ranks(RANKS, train_all, [tiny_run(corpus, **GRID)])
    return [by_rank[0] for by_rank in records]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder of checkpoints but the manifests, which hold a time."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != manifest.NAME
    }


def test_saves_beside_the_training_change_no_bit_of_it_and_of_what_is_saved(
    corpus: str, straight: list[Record], tmp_path: Path
) -> None:
    waits, beside = tmp_path / "waits", tmp_path / "beside"
    configs = [run_of(corpus, waits), run_of(corpus, beside, async_save=True)]
    records = run_on_ranks(RANKS, train_all, configs)
    for which in range(2):
        assert_went_on([by_rank[which] for by_rank in records], straight, last=STEPS)
    assert contents(waits) == contents(beside)
    assert folders.iterations(beside) == [2, 4, 6]


def resumed(corpus: str, folder: Path, straight: list[Record], *, at: int, **flags: Any) -> None:
    """Go on in new processes: from iteration `at`, and to the same end as without a break."""
    records = run_on_ranks(RANKS, train_all, [run_of(corpus, folder, **flags)])
    assert_went_on([by_rank[0] for by_rank in records], straight, last=STEPS - at)


def train_until_hit(config: RunConfig, moment: str, victim: int, save: int, sign: Path) -> None:
    """The save number `save` is hit on one rank."""
    rank, count = torch.distributed.get_rank(), 0
    real = saving._agree_on_plan

    def act() -> None:
        sign.touch()
        kill_this_process()

    with ExitStack() as hit:

        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            if count == save and rank == victim:
                hit.enter_context(MOMENTS[moment].put_in(act))
            return real(*args)

        with patch.object(saving, "_agree_on_plan", counted):
            train(config)


def in_turn(moment: str, victim: int, at: int, async_save: bool) -> list[Any]:
    """A kill in one way to save, and in the other way as a wide test."""
    ids = [f"{moment}-{victim}-{at}-{way}" for way in ("waits", "beside")]
    return [
        pytest.param(moment, victim, at, async_save, id=ids[async_save]),
        pytest.param(
            moment, victim, at, not async_save, id=ids[not async_save], marks=pytest.mark.wide
        ),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "victim", "at", "async_save"),
    [
        *in_turn("half of a tensor is written", 1, 2, False),
        *in_turn("the part is written", 1, 2, True),
        *in_turn("the checkpoint has its name", 0, 2, False),
        *in_turn("the tracker names it", 0, 4, True),
    ],
)
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    corpus: str,
    straight: list[Record],
    tmp_path: Path,
    moment: str,
    victim: int,
    at: int,
    async_save: bool,
) -> None:
    sign, folder = tmp_path / "hit", tmp_path / "run"
    config = run_of(corpus, folder, async_save=async_save)
    with pytest.raises(AssertionError, match=r"exit code|Connection|Read error|failed first"):
        run_on_ranks(RANKS, train_until_hit, config, moment, victim, 2, sign)
    assert sign.exists()
    assert folders.latest_iteration(folder) == at
    resumed(corpus, folder, straight, at=at, async_save=async_save)


def train_with_a_full_disk(config: RunConfig) -> tuple[int, str]:
    """Rank 1 cannot write from the second save on: the iteration it stops at, and the message."""
    steps: list[int] = []
    real, saves = durable.DurableFile.write, 0
    agree = saving._agree_on_plan

    def counted(*args: Any) -> Any:
        nonlocal saves
        saves += 1
        return agree(*args)

    def write(file: Any, data: Any) -> None:
        if saves == 2 and torch.distributed.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(file._path))
        real(file, data)

    plan = training_loop.plan_step

    def noted(config: Any, duration: Any, progress: Any, *more: Any) -> Any:
        steps.append(progress.iteration)
        return plan(config, duration, progress, *more)

    with (
        patch.object(saving, "_agree_on_plan", counted),
        patch.object(durable.DurableFile, "write", write),
        patch.object(training_loop, "plan_step", noted),
    ):
        try:
            train(config)
        except CheckpointError as error:
            return steps[-1], str(error)
    return steps[-1], "no error"


@pytest.mark.parametrize("async_save", [False, True], ids=["waits", "beside"])
def test_a_disk_that_fills_up_on_one_rank_ends_all_alike(
    corpus: str, straight: list[Record], tmp_path: Path, async_save: bool
) -> None:
    config = run_of(corpus, tmp_path / "run", async_save=async_save)
    results = run_on_ranks(RANKS, train_with_a_full_disk, config)
    assert results[0] == results[1]
    step, message = results[0]
    # A background save reports it before the next step, or the one after on a slow machine.
    assert step in ((3, 4, 5) if async_save else (3,))
    assert "rank 1 of 2 failed while writing the checkpoint of iteration 4" in message
    assert "ENOSPC" in message
    assert sorted(os.listdir(tmp_path / "run")) == ["iter_0000002", folders.TRACKER]
    resumed(corpus, tmp_path / "run", straight, at=2, async_save=async_save)


def train_until_terminated(config: RunConfig) -> int:
    """SIGTERM comes on rank 0 right after a save has begun on a slow disk."""
    real = durable.DurableFile.write

    def write(file: Any, data: Any) -> None:
        if "shard" in file._path.name and torch.distributed.get_rank() == 0:
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGTERM)
        real(file, data)

    with patch.object(durable.DurableFile, "write", write):
        return train(config).progress.iteration


def test_a_terminated_run_waits_for_its_save(
    corpus: str, straight: list[Record], tmp_path: Path
) -> None:
    config = run_of(corpus, tmp_path / "run", async_save=True, exit_signal_handler=True)
    stopped = run_on_ranks(RANKS, train_until_terminated, config)
    assert stopped[0] == stopped[1] >= 2
    folder = tmp_path / "run"
    assert folders.latest_iteration(folder) == stopped[0]
    assert 2 in folders.iterations(folder)
    assert [name for name in os.listdir(folder) if name.startswith(".")] == []
    if stopped[0] < STEPS:
        resumed(corpus, folder, straight, at=stopped[0])


def train_with_messages(config: RunConfig) -> tuple[Record | str, list[str]]:
    """The run, or what ended it; and every warning of this rank."""
    messages: list[str] = []
    with patch.object(log, "warning", messages.append):
        try:
            return train(config), messages
        except MegatronError as error:
            return str(error), messages


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of iterations 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_on_ranks(RANKS, train_all, [run_of(corpus, folder)])
    return folder


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing shard", "manifest", "tracker"])
def test_a_damaged_checkpoint_ends_the_run_or_is_passed_over_loudly(
    corpus: str, straight: list[Record], trained: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    (folder / folders.TRACKER).write_text("4")
    shutil.rmtree(folder / "iter_0000006")
    shard = folder / "iter_0000004" / "shard-00001-of-00002.safetensors"
    data = shard.read_bytes()
    if damage == "flipped":
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "truncated":
        shard.write_bytes(data[:-1])
    elif damage == "missing shard":
        shard.unlink()
    elif damage == "manifest":
        (folder / "iter_0000004" / manifest.NAME).write_text("{}")
    else:
        shard.unlink()
        (folder / folders.TRACKER).write_text("four")
    plain = run_on_ranks(RANKS, train_with_messages, run_of(corpus, folder))
    assert plain[0][0] == plain[1][0], "the same on every rank"
    assert isinstance(plain[0][0], str)
    config = run_of(corpus, folder, load_fallback="previous")
    after = run_on_ranks(RANKS, train_with_messages, config)
    records = [record for record, _ in after if isinstance(record, Record)]
    assert len(records) == RANKS, after
    assert_went_on(records, straight, last=STEPS - 2)
    loud = [words for words in after[0][1] if words.startswith("*** --load-fallback previous")]
    assert len(loud) == 1
    assert "going on from iteration 2" in loud[0]
    assert "iteration 4: " in loud[0]


def test_any_iteration_can_be_gone_on_from(
    corpus: str, straight: list[Record], trained: Path
) -> None:
    for at in (2, 4):
        config = run_of(corpus, trained, load_iteration=at, save=None, save_interval=None)
        records = run_on_ranks(RANKS, train_all, [config])
        assert_went_on([by_rank[0] for by_rank in records], straight, last=STEPS - at)


def loaded_only(config: RunConfig) -> tuple[dict[str, Any], list[str]]:
    """A run of no iterations: its state, and its log lines."""
    messages: list[str] = []
    with patch.object(log, "info", messages.append):
        record = train(config)
    return record.state, messages


def state_of(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return whole([Record(state=state) for state in records], prefix="model/")


def test_parts_of_a_model_are_loaded_by_name_and_the_rest_is_as_it_began(
    corpus: str, trained: Path
) -> None:
    # Never a step: what was loaded, and what was not, can be compared.
    still = {"exit_duration_in_mins": 1e-9, "finetune": True, "load": str(trained), **GRID}
    flags = {"load_only": ("layers.*", "embedding.*"), "load_except": ("*.bias", "layers.1.*")}
    fresh = tiny_run(corpus, **{**still, "load": None, "finetune": False})
    all_of_it, part = tiny_run(corpus, **still), tiny_run(corpus, **still, **flags)
    results = run_on_ranks(RANKS, _each_alone, [fresh, all_of_it, part])
    initial, saved, found = (
        state_of([by_rank[which][0] for by_rank in results]) for which in range(3)
    )
    line = next(words for words in results[0][2][1] if words.startswith("loaded "))
    loaded = [name for name in found if not torch.equal(found[name], initial[name])]
    for name, tensor in found.items():
        bare = name.removeprefix("model/")
        wanted = bare.startswith(("layers.0.", "embedding.")) and not bare.endswith(".bias")
        source = saved if wanted else initial
        assert torch.equal(tensor, source[name]), name
    assert loaded
    assert f"of {len(found)} parameters" in line
    assert "left at initial values: " in line
    assert "final_norm" in line or "layers.1." in line


def _each_alone(configs: list[RunConfig]) -> list[tuple[dict[str, Any], list[str]]]:
    return [loaded_only(config) for config in configs]


@pytest.mark.parametrize(("divisor", "tp", "ranks"), [(16, 1, 1), (7, 2, 2), (1, 1, 1)])
def test_a_vocabulary_is_padded_anew_at_every_load(
    corpus: str, straight: list[Record], trained: Path, divisor: int, tp: int, ranks: int
) -> None:
    flags = {**GRID, "tensor_model_parallel_size": tp, "make_vocab_size_divisible_by": divisor}
    still = tiny_run(corpus, **flags, load=str(trained), exit_duration_in_mins=1e-9)
    (records,) = zip(*run_on_ranks(ranks, train_all, [still]), strict=True)
    found, expected = whole(list(records)), whole(straight)
    assert found.keys() == expected.keys()
    assert not [name for name in found if not torch.equal(found[name], expected[name])]


def test_best_checkpoints_by_validation_loss_stay(corpus: str, tmp_path: Path) -> None:
    flags = {"eval_interval": 1, "eval_iters": 1, "save_interval": 1, "keep_last": 1}
    config = run_of(corpus, tmp_path / "run", **flags, keep_best=1, keep_every=4)
    ((record,),) = run_on_ranks(1, train_all, [_on_one_rank(config)])
    losses = {at + 1: result.mean for at, result in enumerate(record.evaluations[:STEPS])}
    best = min(losses, key=lambda at: losses[at])
    kept = folders.iterations(tmp_path / "run")
    assert set(kept) == {best, 4, STEPS}
    for at in kept:
        content, _ = manifest.load(tmp_path / "run" / f"iter_{at:07d}")
        assert content.validation_loss == losses[at]


def _on_one_rank(config: RunConfig) -> RunConfig:
    parallel = dataclasses.replace(config.parallel, tensor_model_parallel_size=1)
    return dataclasses.replace(config, parallel=parallel)


def train_and_note_memory(config: RunConfig) -> list[str]:
    """The threads that made host memory for copies, in the order in which they did."""
    made: list[str] = []
    real = host_copy._touched

    def noted(size: int) -> torch.Tensor:
        made.append(threading.current_thread().name)
        return real(size)

    with patch.object(host_copy, "_touched", noted):
        train(config)
    return made


@pytest.mark.parametrize(
    "flags",
    [
        {},
        pytest.param(
            {"use_distributed_optimizer": True, "tensor_model_parallel_size": 1},
            marks=pytest.mark.wide,
        ),
        pytest.param(
            {"deepspeed": True, "zero_stage": "1", "tensor_model_parallel_size": 1, "fp64": False},
            marks=pytest.mark.wide,
        ),
        {"deepspeed": True, "zero_stage": "3", "tensor_model_parallel_size": 1, "fp64": False},
    ],
    ids=["native", "distributed optimizer", "ZeRO 1", "ZeRO 3"],
)
def test_no_save_beside_the_training_makes_memory(
    corpus: str, tmp_path: Path, flags: dict[str, Any]
) -> None:
    """What is saved later is what the engine held before its first step, on either engine."""
    config = run_of(corpus, tmp_path / "run", async_save=True, **flags)
    assert run_on_ranks(RANKS, train_and_note_memory, config) == [["checkpoint"]] * RANKS
    assert folders.iterations(tmp_path / "run") == [2, 4, 6]
