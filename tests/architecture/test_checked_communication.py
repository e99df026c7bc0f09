"""Nothing communicates behind the back of --check-collectives."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.source_tree import MEGATRON, Source, aliases, dotted, sources, write_tree
from tests.architecture.test_homes import COLLECTIVES

RAW = frozenset(COLLECTIVES) - {"torch.distributed.P2POp", "torch.distributed.nn"}
CHECKS = ("checked", "checked_messages")
BARRIERS = frozenset({"torch.distributed.barrier", "torch.distributed.monitored_barrier"})
# Makes the groups, without which nothing can be compared.
WITHOUT_CHECKS = frozenset({"megatron/mpu/context.py"})


def unchecked(source: Source) -> Iterator[str]:
    """Calls of torch.distributed in functions that did not compare what they do before."""
    names = aliases(source)
    names |= _module_names(source, names)
    for function in ast.walk(source.tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        checks = [c.lineno for c in calls if (dotted(c.func, names) or "").split(".")[-1] in CHECKS]
        for call in calls:
            raw = dotted(call.func, names)
            if raw in RAW | BARRIERS and not any(line < call.lineno for line in checks):
                yield f"{source.name}:{call.lineno}: call checked() before {raw}"


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
    calls = sum(text.text.count("checked(") for text in sources(MEGATRON / "mpu"))
    assert calls > 8


def test_an_unchecked_call_is_found_however_it_is_spelled(tmp_path: Path) -> None:
    text = (
        "import torch.distributed as dist\n"
        "from torch.distributed import broadcast as send_to_all\n"
        "_GATHER = getattr(dist, 'all_gather_single', dist.all_gather_into_tensor)\n"
        "def a(x):\n    dist.all_reduce(x)\n"
        "def b(x):\n    send_to_all(x)\n"
        "def c(x):\n    _GATHER(x)\n"
        "def d(x):\n    dist.barrier()\n    checked('barrier', None, x)\n"
        "def e(x):\n    checked('all_reduce', x, g)\n    dist.all_reduce(x)\n"
        "def f(x):\n    other.checked_messages(x)\n    dist.batch_isend_irecv(x)\n"
    )
    (source,) = sources(write_tree(tmp_path / "megatron", {"mpu/stray.py": text}))
    lines = [line.split(":")[1] for line in unchecked(source)]
    assert lines == ["5", "7", "9", "11"]
