"""One example script of another Megatron: what it starts, and what becomes of that here."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tools.launch_scripts.commands import Started
from tools.launch_scripts.verdicts import Kind

CONTRADICTION = "contradicts itself"  # how `why` begins where flags and JSON differ


class Script(NamedTuple):
    """A script, and others that differ from it in numbers alone.

    Attributes:
        ranks: of its launcher; where that takes all there are, as many as the script reckons with.
        missing: a part of every reason, in order, where it is refused.
        why: what the page says of a script that is refused.
        num_scripts: how many scripts there are of this kind.
        settings: DeepSpeed's JSON that the script writes, without the sizes of batches.
    """

    path: str
    program: str
    ranks: int
    flags: str
    kind: Kind
    missing: tuple[str, ...] = ()
    why: str = ""
    num_scripts: int = 1
    settings: Mapping[str, object] | None = None

    def words(self, folder: Path) -> list[str]:
        """Return its flags, with the JSON written into `folder` where it has one."""
        words = self.flags.split()
        if self.settings is None:
            return words
        path = folder / "deepspeed.json"
        path.write_text(json.dumps(self.settings))
        return [*words, "--deepspeed_config", str(path)]

    def started(self, folder: Path) -> Started:
        """Return what its launcher starts."""
        return Started(self.program, tuple(self.words(folder)), self.ranks)
