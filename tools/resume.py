"""Finished parts of a preprocessing run and the journal that lists them, so that a kill costs one.

Parts lie in `PREFIX.partial/` as corpora of their own until the last is done; then they are merged
and the folder goes. What a reader would get wrong: a part counts only once the journal has it, and
the journal is only good for the same input files, tokenizer and flags.
"""

import json
import shutil
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError
from tools.corpus_output import Totals
from tools.text_output import write_text_files

PART_BYTES = 256 << 20  # of input as it lies on disk; what a kill costs at most
_JOURNAL = "journal.json"


class Part(NamedTuple):
    """A stretch of the input that is finished: how many chunks it took and what they held."""

    chunks: int
    totals: Totals


class Journal:
    """The parts of one run; `fingerprint` names everything that their bytes depend on."""

    def __init__(self, output_prefix: str, fingerprint: str) -> None:
        self.folder = partial_folder(output_prefix)
        self._fingerprint = fingerprint
        self.parts: list[Part] = []
        path = self.folder / _JOURNAL
        if path.exists():
            self._read(path)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def chunks(self) -> int:
        """Chunks of the input that are done."""
        return sum(part.chunks for part in self.parts)

    def prefixes(self, number: int, keys: int) -> list[str]:
        """Where part `number` is or will be, one prefix per key."""
        return [str(self.folder / f"part{number:05d}_{key}") for key in range(keys)]

    def written(self, keys: int) -> list[list[str]]:
        """The prefixes of every part that has a document."""
        return [
            self.prefixes(number, keys)
            for number, part in enumerate(self.parts)
            if part.totals.documents
        ]

    def add(self, part: Part) -> None:
        """Note a part whose files are on disk."""
        self.parts.append(part)
        parts = [{"chunks": part.chunks, "totals": part.totals.to_plain()} for part in self.parts]
        content = {"fingerprint": self._fingerprint, "parts": parts}
        write_text_files({self.folder / _JOURNAL: json.dumps(content, indent=1) + "\n"})

    def remove(self) -> None:
        """Delete the parts, after they have become the output."""
        shutil.rmtree(self.folder)

    def _read(self, path: Path) -> None:
        try:
            content = json.loads(path.read_text())
            known = content["fingerprint"]
            self.parts = [
                Part(part["chunks"], Totals(**part["totals"])) for part in content["parts"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "the journal of an earlier run cannot be read",
                found=f"{path}: {error}",
                fix=f"remove {self.folder} to begin again",
            ) from error
        if known != self._fingerprint:
            raise ConfigError(
                "the finished parts are of a run with other input, tokenizer or flags",
                found=f"{self.folder} with {len(self.parts)} parts",
                fix="give the input and flags of that run, or remove the folder to begin again",
            )


def partial_folder(output_prefix: str) -> Path:
    """The folder of the unfinished parts of an output."""
    return Path(f"{output_prefix}.partial")
