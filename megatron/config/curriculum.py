"""Curriculum: the length of training sequences as a function of the iteration, and nothing else.

The schedules and their arithmetic are DeepSpeed's (`curriculum_learning`, type seqlen; Li et al.
2022, arXiv 2108.06084), so a block of its JSON and our own flags give the same value. Because
nothing is stored, a resumed run cannot differ from an uninterrupted one. What a reader would get
wrong: DeepSpeed counts steps from 1, and a linear schedule ends at a multiple of its step, so that
it may reach its maximum some iterations after its last.
"""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from megatron.errors import ConfigError
from megatron.json_values import JsonObject


class CurriculumSchedule(StrEnum):
    """How the length grows; DeepSpeed's names."""

    FIXED_LINEAR = "fixed_linear"
    FIXED_ROOT = "fixed_root"
    FIXED_DISCRETE = "fixed_discrete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Tokens of a training sample by iteration; made of checked values only.

    Attributes:
        min_length: no sample is shorter (rounded up to a multiple of `step`).
        max_length: no sample is longer.
        iterations: over how many it grows from one to the other (linear, root).
        step: lengths are multiples of it (linear, root).
        root_degree: 2 grows with the square root of the iteration, 1 linearly.
        lengths: one after the other (discrete).
        until: the last iteration, counted from 1, of each length but the last (discrete).
    """

    schedule: CurriculumSchedule
    min_length: int
    max_length: int
    iterations: int = 1
    step: int = 1
    root_degree: float = 1.0
    lengths: tuple[int, ...] = ()
    until: tuple[int, ...] = ()

    def length_at(self, iteration: int) -> int:
        """Return tokens per sample in the iteration that starts after `iteration` of them."""
        number = iteration + 1  # DeepSpeed's count of the step
        if self.schedule is CurriculumSchedule.FIXED_DISCRETE:
            stage = next((at for at, last in enumerate(self.until) if number <= last), -1)
            return self.lengths[stage]
        share: float = (float(number) / self.iterations) ** (1.0 / self.root_degree)
        grown = math.floor(share * (self.max_length - self.min_length) + self.min_length)
        return min(max(grown - grown % self.step, self._shortest), self.max_length)

    @property
    def all_lengths(self) -> tuple[int, ...]:
        """Every length that a run may use, ascending."""
        if self.schedule is CurriculumSchedule.FIXED_DISCRETE:
            return tuple(sorted(set(self.lengths)))
        multiples = range(self._shortest, self.max_length, self.step)
        return (*multiples, self.max_length)

    @property
    def settled_at(self) -> int:
        """The first iteration, from 0, after which the length no longer changes."""
        if self.schedule is CurriculumSchedule.FIXED_DISCRETE:
            return self.until[-1]
        below, settled = -1, 1
        while self.length_at(settled) < self.max_length:
            below, settled = settled, 2 * settled
        while settled - below > 1:  # lengths never shrink
            middle = (below + settled) // 2
            if self.length_at(middle) < self.max_length:
                below = middle
            else:
                settled = middle
        return settled

    def __str__(self) -> str:
        if self.schedule is CurriculumSchedule.FIXED_DISCRETE:
            stages = zip(self.lengths, (*(f"to iteration {last}" for last in self.until), "then"))
            return f"{self.schedule.value}: " + ", ".join(
                f"{n} tokens {when}" for n, when in stages
            )
        degree = f", degree {self.root_degree:g}" if self.root_degree != 1 else ""
        return (
            f"{self.schedule.value}{degree}: {self.min_length} to {self.max_length} tokens over "
            f"{self.iterations} iterations, in multiples of {self.step}"
        )

    @property
    def _shortest(self) -> int:
        return -(-self.min_length // self.step) * self.step


class CurriculumFlags(Protocol):
    """The fields of `TrainingConfig` that are about the curriculum."""

    @property
    def curriculum_schedule(self) -> CurriculumSchedule | None: ...
    @property
    def curriculum_seqlen_min(self) -> int | None: ...
    @property
    def curriculum_seqlen_max(self) -> int | None: ...
    @property
    def curriculum_seqlen_step(self) -> int | None: ...
    @property
    def curriculum_iters(self) -> int | None: ...
    @property
    def curriculum_root_degree(self) -> float | None: ...
    @property
    def curriculum_seqlens(self) -> tuple[int, ...] | None: ...
    @property
    def curriculum_seqlens_until(self) -> tuple[int, ...] | None: ...


# The name of each value in flags and in DeepSpeed's block.
_FLAGS: Mapping[str, str] = {
    "min_length": "--curriculum-seqlen-min",
    "max_length": "--curriculum-seqlen-max",
    "iterations": "--curriculum-iters",
    "step": "--curriculum-seqlen-step",
    "root_degree": "--curriculum-root-degree",
    "lengths": "--curriculum-seqlens",
    "until": "--curriculum-seqlens-until",
}
_KEYS: Mapping[str, str] = {
    "min_length": "min_difficulty",
    "max_length": "max_difficulty",
    "iterations": "total_curriculum_step",
    "step": "difficulty_step",
    "root_degree": "root_degree",
    "lengths": "difficulty",
    "until": "max_step",
}
_LINEAR = ("min_length", "max_length", "iterations", "step")
_NEEDS: Mapping[CurriculumSchedule, tuple[str, ...]] = {
    CurriculumSchedule.FIXED_LINEAR: _LINEAR,
    CurriculumSchedule.FIXED_ROOT: (*_LINEAR, "root_degree"),
    CurriculumSchedule.FIXED_DISCRETE: ("lengths", "until"),
}
_OUTER_KEYS = ("min_length", "max_length")  # the others are in schedule_config


def curriculum_of_flags(flags: CurriculumFlags, *, seq_length: int) -> Curriculum | None:
    """Return the curriculum of the --curriculum flags, or None.

    Without --curriculum-seqlen-max it grows to `seq_length`.
    """
    schedule = flags.curriculum_schedule
    if schedule is None:
        return None
    return _build_curriculum(schedule, {"max_length": seq_length} | _values_of_flags(flags))


def curriculum_problems(flags: CurriculumFlags) -> Iterator[ConfigError]:
    """Yield the contradictions in the flags about the curriculum."""
    values, schedule = _values_of_flags(flags), flags.curriculum_schedule
    if schedule is None:
        if values:
            yield ConfigError(
                "a flag of a curriculum was given, but no schedule for it",
                found=" ".join(_FLAGS[name] for name in values),
                fix="add --curriculum-schedule fixed_linear (or fixed_root, fixed_discrete)",
            )
        return
    shown = f"--curriculum-schedule {schedule}"
    needs = [name for name in _NEEDS[schedule] if name != "max_length"]
    yield from _value_problems(values, needs, _NEEDS[schedule], _FLAGS, shown)


def curriculum_of_block(block: JsonObject) -> Curriculum | None:
    """Return the curriculum of a `curriculum_learning` block of DeepSpeed's JSON; None if disabled.

    Raises:
        ConfigError: the first problem of the block.
    """
    _refuse_unknown(
        block,
        ("enabled", "curriculum_type", "schedule_type", "schedule_config", "min_difficulty",
         "max_difficulty"),
        "curriculum_learning",
    )  # fmt: skip
    enabled, inner = block.get("enabled", False), block.get("schedule_config", {})
    if not isinstance(enabled, bool) or not isinstance(inner, Mapping):
        raise ConfigError(
            "a curriculum is switched on by true, and its schedule_config is an object in braces",
            found=f"curriculum_learning.enabled {enabled!r}, .schedule_config {inner!r}",
            fix='write "enabled": true and "schedule_config": {...}',
        )
    if not enabled:
        return None
    if (kind := block.get("curriculum_type", "seqlen")) != "seqlen":
        raise ConfigError(
            "a curriculum of something else than the sequence length",
            found=f"curriculum_learning.curriculum_type {kind!r}",
            fix='use "curriculum_type": "seqlen"',
        )
    try:
        schedule = CurriculumSchedule(str(block.get("schedule_type")))
    except ValueError:
        raise ConfigError(
            "a curriculum has no schedule that is known",
            found=f"curriculum_learning.schedule_type {block.get('schedule_type')!r}",
            fix="use one of " + ", ".join(CurriculumSchedule),
        ) from None
    names = {key: name for name, key in _KEYS.items()}
    _refuse_unknown(
        inner,
        [_KEYS[name] for name in _KEYS if name not in _OUTER_KEYS],
        "curriculum_learning.schedule_config",
    )
    outer = [_KEYS[name] for name in _OUTER_KEYS]
    given = {key: block[key] for key in outer if key in block} | dict(inner)
    values = {
        names[key]: tuple(value) if isinstance(value, list) else value
        for key, value in given.items()
    }
    needs = tuple(dict.fromkeys((*_OUTER_KEYS, *_NEEDS[schedule])))
    shown = f"curriculum_learning with schedule_type {schedule}"
    for problem in _value_problems(values, needs, needs, _KEYS, shown):
        raise problem
    return _build_curriculum(schedule, values)


def flags_of_block(block: JsonObject) -> dict[str, object]:
    """Return the --curriculum flags, by field name, that mean the same as a block of the JSON.

    Raises:
        ConfigError: as `curriculum_of_block`.
    """
    curriculum = curriculum_of_block(block)
    if curriculum is None:
        return {}
    needs = _NEEDS[curriculum.schedule]
    values = {name: getattr(curriculum, name) for name in needs}
    fields = {flag: _FLAGS[flag].removeprefix("--").replace("-", "_") for flag in _FLAGS}
    return {"curriculum_schedule": curriculum.schedule} | {
        fields[name]: values[name] for name in needs
    }


def one_curriculum(flags: Curriculum | None, block: Curriculum | None) -> Curriculum | None:
    """Return the curriculum of a run, given by flags, by DeepSpeed's JSON, or equally by both.

    Raises:
        ConfigError: they give two different ones.
    """
    if flags is not None and block is not None and flags != block:
        raise ConfigError(
            "the flags and DeepSpeed's JSON give two curricula",
            found=f"flags: {flags}; JSON: {block}",
            fix="leave out the --curriculum flags, or the curriculum_learning block",
        )
    return flags or block


def _build_curriculum(schedule: CurriculumSchedule, values: Mapping[str, object]) -> Curriculum:
    """Build a curriculum from values without problems."""
    lengths = _numbers(values, "lengths")
    # The ends of a discrete schedule follow from its lengths.
    ends = {} if lengths is None else {"min_length": lengths[0], "max_length": lengths[-1]}
    make: Callable[..., Curriculum] = Curriculum
    return make(schedule=schedule, **{**values, **ends})


def _number(values: Mapping[str, object], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) else None


def _numbers(values: Mapping[str, object], name: str) -> tuple[int, ...] | None:
    value = values.get(name)
    return value if isinstance(value, tuple) else None


def _values_of_flags(flags: CurriculumFlags) -> dict[str, object]:
    given: dict[str, object] = {
        "min_length": flags.curriculum_seqlen_min,
        "max_length": flags.curriculum_seqlen_max,
        "iterations": flags.curriculum_iters,
        "step": flags.curriculum_seqlen_step,
        "root_degree": flags.curriculum_root_degree,
        "lengths": flags.curriculum_seqlens,
        "until": flags.curriculum_seqlens_until,
    }
    return {name: value for name, value in given.items() if value is not None}


def _value_problems(
    values: Mapping[str, object],
    needs: Sequence[str],
    allowed: Sequence[str],
    spelled: Mapping[str, str],
    shown: str,
) -> Iterator[ConfigError]:
    """Yield errors for missing, unused and impossible values of a schedule."""
    if missing := [spelled[name] for name in needs if name not in values]:
        yield ConfigError(
            "a curriculum lacks what its schedule is made of",
            found=f"{shown} without {', '.join(missing)}",
            fix=f"give {' and '.join(missing)}",
        )
    if useless := [spelled[name] for name in values if name not in allowed]:
        yield ConfigError(
            "a curriculum was given what its schedule does not read",
            found=f"{shown} and {', '.join(useless)}",
            fix=f"leave {' and '.join(useless)} out, or choose the schedule that reads it",
        )
    odd = [name for name, value in values.items() if not _is_possible(name, value)]
    for name in odd:
        yield ConfigError(
            "a curriculum is made of positive numbers",
            found=f"{spelled[name]} {values[name]!r}",
            fix="use whole numbers of tokens and iterations from 1 on, such as 64",
        )
    if not missing and not odd:
        yield from _order_problems(values, spelled)


def _is_possible(name: str, value: object) -> bool:
    if name in ("lengths", "until"):
        return isinstance(value, tuple) and bool(value) and all(map(_is_count, value))
    if name == "root_degree":
        return _is_count(value) or (type(value) is float and 0 < value < math.inf)
    return _is_count(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _order_problems(
    values: Mapping[str, object], spelled: Mapping[str, str]
) -> Iterator[ConfigError]:
    """Yield errors for values that are possible one by one, but not together."""
    shortest, longest = _number(values, "min_length"), _number(values, "max_length")
    if shortest is not None and longest is not None and shortest > longest:
        yield ConfigError(
            "a curriculum starts above its end",
            found=f"{spelled['min_length']} {shortest}, {spelled['max_length']} {longest}",
            fix="exchange the two",
        )
    lengths, until = _numbers(values, "lengths"), _numbers(values, "until")
    if lengths is None or until is None:
        return
    shown = f"{spelled['lengths']} {_listed(lengths)}, {spelled['until']} {_listed(until)}"
    if len(lengths) != len(until) + 1:
        yield ConfigError(
            "a curriculum needs the last iteration of each of its lengths but the last",
            found=shown,
            fix=f"give {len(lengths) - 1} iterations for {len(lengths)} lengths",
        )
    elif list(lengths) != sorted(lengths) or list(until) != sorted(set(until)):
        yield ConfigError(
            "a curriculum does not go upwards",
            found=shown,
            fix="sort both lists",
        )
    elif lengths[0] < (shortest or 1) or lengths[-1] > (longest or math.inf):
        yield ConfigError(
            "lengths of a curriculum lie outside of its ends",
            found=f"{shown}, {spelled['min_length']} {shortest}, {spelled['max_length']} {longest}",
            fix=f"use {spelled['min_length']} {lengths[0]} and {spelled['max_length']} "
            f"{lengths[-1]}",
        )


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _refuse_unknown(block: JsonObject, known: Sequence[str], where: str) -> None:
    for key in block:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            raise ConfigError(
                "DeepSpeed's JSON holds a key of a curriculum that has no effect",
                found=f"{where}.{key}",
                fix=f"did you mean {near}?",
            )
