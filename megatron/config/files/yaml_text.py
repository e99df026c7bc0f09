"""YAML by the core schema of YAML 1.2: `1e-8` is a number, `no` and `1:30` are texts, 010 is ten.

PyYAML reads YAML 1.1, where these are a text, false, 90 and eight. Importing this imports PyYAML.
"""

import re
from collections.abc import Iterator, Mapping

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from megatron.json_values import JsonValue

_TAG = "tag:yaml.org,2002:"
_SCALARS = {  # chapter 10.3.2 of YAML 1.2
    "null": r"~|null|Null|NULL|",
    "bool": r"true|True|TRUE|false|False|FALSE",
    "int": r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    "float": r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)"
    r"|\.(nan|NaN|NAN)",
}
_MOST_VALUES = 50_000
Path = tuple[str, ...]


class YamlError(ValueError):
    """What is wrong with a YAML text, and in which line."""

    def __init__(self, problem: str, line: int | None, fix: str) -> None:
        self.problem, self.line, self.fix = problem, line, fix
        super().__init__(problem)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    pass


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    def ignore_aliases(self, data: object) -> bool:
        return True


def _whole(loader: _Loader, node: ScalarNode) -> int:
    based = {"0o": 8, "0x": 16}
    return int(node.value, based.get(node.value[:2], 10))


_Loader.yaml_implicit_resolvers = {}
_Loader.add_constructor(f"{_TAG}int", _whole)
for _name, _pattern in _SCALARS.items():
    _kind = (f"{_TAG}{_name}", re.compile(f"^({_pattern})$"), None)
    _Loader.add_implicit_resolver(*_kind)
    _Dumper.add_implicit_resolver(*_kind)  # beside those of 1.1: texts that either misreads, quoted


def parse_yaml(text: str) -> tuple[JsonValue, dict[Path, int]]:
    """Return the value of a YAML text, and the line of each key by the keys that lead to it.

    Raises:
        YamlError: it is not YAML, names a key twice, contains itself, or holds what JSON lacks.
    """
    lines: dict[Path, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        count = iter(range(_MOST_VALUES))
        value = {} if node is None else _value(loader, node, (), lines, (), count)
    except yaml.MarkedYAMLError as error:
        raise _unreadable(error, text) from None
    except yaml.YAMLError as error:
        raise YamlError(str(error), None, "write the file as UTF-8 text") from None
    except RecursionError:
        fix = "flags have values of at most a few levels"
        raise YamlError("values lie too deep in each other", None, fix) from None
    return value, lines


def to_yaml(values: Mapping[str, JsonValue]) -> str:
    """Return a YAML text that `parse_yaml`, and readers of YAML 1.1, turn back into `values`."""
    text = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, width=100)
    assert isinstance(text, str)  # noqa: S101  # invariant: without a stream it is the text
    return text


def _value(
    loader: _Loader,
    node: Node,
    path: Path,
    lines: dict[Path, int],
    above: tuple[Node, ...],
    count: Iterator[int],
) -> JsonValue:
    line = node.start_mark.line + 1
    if next(count, None) is None:  # aliases of aliases are exponentially many
        fix = "write fewer, or fewer * of what has * itself"
        raise YamlError(f"more than {_MOST_VALUES:,} values, up to", line, fix)
    if node in above:
        raise YamlError("a value contains itself", line, "write its content out, without *")
    above = (*above, node)
    if isinstance(node, MappingNode):
        values: dict[str, JsonValue] = {}
        for key_node, value_node in node.value:
            at = key_node.start_mark.line + 1
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise YamlError(f"a key is no name: {key}", at, "use the name of a flag")
            if key in values:
                raise YamlError(
                    f"{key} stands twice, in line {lines[(*path, key)]} and",
                    at,
                    "keep one of the two",
                )
            lines[*path, key] = at
            values[key] = _value(loader, value_node, (*path, key), lines, above, count)
        return values
    if isinstance(node, SequenceNode):
        return [_value(loader, item, path, lines, above, count) for item in node.value]
    try:
        value = loader.construct_object(node)
    except ValueError as error:
        raise YamlError(str(error), line, "put quotes around a text") from None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise YamlError(
        f"a value is a {type(value).__name__}", line, "use a text, a number, true or false"
    )


def _unreadable(error: yaml.MarkedYAMLError, text: str) -> YamlError:
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return YamlError(str(error), None, "see https://yaml.org/spec")
    line = mark.line + 1
    shown = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
    if "\t" in shown[: len(shown) - len(shown.lstrip())]:
        return YamlError("a tab stands before a key", line, "use spaces: YAML forbids tabs there")
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return YamlError(said, line, "mend that line, or put quotes around a text with : or # in it")
