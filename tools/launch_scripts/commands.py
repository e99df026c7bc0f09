"""What the calls of launchers start: a program, its flags, and on how many ranks."""

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import NamedTuple

from tools.launch_scripts.sandbox import GPUS, LauncherCall

_NODES = ("--nnodes", "--num_nodes", "--num-nodes", "--num_machines")
_PER_NODE = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus")
_ALL = ("--num_processes",)
_OUR_TORCHRUN = "torchrun.py"  # examples/torchrun.py
_DEEPY = "deepy.py"  # gpt-neox's launcher
_FOLDER = ("-d", "--conf_dir")
_OF_NEOX = {"train.py": "pretrain_gpt.py"}
_LAUNCH_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
    "accelerate.commands.launch": "accelerate",
}


class Started(NamedTuple):
    """A program that a script would start.

    `world_size` is None where the launcher's options do not tell.
    """

    program: str
    flags: tuple[str, ...]
    world_size: int | None


def started_by(call: LauncherCall) -> Started | None:
    """Return what a launcher would start; None where that is no program (`python -c`)."""
    words = list(call.arguments)
    launcher = call.name
    if launcher.startswith("python"):
        at = next((at for at, word in enumerate(words) if word in _LAUNCH_MODULES), None)
        if at is not None and at and words[at - 1] == "-m":
            launcher, words = _LAUNCH_MODULES[words[at]], words[at + 1 :]
        elif words and PurePath(words[0]).name == _OUR_TORCHRUN:
            launcher, words = "torchrun", words[1:]
        elif "-c" in words[:2] or "-" in words[:1]:
            return None
    at = next((at for at, word in enumerate(words) if word.endswith(".py") or word == "-m"), None)
    if at is None:
        return None
    options, (program, *flags) = words[:at], words[at:]
    if program == "-m":
        if not flags:
            return None
        program, *flags = flags[0].replace(".", "/") + ".py", *flags[1:]
    if PurePath(program).name == _DEEPY:
        return _started_by_deepy(flags)
    # Slurm knows how many tasks there are; a launcher under it starts their processes.
    of_tasks = call.is_task and launcher.startswith("python")
    return Started(program, tuple(flags), None if of_tasks else _world_size(launcher, options))


def _started_by_deepy(words: Sequence[str]) -> Started | None:
    """Return what gpt-neox's launcher would start: PROGRAM [-d FOLDER] FILE..., on all GPUs."""
    rest, files, folder = list(words), list[str](), ""
    while rest and (rest[0] in _FOLDER or not rest[0].startswith("-")):
        word = rest.pop(0)
        if word in _FOLDER:
            folder = rest.pop(0) if rest else ""
        else:
            files.append(word)
    if not files:
        return None
    program, *configs = files
    named = [str(PurePath(folder, config)) for config in configs]
    program = _OF_NEOX.get(PurePath(program).name, program)
    return Started(program, ("--neox-config", *named, *rest), GPUS)


def known_name(program: str) -> str:
    """Return the path of a program below the root of its repository, as far as one can tell."""
    parts = PurePath(program).parts
    for at, part in enumerate(parts):
        if part in ("tasks", "tools", "examples") and at < len(parts) - 1:
            return "/".join(parts[at:])
    return parts[-1]


def _world_size(launcher: str, options: Sequence[str]) -> int | None:
    """Return nodes x processes of each; None where one of them is no number."""
    if launcher.startswith("python"):
        return 1
    whole = _value(options, _ALL)
    if whole is not None:
        return int(whole) if whole.isdecimal() else None
    nodes, per_node = _value(options, _NODES) or "1", _value(options, _PER_NODE)
    if per_node is None:  # DeepSpeed takes all GPUs, torchrun one process
        per_node = "1" if launcher == "torchrun" else "all"
    nodes = re.sub(r"^\d+:", "", nodes)  # of an elastic range the largest
    return int(nodes) * int(per_node) if nodes.isdecimal() and per_node.isdecimal() else None


def _value(options: Sequence[str], names: Sequence[str]) -> str | None:
    for at, word in enumerate(options):
        name, _, value = word.partition("=")
        if name in names:
            return value if value else next(iter(options[at + 1 : at + 2]), None)
    return None
