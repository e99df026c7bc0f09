"""Random streams of one rank, and seeds that are stable hashes of names.

Dropout on a tensor that every tp rank holds whole must draw the same numbers on all of them, and on
a tensor that is split it must not: hence two named streams. A stream is a saved state of the
device's default generator, swapped in by `fork` and back out, because dropout kernels read no other
generator. Nothing here is global; a `RandomStreams` is passed to the code that draws.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from megatron import device
from megatron.errors import CheckpointError

StreamName = Literal["replicated", "tensor"]


def hash_seed(seed: int, *names: object) -> int:
    """Return a 63-bit seed, a function of `seed` and of the text of every name, in order.

    BLAKE2b rather than `hash()`, which Python salts per process. Names are length-prefixed, so
    ("ab", "c") and ("a", "bc") differ.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (seed, *names):
        text = str(part).encode()
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little") >> 1


class RandomStreams:
    """The generators of one rank: "replicated" is equal over tp, "tensor" differs on every rank.

    Both differ between dp ranks, which read other samples, between cp ranks, which hold other
    tokens, and between pp ranks, which hold other layers. Constructing one leaves the default
    generators as they were.
    """

    def __init__(
        self, seed: int, *, tp_rank: int = 0, dp_rank: int = 0, pp_rank: int = 0, cp_rank: int = 0
    ) -> None:
        place: tuple[object, ...] = ("pp", pp_rank, "dp", dp_rank)
        if cp_rank:  # the first rank draws what it draws without context parallelism
            place += ("cp", cp_rank)
        self._states: dict[str, Tensor] = {
            "replicated": _fresh_state(hash_seed(seed, "replicated", *place)),
            "tensor": _fresh_state(hash_seed(seed, "tensor", *place, "tp", tp_rank)),
        }
        self._active: list[str] = []

    @contextmanager
    def fork(self, name: StreamName) -> Iterator[None]:
        """Draw from stream `name` inside the block; the default generators stay unchanged.

        Streams may be nested within each other, but not a stream within itself.
        """
        assert name not in self._active, name  # noqa: S101  # invariant: it would repeat itself
        outside = device.get_rng_state()
        device.set_rng_state(self._states[name])
        self._active.append(name)
        try:
            yield
        finally:
            self._active.remove(name)
            self._states[name] = device.get_rng_state()
            device.set_rng_state(outside)

    def snapshot(self) -> dict[str, Tensor]:
        """Return the present state of every stream, for `restore`, without copying."""
        return dict(self._states)

    def restore(self, snapshot: Mapping[str, Tensor]) -> None:
        """Set every stream to its state at `snapshot`."""
        self._states = dict(snapshot)

    def state_dict(self) -> dict[str, object]:
        """Return every random state of this process: streams, default generators, numpy, Python.

        torch states are uint8 CPU tensors; the numpy and Python states are lists and numbers that
        JSON can hold.
        """
        assert not self._active, self._active  # noqa: S101  # invariant: saved between steps
        return {
            "device_type": device.current().type,
            "streams": dict(self._states),
            "default_cpu": torch.get_rng_state(),
            "default_device": device.get_rng_state(),
            "numpy": _numpy_state(),
            "python": _python_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore every random state from the result of `state_dict`.

        Raises:
            CheckpointError: the states belong to another kind of device, whose generators cannot
                continue each other's numbers.
        """
        here = device.current().type
        if state["device_type"] != here:
            raise CheckpointError(
                "the random states in the checkpoint are of another kind of device",
                found=f"saved on {state['device_type']}, this run uses {here}",
                fix="add --no-load-rng, or continue on the kind of device it was saved on",
            )
        self._states = {name: state["streams"][name] for name in self._states}
        torch.set_rng_state(state["default_cpu"])
        device.set_rng_state(state["default_device"])
        _set_numpy_state(*state["numpy"])
        _set_python_state(*state["python"])


def _fresh_state(seed: int) -> Tensor:
    outside = device.get_rng_state()
    device.default_generator().manual_seed(seed)
    state = device.get_rng_state()
    device.set_rng_state(outside)
    return state


def _numpy_state() -> list[object]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return [kind, np.asarray(keys).tolist(), int(position), int(has_gauss), float(gauss)]


def _set_numpy_state(
    kind: str, keys: list[int], position: int, has_gauss: int, gauss: float
) -> None:
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def _python_state() -> list[object]:
    version, keys, gauss = random.getstate()
    return [version, list(keys), gauss]


def _set_python_state(version: int, keys: list[int], gauss: float | None) -> None:
    random.setstate((version, tuple(keys), gauss))
