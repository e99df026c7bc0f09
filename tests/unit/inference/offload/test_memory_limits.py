"""What may be used of each memory is what is free, or less, and never more."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron import device, host
from megatron.errors import CheckpointError, ConfigError, MachineError
from megatron.inference.offload.memory_limits import parse_max_memory, usable_memories
from tests.support.examples import examples

FREE = {"cuda:0": 100, "cuda:1": 200, "cpu": 1000}


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memories", lambda: dict(FREE))


@examples(60)
@given(st.integers(0, 10**6), st.sampled_from([("B", 1), ("MiB", 2**20), ("GB", 10**9)]))
def test_sizes_are_read_with_their_unit(size: int, unit: tuple[str, int]) -> None:
    words = [f"cuda:0={size}{unit[0]}", "cpu=1.5KiB"]
    assert parse_max_memory(words) == {"cuda:0": size * unit[1], "cpu": 1536}


@pytest.mark.parametrize("word", ["cpu", "cpu=", "cpu=4", "cpu=-1GiB", "cpu=4iB", "=4GiB", "0=1B"])
def test_what_is_no_limit_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="a limit of memory cannot be read") as caught:
        parse_max_memory([word])
    assert word in str(caught.value.found)
    assert "cpu=4GiB" in caught.value.fix


def test_a_memory_has_one_limit() -> None:
    with pytest.raises(ConfigError, match="a memory has two limits"):
        parse_max_memory(["cpu=1B", "cpu=2B"])


def test_the_device_comes_first_and_the_disk_last(tmp_path: Path) -> None:
    assert dict(usable_memories({}, None)) == FREE | {"disk": 0}
    found = usable_memories({"cuda:1": 5}, tmp_path / "not" / "there")
    assert [memory.name for memory in found] == ["cuda:0", "cuda:1", "cpu", "disk"]
    assert found[1].nbytes == 5
    assert found[3].nbytes > 0
    assert usable_memories({"disk": 7}, tmp_path)[3].nbytes == 7


def test_a_limit_of_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a memory that this process does not have") as caught:
        usable_memories({"cuda:7": 1}, tmp_path)
    assert caught.value.fix == "use names among cuda:0, cuda:1, cpu, disk"
    with pytest.raises(ConfigError, match="no effect without a folder to write to"):
        usable_memories({"disk": 1}, None)


def test_more_than_is_free_is_not_promised() -> None:
    with pytest.raises(MachineError, match="less memory is free than may be used") as caught:
        usable_memories({"cpu": 2**40}, None)
    assert "cpu of 1024.00 GiB, 0.00 GiB are free" in str(caught.value.found)


def test_memory_of_unknown_size_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_memories", lambda: {"cpu": None})
    with pytest.raises(ConfigError, match="how much memory is free is unknown") as caught:
        usable_memories({}, None)
    assert "--max-memory cpu=8GiB" in caught.value.fix
    assert usable_memories({"cpu": 5}, None)[0].nbytes == 5


def test_a_disk_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> int:
        raise OSError(5, "Input/output error", str(folder))

    monkeypatch.setattr(host, "free_bytes", fail)
    with pytest.raises(CheckpointError, match="looking at the offload folder failed"):
        usable_memories({}, tmp_path)
