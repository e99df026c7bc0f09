"""Preprocessing on many machines: `torchrun ... tools/preprocess_data_dist.py <flags>`.

The input is cut into pieces, in order; ranks take one after the other, write each as a corpus of
its own to `PREFIX.partial/` on a shared file system, and then put them together, with the bytes of
`preprocess_data.py`. What a reader would get wrong: files are not cut, so there should be more
files than ranks; rows of a HuggingFace dataset are. No GPU and no process group is used.
"""

import argparse
import hashlib
import importlib.util
import json
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron import log
from megatron.errors import ConfigError
from megatron.program import run_program
from tools.preprocess_data import (
    PreprocessingJob,
    PreprocessingProgress,
    job_digest,
    prepare_job,
    preprocessing_parser,
    print_summary,
    require_documents,
    what_decides,
)
from tools.preprocessing import resume
from tools.preprocessing.corpus_merge import METHODS, Merge, merge_on_ranks
from tools.preprocessing.corpus_output import CorpusSet, Totals, sidecar_of
from tools.preprocessing.encoding import Chunk, EncodedChunk
from tools.preprocessing.ranks import ToolRanks
from tools.preprocessing.resume import PieceJournal
from tools.preprocessing.sources import Source

_PIECES_PER_RANK = 4  # so that ranks that are slower, or got longer pieces, end with the others
_VISIBLE_S = 10.0  # how long a shared file system may take to show what another machine wrote
_POLL_S = 0.2
_SHOWN = 1000  # characters of what ranks disagree about


def main(argv: Sequence[str] | None = None) -> None:
    """Write pieces until none is left, then merge them; raises MegatronError."""
    args = _parse(argv)
    started = time.perf_counter()
    with ToolRanks.join() as ranks:
        job = _prepared(ranks, args)
        _require_agreement(ranks, job)
        journal = PieceJournal(args.output_prefix, job_digest(job), len(job.prefixes))
        pieces = job.source.split(_begin(ranks, job, journal, args))
        _write_pieces(ranks, job, journal, pieces)
        ranks.gather("written", True)
        totals = None
        if ranks.is_first:
            totals = _totals(job, journal, len(pieces))
        _put_together(ranks, job, journal, len(pieces), serial=args.merge == METHODS[0])
        if totals is not None:
            journal.remove()
            print_summary(job, totals, time.perf_counter() - started)


def _prepared(ranks: ToolRanks, args: argparse.Namespace) -> PreprocessingJob:
    """Return the checked job, after the first rank has filled the cache of a dataset."""
    if args.hf_dataset and not ranks.is_first:
        ranks.from_first("opened", None)
    job = prepare_job(args)
    if args.hf_dataset and ranks.is_first:
        ranks.from_first("opened", True)
    return job


def _require_agreement(ranks: ToolRanks, job: PreprocessingJob) -> None:
    """Raise ConfigError on every rank if one would write other bytes than the first."""
    first, *others = ranks.gather("what decides", _in_short(what_decides(job, times=False)))
    for rank, other in enumerate(others, start=1):
        for name in (name for name, value in other.items() if value != first[name]):
            raise ConfigError(
                f"rank {rank} has another {name} than rank 0",
                found=f"{other[name]}; on rank 0 {first[name]}",
                fix="give all ranks the same flags, input files, tokenizer and packages",
            )


def _in_short(content: dict[str, Any]) -> dict[str, str]:
    """Return each part as text, or as a digest where the text is long."""
    texts = {name: json.dumps(value) for name, value in content.items()}
    digests = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return {name: text if len(text) <= _SHOWN else digests[name] for name, text in texts.items()}


def _begin(
    ranks: ToolRanks, job: PreprocessingJob, journal: PieceJournal, args: argparse.Namespace
) -> int:
    """Return the number of pieces of the input, on every rank."""
    count = None
    if ranks.is_first:
        wanted = max(_PIECES_PER_RANK * ranks.size, -(-job.source.size // resume.PART_BYTES))
        count = journal.begin(wanted, go_on=args.resume, forget=args.overwrite)
    return int(ranks.from_first("pieces", count))


def _write_pieces(
    ranks: ToolRanks, job: PreprocessingJob, journal: PieceJournal, pieces: Sequence[Source]
) -> None:
    """Write pieces that no other rank takes and no earlier run has finished."""
    everything = Totals.zero(len(job.prefixes))
    with (
        closing(_encoded_pieces(ranks, job, journal, pieces)) as encoded,
        PreprocessingProgress(
            job, size=job.source.size // ranks.size, silent=not ranks.is_first
        ) as progress,
    ):
        for number, results in groupby(encoded, key=itemgetter(0)):
            with CorpusSet(journal.prefixes(number), job.settings, job.tokenizer) as corpora:
                for _, chunk in results:
                    corpora.append(chunk)
                    everything.add(chunk)
                    progress.show(everything, chunk.disk_bytes)
                    ranks.check()
                corpora.finish()
            journal.add(number, corpora.totals)


def _encoded_pieces(
    ranks: ToolRanks, job: PreprocessingJob, journal: PieceJournal, pieces: Sequence[Source]
) -> Generator[tuple[int, EncodedChunk], None, None]:
    """Yield each chunk with the number of its piece; workers run across pieces."""
    owners: deque[int] = deque()  # of the chunks that are on their way

    def chunks() -> Iterator[Chunk]:
        while (number := ranks.take("piece")) < len(pieces):
            if (kept := journal.verified(number)) is not None:
                log.debug(f"piece {number} is kept: {kept.documents} documents")
                continue
            for chunk in pieces[number].chunks(job.chunk_size):
                owners.append(number)
                yield chunk

    with closing(job.encoded(chunks())) as encoded:  # type: ignore[type-var]  # a generator
        for result in encoded:
            yield owners.popleft(), result


def _totals(job: PreprocessingJob, journal: PieceJournal, pieces: int) -> Totals:
    """Return the totals of all pieces; ConfigError if one is not visible from here."""
    everything = Totals.zero(len(job.prefixes))
    deadline = time.monotonic() + _VISIBLE_S
    for number in range(pieces):
        while (totals := journal.totals(number)) is None:
            if time.monotonic() > deadline:
                raise ConfigError(
                    "rank 0 does not see what another rank wrote",
                    found=f"{journal.prefixes(number)[0]}.idx is not there",
                    fix="put --output-prefix on a file system that all machines share",
                )
            time.sleep(_POLL_S)
        everything.include(totals)
    require_documents(job, everything)
    return everything


def _put_together(
    ranks: ToolRanks, job: PreprocessingJob, journal: PieceJournal, pieces: int, *, serial: bool
) -> None:
    written: list[list[str]] = []
    if ranks.is_first:
        found = ((number, journal.totals(number)) for number in range(pieces))
        written = [journal.prefixes(number) for number, each in found if each and each.documents]
    if not serial:
        merges = [
            Merge(prefix, inputs, sidecar_of(job.settings, job.tokenizer, key))
            for prefix, key, inputs in zip(job.prefixes, job.settings.keys, zip(*written))
        ]
        merge_on_ranks(ranks, merges)
        return
    if ranks.is_first:
        with CorpusSet(job.prefixes, job.settings, job.tokenizer) as corpora:
            corpora.merge(written)
            corpora.finish()
    ranks.from_first("merged", True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    flags = preprocessing_parser("preprocess_data_dist.py")
    flags.add_argument_group("ranks").add_argument(
        "--merge",
        choices=METHODS,
        default=METHODS[1],
        help="how pieces become the output: rank 0 copies them, or each rank writes its range of "
        "the one .bin, which all machines must be able to write at once [distributed]",
    )
    return flags.parse_args(argv)


if __name__ == "__main__":
    run_program(main)
