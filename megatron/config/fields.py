"""A command-line flag is declared once, as a dataclass field; this module reads it back.

Name, type and default come from the field, help and spellings from `flag()`. This module is
independent of particular flags, and does not import torch: `--help` must be fast.
"""

import argparse
import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar

from megatron.errors import ConfigError
from megatron.json_values import JsonValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

C = TypeVar("C", bound="DataclassInstance")


def flag(
    default: object = dataclasses.MISSING,
    *,
    help: str,
    aliases: Sequence[str] = (),
    off: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
) -> Any:
    """Return a config field that is also a flag.

    Args:
        aliases: other spellings of the flag.
        off: spellings that mean "no" (`--disable-bias-linear`), for a boolean field.
        values: legacy spellings of values of an enum or a boolean field (`rotary` for `rope`).
    """
    metadata = {
        "help": help,
        "aliases": tuple(aliases),
        "off": tuple(off),
        "values": dict(values or {}),
    }
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field_name: str) -> str:
    """Return the flag of a field: `hidden_size` is `--hidden-size`."""
    return "--" + field_name.replace("_", "-")


def field_names(group: "type[DataclassInstance]") -> tuple[str, ...]:
    """Return the names of a config group's fields, in order."""
    return tuple(field.name for field in dataclasses.fields(group))


def default_of(group: "type[DataclassInstance]", field_name: str) -> object:
    """Return the default of one field of a config group."""
    (field,) = (one for one in dataclasses.fields(group) if one.name == field_name)
    return field.default


def plain_default(group: "type[DataclassInstance]", field_name: str) -> JsonValue:
    """Return the default of one field as `to_plain` would give it."""
    return _plain(default_of(group, field_name))


def check_field(
    condition: bool, field_name: str, value: object, *, problem: str, fix: str
) -> Iterator[ConfigError]:
    """Yield one `ConfigError` that spells the field as its flag, unless `condition` holds."""
    if not condition:
        yield ConfigError(problem, found=f"{flag_name(field_name)} {value}", fix=fix)


def check_loss_weight(field_name: str, value: float) -> Iterator[ConfigError]:
    """Yield an error unless `value`, the weight of a loss, is a finite number from 0."""
    yield from check_field(
        0 <= value < math.inf,
        field_name,
        value,
        problem="the weight of a loss is not a number from 0",
        fix="use a small number, such as 0.001, or 0 for none",
    )


def raise_all(errors: Iterator[ConfigError]) -> None:
    """Raise all problems of a config group as one error."""
    found = list(errors)
    if len(found) == 1:
        raise found[0]
    if found:
        raise FieldsError(found)


class FieldsError(ConfigError):
    """Several problems of one config group; `errors` holds each of them."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        self.errors = tuple(errors)
        super().__init__(
            "\n".join(str(error) for error in errors), fix="mend each of the flags named above"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (FieldsError, (self.errors,))


def add_flags(
    parser: argparse.ArgumentParser,
    title: str,
    group: "type[DataclassInstance]",
    problems: list[ConfigError],
) -> None:
    """Add to `parser`, under `title`, one flag for every field of the config class `group`.

    Values that cannot be converted are appended to `problems` instead of ending the program, so
    that all problems of a command line are reported together.
    """
    section = parser.add_argument_group(title, (group.__doc__ or "").strip())
    hints = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        section.add_argument(
            *(flag_name(field.name), *field.metadata["aliases"]),
            dest=field.name,
            default=argparse.SUPPRESS,  # the dataclass owns the default, in one place
            help=_help(field),
            **_argparse_options(field, hints[field.name], problems),
        )
        if hints[field.name] is bool:
            section.add_argument(
                *("--no-" + field.name.replace("_", "-"), *field.metadata["off"]),
                dest=field.name,
                default=argparse.SUPPRESS,
                action="store_const",
                const=False,
                help=argparse.SUPPRESS,
            )


def from_flags(group: type[C], parsed: Mapping[str, object]) -> C:
    """Build one frozen config from the given flags; defaults are those of the dataclass."""
    fields = {field.name: field for field in dataclasses.fields(group)}
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in parsed
    ]
    if missing:
        raise ConfigError(
            "a required flag is missing",
            found="no " + ", no ".join(flag_name(name) for name in missing),
            fix="add " + " ".join(f"{flag_name(name)} <value>" for name in missing),
        )
    make: Callable[..., C] = group
    return make(**{name: value for name, value in parsed.items() if name in fields})


def to_plain(group: "DataclassInstance") -> dict[str, JsonValue]:
    """Return the fields of a config group as JSON values; `from_plain` turns them back exactly."""
    return {field.name: _plain(getattr(group, field.name)) for field in dataclasses.fields(group)}


def from_plain(group: type[C], values: Mapping[str, object]) -> C:
    """Rebuild a config group from `to_plain`.

    A missing field takes its default: versions without the flag behaved so.

    Raises:
        ConfigError: unknown names, required ones that are absent, or values of another version.
    """
    hints = typing.get_type_hints(group)
    fields = {field.name: field for field in dataclasses.fields(group)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigError(
            f"a stored {group.__name__} holds fields that this version does not know",
            found=", ".join(unknown),
            fix="read it with the version that wrote it",
        )
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and name not in values
    ]
    if missing:
        raise ConfigError(
            f"a stored {group.__name__} lacks fields that this version requires",
            found="no " + ", no ".join(missing),
            fix="read it with the version that wrote it",
        )
    make: Callable[..., C] = group
    return make(**{name: _stored(group, name, hints[name], values[name]) for name in values})


def _stored(group: type, name: str, hint: object, value: object) -> object:
    try:
        return _typed(_kind_of(hint), value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a stored {group.__name__} holds a value that this version does not know",
            found=f"{name}: {value!r}",
            fix="read it with the version that wrote it",
        ) from error


def _plain(value: object) -> JsonValue:
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # "Infinity" stays readable JSON
    assert value is None or isinstance(value, int | float | str), value  # noqa: S101  # invariant: kinds of flags
    return value


class _Kind(NamedTuple):
    """The type of a field's values, or of the items where the field is a tuple."""

    item: type
    is_tuple: bool


def _kind_of(hint: object) -> _Kind:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):  # `X | None`
        (hint,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
    is_tuple = typing.get_origin(hint) is tuple
    item = typing.get_args(hint)[0] if is_tuple else hint
    assert isinstance(item, type), hint  # noqa: S101  # invariant: kinds of flags
    return _Kind(item, is_tuple)


def _typed(kind: _Kind, value: object) -> object:
    if value is None:
        return None
    if kind.is_tuple:
        if not isinstance(value, Iterable):
            raise TypeError(value)
        return tuple(_typed(kind._replace(is_tuple=False), item) for item in value)
    if issubclass(kind.item, enum.Enum):
        return kind.item(value)
    if kind.item is not float:
        return value
    if not isinstance(value, int | float | str):
        raise TypeError(value)
    return float(value)


def _help(field: dataclasses.Field[object]) -> str:
    text = str(field.metadata["help"]).replace("%", "%%")
    if field.default is dataclasses.MISSING:
        return f"{text} [required]"
    if field.default is None:
        return f"{text} [not set]"
    default = field.default
    if isinstance(default, tuple):
        shown = " ".join(str(_plain(item)) for item in default) or "none"
    else:
        shown = (
            {True: "on", False: "off"}[default]
            if isinstance(default, bool)
            else str(_plain(default))
        )
    switch = f"; --no-{field.name.replace('_', '-')} turns it off" if default is True else ""
    return f"{text} [{shown}{switch}]"


class _ArgparseOptions(TypedDict, total=False):
    type: Callable[[str], object]
    nargs: str
    const: bool
    action: type[argparse.Action]
    metavar: str


def _argparse_options(
    field: dataclasses.Field[object], hint: object, problems: list[ConfigError]
) -> _ArgparseOptions:
    kind, is_tuple = _kind_of(hint)
    name = flag_name(field.name)
    if is_tuple:
        return {
            "type": _converter(name, kind, {}, problems),
            "nargs": "+",
            "action": _AsTuple,
            "metavar": kind.__name__.upper(),
        }
    if kind is bool:
        convert = _converter(name, bool, field.metadata["values"], problems)
        return {"type": convert, "nargs": "?", "const": True, "metavar": "true|false"}
    if issubclass(kind, enum.Enum):
        convert = _converter(name, kind, field.metadata["values"], problems)
        return {"type": convert, "metavar": "{" + ",".join(str(c.value) for c in kind) + "}"}
    return {"type": _converter(name, kind, {}, problems), "metavar": kind.__name__.upper()}


def _converter(
    name: str, kind: type, spellings: Mapping[str, str], problems: list[ConfigError]
) -> Callable[[str], object]:
    def convert(text: str) -> object:
        try:
            word = spellings.get(text, text)
            return {"true": True, "false": False}[word.lower()] if kind is bool else kind(word)
        except (ValueError, KeyError):
            problems.append(
                ConfigError(
                    "a flag was given a value of the wrong kind",
                    found=f"{name} {text}",
                    fix=f"give {_expected(kind)}",
                )
            )
            return None

    convert.__name__ = kind.__name__
    return convert


def _expected(kind: type) -> str:
    if issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(choice.value) for choice in kind)
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(kind, "a text")


class _AsTuple(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[object] | None,
        option: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, tuple(values or ()))


def is_number(word: str) -> bool:
    """Return whether a word of a command line is a number, such as the weight of a corpus."""
    try:
        float(word)
    except ValueError:
        return False
    return True
