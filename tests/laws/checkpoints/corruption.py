"""What a load makes of a damaged checkpoint: flipped bits, files that are cut, swapped, not there.

`python -m tests.laws.checkpoints.corruption` (or `make test-damage`) damages the checkpoints of two
real runs in one way after another, and each time loads into an engine that is ready to train. What
counts as found: a CheckpointError that names the file, and the tensor where the damage is in one,
with every weight, number and generator of the run as it was. Exit code 1 if anything else was
loaded. `--write` keeps the table in docs/checkpoints.md. What happens to files while they are
written is kill_grid's.
"""

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

import megatron.training
from megatron import log
from megatron.checkpoint import rng
from megatron.checkpoint.files import safetensors_header
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.sharded import GeneratorStates
from megatron.config.run import RunConfig
from megatron.engine.base import Engine
from megatron.errors import CheckpointError
from megatron.global_vars import Runtime
from megatron.progress import Progress
from tests.support.pages import write_between
from tests.support.ranks import run_on_ranks
from tests.support.tiny import MODELS, Record, tiny_run, train, train_all, whole, write_tiny_corpus

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"
MARKS = (
    "<!-- corruption: written by `make test-damage WRITE=1` -->",
    "<!-- corruption: end -->",
)
EARLIER, SAVED = 2, 3  # iterations; the tracker names the second, one bit away from the first
FLIPS = 1000
# Shares of the flips, beside every bit of the tracker file, of which there are few; the rest is of
# shards.
SHARES = {"manifest": 0.25, "generators": 0.25}
FOUND, UNHARMED = "found", "loaded what was saved"
EARLIER_ONE = "loaded the earlier checkpoint, and said that there is a later one"
GOOD = (FOUND, UNHARMED, EARLIER_ONE)
MODEL: dict[str, Any] = {**MODELS["llama"], "hidden_dropout": 0.1}
# One is loaded by the layout that saved it, generators and all; of the other there are two shards.
RUNS: dict[str, dict[str, Any]] = {
    "1 rank": {},
    "2 ranks": {"tensor_model_parallel_size": 2},
}

Contents = Mapping[str, bytes | None]  # paths below the folder; None: it is not there


class Damage(NamedTuple):
    """One thing that is wrong with a checkpoint, and what an error about it has to name."""

    kind: str
    what: str
    changed: Contents
    names: tuple[str, ...]


class Result(NamedTuple):
    """What a load made of a damage: `FOUND`, `UNHARMED`, or in words what it should not have."""

    kind: str
    what: str
    found: str


def main(argv: Sequence[str] | None = None) -> None:
    """Do all of it and print a table; exit code 1 unless all is found or harmless."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.laws.checkpoints.corruption",
        description=(__doc__ or "").splitlines()[0],
    )
    parser.add_argument("--flips", type=int, default=FLIPS, help=f"bits to flip [{FLIPS}]")
    parser.add_argument("--seed", type=int, default=1234, help="of bits and bytes [1234]")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    flags = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        saved = save_all(Path(folder))
        started = time.monotonic()
        results = [result for one in judge_all(saved, flags.flips, flags.seed) for result in one]
    seconds = time.monotonic() - started
    lines = table(results)
    took = f"{len(results)} damages in {seconds:.0f} s"
    print("\n".join(["", *lines, "", took]))
    for result in results:
        if result.found != FOUND:
            print(f"{result.kind}: {result.what}: {result.found}")
    if flags.write:
        write(PAGE, [*lines, "", f"{took}, on {os.cpu_count()} cores, one process."])
    sys.exit(any(result.found not in GOOD for result in results))


class Saved(NamedTuple):
    """The checkpoints of one run, and what its ranks held when they saved the last one."""

    corpus: str
    folder: Path
    records: list[Record]


def save_all(where: Path) -> list[Saved]:
    """Train in each layout of `RUNS`, and save twice."""
    corpus = write_tiny_corpus(where / "corpus")
    saved = []
    for name, flags in RUNS.items():
        folder = where / name.replace(" ", "-")
        config = _config(corpus, **flags, save=str(folder), save_interval=EARLIER)
        ranks = flags.get("tensor_model_parallel_size", 1)
        records = [of_rank[0] for of_rank in run_on_ranks(ranks, train_all, [config])]
        saved.append(Saved(corpus, folder, records))
    return saved


def _config(corpus: str, **flags: Any) -> RunConfig:
    return tiny_run(corpus, **MODEL, micro_batch_size=4, train_iters=SAVED, **flags)


def judge_all(saved: Sequence[Saved], flips: int, seed: int) -> Iterator[list[Result]]:
    """The results of each run's checkpoint, with its share of the flips."""
    for at, run in enumerate(saved):
        count = flips // len(saved) + (at < flips % len(saved))
        deadline_s = 120 + 0.5 * count
        ((results, record),) = run_on_ranks(1, judge, run, count, seed + at, timeout_s=deadline_s)
        _check_intact(record, run)
        yield results


def _check_intact(record: Record, run: Saved) -> None:
    """After all that, the checkpoint is what was saved, or nothing above means anything."""
    assert record.progress == run.records[0].progress
    here, there = whole([record]), whole(run.records)
    assert here.keys() == there.keys()
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())


def judge(run: Saved, flips: int, seed: int) -> tuple[list[Result], Record]:
    """A body for `run_on_ranks`: every damage in turn, by the load of a run that is to go on.

    The run itself then loads the checkpoint as it was.
    """
    results: list[Result] = []

    def damaged_first(config: RunConfig, engine: Engine, runtime: Runtime, *rest: Any) -> Progress:
        before = Held.of(engine, runtime)
        REAL_LOAD(config, engine, runtime, *rest)
        intact = Held.of(engine, runtime)
        assert before.differing(intact), "a load is meant to change something"
        before.put_back(engine, runtime)
        for damage in damages(run.folder, flips, random.Random(seed)):
            messages: list[str] = []
            with Damaged(run.folder, damage.changed), patch.object(log, "warning", messages.append):
                try:
                    progress = REAL_LOAD(config, engine, runtime, *rest)
                    messages.append(f"loaded iteration {progress.iteration}")
                    error = None
                except CheckpointError as raised:
                    error = str(raised)
                except Exception as raised:  # whatever it is, it is not what a user should see
                    error = f"another error, {type(raised).__name__}: {raised}"
            after = Held.of(engine, runtime)
            found = _verdict(damage, error, before.differing(after), intact.differing(after))
            if found.startswith("not noticed") and _warns_of_a_later_one(messages):
                found = EARLIER_ONE
            results.append(Result(damage.kind, damage.what, found))
            if before.differing(after):
                before.put_back(engine, runtime)
        return REAL_LOAD(config, engine, runtime, *rest)

    megatron.training.load_checkpoint = damaged_first
    return results, train(_config(run.corpus, load=str(run.folder)))


REAL_LOAD = megatron.training.load_checkpoint


def _verdict(
    damage: Damage, error: str | None, changed: Sequence[str], not_as_saved: Sequence[str]
) -> str:
    if error is None:
        return f"not noticed, and {not_as_saved[:3]} are wrong" if not_as_saved else UNHARMED
    if changed:
        return f"found after {changed[:3]} had changed: {error}"
    if error.startswith("another error"):
        return error
    missing = [name for name in damage.names if name not in error]
    return f"found, but without naming {missing}: {error}" if missing else FOUND


def _warns_of_a_later_one(messages: Sequence[str]) -> bool:
    warned = f"names iteration {EARLIER}, but {SAVED} is there too"
    return f"loaded iteration {EARLIER}" in messages and any(warned in text for text in messages)


class Held(NamedTuple):
    """Copies of all that a load fills: weights, optimizer, its numbers, generators."""

    tensors: dict[str, list[Tensor]]
    scalars: Mapping[str, Any]
    generators: GeneratorStates

    @classmethod
    def of(cls, engine: Engine, runtime: Runtime) -> "Held":
        """As it is now."""
        state = engine.state(optimizer=True)
        return cls(
            {
                tensor.name: [view.clone() for _, view in tensor.parts]
                + [view.clone() for view in tensor.padding]
                for tensor in state.tensors
            },
            dict(state.scalars),
            rng.capture(),
        )

    def differing(self, other: "Held") -> list[str]:
        """What is not the same, to the bit."""
        result = [
            name
            for name, parts in self.tensors.items()
            if not all(map(torch.equal, parts, other.tensors[name]))
        ]
        if self.scalars != other.scalars:
            result.append("scalars")
        own, others = self.generators, other.generators
        if own.values != others.values or not all(
            torch.equal(tensor, others.tensors[name]) for name, tensor in own.tensors.items()
        ):
            result.append("generators")
        return result

    def put_back(self, engine: Engine, runtime: Runtime) -> None:
        """Make everything as it was."""
        for tensor in engine.state(optimizer=True).tensors:
            views = [*(view for _, view in tensor.parts), *tensor.padding]
            for view, values in zip(views, self.tensors[tensor.name]):
                view.copy_(values)
        engine.restored(self.scalars, optimizer=True)
        rng.restore(self.generators)


class Damaged:
    """Files of a folder are something else while inside, and what they were after."""

    def __init__(self, folder: Path, changed: Contents) -> None:
        self._folder, self._changed = folder, changed
        self._good: dict[Path, bytes] = {}
        self._made: list[Path] = []

    def __enter__(self) -> None:
        for name, content in self._changed.items():
            path = self._folder / name
            if path.exists():
                self._good[path] = path.read_bytes()
            if content is None:
                path.unlink()
                continue
            self._made += [p for p in (path, *path.parents) if not p.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def __exit__(self, *_: object) -> None:
        for path, content in self._good.items():
            path.write_bytes(content)
        for path in self._made:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def damages(folder: Path, flips: int, draw: random.Random) -> Iterator[Damage]:
    """Everything that is done to the checkpoint that the tracker names."""
    directory = folder / folders.iteration_name(SAVED)
    files = {f"{directory.name}/{path.name}": path for path in sorted(directory.iterdir())}
    files[folders.TRACKER] = folder / folders.TRACKER
    good = {name: path.read_bytes() for name, path in files.items()}
    yield from _flipped(good, files, flips, draw)
    yield from _cut_or_longer(good, draw)
    yield from _swapped(folder, good)
    yield from _deleted(good)
    yield from _foreign(good, directory.name)


def _flipped(
    good: Mapping[str, bytes], files: Mapping[str, Path], flips: int, draw: random.Random
) -> Iterator[Damage]:
    tracker = good[folders.TRACKER]
    bits = [(folders.TRACKER, at, bit) for at in range(len(tracker)) for bit in range(8)]
    left = max(0, flips - len(bits))
    counts = {kind: round(left * share) for kind, share in SHARES.items()}
    for kind, count in {**counts, "shard": left - sum(counts.values())}.items():
        names = [name for name in good if kind_of(name) == kind]
        for _ in range(count):
            (name,) = draw.choices(names, weights=[len(good[n]) for n in names])
            bits.append((name, draw.randrange(len(good[name])), draw.randrange(8)))
    for name, at, bit in bits[:flips] if flips else ():
        data = bytearray(good[name])
        data[at] ^= 1 << bit
        hit = _tensor_at(files[name], at)
        yield Damage(
            f"bit flipped, {kind_of(name)}",
            f"bit {bit} of byte {at} of {name}" + (f", in {hit}" if hit else ""),
            {name: bytes(data)},
            (Path(name).name, *([hit] if hit else [])),
        )


def kind_of(name: str) -> str:
    """What kind of file has this name: shard, generators, manifest or tracker."""
    return "tracker" if name == folders.TRACKER else Path(name).name.partition("-")[0].split(".")[0]


def _tensor_at(path: Path, at: int) -> str | None:
    """The tensor of a shard that holds byte `at`; None in headers and other files."""
    if kind_of(path.name) != "shard":
        return None
    entries = safetensors_header.read(path).entries
    return next((name for name, e in entries.items() if e.start <= at < e.stop), None)


def _cut_or_longer(good: Mapping[str, bytes], draw: random.Random) -> Iterator[Damage]:
    for name, data in good.items():
        half, at = len(data) // 2, draw.randrange(len(data))
        for what, content in {
            "the last byte of": data[:-1],
            "the second half of": data[:half],
            "the first byte of": data[1:],
            f"byte {at} of": data[:at] + data[at + 1 :],
            "everything in": b"",
        }.items():
            yield Damage("cut", f"{what} {name}", {name: content}, (Path(name).name,))
        for what, content in {
            "a zero after": data + b"\0",
            "a line end after": data + b"\n",
            "a zero before": b"\0" + data,
            "itself after": data + data,
            f"a byte at {at} of": data[:at] + b"7" + data[at:],
        }.items():
            yield Damage("extra bytes", f"{what} {name}", {name: content}, (Path(name).name,))
        if kind_of(name) != "tracker":
            at = at // 4096 * 4096
            zeros = data[:at] + bytes(len(data[at : at + 4096])) + data[at + 4096 :]
            yield Damage("a page of zeros", f"at {at} of {name}", {name: zeros}, (Path(name).name,))


def _swapped(folder: Path, good: Mapping[str, bytes]) -> Iterator[Damage]:
    """The right bytes in the wrong place, or of the wrong time."""
    names = [name for name in good if kind_of(name) in ("shard", "generators")]
    for at, one in enumerate(names):
        for other in names[at + 1 :]:
            both = {one: good[other], other: good[one]}
            yield Damage("swapped", f"{one} and {other}", both, (Path(one).name, Path(other).name))
    earlier = folders.iteration_name(EARLIER)
    for name in good:
        then = folder / earlier / Path(name).name
        if kind_of(name) != "tracker":
            changed = {name: then.read_bytes()}
            what = f"{name} is that of iteration {EARLIER}"
            named = folders.iteration_name(SAVED) if kind_of(name) == "manifest" else then.name
            yield Damage("swapped", what, changed, (named,))
    of_all = {n: (folder / earlier / Path(n).name).read_bytes() for n in good if "/" in n}
    what = f"all files are those of iteration {EARLIER}"
    yield Damage("swapped", what, of_all, (folders.iteration_name(SAVED),))


def _deleted(good: Mapping[str, bytes]) -> Iterator[Damage]:
    for name in good:
        yield Damage("deleted", name, {name: None}, (name,))
    everything: Contents = {name: None for name in good if "/" in name}
    yield Damage("deleted", "all files", everything, (folders.iteration_name(SAVED),))


def _foreign(good: Mapping[str, bytes], directory: str) -> Iterator[Damage]:
    """Files of something else: in the place of ours, and beside them."""
    other = safetensors_header.encode([("model/x", "F64", (2,))], {}) + bytes(16)
    for name, data in good.items():
        for what, content in {
            "another model's tensors": other,
            "a page of an error": b"<html>404 Not Found</html>\n",
            "as many random bytes": random.Random(0).randbytes(len(data)),
        }.items():
            named = (Path(name).name,)
            yield Damage("foreign, in place of ours", f"{what}: {name}", {name: content}, named)
    shard = next(data for name, data in good.items() if kind_of(name) == "shard")
    for beside, content in {
        f"{directory}/notes.txt": b"the good one\n",
        f"{directory}/shard-00007-of-00008.safetensors": shard,
        f"{directory}/model.safetensors": shard,
        f"{directory}/config.json": b'{"model_type": "gpt2"}',
        f"{directory}/mp_rank_00/model_optim_rng.pt": b"not a checkpoint",
        f"{directory}/mp_rank_00_model_states.pt": b"not a checkpoint",
        "latest": b"global_step2",
        "config.json": b'{"model_type": "gpt2"}',
        "mp_rank_00_model_states.pt": b"not a checkpoint",
        f"{directory}.old/manifest.json": b"{}",
        f".{directory}.partial-0123abcd/manifest.json": b"{}",
    }.items():
        yield Damage("foreign, beside ours", beside, {beside: content}, ())
    model = {"config.json": b'{"model_type": "gpt2"}', "model.safetensors": shard}
    yield Damage("foreign, beside ours", " and ".join(model), model, ())


def table(results: Sequence[Result]) -> list[str]:
    """A row for each kind of damage, and one for all."""
    lines = [
        "| damage | times | found, nothing changed | loaded what was saved | "
        "loaded the earlier one, with a warning | anything else |",
        "|---|---|---|---|---|---|",
    ]
    for kind in [*dict.fromkeys(result.kind for result in results), "all"]:
        counts = Counter(r.found for r in results if kind in ("all", r.kind))
        known = [counts[found] for found in GOOD]
        numbers = (counts.total(), *known, counts.total() - sum(known))
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    return lines


def write(page: Path, lines: Sequence[str]) -> None:
    """Put `lines` between the marks of a page."""
    write_between(page, lines, MARKS)


if __name__ == "__main__":
    main()
