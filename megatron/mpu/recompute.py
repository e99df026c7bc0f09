"""Activation recomputation that draws the same random numbers the second time.

torch's checkpoint replays the default generators; the named streams are replayed here. A region
with collectives recomputes them too, so every rank of a tp group must recompute alike.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megatron.mpu.random import RandomStreams

Result = TypeVar("Result")


def recompute(function: Callable[..., Result], streams: RandomStreams, *inputs: Any) -> Result:
    """`function(*inputs)`, whose intermediate tensors are thrown away and computed again later.

    Inputs and outputs may be tensors or anything else, several of each. The second run, in
    backward, sees the default generators and every stream as the first did, and leaves all of
    them as it found them: results are bit-equal to those without recomputation.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    replay = _Replay(streams)
    result: Result = checkpoint(
        function,
        *inputs,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=lambda: (nullcontext(), replay),
    )
    return result


class _Replay:
    """Puts the streams back to where they are now for the length of a block, any number of times.

    Not a generator-based context manager: those can be entered once, and a graph that is kept
    (`retain_graph`) recomputes at every backward.
    """

    def __init__(self, streams: RandomStreams) -> None:
        self._streams = streams
        self._first = streams.snapshot()
        self._outside = self._first

    def __enter__(self) -> None:
        self._outside = self._streams.snapshot()
        self._streams.restore(self._first)

    def __exit__(self, *_: object) -> None:
        self._streams.restore(self._outside)
