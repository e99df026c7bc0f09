"""`megatron.json`: our manifest of a checkpoint in another framework's layout.

It holds the length and digest of every file, the random states of every rank and the run's flags.
Other programs ignore it. The formats read the other files. A folder without it cannot be shown to
be complete, so it can be loaded but is never deleted. `sealed_save` writes it.
"""

from pathlib import Path

from megatron.checkpoint.folder import manifest, verify
from megatron.checkpoint.folder.manifest import Manifest


def of(directory: Path) -> Manifest | None:
    """Return our manifest of `directory`; None if only another program wrote there.

    Raises:
        CheckpointError: it is damaged, or files are missing or of another length.
    """
    content = manifest.load_seal(directory)
    if content is not None:
        check_lengths(directory, content)
    return content


def check_lengths(directory: Path, content: Manifest) -> None:
    """Raise CheckpointError where a file is missing, or of another length."""
    if damages := verify.wrong_sizes(directory, content, content.files):
        raise verify.damage_error(directory, damages)


def check_digests(directory: Path, content: Manifest, *, share: int, of: int) -> None:
    """Raise CheckpointError if a file in part `share` of `of` parts is not as it was written."""
    files = list(content.files)[share::of]
    if damages := verify.wrong_digests(directory, content, files):
        raise verify.damage_error(directory, damages)
