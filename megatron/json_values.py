"""The types of JSON values, for what is read from files and recorded in them.

Check for objects with `isinstance(value, Mapping)`: after a check with `dict`, mypy no longer has
the types of its values.
"""

import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
JsonObject: TypeAlias = Mapping[str, JsonValue]


def parse_json(text: str | bytes, *, constants: bool = False) -> JsonValue:
    """Return the value of a JSON text that names nothing twice.

    Args:
        constants: accept NaN and Infinity, which JSON does not have but Python writes.

    Raises:
        ValueError: the text is not JSON (`json.JSONDecodeError` tells the place), a name stands
            twice in one object, or there is a constant that JSON does not have.
        RecursionError: its objects lie too deep in each other.
    """
    reject = None if constants else _reject_constant
    value: JsonValue = json.loads(text, object_pairs_hook=_object_of, parse_constant=reject)
    return value


def object_at(values: JsonObject, key: str) -> dict[str, JsonValue]:
    """Return a copy of the object under `key`; empty where there is something else, or nothing."""
    value = values.get(key)
    return dict(value) if isinstance(value, Mapping) else {}


def _object_of(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(twice)}: named twice in one object")
    return fields


def _reject_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")
