"""Worlds of tiny runs of any training program, for plans of steps on ranks that are not there."""

from typing import Any

from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.planning.rehearsal import World
from megatron.preflight.run import RunPlan
from tests.support.tiny import tiny_run
from tools.planning.launch import PROGRAMS

# Flags of a tiny run beside those of a GPT, by the name of a task.
OF_TASK: dict[str, dict[str, Any]] = {
    "t5": {"task": "t5", "decoder_seq_length": 8, "mask_prob": 0.15},
    "ict": {"task": "ict", "biencoder_projection_dim": 8},
    "vit": {"task": "vit", "num_classes": 3, "img_dim": 8, "patch_dim": 2},
    "prefix-lm": {"task": "prefix-lm"},
    "t0": {"task": "t0"},
}


def planned_world(size: int, *, task: str = "gpt", **flags: Any) -> World:
    """The world of a tiny run of a program; `OF_TASK` has what it needs."""
    program = PROGRAMS[task]
    defaults = getattr(program.module, "DEFAULTS", {})
    config = program.adapted(tiny_run("nowhere", **(defaults | flags)))
    return World.of(config, program.task(config), tokenizer_of(config), size)


def plan_of_world(world: World) -> RunPlan:
    """What the checks of such a run take."""
    size = world.topology.world_size
    launch = Launch(world_size=size, local_world_size=size)
    return RunPlan(world.config, launch, world.tokenizer, reads=world.task.reads)
