"""Every flag is explained, is read by something, and is on the page that lists them."""

import ast
import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.arguments import _parser
from megatron.config.dependent_flags import EXPLAINED
from megatron.config.fields import flag, flag_name
from megatron.config.presets import PRESETS
from megatron.config.run import GROUPS
from megatron.config.spellings.aliases import ALIASES, CONVERTED
from megatron.config.spellings.no_effect import NO_EFFECT
from megatron.config.spellings.refused import REFUSALS, REFUSED, REMOVED
from tests.architecture.source_tree import MEGATRON, Source, imports, programs, sources, write_tree

SHORTEST_HELP = 8
# Flags that a check reads and nothing else, with the reason why that is all there is to do.
ONLY_CHECKED: dict[str, str] = {}


def unexplained(groups: Iterable[type]) -> list[str]:
    """Fields without help worth the name, and fields that are no flags."""
    return [
        f"{group.__name__}.{field.name}"
        for group in groups
        for field in dataclasses.fields(group)  # type: ignore[arg-type]
        if len(str(field.metadata.get("help", "")).strip()) < SHORTEST_HELP
    ]


def repeated(groups: Iterable[type]) -> list[str]:
    """Field names that more than one group has, which would make `get_args()` ambiguous."""
    names = Counter(
        field.name
        for group in groups
        for field in dataclasses.fields(group)  # type: ignore[arg-type]
    )
    return [name for name, count in names.items() if count > 1]


def unread(names: Iterable[str], library: Sequence[Source]) -> list[str]:
    """Names that nothing outside of the config classes reads as an attribute.

    A property of a config class counts as a reader of what it mentions when it is itself read, and
    so does a function of config/ that is imported from there.
    """
    read: set[str] = set()
    through: dict[str, set[str]] = {}
    for source in library:
        if source.name.startswith("megatron/config/"):
            through |= _properties(source) | _functions(source)
        else:
            read |= _attributes(source.tree, of_self=False) | _taken_from_config(source)
    todo = list(read)
    while todo:
        more = through.get(todo.pop(), set()) - read
        read |= more
        todo += more
    return sorted(set(names) - read)


def _properties(source: Source) -> dict[str, set[str]]:
    return {
        node.name: _attributes(node, of_self=True)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
    }


def _functions(source: Source) -> dict[str, set[str]]:
    """What each function of a module reads, by attribute or by calling another function."""
    return {
        node.name: _attributes(node, of_self=False)
        | {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef)
    }


def _taken_from_config(source: Source) -> set[str]:
    return {
        name.rpartition(".")[2]
        for _, name in imports(source)
        if name.startswith("megatron.config.")
    }


def _attributes(tree: ast.AST, *, of_self: bool) -> set[str]:
    """Attributes read below `tree`; those of `self` are a class's own affair unless asked for."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id == "self"
            if of_self or not own:
                found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found |= _names_looked_up(node)
    return found


def _names_looked_up(function: ast.FunctionDef) -> set[str]:
    """What `getattr` and `given.get` are asked for; in a loop over names, every word there."""
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    asked = [node.args[1] for node in calls if getattr(node.func, "id", "") == "getattr"]
    asked += [node.args[0] for node in calls if ast.unparse(node.func) == "given.get"]
    if any(not isinstance(name, ast.Constant) for name in asked):
        words = (node.value for node in ast.walk(function) if isinstance(node, ast.Constant))
        return {word for word in words if isinstance(word, str) and word.isidentifier()}
    return {str(name.value) for name in asked if isinstance(name, ast.Constant)}


def every_flag() -> set[str]:
    """Every spelling that the parser takes, without those of other Megatrons."""
    return {word for action in _parser([])._actions for word in action.option_strings}


def test_every_flag_has_help() -> None:
    assert unexplained(GROUPS.values()) == []


def test_field_names_are_unique_over_all_groups() -> None:
    assert repeated(GROUPS.values()) == []


def test_every_flag_is_read_somewhere() -> None:
    names = [field.name for group in GROUPS.values() for field in dataclasses.fields(group)]
    left = unread(names, [*sources(MEGATRON), *programs()])
    assert [flag_name(name) for name in left if name not in ONLY_CHECKED] == []
    assert set(left) >= set(ONLY_CHECKED), "an entry of ONLY_CHECKED is read by now; drop it"


def test_a_legacy_spelling_is_in_one_table_and_is_no_flag_of_ours() -> None:
    tables = [*ALIASES, *CONVERTED, *NO_EFFECT, *REMOVED, *REFUSED, *EXPLAINED]
    assert [word for word, count in Counter(tables).items() if count > 1] == []
    assert sorted(set(tables) & every_flag()) == []
    families = tuple(word[:-1] for word in tables if word.endswith("*"))
    assert sorted(word for word in every_flag() if word.startswith(families)) == []


def test_what_a_legacy_spelling_points_to_is_a_flag() -> None:
    ours = every_flag()
    targets = [words[0] for words in ALIASES.values()] + list(REMOVED.values())
    texts = [one.instead for one in REFUSALS] + [one.because for one in NO_EFFECT.values()]
    texts += [one.meaning for one in CONVERTED.values()]
    targets += [word for text in texts for word in re.findall(r"--[a-z0-9-]+", text)]
    assert sorted(set(targets) - ours) == []


def test_presets_give_values_to_fields_that_exist() -> None:
    names = {field.name for group in GROUPS.values() for field in dataclasses.fields(group)}
    assert sorted({key for shape in PRESETS.values() for key in shape} - names) == []


@dataclasses.dataclass
class _One:
    seed: int = flag(1, help="where random numbers begin")
    terse: int = flag(1, help="x")


@dataclasses.dataclass
class _Other:
    seed: int = flag(1, help="where random numbers begin")
    plain: int = 1


def test_flags_without_help_and_repeated_names_are_found() -> None:
    assert unexplained([_One, _Other]) == ["_One.terse", "_Other.plain"]
    assert repeated([_One, _Other]) == ["seed"]


def test_a_flag_that_nothing_reads_is_found(tmp_path: Path) -> None:
    package = write_tree(
        tmp_path / "megatron",
        {
            "config/model.py": "class M:\n"
            "    @property\n    def width(self):\n        return self.asked_width\n"
            "    @property\n    def idle(self):\n        return self.unused\n"
            "    def _problems(self):\n        return self.checked\n",
            "model/a.py": "def f(config):\n    return config.width\n"
            "class C:\n    def g(self):\n        return self.own\n",
            "config/rules.py": "def asked_for(config):\n    return _more(config)\n"
            "def _more(config):\n    return config.through_a_function\n"
            "def idle(config):\n    return config.unused\n",
            "engine/c.py": "from megatron.config.rules import asked_for\nx = asked_for(y)\n",
            "preflight/b.py": "def f(c):\n    return [getattr(c, n) for n in ('looped', 'x y')]\n",
        },
    )
    names = ["asked_width", "unused", "checked", "own", "looped", "width", "through_a_function"]
    assert unread(names, sources(package)) == ["checked", "own", "unused"]
