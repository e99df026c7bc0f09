"""The device of a process, on the CPU, and with a CUDA device that is only pretended."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
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


def test_ranks_of_one_host_have_equal_shares_of_its_free_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device.host, "available_memory_bytes", lambda: 1000)
    device.select("cpu", ranks_of_host=4)
    assert device.free_memory_bytes() == 250
    monkeypatch.setattr(device.host, "available_memory_bytes", lambda: None)
    assert device.free_memory_bytes() is None
    monkeypatch.setattr(device.host, "available_memory_bytes", lambda: 1000)
    device.select("cpu")
    assert device.free_memory_bytes() == 1000


def test_the_device_of_a_process_is_the_first_of_its_memories(
    two_cuda_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.host, "available_memory_bytes", lambda: 1000)
    device.select("cpu")
    assert device.free_memories() == {"cpu": 1000}
    device.select("cuda", local_rank=1, ranks_of_host=2)
    found = device.free_memories()
    assert list(found.items()) == [("cuda:1", 104), ("cuda:0", 100), ("cpu", 500)]
    monkeypatch.setattr(device.host, "available_memory_bytes", lambda: None)
    assert device.free_memories()["cpu"] is None


def test_versions_of_the_libraries_of_a_gpu_are_known(
    two_cuda_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.library_versions() == {}, "on a CPU"
    device.select("cuda", local_rank=1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert device.library_versions() == {"CUDA": "13.0", "NCCL": "2.28.9"}


def test_a_copy_in_host_memory_outlives_what_was_copied() -> None:
    tensor = torch.arange(6.0)
    copy = device.HostCopy(tensor)
    tensor.zero_()
    assert torch.equal(copy.back(), torch.arange(6.0))
    assert torch.equal(copy.values(), torch.arange(6.0))


class PretendedStream:
    """A stream of a GPU; the list has what is done on which, in order."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def wait_stream(self, other: "PretendedStream") -> None:
        self.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.done.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        event = f"event {sum(one.startswith('event') for one in self.done)}"
        self.done.append(event)
        return event

    def synchronize(self) -> None:
        self.done.append(f"all waits for {self.name}")


class PretendedTensor:
    """A tensor of the host."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def to(self, where: torch.device, *, non_blocking: bool) -> "PretendedTensor":
        assert where.type == "cuda"
        assert non_blocking
        self.done.append(f"copy {self.name}")
        return self

    def record_stream(self, stream: PretendedStream) -> None:
        self.done.append(f"{self.name} is read on {stream.name}")


def test_tensors_go_to_a_gpu_on_a_stream_of_their_own(
    two_cuda_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    kernels = PretendedStream("kernels", done)

    @contextmanager
    def on(stream: PretendedStream) -> Iterator[None]:
        done.append(f"on {stream.name}")
        yield
        done.append("back")

    monkeypatch.setattr(torch.cuda, "Stream", lambda: PretendedStream("uploads", done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(device._CURRENT, "uploading", None)
    device.select("cuda", local_rank=1)
    tensors: Any = {name: PretendedTensor(name, done) for name in ("text", "mask")}
    assert device.upload(tensors) == tensors
    assert done == [
        *("on uploads", "copy text", "copy mask", "back", "kernels waits for uploads"),
        *("text is read on kernels", "mask is read on kernels"),
    ]
    device.upload(tensors)
    assert done[7:] == done[:7], "the stream is made once"


def test_parts_come_and_go_on_streams_of_their_own_and_take_turns_in_rooms(
    two_cuda_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    kernels, streams = PretendedStream("kernels", done), iter(("coming", "going"))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: PretendedStream(next(streams), done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(done.append(stream.name)))
    device.select("cuda", local_rank=0)
    trip = device.RoundTrip(128)
    hosts = [[torch.arange(5.0), torch.ones(8).bfloat16()] for _ in range(4)]
    places = set()
    with trip:
        for part in hosts:
            wide, narrow = trip.there(part)
            assert torch.equal(wide, part[0])
            assert torch.equal(narrow, part[1])
            assert wide.data_ptr() % 32 == narrow.data_ptr() % 32 == 0
            places.add(wide.data_ptr())
            wide += 1
            narrow *= 2
            trip.back()
    trip.settle()
    for wide, narrow in hosts:
        assert wide.tolist() == [1, 2, 3, 4, 5]
        assert narrow.tolist() == [2] * 8
    assert len(places) == 3, "the fourth part is where the first was"
    a_part = ["coming", "kernels waits for coming", "going waits for kernels", "going"]
    assert done == [
        "coming waits for going",
        *(step for at in range(3) for step in (*a_part, f"event {at}")),
        *("coming waits for event 0", *a_part, "event 3", "all waits for going"),
    ]


def test_what_arrives_on_a_gpu_waits_for_the_kernels_that_had_its_room(
    two_cuda_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    kernels = PretendedStream("kernels", done)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, dtype, device: empty(size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: PretendedStream("coming", done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(done.append(stream.name)))
    device.select("cuda", local_rank=0)
    parts = [[torch.arange(5.0) + at, torch.ones(8).bfloat16() * at] for at in range(3)]
    assert device.room_bytes(parts[0]) == 64
    rooms = device.UploadRooms(64, 2)
    first, second = rooms.send(parts[0]), rooms.send(parts[1])
    assert all(map(torch.equal, rooms.take(first), parts[0]))
    rooms.release(first)
    third = rooms.send(parts[2])
    assert all(map(torch.equal, rooms.take(second), parts[1])), "in a room of its own"
    assert all(map(torch.equal, rooms.take(third), parts[2]))
    assert third.tensors[0].data_ptr() == first.tensors[0].data_ptr()
    assert done == [
        *("coming", "event 0", "coming", "event 1", "kernels waits for event 0", "event 2"),
        *("coming waits for event 2", "coming", "event 3"),
        *("kernels waits for event 1", "kernels waits for event 3"),
    ]


def test_on_a_cpu_parts_are_copies() -> None:
    device.select("cpu")
    trip, values = device.RoundTrip(64), torch.zeros(3)
    with trip:
        (there,) = trip.there([values])
        there += 1
        assert not values.any()
        trip.back()
    trip.settle()
    assert values.tolist() == [1, 1, 1]


def test_tensors_of_the_host_are_on_a_cpu_already() -> None:
    device.select("cpu")
    batch = {"text": torch.arange(4), "labels": torch.ones(2)}
    assert all(moved is batch[name] for name, moved in device.upload(batch).items())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_host_memory_is_pinned_for_a_gpu(
    kind: str, two_cuda_devices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device.select(kind)
    asked: dict[str, Any] = {}
    monkeypatch.setattr(torch, "empty", lambda size, **named: asked.update(named))
    device.host_empty(3, torch.int64)
    expected = {"dtype": torch.int64, "device": "cpu", "pin_memory": kind == "cuda"}
    assert asked == expected


def test_on_meta_values_that_the_host_needs_are_answered() -> None:
    asked = []

    def answer(what: str, tensor: torch.Tensor) -> torch.Tensor:
        asked.append((what, tensor.shape))
        return torch.tensor([1, 2])

    with device.on_meta(answer):
        assert device.current().type == "meta"
        counts = torch.empty(2, dtype=torch.int64, device=device.current())
        assert device.values_for_host(counts, "counts").tolist() == [1, 2]
        assert device.values_for_host(torch.tensor([3]), "others").tolist() == [3]
    assert asked == [("counts", (2,))]
    assert device.current().type == "cpu"
    with pytest.raises(NotImplementedError, match="meta tensor"):
        device.values_for_host(counts, "counts")


def test_an_allocation_that_failed_is_told_from_other_errors() -> None:
    failed = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")
    assert device.is_out_of_memory(failed)
    assert device.is_out_of_memory(MemoryError())
    assert not device.is_out_of_memory(RuntimeError("shapes do not match"))
    assert not device.is_out_of_memory(ValueError("can't allocate memory"))
