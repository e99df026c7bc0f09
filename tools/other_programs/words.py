"""The command line of another Megatron's program, as the words of ours; a pure translation."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.arguments import parse_given
from megatron.errors import ConfigError


class Option(NamedTuple):
    """A flag of another program: the words of ours for it, or why it has no effect.

    Attributes:
        ours: what stands for the flag itself.
        num_values: values that follow it, which follow `ours` unless the flag has no effect.
        because: why it has no effect; None: it has one.
    """

    ours: tuple[str, ...] = ()
    num_values: int = 1
    because: str | None = None


class OtherProgram(NamedTuple):
    """Another Megatron's program.

    Attributes:
        module: ours, run as a program.
        about: one line for `--help`: what ours is.
        options: its flags that are not ours; all others are passed on as they are.
        first: words that ours needs before all others.
        completed: adds what is a default there and not here.
        keeps: flags that are passed on where those of a training run are left out, because a
            checkpoint records them; None: nothing is left out.
    """

    module: str
    about: str
    options: Mapping[str, Option] = {}
    first: tuple[str, ...] = ()
    completed: Callable[[list[str]], list[str]] = lambda words: words
    keeps: tuple[str, ...] | None = None


class Translation(NamedTuple):
    """The words of ours, and what of the others has no effect."""

    words: list[str]
    notes: list[str]


def translated(program: OtherProgram, argv: Sequence[str]) -> Translation:
    """Return the command line of our program for one of another.

    Raises:
        ConfigError: a flag lacks its value.
        CommandLineError: a flag that neither program has, where those of a run are left out.
    """
    words: list[str] = []
    notes: list[str] = []
    rest = [part for word in argv for part in _split(word, program.options)]
    others: list[str] = []
    while rest:
        word = rest.pop(0)
        option = program.options.get(word)
        if option is None:
            kept = program.keeps is None or word in program.keeps
            (words if kept else others).append(word)
            while kept and rest and not rest[0].startswith("--"):
                words.append(rest.pop(0))
            continue
        values, rest = rest[: option.num_values], rest[option.num_values :]
        if len(values) < option.num_values:
            raise ConfigError(
                "a flag lacks its value", found=word, fix=f"write a value after {word}"
            )
        if option.because is None:
            words += [*option.ours, *values]
        else:
            notes.append(
                f"{' '.join([word, *values])}: accepted, has no effect here because "
                f"{option.because}"
            )
    if others:
        parse_given(others)
        notes.append(f"{' '.join(others)}: not needed, as the checkpoint records its model")
    return Translation([*program.first, *program.completed(words)], notes)


def _split(word: str, options: Mapping[str, Option]) -> list[str]:
    name, equals, value = word.partition("=")
    return [name, value] if equals and name in options else [word]
