"""The flags of programs that generate text with models larger than the memory of their device."""

import argparse
from pathlib import Path

from megatron.errors import ConfigError
from megatron.inference.offload.memory_limits import parse_max_memory
from megatron.inference.offload.place_model import PlacementOptions
from megatron.inference.offload.placement import DeviceMap
from megatron.inference.offload.working_bytes import CacheDemand


def add_placement_flags(parser: argparse.ArgumentParser) -> None:
    """Add --device-map and what belongs to it."""
    add = parser.add_argument_group(
        "placement", "Models larger than memory (docs/inference.md#larger-than-the-machine)."
    ).add_argument
    add("--device-map", choices=[str(each) for each in DeviceMap], help=_MAP_HELP)
    add("--max-memory", nargs="+", default=[], metavar="NAME=SIZE", help=_MEMORY_HELP)
    add("--offload-folder", type=Path, metavar="FOLDER", help=_FOLDER_HELP)


_MAP_HELP = (
    "share layers out over GPUs, CPU and disk: fill them in order (sequential), even GPUs out "
    "(balanced), or that only if one is too small (auto) [all on one device]"
)
_MEMORY_HELP = "bytes to be used, such as cpu=8GiB cuda:0=20GB [what is free]"
_FOLDER_HELP = "for layers on the disk that the checkpoint does not hold as they are needed"


def placement_options(args: argparse.Namespace, demand: CacheDemand) -> PlacementOptions | None:
    """Return what the flags say; None without --device-map.

    Raises:
        ConfigError: a limit that cannot be read, or flags without --device-map.
    """
    limits = parse_max_memory(args.max_memory)
    if args.device_map is not None:
        return PlacementOptions(
            device_map=DeviceMap(args.device_map),
            demand=demand,
            max_memory=limits,
            folder=args.offload_folder,
        )
    if limits or args.offload_folder is not None:
        given = "--max-memory" if limits else "--offload-folder"
        raise ConfigError(
            "a flag of the placement of layers has no effect",
            found=f"{given} without --device-map",
            fix="add --device-map auto",
        )
    return None
