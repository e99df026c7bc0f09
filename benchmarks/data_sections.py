"""The sections of `data.py` that read and index: samples, blending, sample-index, first-batch."""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.data_turns import (
    Row,
    Section,
    Target,
    Turn,
    ratio,
    require_equal,
    row_of,
    take_turns,
)
from benchmarks.data_worker import Answer, Worker
from megatron.config.data import DataIntegrity
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder

OURS = Path(__file__).with_name("data_ours.py")
PEERS = Path(__file__).with_name("data_peers.py")
PEER = "megatron-core"
NO_PEER = "no --peer-python, so there is no peer here"
SEED = 1234
MICRO_BATCH = 4
_VOCAB = 50257
_COMPARED_SAMPLES = 1000
_DOCUMENTS_AT_A_TIME = 20_000
_FIRST_PASSES = 3


class Setting(NamedTuple):
    """The flags, and values that several sections share."""

    flags: argparse.Namespace
    folder: Path
    our_python: str

    def ours(self) -> Worker:
        """Start a process of our library."""
        return Worker(self.our_python, OURS)

    @contextmanager
    def peer(self) -> Iterator[Worker | None]:
        """Start a process of the peer, if it is installed."""
        if self.flags.peer_python is None:
            yield None
            return
        with Worker(self.flags.peer_python, PEERS) as worker:
            yield worker

    def cache(self, owner: str) -> str:
        """Return the folder of sample indices of one of the two."""
        folder = self.folder / f"index-{owner}"
        folder.mkdir(exist_ok=True)
        return str(folder)


def samples(setting: Setting) -> Section:
    """Measure GPT samples in random order from one corpus, read one by one."""
    flags = setting.flags
    prefix = corpus(setting)
    section = Section(
        "samples",
        f"{flags.seq_length + 1} tokens each, of {flags.tokens:,} tokens in {flags.documents:,} "
        f"documents; turns of {flags.turn_samples:,}, pages in memory",
    )
    shape = {"prefix": prefix, "seq_length": flags.seq_length}
    with ExitStack() as stack:
        ours = stack.enter_context(setting.ours())
        peer = stack.enter_context(setting.peer())
        open_ours = partial(ours.ask, "open_samples", cache=setting.cache("ours"), seed=SEED)
        names = {
            name + (", mapped" if mapped else ""): (name, mapped)
            for mapped in (False, True)
            for name in ("off", "touched")
        }
        for name, (integrity, mapped) in names.items():
            total = open_ours(name=name, integrity=integrity, mapped=mapped, **shape)["samples"]
        section.rows += _first_touch(ours, open_ours, shape, total)
        readers = {f"ours {name}": ("read_samples", name, ours) for name in names}
        for name in names:
            ours.ask("read_samples", name=name, start=0, count=total)  # everything is touched now
        if peer is not None:
            peer.ask("open_samples", name=PEER, cache=setting.cache("peer"), seed=SEED, **shape)
            count = min(_COMPARED_SAMPLES, total)
            compared = {"start": 0, "count": count, "digest": True}
            our_answer = ours.ask("read_samples", name="touched", **compared)
            peer_answer = peer.ask("read_samples", name=PEER, **compared)
            require_equal(f"the first {count} samples", our_answer["digest"], peer_answer["digest"])
            readers[PEER] = ("read_samples", PEER, peer)
            readers[f"{PEER}, tokens alone"] = ("read_tokens", PEER, peer)
        else:
            section.notes.append(NO_PEER)
        ours.ask("open_memmap", name="memmap", dtype="uint16", **shape)
        readers["bare memmap"] = ("read_memmap", "memmap", ours)
        rounds = take_turns(
            {who: _reader(*reader, flags.turn_samples, total) for who, reader in readers.items()},
            repeats=flags.rounds,
            amount=flags.turn_samples,
            unit="samples",
        )
    section.rows += rounds
    _judge_samples(section, rounds)
    return section


def blending(setting: Setting) -> Section:
    """Measure the order of a blend, built in a new process each time."""
    flags = setting.flags
    section = Section("blending", f"the order of {flags.samples:,} samples of 10 and of 50 sets")
    for sets, wanted in ((10, 2.0), (50, 4.0)):
        weights = [random.Random(SEED + i).uniform(0.1, 1.0) for i in range(sets)]
        arguments = {"weights": weights, "size": flags.samples}

        def build(worker: Worker, arguments: dict[str, object] = arguments) -> Answer:
            return worker.ask("blending", **arguments)

        our_name, peer_name = f"ours, {sets} sets", f"{PEER}, {sets} sets"
        contestants: dict[str, Turn] = {our_name: in_fresh(setting.ours, build)}
        if flags.peer_python is not None:
            contestants[peer_name] = in_fresh(setting.peer, build)
            _require_same_answer(setting, "blending", arguments, f"the order of {sets} sets")
        rows = take_turns(
            contestants, repeats=flags.repeats, amount=flags.samples, unit="samples", fresh=True
        )
        section.rows += rows
        found = ratio(row_of(rows, peer_name), row_of(rows, our_name))
        section.targets.append(Target(f"{sets} sets, {PEER} / ours in CPU s", found, wanted))
        found = ratio(row_of(rows, peer_name), row_of(rows, our_name), "wall")
        section.notes += [] if found is None else [f"{sets} sets, in wall s: {found:.2f}"]
    section.notes += [NO_PEER] if flags.peer_python is None else []
    _note_implementations(section)
    return section


def sample_index(setting: Setting) -> Section:
    """Measure the index of samples over many short documents in random order."""
    flags = setting.flags
    section = Section(
        "sample-index", f"{flags.index_documents:,} documents with {flags.tokens:,} tokens"
    )
    rng = np.random.default_rng(SEED)
    files = {name: setting.folder / f"{name}.npy" for name in ("sizes", "documents")}
    np.save(files["sizes"], document_sizes(flags.index_documents, flags.tokens, rng))
    np.save(files["documents"], rng.permutation(flags.index_documents).astype(np.int32))
    arguments = {"seq_length": flags.seq_length, "tokens": flags.tokens}
    with setting.ours() as ours, setting.peer() as peer:
        workers = {"ours": ours} | ({} if peer is None else {PEER: peer})
        digests = []
        for worker in workers.values():
            worker.ask("load_sizes", **{name: str(path) for name, path in files.items()})
            digests.append(worker.ask("sample_index", digest=True, **arguments)["digest"])
        require_equal("the sample index", digests[0], digests[-1])
        section.rows = take_turns(
            {
                who: partial(worker.ask, "sample_index", **arguments)
                for who, worker in workers.items()
            },
            repeats=flags.repeats,
            amount=(flags.tokens - 1) // flags.seq_length,
            unit="samples",
        )
    found = ratio(row_of(section.rows, "ours"), row_of(section.rows, PEER))
    section.targets.append(Target(f"ours / {PEER} in CPU s", found, below=1.2))
    section.notes += [NO_PEER] if flags.peer_python is None else []
    _note_implementations(section)
    for path in files.values():
        path.unlink()
    return section


def first_batch(setting: Setting) -> Section:
    """Measure process start to first batch, with the index of samples on disk."""
    flags = setting.flags
    section = Section(
        "first-batch",
        f"{MICRO_BATCH} samples of {flags.seq_length + 1} of {flags.tokens:,} tokens, warm index, "
        "a new process each time; seconds are those after its imports",
    )
    prefix = corpus(setting)

    def ask(worker: Worker, owner: str) -> Answer:
        return worker.ask(
            "first_batch",
            started=worker.started,
            prefix=prefix,
            cache=setting.cache(owner),
            seq_length=flags.seq_length,
            seed=SEED,
            micro_batch=MICRO_BATCH,
        )

    contestants: dict[str, Turn] = {"ours": in_fresh(setting.ours, partial(ask, owner="ours"))}
    if flags.peer_python is not None:
        contestants[PEER] = in_fresh(setting.peer, partial(ask, owner="peer"))
    for turn in contestants.values():
        turn()  # builds the index
    section.rows = take_turns(contestants, repeats=flags.repeats, amount=1, unit="first batch")
    for row in section.rows:
        turns = [(turn["imports"], turn["whole"]) for turn in row.turns]
        imports, whole = (float(np.median(column)) for column in zip(*turns))
        section.notes.append(
            f"{row.who}: {whole:.2f} s from the start of the process, of which {imports:.2f} s "
            "are Python and imports"
        )
    section.targets.append(Target("ours, wall s after imports", section.rows[0].wall, below=0.5))
    section.notes += [NO_PEER] if flags.peer_python is None else []
    return section


def corpus(setting: Setting) -> str:
    """Return a corpus of random tokens in documents of very different lengths.

    It is made once per folder.
    """
    flags = setting.flags
    prefix = str(setting.folder / f"tokens-{flags.tokens}-{flags.documents}")
    if MMapIndexedDataset.exists(prefix):
        return prefix
    started = time.perf_counter()
    rng = np.random.default_rng(SEED)
    sizes = document_sizes(flags.documents, flags.tokens, rng)
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        for start in range(0, len(sizes), _DOCUMENTS_AT_A_TIME):
            some = sizes[start : start + _DOCUMENTS_AT_A_TIME]
            tokens = rng.integers(0, _VOCAB, int(some.sum(dtype=np.int64)), dtype=np.uint16)
            for document in np.split(tokens, np.cumsum(some)[:-1]):
                builder.add_item(document)
                builder.end_document()
    seconds = time.perf_counter() - started
    print(f"made a corpus of {flags.tokens:,} tokens in {seconds:.0f} s: {prefix}", flush=True)
    return prefix


def document_sizes(documents: int, tokens: int, rng: np.random.Generator) -> npt.NDArray[np.int32]:
    """Return int32 lengths >= 1 that add up to `tokens`; most are short, a few very long."""
    shares = rng.exponential(size=documents)
    sizes = np.empty(documents, np.int32)
    sizes[:] = 1 + np.floor(shares * ((tokens - documents) / shares.sum()))
    sizes[: tokens - int(sizes.sum(dtype=np.int64))] += 1
    return sizes


def in_fresh(
    make: Callable[[], AbstractContextManager[Worker | None]], job: Callable[[Worker], Answer]
) -> Turn:
    """Return a turn that runs `job` in a new process, which `make` starts."""

    def turn() -> Answer:
        with make() as worker:
            assert worker is not None  # noqa: S101  # invariant: asked only where there is one
            return job(worker)

    return turn


def _first_touch(
    ours: Worker, open_ours: Callable[..., Answer], shape: dict[str, object], total: int
) -> list[Row]:
    """Measure a pass over every sample of a newly opened corpus, with and without checks."""

    def all_of(integrity: str) -> Answer:
        open_ours(name="fresh", integrity=integrity, mapped=False, **shape)
        return ours.ask("read_samples", name="fresh", start=0, count=total)

    all_of(DataIntegrity.OFF)  # pages come into memory
    return take_turns(
        {
            f"ours {mode}, first pass over all": partial(all_of, mode)
            for mode in (DataIntegrity.OFF, DataIntegrity.TOUCHED)
        },
        repeats=_FIRST_PASSES,
        amount=total,
        unit="samples",
    )


def _reader(job: str, name: str, worker: Worker, count: int, total: int) -> Turn:
    """Return a turn that reads on from the end of the previous turn."""
    turn = 0

    def read() -> Answer:
        nonlocal turn
        start = turn * count % max(1, total - count)
        turn += 1
        return worker.ask(job, name=name, start=start, count=min(count, total))

    return read


def _judge_samples(section: Section, rounds: list[Row]) -> None:
    touched = row_of(rounds, "ours touched")
    rate = None if touched is None else touched.per_cpu_second
    section.targets.append(Target("ours touched, samples per CPU s", rate, 120_000))
    for kind in ("", ", mapped"):
        found = ratio(row_of(rounds, f"ours touched{kind}"), row_of(rounds, f"ours off{kind}"))
        cost = None if found is None else 100 * (found - 1)
        section.targets.append(
            Target(f"touched beside off{kind}, % more CPU s after first touch", cost, below=3.0)
        )
    for who in (PEER, f"{PEER}, tokens alone", "bare memmap"):
        found = ratio(row_of(rounds, who), touched)
        section.notes += [] if found is None else [f"{who} / ours touched in CPU s: {found:.2f}"]
    first = ratio(
        row_of(section.rows, "ours touched, first pass over all"),
        row_of(section.rows, "ours off, first pass over all"),
    )
    if first is not None:
        section.notes.append(f"the first pass costs {100 * (first - 1):.1f} % more CPU s with it")


def _require_same_answer(
    setting: Setting, job: str, arguments: dict[str, object], what: str
) -> None:
    with setting.ours() as ours, setting.peer() as peer:
        found = [
            worker.ask(job, digest=True, **arguments)["digest"]
            for worker in (ours, peer)
            if worker is not None
        ]
    require_equal(what, found[0], found[-1])


def _note_implementations(section: Section) -> None:
    compiled = all(t["compiled"] for row in section.rows for t in row.turns if "compiled" in t)
    if not compiled:
        section.notes.append("our C++ module is not built: these are the twins in Python")
