"""The page docs/flags.md: every flag with its spellings, type, default and meaning.

It is written from the config groups alone, so it cannot disagree with `--help`.
"""

import dataclasses
import enum
import types
import typing
from collections.abc import Iterator
from typing import Any

from megatron.config.dependent_flags import DEPENDENT, OTHER_DEFAULTS
from megatron.config.fields import flag_name
from megatron.config.presets import PRESETS
from megatron.config.run import GROUPS
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from megatron.config.spellings.no_effect import WITHOUT_EFFECT, NoEffect
from megatron.config.spellings.refused import REFUSALS, REMOVED
from megatron.config.spellings.usage import flags_of
from tools.docs import markdown

HEAD = """\
# Flags

Written by `make docs` from the dataclasses in `megatron/config/` and the tables in
`megatron/config/spellings/`; edit those. `pretrain_gpt.py --help` shows the same.

A switch is on when it is named alone; `--flag true` and `--flag false` are accepted too, and
`--no-flag` turns it off. A flag may be shortened while no other begins so, and the log says what
it was taken as. A flag that is nowhere on this page is an error, and so is one whose feature this
version lacks: nothing is swallowed. `--config FILE` reads flags from files
([config files](config_files.md)); the titles below are the groups of their
keys.

Rules that need more than one group (shapes against ranks, batches against replicas, schedules
against the length of the training) are the checks of `megatron/preflight/`, which run before
anything is built and report everything that is wrong at once.
"""


def page() -> str:
    """Return the whole page as Markdown."""
    sections = [HEAD, *_group_sections(), _presets(), *_legacy_sections()]
    return "\n".join(sections)


def _group_sections() -> Iterator[str]:
    for name, group in GROUPS.items():
        hints = typing.get_type_hints(group)
        rows = [
            (
                f"`{flag_name(field.name)}`",
                _spellings(field, hints[field.name]),
                _kind(hints[field.name]),
                _default(field),
                str(field.metadata["help"]),
            )
            for field in dataclasses.fields(group)
        ]
        title = f"## {name}\n\n{(group.__doc__ or '').strip()}\n\n"
        yield title + markdown.table(("flag", "also", "type", "default", "meaning"), rows)


def _presets() -> str:
    rows = [
        (f"`{name}`", ", ".join(f"{key} {_value(value)}" for key, value in shape.items()))
        for name, shape in PRESETS.items()
    ]
    return (
        "## Presets\n\n`--model-preset NAME` takes the model's shape from this table; flags given "
        "beside it win.\n\n" + markdown.table(("name", "shape"), rows)
    )


def _legacy_sections() -> Iterator[str]:
    yield (
        "## Flags of other Megatrons\n\n"
        "### Other spellings of ours\n\n"
        + markdown.table(
            ("given", "means"), [(f"`{k}`", f"`{' '.join(v)}`") for k, v in ALIASES.items()]
        )
    )
    yield (
        "### Values that are written differently\n\n"
        + markdown.table(("flag", "means"), [(f"`{k}`", v.meaning) for k, v in CONVERTED.items()])
    )
    yield (
        "### Accepted, without effect\n\nEach use is logged, with the reason. A star stands for "
        "every flag with that prefix.\n\n"
        + markdown.table(
            ("flags", "why"), [(_names(one.usage), _why(one)) for one in WITHOUT_EFFECT]
        )
    )
    yield (
        "### Meaning depends on the flags beside them\n\n"
        + markdown.table(("flag", "means"), [(f"`{one.flag}`", one.meaning) for one in DEPENDENT])
    )
    yield (
        "### Defaults that differ\n\nWhat other Megatrons do where the flag is not given.\n\n"
        + markdown.table(
            ("flag", "default here", "elsewhere"),
            [
                (f"`{flag_name(field.name)}`", _default(field), OTHER_DEFAULTS[field.name])
                for group in GROUPS.values()
                for field in dataclasses.fields(group)
                if field.name in OTHER_DEFAULTS
            ],
        )
    )
    yield (
        "### Refused: removed long ago\n\n"
        + markdown.table(("flag", "use"), [(f"`{k}`", f"`{v}`") for k, v in REMOVED.items()])
    )
    yield (
        "### Refused: features that this version does not have\n\n"
        + markdown.table(
            ("feature", "flags", "use instead"),
            [(one.feature, _names(one.flags), one.instead) for one in REFUSALS],
        )
    )


def _names(usage: str) -> str:
    return ", ".join(f"`{flag}`" for flag, _ in flags_of(usage))


def _why(one: NoEffect) -> str:
    return one.because + (f"; only with {' or '.join(one.only)}" if one.only else "")


def _spellings(field: dataclasses.Field[Any], hint: Any) -> str:
    words = [*field.metadata["aliases"]]
    if hint is bool:
        words += ["--no-" + field.name.replace("_", "-"), *field.metadata["off"]]
    return ", ".join(f"`{word}`" for word in words)


def _kind(hint: Any) -> str:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return f"{_kind(typing.get_args(hint)[0])}, one or more"
    if issubclass(hint, enum.Enum):
        return " or ".join(f"`{choice.value}`" for choice in hint)
    return {bool: "switch", int: "whole number", float: "number", str: "text"}[hint]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required"
    return "not set" if field.default is None else _value(field.default)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value.value if isinstance(value, enum.Enum) else value)
