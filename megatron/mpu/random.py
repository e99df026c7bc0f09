"""Random numbers as functions of names, and seeds that are stable hashes of names.

What is dropped is a function of the run's seed, of the place in the model, of the sample and of the
token: every rank that holds an element draws the same for it, whatever the layout, and a run that
goes on anywhere draws what it would have drawn. Nothing here is global; a `RandomStreams` is passed
to the code that draws.
"""

import hashlib
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megatron import device
from megatron.errors import CheckpointError

_MOST_TOKENS = 28  # bits for the place in a row, the others are for the number of the row


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


class Samples(NamedTuple):
    """The samples of a micro-batch, by their numbers in the order of the whole run.

    Where a sample has several texts, `text` of `texts` is the one that is worked on: its rows have
    numbers that no row of another text has.
    """

    first: int
    size: int
    text: int = 0
    texts: int = 1


class RandomStreams:
    """The names of what one rank draws: the seed of the run, and the samples that it works on.

    Attributes:
        samples: those of the present pass; None outside of one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.samples: Samples | None = None
        self._origin: Tensor | None = None
        self._of: Samples | None = None
        self._made: dict[Hashable, Tensor] = {}

    def seed_of(self, *place: object) -> int:
        """Return the seed of a place in the model, the same on every rank and in every step."""
        return hash_seed(self._seed, *place)

    @contextmanager
    def of(self, samples: Samples | None) -> Iterator[None]:
        """Work on `samples` inside the block."""
        outside, self.samples = self.samples, samples
        try:
            yield
        finally:
            self.samples = outside

    @contextmanager
    def counted_from(self, origin: Tensor) -> Iterator[None]:
        """Count `samples` from the one of this number, int64 on the device, inside the block."""
        self._origin, self._of = origin, None
        try:
            yield
        finally:
            self._origin, self._of = None, None

    @contextmanager
    def of_text(self, text: int, texts: int) -> Iterator[None]:
        """Work on one of several texts of the present samples inside the block."""
        present = self.samples
        with self.of(None if present is None else present._replace(text=text, texts=texts)):
            yield

    def rows(self, batch: int, device: torch.device) -> Tensor:
        """Return the numbers of the rows of the present micro-batch in the run: int64 [batch].

        Rows beside each other may be of one sample, as the choices of a question are.

        Raises:
            ValueError: the samples do not share the rows out evenly, or there are none.
        """
        first, size, text, texts = self._present()
        if batch % size:
            raise ValueError(f"{batch} rows of {size} samples")
        rows = torch.arange(batch, device=device) + first * (batch // size)
        if self._origin is not None:
            rows += self._origin * (batch // size)
        return rows if texts == 1 else rows * texts + text

    def tokens(self, batch: int, positions: Tensor) -> Tensor:
        """Return the numbers of tokens in the run: int64 [s, batch], of int64 positions [s].

        Tokens of one sample and position have one number, on whatever ranks they are.
        """
        return (self.rows(batch, positions.device) << _MOST_TOKENS) + positions.unsqueeze(1)

    def heads(self, batch: int, heads: range, of: int, length: int, device: torch.device) -> Tensor:
        """Return the numbers of queries in the run: int64 [batch, heads, length], of some heads.

        Args:
            of: how many heads there are.
        """
        of_rows = self.rows(batch, device).view(-1, 1, 1) * of
        of_heads = torch.arange(heads.start, heads.stop, device=device).view(-1, 1)
        return (of_rows + of_heads << _MOST_TOKENS) + torch.arange(length, device=device)

    def once(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return `make()`, made once for the present samples, of all calls with the same key."""
        if self._of != self.samples:
            self._of, self._made = self.samples, {}
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @contextmanager
    def generator(self, *place: object) -> Iterator[None]:
        """Seed the default generator of the device by a place and the present samples.

        For kernels that read no other. Outside the block it stays unchanged.

        Raises:
            ValueError: only the device knows the number of the samples (`counted_from`).
        """
        if self._origin is not None:
            raise ValueError("a generator of the host is seeded by samples that it does not know")
        outside = device.get_rng_state()
        first, size, *text = self._present()
        names = (first, size) if text == [0, 1] else (first, size, *text)
        device.default_generator().manual_seed(self.seed_of(*place, *names))
        try:
            yield
        finally:
            device.set_rng_state(outside)

    def repeat(self) -> Callable[[], AbstractContextManager[None]]:
        """Return what makes blocks in which the numbers of from here on are drawn once more.

        After a block the samples and torch's default generators, of the host and of the device, are
        as before it. That of a device is left out where only the device knows the samples
        (`counted_from`): nothing of the framework draws from it there, and torch reads no state of
        it while a graph is captured.
        """
        generators = {torch.default_generator}  # on a CPU that of the device too
        if self._origin is None:
            generators.add(device.default_generator())
        samples, states = self.samples, _generator_states(generators)

        @contextmanager
        def again() -> Iterator[None]:
            outside = _generator_states(generators)
            _set_generator_states(states)
            try:
                with self.of(samples):
                    yield
            finally:
                _set_generator_states(outside)

        return again

    def _present(self) -> Samples:
        if self.samples is None:
            raise ValueError("something is to be drawn outside of `RandomStreams.of`")
        return self.samples


def _generator_states(generators: Iterable[torch.Generator]) -> dict[torch.Generator, Tensor]:
    return {generator: generator.get_state() for generator in generators}


def _set_generator_states(states: Mapping[torch.Generator, Tensor]) -> None:
    for generator, state in states.items():
        generator.set_state(state)


def default_states() -> dict[str, object]:
    """Return the state of the default generators of torch, NumPy and Python.

    Nothing of the framework draws from them while it trains; a program's own code may. torch states
    are uint8 CPU tensors; the NumPy and Python states are lists and numbers that JSON can hold.
    """
    return {
        "device_type": device.current().type,
        "default_cpu": torch.get_rng_state(),
        "default_device": device.get_rng_state(),
        "numpy": _numpy_state(),
        "python": _python_state(),
    }


def set_default_states(state: Mapping[str, Any]) -> None:
    """Restore the default generators from the result of `default_states`.

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
    torch.set_rng_state(state["default_cpu"])
    device.set_rng_state(state["default_device"])
    _set_numpy_state(*state["numpy"])
    _set_python_state(*state["python"])


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
