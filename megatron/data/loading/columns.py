"""Takes the tensors that a model needs out of a raw batch, and names those that are not there."""

import difflib
from collections.abc import Mapping

from torch import Tensor

from megatron.errors import DataError


def columns(raw: Mapping[str, Tensor], *names: str) -> tuple[Tensor, ...]:
    """Return the tensors of a raw batch with these names.

    Raises:
        DataError: some are not there; with what is, and the nearest names.
    """
    missing = [name for name in names if name not in raw]
    if not missing:
        return tuple(raw[name] for name in names)
    near = {name: difflib.get_close_matches(name, raw, n=1) for name in missing}
    hints = [f"{name} (nearest: {found[0]})" if found else name for name, found in near.items()]
    raise DataError(
        "a batch lacks tensors that the model takes",
        found=f"no {', '.join(hints)}; the batch has {', '.join(raw) or 'none'}",
        fix="give samples with these names: a dataset of the kind that the flags ask for, or one "
        "of your own whose samples are mappings with them",
    )
