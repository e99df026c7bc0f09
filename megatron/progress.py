"""How far a run is, and how large its batches are, as frozen values and pure functions.

Everything that depends on "where are we" (learning rate, micro-batches, the next sample) is
computed from a `Progress`; nothing counts on its own. Iterations here are counted from 0, and a
skipped iteration has still consumed its samples.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megatron.errors import CheckpointError, ConfigError


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a training run; immutable, replaced after each iteration."""

    iteration: int = 0
    consumed_samples: int = 0
    consumed_tokens: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    nonfinite_in_a_row: int = 0  # 0 as soon as one iteration is fine again

    def after(
        self, *, samples: int, tokens: int, skipped: bool = False, nonfinite: bool | None = None
    ) -> "Progress":
        """Return the progress after one more iteration of `samples` and `tokens`.

        Args:
            skipped: the weights were not updated.
            nonfinite: the skip counts towards --nonfinite-limit. When not given, every skip does;
                an overflow under dynamic loss scaling is expected and should not.
        """
        bad = skipped if nonfinite is None else nonfinite
        return dataclasses.replace(
            self,
            iteration=self.iteration + 1,
            consumed_samples=self.consumed_samples + samples,
            consumed_tokens=self.consumed_tokens + tokens,
            skipped_iterations=self.skipped_iterations + int(skipped),
            nonfinite_in_a_row=self.nonfinite_in_a_row + 1 if bad else 0,
        )

    def after_evaluation(self, *, samples: int) -> "Progress":
        """Return the progress after an evaluation on `samples` validation samples."""
        return dataclasses.replace(
            self, consumed_valid_samples=self.consumed_valid_samples + samples
        )

    def to_plain(self) -> dict[str, int]:
        """Return the counters as JSON values; `from_plain` turns them back exactly."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, values: Mapping[str, int]) -> "Progress":
        """Rebuild from `to_plain`; a missing, unknown or negative counter is an error."""
        names = {field.name for field in dataclasses.fields(cls)}
        wrong = sorted(names.symmetric_difference(values)) or sorted(
            name for name, value in values.items() if type(value) is not int or value < 0
        )
        if wrong:
            raise CheckpointError(
                "the stored progress of a run is not one that this version wrote",
                found=", ".join(f"{name}={values.get(name, 'missing')}" for name in wrong),
                fix="resume from another checkpoint, or read it with the version that wrote it",
            )
        return cls(**values)


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The global batch size as a function of the samples consumed so far.

    Without `rampup` and `steps` it is constant. With `rampup = (start, increment, samples)` it
    grows in equal stretches of samples, as in Megatron: start + increment * floor(consumed * steps
    / samples), and `global_batch_size` from `samples` on. It is computed in integers, so that no
    stretch ends an iteration early or late by rounding. With `steps` it is that of the last one
    that has begun, and `global_batch_size` is the largest of them.
    """

    micro_batch_size: int
    global_batch_size: int
    data_parallel_size: int
    rampup: tuple[int, int, int] | None = None
    steps: tuple[tuple[int, int], ...] = ()  # (consumed samples from which on, size), from 0 on

    def __post_init__(self) -> None:
        self._check_global_batch_size()
        if self.rampup is not None:
            self._check_rampup(*self.rampup)
        self._check_steps()

    @property
    def samples_per_microbatch(self) -> int:
        """Samples in one micro-batch of all data-parallel ranks together."""
        return self.micro_batch_size * self.data_parallel_size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every global batch size of the run, in order."""
        return tuple(stretch.size for stretch in self._stretches())

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the samples in the iteration that starts at `consumed_samples`."""
        if self.steps:
            return next(size for begin, size in self.steps[::-1] if begin <= consumed_samples)
        if self.rampup is None:
            return self.global_batch_size
        start, increment, samples = self.rampup
        steps = (self.global_batch_size - start) // increment
        return start + increment * min(steps, consumed_samples * steps // samples)

    def num_microbatches_at(self, consumed_samples: int) -> int:
        """Return micro-batches per data-parallel rank in the iteration that starts there."""
        return self.global_batch_size_at(consumed_samples) // self.samples_per_microbatch

    def samples_before(self, iteration: int) -> int:
        """Return the samples consumed before iteration `iteration` (from 0)."""
        consumed = done = 0
        for size, until in self._stretches():
            steps = iteration - done
            if until is not None:
                steps = min(steps, _ceil_divide(max(until - consumed, 0), size))
            consumed, done = consumed + steps * size, done + steps
        return consumed

    def iterations_within(self, samples: int) -> int:
        """Return the number of iterations, from the start of a run, that fit into `samples`."""
        consumed = done = 0
        for size, until in self._stretches():
            fitting = (samples - consumed) // size
            wanted = fitting if until is None else _ceil_divide(max(until - consumed, 0), size)
            steps = min(fitting, wanted)
            consumed, done = consumed + steps * size, done + steps
            if fitting < wanted:
                break
        return done

    def _stretches(self) -> Iterator["_Stretch"]:
        for (_, size), (until, _) in pairwise(self.steps):
            yield _Stretch(size, until)
        if self.rampup is not None:
            start, increment, samples = self.rampup
            steps = (self.global_batch_size - start) // increment
            for step in range(steps):
                yield _Stretch(start + step * increment, _ceil_divide((step + 1) * samples, steps))
        yield _Stretch(self.steps[-1][1] if self.steps else self.global_batch_size, None)

    def _check_global_batch_size(self) -> None:
        unit = self.samples_per_microbatch
        if self.global_batch_size % unit:
            below = self.global_batch_size // unit * unit
            nearest = [str(size) for size in (below, below + unit) if size]
            raise ConfigError(
                "the global batch does not divide into whole micro-batches",
                found=f"--global-batch-size {self.global_batch_size}, --micro-batch-size "
                f"{self.micro_batch_size} on {self.data_parallel_size} data-parallel ranks "
                f"({unit} samples at a time)",
                fix="use --global-batch-size " + " or ".join(nearest),
            )

    def _check_steps(self) -> None:
        begins = [begin for begin, _ in self.steps]
        if begins[:1] not in ([], [0]) or any(a >= b for a, b in pairwise(begins)):
            raise ConfigError(
                "two batch sizes of a schedule begin with the same sample",
                found=f"sizes {[size for _, size in self.steps]} from samples {begins} on",
                fix="let each size of --step-batch-size-schedule last for one sample or more",
            )
        unit = self.samples_per_microbatch
        uneven = [size for _, size in self.steps if size % unit]
        if uneven:
            raise ConfigError(
                "a step of the batch-size schedule does not divide into whole micro-batches",
                found=f"a global batch of {uneven[0]} in --step-batch-size-schedule, "
                f"--micro-batch-size {self.micro_batch_size} on {self.data_parallel_size} "
                f"data-parallel ranks ({unit} samples at a time)",
                fix=f"use multiples of {unit}",
            )

    def _check_rampup(self, start: int, increment: int, samples: int) -> None:
        target = self.global_batch_size
        shown = f"--rampup-batch-size {start} {increment} {samples}"
        if min(start, increment, samples) <= 0 or start >= target or (target - start) % increment:
            raise ConfigError(
                "the batch-size ramp does not arrive at the global batch size",
                found=f"{shown}, --global-batch-size {target}",
                fix=self._working_rampup(start, increment, samples),
            )
        unit = self.samples_per_microbatch
        uneven = [size for size in range(start, target, increment) if size % unit]
        if uneven:
            raise ConfigError(
                "a step of the batch-size ramp does not divide into whole micro-batches",
                found=f"{shown} goes through a global batch of {uneven[0]}, --micro-batch-size "
                f"{self.micro_batch_size} on {self.data_parallel_size} data-parallel ranks "
                f"({unit} samples at a time)",
                fix=self._working_rampup(start, increment, samples),
            )

    def _working_rampup(self, start: int, increment: int, samples: int) -> str:
        """Return a fix: the nearest ramp whose every step divides."""
        unit, target = self.samples_per_microbatch, self.global_batch_size
        starts = range(unit, target, unit)
        if not starts:
            return "drop --rampup-batch-size: the global batch is a single micro-batch"
        near = min(starts, key=lambda size: abs(size - start))
        rest = target - near
        steps = [size for size in range(unit, rest + 1, unit) if rest % size == 0]
        step = min(steps, key=lambda size: abs(size - increment))
        return f"use --rampup-batch-size {near} {step} {max(samples, 1)}"


class _Stretch(NamedTuple):
    """A part of the run with a constant global batch size."""

    size: int
    until: int | None  # consumed samples at which the next stretch starts; None: never


@dataclass(frozen=True, slots=True)
class TokenCount:
    """How many tokens the iterations of a run consume, when the length of samples may change.

    Attributes:
        length_at: tokens of each sample in an iteration, counted from 0.
        settled_at: the first iteration from which on that length stays what it is.
    """

    batch_schedule: BatchSchedule
    length_at: Callable[[int], int]
    settled_at: int = 0

    def before(self, iteration: int) -> int:
        """Return the tokens consumed before iteration `iteration` (from 0)."""
        return self.of_samples(self.batch_schedule.samples_before(iteration))

    def of_samples(self, samples: int) -> int:
        """Return the tokens of the run's first `samples` samples."""
        tokens = counted = iteration = 0
        while iteration < self.settled_at:
            size = self.batch_schedule.global_batch_size_at(counted)
            if counted + size > samples:
                break
            tokens += size * self.length_at(iteration)
            counted, iteration = counted + size, iteration + 1
        return tokens + (samples - counted) * self.length_at(iteration)


@dataclass(frozen=True, slots=True)
class Duration:
    """The length of a run: a number of iterations, or a number of samples.

    A run measured in samples ends with the last global batch that fits into them (as in Megatron),
    so `total_samples` can be less than `train_samples` by a part of a batch. With `train_tokens`,
    which are counted by `tokens`, it may end earlier: with the iteration that reaches them.
    """

    batch_schedule: BatchSchedule
    train_iters: int | None = None
    train_samples: int | None = None
    train_tokens: int | None = None
    tokens: TokenCount | None = None

    def __post_init__(self) -> None:
        counted = self.train_tokens is None or self.tokens is not None
        assert counted  # noqa: S101  # invariant: a limit of tokens comes with their count
        limits = (self.train_iters is None) + (self.train_samples is None)
        assert limits == 1  # noqa: S101  # invariant: TrainingConfig has exactly one of the two
        if self.total_iterations < 1:
            first = self.batch_schedule.global_batch_size_at(0)
            raise ConfigError(
                "the training is shorter than one iteration",
                found=f"--train-samples {self.train_samples}, the first global batch has {first}",
                fix=f"use --train-samples {first} or more",
            )

    @property
    def total_iterations(self) -> int:
        """Iterations from the start of the run to its end."""
        most = self.train_iters or 0
        if self.train_samples is not None:
            most = self.batch_schedule.iterations_within(self.train_samples)
        if self.train_tokens is None or self.tokens is None:
            return most
        return _iterations_until(self.tokens, self.train_tokens, most)

    @property
    def total_samples(self) -> int:
        """Samples consumed from the start of the run to its end, exactly."""
        return self.batch_schedule.samples_before(self.total_iterations)

    def is_done(self, progress: Progress) -> bool:
        """Return whether the run has no further iteration.

        A run in samples looks at the samples, not at the iterations: after a change of batch size
        between two starts it still ends at that number.
        """
        if self.train_tokens is not None and progress.consumed_tokens >= self.train_tokens:
            return True
        if self.train_samples is not None:
            following = self.batch_schedule.global_batch_size_at(progress.consumed_samples)
            return progress.consumed_samples + following > self.train_samples
        return progress.iteration >= (self.train_iters or 0)


@lru_cache(maxsize=16)  # called at every step with the same arguments
def _iterations_until(tokens: TokenCount, wanted: int, most: int) -> int:
    """Return how many iterations consume `wanted` tokens, at most `most`."""
    below, enough = 0, most
    if tokens.before(most) < wanted:
        return most
    while enough - below > 1:
        middle = (below + enough) // 2
        if tokens.before(middle) < wanted:
            below = middle
        else:
            enough = middle
    return enough


def _ceil_divide(value: int, divisor: int) -> int:
    return -(-value // divisor)
