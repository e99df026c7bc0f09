"""Preprocessing on many machines: `torchrun ... tools/preprocess_data_dist.py <flags>`.

The input files are divided into stretches of like size, one per rank and in order; each rank
writes its stretch to `PREFIX.partial/` on a shared file system, and rank 0 merges them, with the
bytes of `preprocess_data.py`. What a reader would get wrong: files are not cut, so there should be
at least as many as ranks. No GPU and no process group is used, only the launcher's key-value store.
"""

import importlib.util
import json
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torch.distributed import DistStoreError, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from megatron.errors import ConfigError, MegatronError, PeerError
from megatron.preflight.environment import Launch, launch_from_environment
from megatron.program import run
from tools.corpus_output import CorpusSet, Totals
from tools.preprocess_data import Job, Progress, parser, prepare, print_summary, require_documents
from tools.resume import partial_folder

_BEAT_S = 2.0
_SILENCE_S = 120.0  # after this, a rank that has not finished counts as dead
_POLL_S = 0.2


def main(argv: Sequence[str] | None = None) -> None:
    """Write this rank's part; rank 0 then merges all of them and says what was written."""
    args = parser("preprocess_data_dist.py").parse_args(argv)
    if args.resume:
        raise ConfigError(
            "a run on several ranks cannot be resumed",
            found="--resume",
            fix="leave it out, or use tools/preprocess_data.py --resume with more --workers",
        )
    launch = launch_from_environment()
    if launch.world_size == 1:
        raise ConfigError(
            "there is only one rank",
            found=f"WORLD_SIZE={launch.world_size}",
            fix="start with torchrun --nproc-per-node 2 or more, or use tools/preprocess_data.py",
        )
    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=_SILENCE_S)))
    started = time.perf_counter()
    folder = partial_folder(args.output_prefix)
    with _Heartbeat(store, launch.rank):
        try:
            job = prepare(args)
            mine = _part(folder, launch.rank, len(job.prefixes))
            totals = _write_part(job, stretch(job.inputs.files, launch), mine)
        except MegatronError as error:
            store.set(f"end{launch.rank}", json.dumps({"error": str(error)}))
            raise
        store.set(f"end{launch.rank}", json.dumps({"totals": totals.to_plain()}))
    if launch.rank:
        return
    parts = [Totals(**_outcome(store, rank)) for rank in range(launch.world_size)]
    everything = Totals.zero(len(job.prefixes))
    for part in parts:
        everything.include(part)
    require_documents(job, everything)
    written = [_part(folder, n, len(job.prefixes)) for n, p in enumerate(parts) if p.documents]
    _require_visible(written)
    with CorpusSet(job.prefixes, job.settings, job.tokenizer) as corpora:
        corpora.merge(written)
        corpora.finish()
    shutil.rmtree(folder)
    print_summary(job, everything, time.perf_counter() - started)


def stretch(files: Sequence[Path], launch: Launch) -> tuple[Path, ...]:
    """The files of one rank: whole, in order, and about as many bytes as the others have.

    A file belongs to the rank in whose share of all bytes its middle lies.
    """
    sizes = [path.stat().st_size for path in files]
    total = max(1, sum(sizes))
    mine = []
    before = 0
    for path, size in zip(files, sizes):
        owner = min((2 * before + size) * launch.world_size // (2 * total), launch.world_size - 1)
        before += size
        if owner == launch.rank:
            mine.append(path)
    return tuple(mine)


class _Heartbeat:
    """Says every other second that this rank is alive, by a connection of its own."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store = store.clone() if isinstance(store, TCPStore) else store
        self._rank = rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _beat(self) -> None:
        number = 0
        while not self._ended.wait(_BEAT_S):
            number += 1
            try:
                self._store.set(f"beat{self._rank}", str(number))
            except DistStoreError:
                return  # the launcher is gone; this rank's own next word to it fails as well


def _write_part(job: Job, files: tuple[Path, ...], prefixes: list[str]) -> Totals:
    own = job._replace(inputs=job.inputs._replace(files=files))
    Path(prefixes[0]).parent.mkdir(parents=True, exist_ok=True)
    encoded = own.encoded(own.chunks())
    try:
        with CorpusSet(prefixes, job.settings, job.tokenizer) as corpora, Progress(own) as progress:
            for chunk in encoded:
                corpora.append(chunk)
                progress.show(corpora.totals, chunk.disk_bytes)
            corpora.finish()
    finally:
        encoded.close()  # type: ignore[attr-defined]  # a generator
    return corpora.totals


def _part(folder: Path, rank: int, keys: int) -> list[str]:
    return [str(folder / f"rank{rank:05d}_{key}") for key in range(keys)]


def _outcome(store: Store, rank: int) -> dict[str, object]:
    """What a rank wrote; PeerError when it failed or has been silent for too long."""
    heard, last = time.monotonic(), b""
    while not store.check([f"end{rank}"]):
        beat = store.get(f"beat{rank}") if store.check([f"beat{rank}"]) else b""
        if beat != last:
            heard, last = time.monotonic(), beat
        if time.monotonic() - heard > _SILENCE_S:
            raise PeerError(
                f"rank {rank} was not heard of for {_SILENCE_S:.0f} s",
                found="no part, and no sign of life",
                fix="look for its last words in its own output, then start all ranks again",
            )
        time.sleep(_POLL_S)
    outcome: dict[str, dict[str, object]] = json.loads(store.get(f"end{rank}"))
    if "error" in outcome:
        raise PeerError(
            f"rank {rank} could not write its part",
            found=outcome["error"],
            fix="see to that, then start all ranks again",
        )
    return outcome["totals"]


def _require_visible(parts: Sequence[Sequence[str]]) -> None:
    missing = [prefix for part in parts for prefix in part if not Path(f"{prefix}.idx").exists()]
    if missing:
        raise ConfigError(
            "rank 0 does not see what another rank wrote",
            found=f"{missing[0]}.idx is not there",
            fix="put --output-prefix on a file system that all machines share",
        )


if __name__ == "__main__":
    run(main)
