"""Finished parts of a preprocessing run and the journal that lists them, so that a kill costs one.

Parts lie in `PREFIX.partial/` as corpora of their own until the last is done; then they are merged
and the folder goes. What a reader would get wrong: a part counts only once the journal has it, and
the journal is only good for the same input files, tokenizer and flags.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from megatron import log
from megatron.config.data import DataIntegrity
from megatron.data.corpus.checksums import read_checksums
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import ConfigError, DataError
from tools.preprocessing.corpus_output import Totals
from tools.preprocessing.text_output import write_text_files

PART_BYTES = 256 << 20  # of input as it lies on disk; what a kill costs at most
_JOURNAL = "journal.json"
_PLAN = "plan.json"
_NOTE = ".note.json"  # behind the name of a piece; not a sidecar


class CorpusPart(NamedTuple):
    """A finished part of the input: its number of chunks, and its totals."""

    chunks: int
    totals: Totals


class Journal:
    """The parts of one run; `fingerprint` stands for everything that determines their bytes."""

    def __init__(self, output_prefix: str, fingerprint: str) -> None:
        self.folder = partial_folder(output_prefix)
        self._fingerprint = fingerprint
        self.parts: list[CorpusPart] = []
        path = self.folder / _JOURNAL
        if path.exists():
            self._read(path)
        elif (self.folder / _PLAN).exists():
            raise ConfigError(
                "the finished parts are of a run on several ranks",
                found=str(self.folder),
                fix="go on with tools/preprocess_data_dist.py --resume, or remove the folder",
            )
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def chunks(self) -> int:
        """Number of finished chunks of the input."""
        return sum(part.chunks for part in self.parts)

    def prefixes(self, number: int, keys: int) -> list[str]:
        """Return the prefixes of part `number`, one per key, whether or not it is written."""
        return [str(self.folder / f"part{number:05d}_{key}") for key in range(keys)]

    def written(self, keys: int) -> list[list[str]]:
        """Return the prefixes of every part with documents."""
        return [
            self.prefixes(number, keys)
            for number, part in enumerate(self.parts)
            if part.totals.documents
        ]

    def add(self, part: CorpusPart) -> None:
        """Record a part whose files are on disk."""
        self.parts.append(part)
        parts = [{"chunks": part.chunks, "totals": part.totals.to_plain()} for part in self.parts]
        content = {"fingerprint": self._fingerprint, "parts": parts}
        write_text_files({self.folder / _JOURNAL: json.dumps(content, indent=1) + "\n"})

    def remove(self) -> None:
        """Delete the parts, once they are merged into the output."""
        shutil.rmtree(self.folder)

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
            recorded = content["fingerprint"]
            self.parts = [
                CorpusPart(part["chunks"], Totals(**part["totals"])) for part in content["parts"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, error) from error
        if recorded != self._fingerprint:
            raise _of_another_run(self.folder)


class PieceJournal:
    """The pieces of a run on several ranks: done in any order, verified before reuse.

    The first rank calls `begin`, then any rank may look at pieces and add its own. A piece counts
    once its note is on disk, which comes after its corpora.
    """

    def __init__(self, output_prefix: str, fingerprint: str, keys: int) -> None:
        self.folder = partial_folder(output_prefix)
        self._fingerprint = fingerprint
        self._keys = keys

    def begin(self, pieces: int, *, go_on: bool, forget: bool) -> int:
        """Return the number of pieces: `pieces`, or that of the run being resumed.

        Raises ConfigError for finished pieces with neither `go_on` nor `forget`.
        """
        plan = self.folder / _PLAN
        done = len(list(self.folder.glob(f"piece*{_NOTE}")))
        if (self.folder / _JOURNAL).exists():
            raise ConfigError(
                "the finished parts are of a run of one process",
                found=str(self.folder),
                fix="go on with tools/preprocess_data.py --resume, or remove the folder",
            )
        if go_on and plan.exists():
            pieces = self._read_plan(plan)
            log.info(f"going on behind {done} finished pieces")
            return pieces
        if done and not forget and not go_on:
            raise ConfigError(
                "finished parts of an earlier run are there",
                found=f"{self.folder} with {done} pieces",
                fix="add --resume to keep them, or --overwrite to begin again",
            )
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        content = {"fingerprint": self._fingerprint, "pieces": pieces}
        write_text_files({plan: json.dumps(content) + "\n"})
        return pieces

    def prefixes(self, number: int) -> list[str]:
        """Return the prefixes of a piece, one per key, whether or not it is written."""
        return [str(self.folder / f"piece{number:05d}_{key}") for key in range(self._keys)]

    def add(self, number: int, totals: Totals) -> None:
        """Record a piece whose files are on disk."""
        write_text_files({self._note(number): json.dumps(totals.to_plain()) + "\n"})

    def totals(self, number: int) -> Totals | None:
        """Return the totals of a finished piece; None if it is not finished."""
        try:
            return Totals(**json.loads(self._note(number).read_text()))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise ConfigError(
                "the note of a finished piece cannot be read",
                found=f"{self._note(number)}: {error}",
                fix="remove it, and the piece is made again with --resume",
            ) from error

    def verified(self, number: int) -> Totals | None:
        """Return `totals`, or None if a byte of the piece's corpora is not as written."""
        totals = self.totals(number)
        if totals is None or not totals.documents:
            return totals
        try:
            for prefix, tokens in zip(self.prefixes(number), totals.tokens):
                found = MMapIndexedDataset(prefix, integrity=DataIntegrity.FULL)
                if read_checksums(prefix) is None or found.num_tokens != tokens:
                    return None
        except DataError as error:
            log.warning(f"piece {number} is made again: {error.problem}")
            return None
        return totals

    def remove(self) -> None:
        """Delete the pieces, once they are merged into the output."""
        shutil.rmtree(self.folder)

    def _note(self, number: int) -> Path:
        return self.folder / f"piece{number:05d}{_NOTE}"

    def _read_plan(self, path: Path) -> int:
        try:
            content = json.loads(path.read_text())
            recorded, pieces = content["fingerprint"], int(content["pieces"])
        except (ValueError, KeyError, TypeError) as error:
            raise _unreadable(path, error) from error
        if recorded != self._fingerprint:
            raise _of_another_run(self.folder)
        return pieces


def partial_folder(output_prefix: str) -> Path:
    """Return the folder of the unfinished parts of an output."""
    return Path(f"{output_prefix}.partial")


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "the journal of an earlier run cannot be read",
        found=f"{path}: {error}",
        fix=f"remove {path.parent} to begin again",
    )


def _of_another_run(folder: Path) -> ConfigError:
    return ConfigError(
        "the finished parts are of a run with other input, tokenizer or flags",
        found=str(folder),
        fix="give the input and flags of that run, or remove the folder to begin again",
    )
