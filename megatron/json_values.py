"""The types of JSON values, for what is read from files and recorded in them.

Check for objects with `isinstance(value, Mapping)`: after a check with `dict`, mypy no longer has
the types of its values.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
JsonObject: TypeAlias = Mapping[str, JsonValue]


def object_at(values: JsonObject, key: str) -> dict[str, JsonValue]:
    """Return a copy of the object under `key`; empty where there is something else, or nothing."""
    value = values.get(key)
    return dict(value) if isinstance(value, Mapping) else {}
