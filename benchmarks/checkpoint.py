"""How fast a checkpoint is saved and loaded, beside raw writes and reads of the same bytes.

Raw is what the disk can do: the same bytes in one file, with fsync, and read back. Ours, torch.save
and torch's distributed checkpoint (DCP) take turns with it, forwards and then backwards, and ratios
are of turns of one round, because disks change their speed. What a reader would get wrong: without
fsync a write ends in memory, and a read comes from there unless the pages are dropped. Every file
is synced; it is read once after its pages were dropped (`load`), and once more (`again`).
Ours checks every digest before it touches a tensor; the others check nothing.
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

from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp  # noqa: E402

from benchmarks.machine import machine  # noqa: E402
from megatron import log  # noqa: E402
from megatron.checkpoint.files import unpickle  # noqa: E402
from megatron.checkpoint.load import storage  # noqa: E402
from megatron.checkpoint.save.background import BackgroundSaves  # noqa: E402
from megatron.checkpoint.sharded import ShardedTensor, Snapshot  # noqa: E402
from megatron.mpu.context import ParallelContext  # noqa: E402

WRITE_TARGET, READ_TARGET, STALL_TARGET = 0.85, 0.85, 0.10
MIB = 2**20
_LARGEST = 16 * MIB  # bytes of one tensor; every layer also has one of a few KiB
_SMALL_ROWS = 1000
_LOOK_S = 0.02  # between two looks at a save beside the training, as between two steps
_BLOCK = 8 * MIB
PARTS = ("save", "load", "again")

State = Mapping[str, Tensor]


class Way(NamedTuple):
    """A way to save a state to a folder, and to load it from there."""

    save: Callable[[Path, State], None]
    load: Callable[[Path, State], None]


class Taken(NamedTuple):
    """Time: seconds of wall clock and of CPUs."""

    seconds: float
    cpu: float


class Stall(NamedTuple):
    """Seconds for which training stood still during saves in the background."""

    first: float  # of a run that has made its memory before, as runs do
    next: float
    unprepared: float  # the first, where the save itself has to make the memory


class Round(NamedTuple):
    """One turn of each way, by name; `load` is from the disk and `again` from memory."""

    save: Mapping[str, Taken]
    load: Mapping[str, Taken]
    again: Mapping[str, Taken]
    stall: Stall


class Summary(NamedTuple):
    """Medians over all rounds of `save`, `load` and `again`.

    Rates are in MiB/s, ratios are of rates (above 1: faster than raw) and CPU times are in seconds;
    stalls are of the time that a save takes for which the training waits.
    """

    rates: Mapping[str, Mapping[str, float]]
    ratios: Mapping[str, Mapping[str, float]]
    cpu: Mapping[str, Mapping[str, float]]
    stall: Stall


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, compare the loaded with the saved state, and print a table."""
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
        warm_up(Path(place), state)
        rounds = [measure(Path(place), state, target, turn) for turn in range(flags.rounds)]
    summary = summarize(rounds, size)
    print("\n".join(table(summary, size, len(rounds))))
    if flags.json is not None:
        record: dict[str, Any] = {"machine": machine(), "bytes": size}
        record |= {"rounds": [plain(one) for one in rounds], "summary": plain(summary)}
        flags.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def make_state(size: int, *, seed: int) -> dict[str, Tensor]:
    """Return fp32 weights and two moments of each, about `size` bytes, under their names."""
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
    """Return the bytes of all values."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def save_raw(folder: Path, state: State) -> None:
    """Write all bytes to one file, one write for each tensor, and fsync."""
    with open(folder / "raw", "xb", buffering=0) as file:
        for tensor in state.values():
            view = _bytes(tensor)
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def load_raw(folder: Path, state: State) -> None:
    """Read the file into the memory of the tensors, in blocks."""
    with open(folder / "raw", "rb", buffering=0) as file:
        for tensor in state.values():
            view = _bytes(tensor)
            while view:
                count = file.readinto(view[:_BLOCK])
                if not count:
                    raise EOFError(f"{folder / 'raw'} ends before the state does")
                view = view[count:]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).numpy().data.cast("B")


def save_ours(folder: Path, state: State) -> None:
    """Save as --save does."""
    storage.save_snapshot(folder, _snapshot(state), iteration=1, ctx=ParallelContext.single())


def load_ours(folder: Path, state: State) -> None:
    """Load as --load does, with every digest checked."""
    opened = storage.open_checkpoint(folder, ctx=ParallelContext.single())
    opened.read_into(_snapshot(state).tensors)


def _snapshot(state: State) -> Snapshot:
    tensors = tuple(ShardedTensor.of(name, tensor) for name, tensor in state.items())
    return Snapshot(tensors, progress={}, config={})


def save_pickled(folder: Path, state: State) -> None:
    """Save by torch.save, and fsync."""
    with open(folder / "state.pt", "xb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())


def load_pickled(folder: Path, state: State) -> None:
    """Load by torch.load, weights only and mapped, and copy into the state."""
    for name, tensor in unpickle.load(folder / "state.pt").items():
        state[name].copy_(tensor)


def save_dcp(folder: Path, state: State) -> None:
    """Save by torch's distributed checkpoint with its defaults, which sync its files."""
    save_with_dcp(dict(state), checkpoint_id=folder / "dcp", no_dist=True)


def load_dcp(folder: Path, state: State) -> None:
    """Load by torch's distributed checkpoint, in place."""
    load_with_dcp(dict(state), checkpoint_id=folder / "dcp", no_dist=True)


WAYS: Mapping[str, Way] = {
    "raw": Way(save_raw, load_raw),
    "ours": Way(save_ours, load_ours),
    "torch.save": Way(save_pickled, load_pickled),
    "DCP": Way(save_dcp, load_dcp),
}


def warm_up(place: Path, state: State) -> None:
    """Write once before measuring: the first bytes on a disk or virtual machine may be slow."""
    save_raw(place, state)
    (place / "raw").unlink()


def order(turn: int) -> list[str]:
    """Return the ways in order, and in reverse order every other time.

    The state that one leaves behind (a full write cache, freed blocks) then affects each of them.
    """
    return list(WAYS) if turn % 2 == 0 else list(WAYS)[::-1]


def measure(place: Path, state: State, target: State, turn: int) -> Round:
    """Return one round: every way once, then saves during training.

    Raises:
        ValueError: a way loads something else than was saved.
    """
    save: dict[str, Taken] = {}
    load: dict[str, Taken] = {}
    again: dict[str, Taken] = {}
    for name in order(turn):
        folder, way = place / name, WAYS[name]
        folder.mkdir()
        os.sync()  # nothing of the others is left to be written
        save[name] = _timed(lambda: way.save(folder, state))  # noqa: B023  # called now
        for loads, is_cold in ((load, True), (again, False)):
            for tensor in target.values():
                tensor.zero_()
            if is_cold:
                forget(folder)
            loads[name] = _timed(lambda: way.load(folder, target))  # noqa: B023
            differing = [n for n, tensor in state.items() if not torch.equal(tensor, target[n])]
            if differing:
                raise ValueError(f"{name} loads other values than it saved: {differing[:3]}")
        shutil.rmtree(folder)
    return Round(save, load, again, stall(place / "beside", state))


def _timed(call: Callable[[], None]) -> Taken:
    began, used = time.perf_counter(), time.process_time()
    call()
    return Taken(time.perf_counter() - began, time.process_time() - used)


def forget(folder: Path) -> None:
    """Ask the system to drop cached pages of the files, so that reads are from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def stall(folder: Path, state: State) -> Stall:
    """Return the seconds for which training stands still in saves of two runs.

    What a run does when it begins is not counted, as the time until the first save is long.
    """
    tensors = _snapshot(state).tensors
    with BackgroundSaves(ParallelContext.single()) as saves:
        saves.reserve(tensors)
        saves.wait_for_memory()
        first, second = (_stall_of(saves, folder, state) for _ in range(2))
    with BackgroundSaves(ParallelContext.single()) as saves:
        return Stall(first, second, _stall_of(saves, folder, state))


def _stall_of(saves: BackgroundSaves, folder: Path, state: State) -> float:
    folder.mkdir()
    saves.start(folder, _snapshot(state), iteration=1)
    while (saved := saves.poll()) is None:
        time.sleep(_LOOK_S)
    shutil.rmtree(folder)
    os.sync()
    return saved.stalled


def summarize(rounds: Sequence[Round], size: int) -> Summary:
    """Return medians of rates, of CPU time, and of ratios to raw within each round."""
    rates, ratios, cpu = {}, {}, {}
    for what in PARTS:
        times: list[Mapping[str, Taken]] = [getattr(one, what) for one in rounds]
        rates[what] = {n: size / MIB / median(one[n].seconds for one in times) for n in WAYS}
        ratios[what] = {
            n: median(one["raw"].seconds / one[n].seconds for one in times) for n in WAYS
        }
        cpu[what] = {n: median(one[n].cpu for one in times) for n in WAYS}
    stalls = [[s / one.save["ours"].seconds for s in one.stall] for one in rounds]
    return Summary(rates, ratios, cpu, Stall(*map(median, zip(*stalls, strict=True))))


def plain(values: Any) -> Any:
    """Return named tuples as mappings, recursively, for JSON."""
    if hasattr(values, "_asdict"):
        values = values._asdict()
    if isinstance(values, Mapping):
        return {name: plain(value) for name, value in values.items()}
    return values


def table(summary: Summary, size: int, rounds: int) -> list[str]:
    """Return the results as Markdown, with the targets below."""
    lines = [
        f"{size / MIB:.0f} MiB, medians of {rounds} rounds; MiB/s, beside raw, and seconds of CPU",
        "",
        "| | save | of raw | CPU s | load | of raw | CPU s | again | of raw | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in WAYS:
        cells = [
            cell
            for what in PARTS
            for cell in (
                f"{summary.rates[what][name]:.0f}",
                f"{summary.ratios[what][name]:.2f}",
                f"{summary.cpu[what][name]:.2f}",
            )
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    save, load = (summary.ratios[what]["ours"] for what in ("save", "load"))
    worst, late = max(summary.stall[:2]), summary.stall.unprepared
    return [
        *lines,
        "",
        f"save: {_outcome(save >= WRITE_TARGET)}: {save:.0%} of raw writes, "
        f"{WRITE_TARGET:.0%} wanted",
        f"load: {_outcome(load >= READ_TARGET)}: {load:.0%} of raw reads, {READ_TARGET:.0%} wanted",
        f"--async-save: {_outcome(worst <= STALL_TARGET)}: training stands still for {worst:.0%} "
        f"of the time of a save, {STALL_TARGET:.0%} allowed; {late:.0%} without memory made before",
    ]


def _outcome(reached: bool) -> str:
    return "reached" if reached else "missed"


if __name__ == "__main__":
    main()
