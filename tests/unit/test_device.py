"""The device of a process, on the CPU, and with a CUDA device that is only pretended."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron import device
from megatron.errors import MachineError

RESIDENT_AT_LEAST_BYTES = 10 * 2**20  # a Python with torch is far larger


@pytest.fixture(autouse=True)
def _the_device_of_other_tests() -> Iterator[None]:
    before = device.current()
    yield
    device._CURRENT.device = before


@pytest.fixture
def two_cuda_devices(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """torch.cuda as on a machine with two devices; the calls it got, by name."""
    calls: dict[str, Any] = {}

    def record(name: str, answer: Any = None) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] = args
            return answer

        return call

    for name, answer in (
        ("is_available", True),
        ("device_count", 2),
        ("set_device", None),
        ("synchronize", None),
        ("is_bf16_supported", False),
        ("get_rng_state", "state"),
        ("set_rng_state", None),
        ("memory_allocated", 5),
        ("max_memory_allocated", 7),
        ("memory_reserved", 9),
        ("mem_get_info", (100, 200)),
        ("get_device_properties", SimpleNamespace(total_memory=200)),
        ("get_device_name", "Some GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, record(name, answer))
    monkeypatch.setattr(torch.cuda, "default_generators", ("first", "second"))
    return calls


def test_the_cpu_is_always_there() -> None:
    assert device.select("cpu") == torch.device("cpu")
    assert device.current() == torch.device("cpu")
    device.synchronize()
    assert device.name().startswith("cpu (")


def test_the_generator_of_the_cpu_is_torch_s_own() -> None:
    device.select("cpu")
    state = device.get_rng_state()
    first = torch.rand(3)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    assert device.default_generator() is torch.default_generator


def test_memory_of_a_cpu_run_is_that_of_the_process() -> None:
    device.select("cpu")
    assert device.memory_allocated_bytes() > RESIDENT_AT_LEAST_BYTES
    assert device.peak_memory_bytes() > RESIDENT_AT_LEAST_BYTES
    assert device.free_memory_bytes() is not None


def test_a_cuda_device_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MachineError, match="a CUDA device was asked for and there is none"):
        device.select("cuda")
    assert device.current() == torch.device("cpu")


def test_more_ranks_than_devices_is_an_error(two_cuda_devices: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match="more ranks on this node than CUDA devices") as caught:
        device.select("cuda", local_rank=2)
    assert caught.value.found == "local rank 2, 2 devices"
    assert "at most 2 processes" in caught.value.fix


def test_a_rank_takes_the_device_of_its_number(two_cuda_devices: dict[str, Any]) -> None:
    assert device.select("cuda", local_rank=1) == torch.device("cuda", 1)
    assert two_cuda_devices["set_device"] == (torch.device("cuda", 1),)
    assert device.device_count() == 2
    assert device.cuda_is_available()


def test_questions_go_to_the_selected_device(two_cuda_devices: dict[str, Any]) -> None:
    device.select("cuda", local_rank=1)
    here = (torch.device("cuda", 1),)
    assert device.get_rng_state() == "state"
    assert two_cuda_devices["get_rng_state"] == here
    device.set_rng_state(torch.zeros(1))
    assert two_cuda_devices["set_rng_state"][1] == here[0]
    assert device.default_generator() == "second"
    assert device.memory_allocated_bytes() == 5
    assert device.free_memory_bytes() == 100 + (9 - 5)
    assert [device.total_memory_bytes(index) for index in (1, 2)] == [200, None]
    assert device.peak_memory_bytes() == 7
    assert device.name() == "Some GPU"
    device.synchronize()
    assert "synchronize" in two_cuda_devices


def test_a_copy_in_host_memory_outlives_what_was_copied() -> None:
    tensor = torch.arange(6.0)
    copy = device.HostCopy(tensor)
    tensor.zero_()
    assert torch.equal(copy.back(), torch.arange(6.0))
