"""The device of this process: the only module that names `torch.cuda`.

Everything here works on a CPU-only machine. A device asked for that is not there is an error,
never a silent fallback.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from megatron import host
from megatron.errors import MachineError

_ROOMS = 3  # for what comes, what is computed, and what goes
_ALIGNED = 32  # bytes, at whose multiples kernels may load several elements at once
_CPU_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory")

# Stands in for the values of a tensor on `meta`: from what they are, and a tensor of their shape.
Answer = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Current:
    device: torch.device = torch.device("cpu")
    copying: torch.cuda.Stream | None = None  # made at the first copy to host memory
    uploading: torch.cuda.Stream | None = None  # made at the first copy from there
    answer: Answer | None = None  # while on `meta`
    ranks_of_host: int = 1  # which share its memory


_CURRENT = _Current()
Result = TypeVar("Result")


def cuda_is_available() -> bool:
    """Return whether a CUDA device can be used by this build of torch on this machine."""
    return torch.cuda.is_available()


def device_count() -> int:
    """Return the number of CUDA devices that this process can see."""
    return torch.cuda.device_count()


def select(kind: str, local_rank: int = 0, *, ranks_of_host: int = 1) -> torch.device:
    """Make `cpu` or `cuda:<local_rank>` the device of this process and return it.

    Args:
        ranks_of_host: processes of this run on this host, which share its memory.
    """
    _CURRENT.ranks_of_host = ranks_of_host
    if kind == "cpu":
        _CURRENT.device = torch.device("cpu")
        return _CURRENT.device
    if not cuda_is_available():
        raise MachineError(
            "a CUDA device was asked for and there is none",
            found=f"torch {torch.__version__}, CUDA build: {torch.version.cuda or 'no'}",
            fix="use --device cpu --distributed-backend gloo, or install a CUDA build of torch",
        )
    if local_rank >= device_count():
        raise MachineError(
            "there are more ranks on this node than CUDA devices",
            found=f"local rank {local_rank}, {device_count()} devices",
            fix=f"start at most {device_count()} processes per node",
        )
    _CURRENT.device = torch.device("cuda", local_rank)
    torch.cuda.set_device(_CURRENT.device)
    return _CURRENT.device


def current() -> torch.device:
    """Return the device of this process; the CPU until `select` sets another."""
    return _CURRENT.device


@contextmanager
def on_meta(answer: Answer) -> Iterator[None]:
    """Make `meta`, which has shapes and no values, the device of this process within the block.

    Args:
        answer: returns what the host has to know of a tensor (`values_for_host`).
    """
    before = (_CURRENT.device, _CURRENT.answer)
    _CURRENT.device, _CURRENT.answer = torch.device("meta"), answer
    try:
        yield
    finally:
        _CURRENT.device, _CURRENT.answer = before


def values_for_host(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """Return a tensor in host memory, without which a step cannot go on; wait until it is there.

    Args:
        what: the values are, by which they are answered on `meta`.
    """
    if tensor.is_meta and _CURRENT.answer is not None:
        return _CURRENT.answer(what, tensor)
    return tensor.cpu()


def has_bf16_partial_sums() -> bool:
    """Return whether products of bfloat16 on GPUs may add partial sums in bfloat16."""
    return bool(torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction)


def allow_bf16_partial_sums(allowed: bool) -> None:
    """Let products of bfloat16 on GPUs add partial sums in bfloat16, or not."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = allowed


def synchronize() -> None:
    """Wait until every kernel that was launched has ended."""
    if _CURRENT.device.type == "cuda":
        torch.cuda.synchronize()


def can_capture() -> bool:
    """Return whether kernels of this device can be captured (`CapturedCall`)."""
    return _CURRENT.device.type == "cuda"


def leave_default_stream() -> None:
    """Launch what follows in this thread on another stream: the default one cannot be captured.

    Before parameters are made: autograd adds gradients on the stream where it met them first.
    """
    if _CURRENT.device.type == "cuda":
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)


class CapturedCall(Generic[Result]):
    """A call whose kernels are captured, not run: `replay` launches them all at once, each time.

    They read and write where they did in the call. Its memory stays theirs: what the call returned
    has the values of the last replay.

    Args:
        call: waits for nothing that the device computes.

    Raises:
        RuntimeError: it does.
    """

    def __init__(self, call: Callable[[], Result]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Other threads may pin memory and ask for events meanwhile.
        with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
            self.result = call()

    def replay(self) -> None:
        """Launch the kernels."""
        self._graph.replay()


def get_rng_state() -> torch.Tensor:
    """Return the state of the current device's default generator, a CPU uint8 tensor."""
    if _CURRENT.device.type == "cuda":
        return torch.cuda.get_rng_state(_CURRENT.device)
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor) -> None:
    """Set the state of the current device's default generator to `state` (a CPU uint8 tensor)."""
    if _CURRENT.device.type == "cuda":
        torch.cuda.set_rng_state(state, _CURRENT.device)
    else:
        torch.set_rng_state(state)


def default_generator() -> torch.Generator:
    """Return the generator that dropout draws from on the current device."""
    if _CURRENT.device.type == "cuda":
        return torch.cuda.default_generators[_CURRENT.device.index]
    return torch.default_generator


def memory_allocated_bytes() -> int:
    """Return bytes in use: by tensors on a GPU, resident in this process on a CPU."""
    if _CURRENT.device.type == "cuda":
        return torch.cuda.memory_allocated()
    return host.resident_bytes("VmRSS")


def peak_memory_bytes() -> int:
    """Return the most bytes in use: by tensors on a GPU, resident in this process on a CPU."""
    if _CURRENT.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return host.peak_resident_bytes()


def total_memory_bytes(index: int) -> int | None:
    """Return all the memory of one CUDA device; None where there is no such device."""
    if not cuda_is_available() or index >= device_count():
        return None
    return int(torch.cuda.get_device_properties(index).total_memory)


def free_memory_bytes() -> int | None:
    """Return bytes free for tensors of this rank; None where that is unknown.

    Each rank has a GPU of its own, and on CPUs an equal share of what is free on the host.
    """
    if _CURRENT.device.type == "cuda":
        # Reserved by torch, and unused.
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info()[0] + cached
    free = host.available_memory_bytes()
    return None if free is None else free // _CURRENT.ranks_of_host


def free_memories() -> dict[str, int | None]:
    """Return the free bytes of all memories of this process, by name; None where that is unknown.

    Its device comes first, then the other GPUs that it sees, then the host.
    """
    own = _CURRENT.device
    found = {str(own): free_memory_bytes()}
    if own.type == "cuda":
        others = (index for index in range(device_count()) if index != own.index)
        found |= {f"cuda:{index}": torch.cuda.mem_get_info(index)[0] for index in others}
        free = host.available_memory_bytes()
        found["cpu"] = None if free is None else free // _CURRENT.ranks_of_host
    return found


def name() -> str:
    """Return the name of the device, for the log."""
    if _CURRENT.device.type == "cuda":
        return torch.cuda.get_device_name(_CURRENT.device)
    return f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def library_versions() -> dict[str, str]:
    """Return the versions of CUDA and NCCL where this process computes on a GPU."""
    if _CURRENT.device.type != "cuda":
        return {}
    versions = {"CUDA": str(torch.version.cuda)}
    if torch.distributed.is_nccl_available():
        numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        versions["NCCL"] = ".".join(map(str, numbers))
    return versions


def capability() -> tuple[int, int]:
    """Return the compute capability of this process's CUDA device."""
    return torch.cuda.get_device_capability()


def host_empty(size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return uninitialised host memory [size], from which copies to a GPU do not wait for it."""
    is_pinned = _CURRENT.device.type == "cuda"
    return torch.empty(size, dtype=dtype, device="cpu", pin_memory=is_pinned)


def upload(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the host on the device, for kernels launched from here on.

    On a GPU they are copied on a stream of their own. The host is ahead of the kernels that it
    launches, so the copies run beside those of the batch before.
    """
    here = _CURRENT.device
    if here.type != "cuda":
        return {name: tensor.to(here) for name, tensor in tensors.items()}
    stream, compute = _uploading_stream(), torch.cuda.current_stream()
    with torch.cuda.stream(stream):
        moved = {name: tensor.to(here, non_blocking=True) for name, tensor in tensors.items()}
    compute.wait_stream(stream)
    for tensor in moved.values():
        tensor.record_stream(compute)  # their memory is not used again before it is done
    return moved


class HostCopy:
    """The values of a contiguous tensor in host memory, copied beside the kernels of a GPU.

    The tensor may be dropped at once: its memory is not used again before the copy is done. On a
    CPU this is a plain copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._device = tensor.device
        if tensor.device.type != "cuda":
            self._values = tensor.clone()
            return
        stream = _copying_stream()
        stream.wait_stream(torch.cuda.current_stream())  # the values are being computed there
        self._values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            self._values.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        self._done = stream.record_event()

    def back(self) -> torch.Tensor:
        """Return a read-only copy on the device for kernels launched from here on."""
        if self._device.type != "cuda":
            return self._values
        torch.cuda.current_stream().wait_event(self._done)
        return self._values.to(self._device, non_blocking=True)

    def values(self) -> torch.Tensor:
        """Return the values in host memory, read-only; wait until the copy is done."""
        if self._device.type == "cuda":
            self._done.synchronize()
        return self._values


class RoundTrip:
    """Takes tensors of host memory to the device, part by part, and their new values back.

    On a GPU parts take turns in rooms of fixed size, on streams of their own: one part comes while
    another is computed and a third goes back. On a CPU these are plain copies. A context for each
    round: what the round before took back may be taken there again.

    Args:
        nbytes: of the largest part, of which each tensor takes a multiple of 32.
    """

    def __init__(self, nbytes: int) -> None:
        self._hosts: list[torch.Tensor] = []
        self._here: list[torch.Tensor] = []
        self._is_gpu = _CURRENT.device.type == "cuda"
        if not self._is_gpu:
            return
        self._turn = 0
        self._rooms = [
            torch.empty(nbytes, dtype=torch.uint8, device=_CURRENT.device) for _ in range(_ROOMS)
        ]
        self._is_free: list[torch.cuda.Event | None] = [None] * _ROOMS
        self._coming = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._going = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __enter__(self) -> "RoundTrip":
        if self._is_gpu:
            self._coming.wait_stream(self._going)
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts, self._here = [], []

    def there(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return one part on the device, for kernels launched from here on."""
        self._hosts = list(tensors)
        if not self._is_gpu:
            self._here = [tensor.clone() for tensor in tensors]
            return self._here
        free = self._is_free[self._turn]
        self._here = places_in(self._rooms[self._turn], tensors)
        if free is not None:
            self._coming.wait_event(free)
        with torch.cuda.stream(self._coming):
            for tensor, place in zip(tensors, self._here):
                place.copy_(tensor, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._coming)
        return self._here

    def back(self) -> None:
        """Take the new values of the last part back."""
        if not self._is_gpu:
            for tensor, new in zip(self._hosts, self._here):
                tensor.copy_(new)
            return
        self._going.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._going):
            for tensor, new in zip(self._hosts, self._here):
                tensor.copy_(new, non_blocking=True)
        self._is_free[self._turn] = self._going.record_event()
        self._turn = (self._turn + 1) % _ROOMS

    def settle(self) -> None:
        """Wait until all new values are in host memory."""
        if self._is_gpu:
            self._going.synchronize()


class UploadRooms:
    """Rooms in the memory of a GPU, which tensors of the host or of other GPUs take in turns.

    They are copied on a stream of its own, beside the kernels of those that came before, from
    pinned memory without the host. Where a room was used, its kernels end before it is filled.

    Args:
        nbytes: of the largest part (`room_bytes`).
        rooms: parts that are on the device at a time.
    """

    def __init__(self, nbytes: int, rooms: int) -> None:
        self._rooms = [
            torch.empty(nbytes, dtype=torch.uint8, device=_CURRENT.device) for _ in range(rooms)
        ]
        self._is_free: list[torch.cuda.Event | None] = [None] * rooms
        self._coming = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, tensors: Sequence[torch.Tensor]) -> "RoomUpload":
        """Begin to copy one part; any thread may call it, one at a time."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._rooms)
        free, places = self._is_free[turn], places_in(self._rooms[turn], tensors)
        if free is not None:
            self._coming.wait_event(free)
        with torch.cuda.stream(self._coming):
            for tensor, place in zip(tensors, places):
                place.copy_(tensor, non_blocking=True)
        return RoomUpload(turn, places, self._coming.record_event())

    def take(self, upload: "RoomUpload") -> list[torch.Tensor]:
        """Return a part for kernels launched from here on."""
        torch.cuda.current_stream().wait_event(upload.done)
        return upload.tensors

    def release(self, upload: "RoomUpload") -> None:
        """Give the room of a part back; kernels launched from here on do not read it."""
        self._is_free[upload.room] = torch.cuda.current_stream().record_event()


@dataclass(frozen=True, slots=True)
class RoomUpload:
    """Tensors on their way into a room of a GPU's memory."""

    room: int
    tensors: list[torch.Tensor]
    done: torch.cuda.Event


def room_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of a room that tensors lie in one after the other, each aligned."""
    return sum(-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors)


def places_in(room: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory of a room for each of some tensors, aligned."""
    places, at = [], 0
    for tensor in tensors:
        places.append(room[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape))
        at += room_bytes([tensor])
    return places


def _copying_stream() -> torch.cuda.Stream:
    if _CURRENT.copying is None:
        _CURRENT.copying = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _CURRENT.copying


def _uploading_stream() -> torch.cuda.Stream:
    # Not that of copies to the host, which wait for kernels.
    if _CURRENT.uploading is None:
        _CURRENT.uploading = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    return _CURRENT.uploading


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that an allocation failed."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in _CPU_OUT_OF_MEMORY
    )
