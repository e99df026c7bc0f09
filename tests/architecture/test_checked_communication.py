"""Nothing communicates behind the back of --check-collectives."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, Source, aliases, dotted, sources, write_tree
from tests.architecture.test_homes import COLLECTIVES

RAW = frozenset(COLLECTIVES) - {"torch.distributed.P2POp", "torch.distributed.nn"}
CHECKS = ("calling", "exchanging")
BARRIERS = frozenset({"torch.distributed.barrier", "torch.distributed.monitored_barrier"})
# Makes the groups, without which nothing can be compared.
WITHOUT_CHECKS = frozenset({"megatron/mpu/context.py"})


def unchecked(source: Source) -> Iterator[str]:
    """Calls of torch.distributed outside of a `with` that compares and names them."""
    names = aliases(source)
    names |= _module_names(source, names)
    checked = {
        node
        for block in ast.walk(source.tree)
        if isinstance(block, ast.With)
        and any(_is_check(item.context_expr, names) for item in block.items)
        for statement in block.body
        for node in ast.walk(statement)
    }
    for call in ast.walk(source.tree):
        raw = dotted(call.func, names) if isinstance(call, ast.Call) else None
        if raw in RAW | BARRIERS and call not in checked:
            yield f"{source.name}:{call.lineno}: call {raw} in a block `with calling()`"


def _is_check(expression: ast.expr, names: dict[str, str]) -> bool:
    if not isinstance(expression, ast.Call):
        return False
    return (dotted(expression.func, names) or "").split(".")[-1] in CHECKS


def _module_names(source: Source, names: dict[str, str]) -> dict[str, str]:
    """Names of a module that stand for raw communication, whichever of several it is."""
    found = {}
    for node in source.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            inside = {dotted(part, names) for part in ast.walk(node.value)}
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for raw in sorted(name for name in inside if name in RAW):
                    if isinstance(target, ast.Name) and isinstance(node.value, ast.Call):
                        found[target.id] = raw
    return found


def test_every_raw_communication_is_checked_before() -> None:
    found = [
        line
        for source in sources(MEGATRON)
        if source.name not in WITHOUT_CHECKS
        for line in unchecked(source)
    ]
    assert not found, "\n".join(found)


def test_the_gate_sees_what_there_is() -> None:
    calls = sum(text.text.count("with calling(") for text in sources(MEGATRON / "mpu"))
    assert calls > 8


def test_an_unchecked_call_is_found_however_it_is_spelled(tmp_path: Path) -> None:
    text = (
        "import torch.distributed as dist\n"
        "from torch.distributed import broadcast as send_to_all\n"
        "_GATHER = getattr(dist, 'all_gather_single', dist.all_gather_into_tensor)\n"
        "def a(x):\n    dist.all_reduce(x)\n"
        "def b(x):\n    send_to_all(x)\n"
        "def c(x):\n    _GATHER(x)\n"
        "def d(x):\n    calling('barrier', None, x)\n    dist.barrier()\n"
        "def e(x):\n    with calling('all_reduce', x, g):\n        dist.all_reduce(x)\n"
        "def f(x):\n    with other.exchanging(x):\n        dist.batch_isend_irecv(x)\n"
    )
    (source,) = sources(write_tree(tmp_path / "megatron", {"mpu/stray.py": text}))
    lines = [line.split(":")[1] for line in unchecked(source)]
    assert lines == ["5", "7", "9", "12"]
