"""Machines that a plan is told of: their file, and the time of a call."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.planning.hardware import Hardware, Link, read_hardware
from tests.support.tiny import tiny_run

VALUES: dict[str, Any] = {
    "peak_flops": {"bf16": 1e15, "fp8": 2e15},
    "efficiency": 0.5,
    "memory_bandwidth": 3e12,
    "ranks_per_node": 4,
    "node": {"bandwidth": 100.0, "latency": 1.0},
    "network": {"bandwidth": 10.0, "latency": 5.0},
}
HARDWARE = Hardware(
    **(VALUES | {name: Link(**VALUES[name]) for name in ("node", "network")})  # type: ignore[arg-type]
)


def written(folder: Path, values: object) -> Path:
    path = folder / "hardware.json"
    path.write_text(json.dumps(values))
    return path


def test_a_file_gives_the_hardware(tmp_path: Path) -> None:
    assert read_hardware(written(tmp_path, VALUES)) == HARDWARE


@pytest.mark.parametrize(
    ("changes", "found", "fix"),
    [
        ({"colour": 1}, "unknown 'colour'", "use exactly peak_flops, efficiency"),
        ({"node": {"bandwidth": 1.0}}, "node: no 'latency'", "use exactly bandwidth, latency"),
        ({"node": 3}, "node: 3", "use an object of bandwidth, latency"),
        ({"peak_flops": {"int8": 1}}, "peak_flops: {'int8': 1}", "name some of fp8, bf16"),
        ({"peak_flops": {"bf16": "fast"}}, "peak_flops.bf16: 'fast'", "use a positive number"),
        ({"efficiency": 50}, "efficiency: 50", "use a share from 0 to 1"),
        ({"memory_bandwidth": 0}, "memory_bandwidth: 0", "use a positive number"),
        ({"ranks_per_node": 0}, "ranks_per_node: 0", "use a whole number from 1"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(
    tmp_path: Path, changes: dict[str, Any], found: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_hardware(written(tmp_path, VALUES | changes))
    assert found in str(raised.value.found)
    assert fix in raised.value.fix


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as raised:
        read_hardware(tmp_path / "none.json")
    assert "none.json" in str(raised.value.found)


def test_a_peak_is_that_of_the_dtype_of_products() -> None:
    assert HARDWARE.peak(tiny_run("nowhere", bf16=True)) == 1e15
    fp8 = tiny_run("nowhere", bf16=True, fp8_format="hybrid", hidden_size=64)
    assert HARDWARE.peak(fp8) == 2e15
    with pytest.raises(ConfigError, match="no peak for the dtype") as raised:
        HARDWARE.peak(tiny_run("nowhere"))
    assert raised.value.fix == 'add "fp64" to "peak_flops"'


@pytest.mark.parametrize(
    ("operation", "ranks", "size", "seconds"),
    [
        # Inside a node: 3 steps, of which each moves a fourth of 400 bytes.
        ("reduce_scatter", (0, 1, 2, 3), 400, 3 * (1 + 100 / 100)),
        ("all_gather", (0, 1, 2, 3), 100, 3 * (1 + 100 / 100)),
        ("all_reduce", (0, 1, 2, 3), 400, 2 * 3 * (1 + 100 / 100)),
        # One rank of each of two nodes.
        ("reduce_scatter", (0, 4), 400, 5 + 200 / 10),
        # Two of each of two nodes: inside the half, then a fourth over the network.
        ("reduce_scatter", (0, 1, 4, 5), 400, (1 + 200 / 100) + (5 + 100 / 10)),
        ("all_to_all_rows", (0, 1, 4, 5), 400, 1 + 100 / 100 + 2 * 5 + 200 / 10),
        ("send", (3, 2), 100, 1 + 1),
        ("send", (3, 4), 100, 5 + 10),
    ],
)
def test_the_time_of_a_call(
    operation: str, ranks: tuple[int, ...], size: int, seconds: float
) -> None:
    assert HARDWARE.seconds(operation, ranks, calls=1, size=size) == pytest.approx(seconds)
    # Two calls take twice as long.
    both = HARDWARE.seconds(operation, ranks, calls=2, size=2 * size)
    assert both == pytest.approx(2 * seconds)
