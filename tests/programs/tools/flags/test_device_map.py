"""Flags of placement mean what they say, and nothing without --device-map."""

import argparse
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.inference.offload.place_model import PlacementOptions
from megatron.inference.offload.placement import DeviceMap
from megatron.inference.offload.working_bytes import CacheDemand
from tools.flags.device_map import add_placement_flags, placement_options

DEMAND = CacheDemand(sequences=3)


def read(words: str) -> PlacementOptions | None:
    parser = argparse.ArgumentParser()
    add_placement_flags(parser)
    return placement_options(parser.parse_args(words.split()), DEMAND)


def test_flags_become_options() -> None:
    words = "--device-map balanced --max-memory cpu=1KiB cuda:0=2kB --offload-folder there"
    assert read(words.replace("kB", "KB")) == PlacementOptions(
        device_map=DeviceMap.BALANCED,
        demand=DEMAND,
        max_memory={"cpu": 1024, "cuda:0": 2000},
        folder=Path("there"),
    )
    assert read("") is None


@pytest.mark.parametrize("words", ["--max-memory cpu=1GiB", "--offload-folder there"])
def test_what_has_no_effect_without_a_device_map_is_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="a flag of the placement of layers has no effect") as e:
        read(words)
    assert e.value.found == f"{words.split()[0]} without --device-map"
