"""Machines as a plan knows them: a JSON file of peaks, bandwidths and latencies."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.config.precision import Precision
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue, parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way between two ranks: bytes per second of one rank in one direction, and seconds."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A cluster of equal nodes.

    Attributes:
        peak_flops: FLOP/s of a rank by the dtype of matrix products (fp8, bf16, fp16, fp32, fp64).
        efficiency: the share of it that products and attention reach, from 0 to 1.
        memory_bandwidth: bytes per second of a rank's memory.
        node: between ranks of one node.
        network: between nodes, for each rank.
    """

    peak_flops: Mapping[str, float]
    efficiency: float
    memory_bandwidth: float
    ranks_per_node: int
    node: Link
    network: Link

    def peak(self, config: RunConfig) -> float:
        """Return the FLOP/s of a rank by the dtype of a run's matrix products.

        Raises:
            ConfigError: it is not known.
        """
        is_fp8 = config.fp8.fp8_format is not None
        name = "fp8" if is_fp8 else _SHORT[config.precision.precision]
        if name not in self.peak_flops:
            raise ConfigError(
                "the description of the hardware has no peak for the dtype of the run",
                found=f"{name}; there are {', '.join(self.peak_flops)}",
                fix=f'add "{name}" to "peak_flops"',
            )
        return self.peak_flops[name]

    def seconds(self, operation: str, ranks: Sequence[int], *, calls: int, size: int) -> float:
        """Return the time of so many calls, of `size` bytes together, as this rank gives them.

        A group over several nodes does its part within each node first, so that ranks share what
        crosses the network. With n_i members in each of n_o nodes, latency a and bandwidth B of
        links inside and outside, a gather of N bytes in all takes
        (n_i - 1)(a_i + N / (n_i B_i)) + (n_o - 1)(a_o + N / (n_i n_o B_o)); a reduce-scatter of N
        as much, and an all-reduce both (Thakur, Rabenseifner and Gropp 2005, sections 4.1 to 4.5,
        for rings). Each rank has an own link to the network.
        """
        count = len(ranks)
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        inside = -(-count // nodes)
        near, far = self.node, self.network
        if operation in ("all_to_all", "all_to_all_rows"):
            latency = (inside - 1) * near.latency + (count - inside) * far.latency
            within = (inside - 1) / count / near.bandwidth
            return calls * latency + size * (within + (count - inside) / count / far.bandwidth)
        if operation in ("all_gather", "reduce_scatter", "all_reduce"):
            passes = 2 if operation == "all_reduce" else 1
            whole = size * count if operation == "all_gather" else size
            latency = (inside - 1) * near.latency + (nodes - 1) * far.latency
            moved = (inside - 1) / inside / near.bandwidth
            moved += (nodes - 1) / (inside * nodes) / far.bandwidth
            return passes * (calls * latency + whole * moved)
        link = near if nodes == 1 else far
        return calls * math.ceil(math.log2(count)) * link.latency + size / link.bandwidth


def read_hardware(path: Path) -> Hardware:
    """Return the hardware that a file describes.

    Raises:
        ConfigError: it cannot be read, or names something else than the fields of `Hardware`.
    """
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            "the description of the hardware cannot be read",
            found=f"{path}: {error}",
            fix="give a JSON file as docs/planning.md describes it",
        ) from error
    values = _object(value, [field.name for field in fields(Hardware)], "", path)
    links = {
        name: Link(**_numbers(_object(values[name], ["bandwidth", "latency"], name, path), path))
        for name in ("node", "network")
    }
    peaks = values["peak_flops"]
    if not isinstance(peaks, Mapping) or not set(peaks) <= set(_DTYPES) or not peaks:
        raise _wrong(path, "peak_flops", peaks, f"name some of {', '.join(_DTYPES)}")
    plain = _numbers({name: values[name] for name in ("efficiency", "memory_bandwidth")}, path)
    if plain["efficiency"] > 1:
        raise _wrong(path, "efficiency", plain["efficiency"], "use a share from 0 to 1")
    ranks = values["ranks_per_node"]
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise _wrong(path, "ranks_per_node", ranks, "use a whole number from 1")
    return Hardware(
        peak_flops=_numbers(peaks, path, "peak_flops."),
        efficiency=plain["efficiency"],
        memory_bandwidth=plain["memory_bandwidth"],
        ranks_per_node=ranks,
        node=links["node"],
        network=links["network"],
    )


_SHORT = {
    Precision.BF16: "bf16",
    Precision.FP16: "fp16",
    Precision.FP32: "fp32",
    Precision.FP64: "fp64",
}
_DTYPES = ("fp8", *_SHORT.values())


def _object(value: JsonValue, names: Sequence[str], where: str, path: Path) -> JsonObject:
    """Return an object that has these names and no others."""
    if not isinstance(value, Mapping):
        raise _wrong(path, where or "the file", value, f"use an object of {', '.join(names)}")
    wrong = sorted(set(value).symmetric_difference(names))
    if wrong:
        raise ConfigError(
            "the description of the hardware has wrong keys",
            found=f"{path}{': ' + where if where else ''}: "
            + ", ".join(f"{'unknown' if name in value else 'no'} {name!r}" for name in wrong),
            fix=f"use exactly {', '.join(names)}",
        )
    return value


def _numbers(values: JsonObject, path: Path, where: str = "") -> dict[str, float]:
    return dict(_checked(values, path, where))


def _checked(values: JsonObject, path: Path, where: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or float(value) < 0 or (value == 0 and name != "latency"):  # type: ignore[arg-type]
            raise _wrong(path, where + name, value, "use a positive number")
        yield name, float(value)  # type: ignore[arg-type]  # checked


def _wrong(path: Path, name: str, value: JsonValue, fix: str) -> ConfigError:
    return ConfigError(
        "the description of the hardware has a value that makes no sense",
        found=f"{path}: {name}: {value!r}",
        fix=fix,
    )
