"""Each dangerous power has one home, so that its uses are all in one place."""

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.architecture.source_tree import (
    MEGATRON,
    Source,
    aliases,
    dotted,
    imports,
    programs,
    sources,
    write_tree,
)


class Home(NamedTuple):
    """Names (with all that is below them) that only the files `homes` may use."""

    what: str
    names: tuple[str, ...]
    homes: tuple[str, ...]
    in_programs: bool  # whether entry points and tools are held to it too


COLLECTIVE_NAMES = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single
    all_reduce all_reduce_coalesced all_to_all all_to_all_single batch_isend_irecv
    broadcast broadcast_object_list gather gather_object irecv
    isend nn P2POp recv recv_object_list
    reduce reduce_scatter reduce_scatter_tensor scatter scatter_object_list
    send send_object_list
"""
COLLECTIVES = tuple(f"torch.distributed.{name}" for name in COLLECTIVE_NAMES.split())
COMMUNICATION_HOMES = (
    *(f"megatron/mpu/{name}.py" for name in ("collectives", "mappings", "data")),
    "megatron/pipeline/p2p.py",
    "megatron/pipeline/tied.py",
)
HOMES = (
    Home(
        "the environment",
        ("os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"),
        ("megatron/initialize.py", "megatron/launch.py"),
        in_programs=False,
    ),
    # megatron-core asks CUDA for the device, also where there is none
    Home(
        "CUDA",
        ("torch.cuda",),
        ("megatron/device.py", "benchmarks/peers/packages.py"),
        in_programs=True,
    ),
    Home(
        "making process groups",
        ("torch.distributed.new_group", "torch.distributed.new_subgroups"),
        ("megatron/mpu/context.py",),
        in_programs=True,
    ),
    Home("raw communication", COLLECTIVES, COMMUNICATION_HOMES, in_programs=True),
    Home(
        "raw barriers",
        ("torch.distributed.barrier", "torch.distributed.monitored_barrier"),
        # context.py makes gloo's connections at once, before a rank that is done could close them
        (*COMMUNICATION_HOMES, "megatron/mpu/context.py"),
        in_programs=True,
    ),
    Home(
        "joining and leaving the job",
        ("torch.distributed.init_process_group", "torch.distributed.destroy_process_group"),
        # a plan joins ranks that are not there; one benchmark has stages that compute nothing, and
        # no run to initialise; megatron-core wants a job also of one process
        (
            "megatron/initialize.py",
            "megatron/mpu/initialize.py",
            "megatron/planning/rehearsal.py",
            "benchmarks/pipeline_bubble.py",
            "benchmarks/peers/packages.py",
        ),
        in_programs=True,
    ),
    Home("printing", ("print",), ("megatron/log.py",), in_programs=False),
    Home(
        "DeepSpeed",
        ("deepspeed",),
        tuple(
            f"megatron/engine/deepspeed/{part}.py"
            for part in (
                "engine",
                "layers",
                "model",
                "offload",
                "pipe_engine",
                "pipeline",
                "saving",
                "start",
                "state",
                "updates",
            )
        ),
        in_programs=True,
    ),
    Home(
        "ending the process",
        ("sys.exit", "SystemExit", "exit", "quit"),
        ("megatron/program.py",),
        in_programs=False,
    ),
    Home(
        "ending the process at once",
        # native_stacks.py asks a process for its stacks by a signal
        ("os._exit", "os.abort", "os.kill"),
        (
            *("megatron/program.py", "megatron/supervise.py"),
            *("megatron/peers/watch.py", "megatron/peers/native_stacks.py"),
        ),
        in_programs=True,
    ),
    Home(
        "pickle",
        ("pickle", "cPickle", "dill", "torch.load"),
        ("megatron/checkpoint/files/unpickle.py",),  # weights only, with a list of what is allowed
        in_programs=True,
    ),
    Home(
        # torch's own are in SECURITY.md; benchmarks have pipes and a free port of this machine
        "opening sockets",
        (
            *("socket.socket", "socket.create_server", "socket.create_connection", "socketserver"),
            *("http.server", "asyncio.start_server", "multiprocessing.connection", "xmlrpc"),
            *("multiprocessing.managers", "torch.distributed.TCPStore", "torch.distributed.rpc"),
        ),
        (
            *("megatron/launch.py", "megatron/peers/handshake.py"),
            "megatron/serving/server.py",  # with limits and keys: docs/serving.md
            "megatron/control/coordinator_server.py",
            *(f"benchmarks/{name}.py" for name in ("pipeline_bubble", "train_cpu")),
        ),
        in_programs=True,
    ),
    Home(
        "pickled messages",  # between ranks of one job: SECURITY.md
        tuple(f"megatron.mpu.collectives.{name}_object" for name in ("all_gather", "broadcast")),
        (
            *(f"megatron/checkpoint/{name}.py" for name in ("agreement", "folder/shared_view")),
            *(f"megatron/engine/{name}.py" for name in ("scoring", "deepspeed/offload")),
            *(f"megatron/loop/{name}.py" for name in ("startup", "profile")),
            *(f"megatron/mpu/{name}.py" for name in ("data", "progress_barrier")),
            *(f"megatron/optimizer/{name}.py" for name in ("agreement", "clip_grads")),
            "megatron/pipeline/tied.py",
            *("megatron/inference/model_checks.py", "megatron/engine/diagnosis.py"),
            "megatron/serving/ranks/round_log.py",
            *(
                f"megatron/loop/{name}.py"
                for name in ("drawn_samples", "memory_marks", "stragglers")
            ),
            *("megatron/preflight/agreement.py", "megatron/preflight/probe.py"),
            *(f"tasks/{name}.py" for name in ("finetune/judging", "eval_harness/adapter")),
            "tasks/vision/classification.py",
            "tools/generate_text.py",
        ),
        in_programs=True,
    ),
    Home("running text as code", ("eval", "exec"), (), in_programs=True),
)


def strangers(home: Home, library: Sequence[Source], users: Sequence[Source]) -> Iterator[str]:
    """Every use of what `home` holds by a file that is not one of its homes."""
    for source in [*library, *(users if home.in_programs else ())]:
        if source.name in home.homes:
            continue
        uses = uses_in(source)
        lines = sorted({line for line, name in uses if _is_below(name, home.names)})
        where = ", ".join(home.homes) or "nowhere"
        yield from (f"{source.name}:{line}: {home.what} belongs to {where}" for line in lines)


@functools.cache
def uses_in(source: Source) -> frozenset[tuple[int, str]]:
    """Lines and full names of all that a file imports or mentions; read once for all homes."""
    names = aliases(source)
    mentioned = (
        (node.lineno, full)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Name | ast.Attribute)
        and not isinstance(node.ctx, ast.Store)  # a field of that name is no use
        and (full := dotted(node, names)) is not None
    )
    return frozenset((*imports(source), *mentioned))


def _is_below(name: str, tops: tuple[str, ...]) -> bool:
    return any(name == top or name.startswith(f"{top}.") for top in tops)


@pytest.mark.parametrize("home", HOMES, ids=lambda home: home.what.replace(" ", "-"))
def test_what_has_a_home_is_used_nowhere_else(home: Home) -> None:
    found = list(strangers(home, sources(MEGATRON), programs()))
    assert not found, "\n".join(found)


def test_no_method_moves_a_tensor_to_cuda_by_name() -> None:
    found = [
        f"{source.name}:{node.lineno}: use .to(device.current())"
        for source in [*sources(MEGATRON), *programs()]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "cuda"
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("the environment", "from os import environ as e\nx = e['HOME']\n"),
        ("the environment", "import os\nx = os.getenv('HOME')\n"),
        ("CUDA", "import torch\ntorch.cuda.synchronize()\n"),
        ("CUDA", "def f():\n    from torch import cuda\n    cuda.synchronize()\n"),
        ("making process groups", "import torch.distributed as dist\ndist.new_group([0])\n"),
        ("raw communication", "import torch\ntorch.distributed.all_reduce(x)\n"),
        ("raw communication", "from torch.distributed import broadcast\nbroadcast(x)\n"),
        ("raw barriers", "import torch.distributed as d\nd.barrier()\n"),
        ("printing", "print('hello')\n"),
        ("DeepSpeed", "def f():\n    import deepspeed\n"),
        ("ending the process", "raise SystemExit(1)\n"),
        ("ending the process at once", "import os\nos._exit(1)\n"),
        ("pickle", "import pickle\n"),
        ("pickle", "import torch\ntorch.load('x')\n"),
        ("opening sockets", "import socket\nsocket.socket()\n"),
        ("opening sockets", "from http.server import HTTPServer\n"),
        ("pickled messages", "from megatron.mpu.collectives import all_gather_object\n"),
        ("running text as code", "eval('1')\n"),
    ],
)
def test_a_use_away_from_home_is_found(tmp_path: Path, what: str, text: str) -> None:
    (home,) = (home for home in HOMES if home.what == what)
    package = write_tree(tmp_path / "megatron", {"model/stray.py": text})
    found = list(strangers(home, sources(package), ()))
    assert found
    assert all(f"{what} belongs to" in line for line in found)
    assert list(strangers(home, (), sources(package))) == (found if home.in_programs else [])


def test_names_that_only_look_alike_are_nobodys_business(tmp_path: Path) -> None:
    text = "import torch\nx = torch.version.cuda\nself.print()\nbroadcast(x)\nos_environ = 1\n"
    text += "deepspeed: bool = False\n"
    package = write_tree(tmp_path / "megatron", {"model/fine.py": text})
    assert not [line for home in HOMES for line in strangers(home, sources(package), ())]
