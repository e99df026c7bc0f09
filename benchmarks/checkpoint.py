"""How fast a checkpoint is saved and loaded, beside raw writes and reads of the same bytes.

Raw is what the disk can do: the same bytes in one file, with fsync, and read back. Ours, torch.save
and torch's distributed checkpoint (DCP) take turns with it, round by round, and ratios are of turns
of one round, because disks change their speed. What a reader would get wrong: without fsync a write
ends in memory, and without dropping the pages a read comes from there; both are done for all alike.
Ours checks digests as it loads (every byte is read twice, once from the disk); the others do not.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch.distributed.checkpoint as dcp  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from megatron import log  # noqa: E402
from megatron.checkpoint import storage, unpickle  # noqa: E402
from megatron.checkpoint.background import BackgroundSaves  # noqa: E402
from megatron.checkpoint.sharded import ShardedTensor, Snapshot  # noqa: E402
from megatron.mpu.context import ParallelContext  # noqa: E402

WRITE_TARGET, READ_TARGET, STALL_TARGET = 0.85, 0.85, 0.10
MIB = 2**20
_LARGEST = 16 * MIB  # bytes of one tensor; every layer also has one of a few KiB
_SMALL_ROWS = 1000
_LOOK_S = 0.02  # between two looks at a save beside the training, as between two steps
_BLOCK = 8 * MIB

State = Mapping[str, Tensor]


class Way(NamedTuple):
    """One way to keep a state in a folder, and to fill a state from there."""

    save: Callable[[Path, State], None]
    load: Callable[[Path, State], None]


class Round(NamedTuple):
    """Seconds of one round by the name of the way; `stalled` is of ours beside the training."""

    save: Mapping[str, float]
    load: Mapping[str, float]
    stalled: float


class Summary(NamedTuple):
    """What is told of all rounds; rates in MiB/s, ratios of rates (above 1: faster than raw)."""

    save_rates: Mapping[str, float]
    load_rates: Mapping[str, float]
    save_ratios: Mapping[str, float]
    load_ratios: Mapping[str, float]
    stall: float  # of the time of a save that the training waits for


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, compare what was loaded with what was saved, and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=int, default=2048, help="size of the state [2048]")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each way [5]")
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure [the system's]")
    parser.add_argument("--json", type=Path, help="keep every second in this file")
    flags = parser.parse_args(argv)
    log.configure(0, 1, level="error")
    state, target = make_state(flags.mib * MIB, seed=1), make_state(flags.mib * MIB, seed=2)
    size = bytes_of(state)
    if flags.dir is not None:
        flags.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=flags.dir) as place:
        rounds = [measure(Path(place), state, target, turn) for turn in range(flags.rounds)]
    summary = summarize(rounds, size)
    print("\n".join(table(summary, size, len(rounds))))
    if flags.json is not None:
        kept: dict[str, Any] = {"machine": machine(), "bytes": size}
        kept |= {"rounds": [one._asdict() for one in rounds], "summary": summary._asdict()}
        flags.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def make_state(size: int, *, seed: int) -> dict[str, Tensor]:
    """fp32 weights and two moments of each, about `size` bytes, under a checkpoint's names."""
    draw = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    left, layer = size // 3, 0
    while left > 0:
        numbers = max(_SMALL_ROWS, min(left, _LARGEST) // 4)
        shapes = {f"layers.{layer}.weight": (numbers // 100, 100), f"layers.{layer}.bias": (1000,)}
        for name, shape in shapes.items():
            for kind in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq"):
                state[f"{kind}/{name}"] = torch.rand(shape, generator=draw)
        left, layer = left - numbers * 4, layer + 1
    return state


def bytes_of(state: State) -> int:
    """Bytes of all values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def save_raw(folder: Path, state: State) -> None:
    """All bytes in one file, one write for each tensor, and fsync."""
    with open(folder / "raw", "xb", buffering=0) as file:
        for tensor in state.values():
            view = _bytes(tensor)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def load_raw(folder: Path, state: State) -> None:
    """The file straight into the memory of the tensors, in blocks."""
    with open(folder / "raw", "rb", buffering=0) as file:
        for tensor in state.values():
            view = _bytes(tensor)
            while view:
                count = file.readinto(view[:_BLOCK])
                if not count:
                    raise EOFError(f"{folder / 'raw'} ends before the state does")
                view = view[count:]


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.view(-1).numpy()).cast("B")


def save_ours(folder: Path, state: State) -> None:
    """What --save does."""
    storage.save(folder, _snapshot(state), iteration=1, ctx=ParallelContext.single())


def load_ours(folder: Path, state: State) -> None:
    """What --load does, every digest checked."""
    opened = storage.open_checkpoint(folder, ctx=ParallelContext.single())
    opened.read_into(_snapshot(state).tensors)


def _snapshot(state: State) -> Snapshot:
    tensors = tuple(ShardedTensor.of(name, tensor) for name, tensor in state.items())
    return Snapshot(tensors, progress={}, config={})


def save_pickled(folder: Path, state: State) -> None:
    """torch.save, and fsync."""
    with open(folder / "state.pt", "xb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def load_pickled(folder: Path, state: State) -> None:
    """torch.load of weights only, mapped, and copied into the state."""
    for name, tensor in unpickle.load(folder / "state.pt").items():
        state[name].copy_(tensor)


def save_dcp(folder: Path, state: State) -> None:
    """torch's distributed checkpoint as it comes, which syncs its files."""
    dcp.save(dict(state), checkpoint_id=folder / "dcp", no_dist=True)


def load_dcp(folder: Path, state: State) -> None:
    """The same, in place."""
    dcp.load(dict(state), checkpoint_id=folder / "dcp", no_dist=True)


WAYS: Mapping[str, Way] = {
    "raw": Way(save_raw, load_raw),
    "ours": Way(save_ours, load_ours),
    "torch.save": Way(save_pickled, load_pickled),
    "DCP": Way(save_dcp, load_dcp),
}


def measure(place: Path, state: State, target: State, turn: int) -> Round:
    """One round: every way once, begun by another one each time; then a save beside the training.

    Raises:
        ValueError: a way loads something else than was saved.
    """
    names = list(WAYS)
    order = names[turn % len(names) :] + names[: turn % len(names)]
    save, load = {}, {}
    for name in order:
        folder = place / name
        folder.mkdir()
        os.sync()  # nothing of the others is left to be written
        save[name] = _seconds(lambda: WAYS[name].save(folder, state))  # noqa: B023  # called now
        for tensor in target.values():
            tensor.zero_()
        forget(folder)
        load[name] = _seconds(lambda: WAYS[name].load(folder, target))  # noqa: B023
        differing = [n for n, tensor in state.items() if not torch.equal(tensor, target[n])]
        if differing:
            raise ValueError(f"{name} loads other values than it saved: {differing[:3]}")
        shutil.rmtree(folder)
    return Round(save, load, stall(place / "beside", state))


def _seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Ask the system to drop what it holds of the files in memory, so that reads are from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stall(folder: Path, state: State) -> float:
    """Seconds for which training stands still in a save beside it, not the first of its run.

    The first one also makes the memory that the others use again.
    """
    folder.mkdir()
    with BackgroundSaves(ParallelContext.single()) as saves:
        for iteration in (1, 2):
            saves.start(folder, _snapshot(state), iteration=iteration)
            while (saved := saves.look()) is None:
                time.sleep(_LOOK_S)
    shutil.rmtree(folder)
    return saved.stalled


def summarize(rounds: Sequence[Round], size: int) -> Summary:
    """Medians: of rates, and of ratios to raw within each round."""
    mib = size / MIB
    return Summary(
        {name: mib / median(one.save[name] for one in rounds) for name in WAYS},
        {name: mib / median(one.load[name] for one in rounds) for name in WAYS},
        {name: median(one.save["raw"] / one.save[name] for one in rounds) for name in WAYS},
        {name: median(one.load["raw"] / one.load[name] for one in rounds) for name in WAYS},
        median(one.stalled / one.save["ours"] for one in rounds),
    )


def table(summary: Summary, size: int, rounds: int) -> list[str]:
    """Markdown; the targets stand under it with what was reached."""
    lines = [
        f"{size / MIB:.0f} MiB, medians of {rounds} rounds; MiB/s, and beside raw",
        "",
        "| | save | of raw | load | of raw |",
        "|---|---|---|---|---|",
    ]
    for name in WAYS:
        cells = (
            f"{summary.save_rates[name]:.0f}",
            f"{summary.save_ratios[name]:.2f}",
            f"{summary.load_rates[name]:.0f}",
            f"{summary.load_ratios[name]:.2f}",
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    save, load = summary.save_ratios["ours"], summary.load_ratios["ours"]
    return [
        *lines,
        "",
        f"save: {_told(save >= WRITE_TARGET)}: {save:.0%} of raw writes, {WRITE_TARGET:.0%} wanted",
        f"load: {_told(load >= READ_TARGET)}: {load:.0%} of raw reads, {READ_TARGET:.0%} wanted",
        f"--async-save: {_told(summary.stall <= STALL_TARGET)}: training stands still for "
        f"{summary.stall:.0%} of the time of a save, {STALL_TARGET:.0%} allowed",
    ]


def _told(reached: bool) -> str:
    return "reached" if reached else "missed"


if __name__ == "__main__":
    main()
