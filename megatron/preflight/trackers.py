"""Checks of the services that record a run: they are installed, and their keys are there.

Libraries are imported by ranks that write alone, and only there keys are looked for.
"""

import importlib.util
from collections.abc import Iterator

from megatron.config.fields import flag_name
from megatron.errors import ConfigError, MegatronError
from megatron.preflight.run import RunPlan
from megatron.trackers.reporting import monitors_of, services_of, services_on, writing_rank
from megatron.trackers.tracker import Service


def trackers_write_from_a_rank_of_the_run(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the rank that writes to the trackers exists."""
    world_size = plan.launch.world_size
    rank = writing_rank(plan.config.trackers, world_size)
    if rank >= world_size:
        yield ConfigError(
            "the rank that writes to the trackers is not there",
            found=f"--tracker-rank {rank}; {world_size} ranks",
            fix=f"use ranks from 0 to {world_size - 1}",
        )


def trackers_are_installed(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that the library of every service that flags or DeepSpeed's JSON ask for is there."""
    flags = {one: flag_name(one.field) for one in services_of(plan.config.trackers)}
    blocks = {one: f"{one.title} in --deepspeed_config" for one in monitors_of(plan.config)}
    for service, asked in (blocks | flags).items():
        if not _is_installed(service):
            extra = service.package
            yield ConfigError(
                f"the library of {service.title} is not installed",
                found=f"{asked}, no package {extra}",
                fix=f"pip install 'megatron-verified[{extra}]', or leave {asked} out",
            )


def trackers_have_their_keys(plan: RunPlan) -> Iterator[MegatronError]:
    """Check on each rank that writes that its libraries find a key, if they need one.

    DeepSpeed writes to those of its JSON on rank 0.
    """
    launch = plan.launch
    services = services_on(plan.config, launch.rank, launch.world_size)
    for service in filter(_is_installed, services):
        problem = service.problem()
        if problem is not None:
            names = " or ".join(service.secrets)
            yield ConfigError(
                f"{service.title} has no valid key on rank {launch.rank}",
                found=problem,
                fix=f"set {names} there, or let it work offline (docs/trackers.md)",
            )


def _is_installed(service: Service) -> bool:
    return importlib.util.find_spec(service.package) is not None
