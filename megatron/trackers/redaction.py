"""Takes secrets out of what is recorded elsewhere: passwords in addresses, and values of keys.

A word in a name tells a key. Only texts are taken out, so that numbers of tokens stay.
"""

import re
from collections.abc import Mapping, Sequence

from megatron.json_values import JsonObject, JsonValue
from megatron.launch import CREDENTIAL_WORDS, is_secret_name
from megatron.log import REDACTED

_OPAQUE = re.compile(r"\b(?=\w*\d)\w{20,}\b")
_USER = re.compile(r"(?<=://)[^/\s@]+@")
_PARAMETER = re.compile(rf"([?&][^=&\s]*{CREDENTIAL_WORDS}=)[^&\s]+", re.IGNORECASE)


def redacted(values: JsonObject) -> dict[str, JsonValue]:
    """Return `values` without secrets, at any depth."""
    return {
        name: REDACTED if _is_secret(name, value) else _value(value)
        for name, value in values.items()
    }


def redacted_text(text: str) -> str:
    """Return `text` without users and passwords in addresses, and without keys after `?` or `&`."""
    return _PARAMETER.sub(rf"\1{REDACTED}", _USER.sub(f"{REDACTED}@", text))


def redacted_failure(error: Exception) -> str:
    """Return the kind and the message of an error, also without words that may be keys.

    Libraries repeat a key that a service refuses: long words with a digit are left out.
    """
    return _OPAQUE.sub(REDACTED, redacted_text(f"{type(error).__name__}: {error}"))


def _is_secret(name: str, value: JsonValue) -> bool:
    return isinstance(value, str) and bool(value) and is_secret_name(name)


def _value(value: JsonValue) -> JsonValue:
    if isinstance(value, str):
        return redacted_text(value)
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, Sequence):
        return [_value(item) for item in value]
    return value
