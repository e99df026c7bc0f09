"""The layer rule, as data and as a check; docs/architecture.md has the reasons.

A module may import only from lower layers and from its own package. Packages that share a layer
are strangers. Imports inside functions and under TYPE_CHECKING count as well.
"""

from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source_tree import Source, imports, sources

LAYERS: tuple[frozenset[str], ...] = (  # lower first
    frozenset({"errors", "json_values"}),  # for everybody
    frozenset({"host"}),
    frozenset({"log", "device", "atomic", "launch", "spans"}),
    frozenset({"config", "ops", "peers", "progress", "scheduling", "timers"}),
    frozenset({"mpu", "data", "tokenizer", "lengths", "control"}),
    frozenset({"model", "optimizer", "pipeline", "checkpoint", "trackers"}),
    frozenset({"model_build"}),
    frozenset({"engine", "preflight", "inference"}),
    frozenset({"loop", "planning", "serving"}),
    frozenset({"program"}),
    frozenset({"arguments"}),
    frozenset({"global_vars"}),
    frozenset({"initialize"}),
    frozenset({"checkpointing"}),
    frozenset({"training", "trained_model"}),
    frozenset({"command", "supervise"}),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PROGRAMS = (
    "tools",
    "tasks",
    "tests",
    "benchmarks",
    "pretrain_gpt",
    "pretrain_bert",
    "pretrain_prefix_lm",
    "pretrain_t5",
    "pretrain_ict",
    "pretrain_vit",
    "finetune_t0_non_causal_decoder",
)
LOOP_MAY_KNOW = "megatron.model.specs"
VERSION = "__version__"  # `megatron.__version__` is of no layer


def violations(package: Path) -> Iterator[str]:
    """Every import below `package` (the megatron/ folder) that points up or sideways."""
    for source in sources(package):
        inside = _part(source.module)
        if inside is None:  # megatron/__init__.py, which looks names up lazily
            continue
        if inside not in LEVEL:
            yield f"{source.name}: megatron.{inside} is in no layer; add it to LAYERS"
            continue
        for line, target in _parts_imported(source):
            if target not in LEVEL:
                yield f"{source.name}:{line}: megatron.{target} is in no layer"
            elif target != inside and LEVEL[target] >= LEVEL[inside]:
                yield (
                    f"{source.name}:{line}: megatron.{inside} (layer {LEVEL[inside]}) may not "
                    f"import megatron.{target} (layer {LEVEL[target]})"
                )


def models_in_loop(package: Path) -> Iterator[str]:
    """Imports of one kind of model by the training loop, which is the same for all of them."""
    for source in sources(package):
        if _part(source.module) != "loop":
            continue
        for line, name in imports(source):
            of_model = name.startswith("megatron.model.") and not name.startswith(LOOP_MAY_KNOW)
            if of_model or any(kind in name for kind in ("gpt", "bert", "t5")):
                yield f"{source.name}:{line}: {name} belongs to a task or a caller of the loop"


def outsiders(package: Path) -> Iterator[str]:
    """Imports of the programs and tests from below: the library imports none of its users."""
    for source in sources(package):
        for line, name in imports(source):
            if name.partition(".")[0] in PROGRAMS:
                yield f"{source.name}:{line}: the library may not import {name}"


def cycles(package: Path) -> list[tuple[str, ...]]:
    """Groups of modules that import each other, in a round or hidden in functions."""
    found = {source.module: source for source in sources(package)}
    graph = {name: _modules_imported(source, set(found)) for name, source in found.items()}
    return [group for group in _strongly_connected(graph) if len(group) > 1]


def _part(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def _parts_imported(source: Source) -> Iterator[tuple[int, str]]:
    for line, name in imports(source):
        top, _, rest = name.partition(".")
        if top == "megatron" and rest and rest != VERSION:
            yield line, rest.partition(".")[0]


def _modules_imported(source: Source, known: set[str]) -> set[str]:
    """The modules among `known` that a file imports; a name of a module stands for the module."""
    found = set()
    for _, name in imports(source):
        while name and name not in known:
            name = name.rpartition(".")[0]
        if name and name != source.module:
            found.add(name)
    return found


def _strongly_connected(graph: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Tarjan's algorithm; every node is in exactly one of the groups that come back."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[tuple[str, ...]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            groups.append(tuple(sorted(stack[at:])))
            del stack[at:]

    for node in graph:
        if node not in index:
            visit(node)
    return groups
