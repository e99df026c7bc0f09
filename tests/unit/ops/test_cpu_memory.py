"""Tensors that are kept together do not overlap and leave no gaps; copies are their tensors."""

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron.ops import cpu_memory
from megatron.ops.cpu_memory import (
    CopiesInLargePages,
    TensorMemory,
    keep_tensors_together,
    tensor_memory,
)

MIB = 1 << 20


@pytest.fixture(scope="module")
def together() -> Iterator[None]:
    """Keep tensors of this module's tests together."""
    undo = keep_tensors_together()
    try:
        yield
    finally:
        undo()


def of_bytes(size: int, value: int = 0) -> Tensor:
    """Return so many equal bytes."""
    return torch.full((size,), value, dtype=torch.uint8)


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 20), st.integers(MIB, 3 * MIB)), max_size=40
    )
)
def test_tensors_keep_their_values_and_leave_nothing(
    together: None, steps: list[tuple[bool, int, int]]
) -> None:
    before = tensor_memory()
    alive: dict[int, Tensor] = {}
    for number, (takes, which, size) in enumerate(steps):
        if takes or not alive:
            alive[number] = of_bytes(size, number)
        else:
            freed = sorted(alive)[which % len(alive)]
            assert (alive[freed] == freed).all()
            del alive[freed]
        whole_pages = sum(-(-each.nbytes // 4096) * 4096 for each in alive.values())
        assert tensor_memory().in_use == before.in_use + whole_pages
    assert all((tensor == number).all() for number, tensor in alive.items())
    alive.clear()
    assert tensor_memory() == before


def test_the_place_of_a_freed_tensor_holds_the_next_one_of_its_size(together: None) -> None:
    # A layer's tensors: of those that are freed the next layer makes others of the same sizes.
    kept = []
    for _ in range(8):
        norm, middle = of_bytes(2 * MIB), of_bytes(8 * MIB)
        kept += [of_bytes(6 * MIB), of_bytes(2 * MIB)]
        del norm, middle
    found = tensor_memory()
    gaps = found.end - found.in_use
    assert gaps <= (2 + 8) * MIB
    place = kept[3].data_ptr()
    del kept[3]
    assert of_bytes(2 * MIB).data_ptr() == place


def test_the_smallest_gap_that_is_large_enough_is_taken(together: None) -> None:
    sizes = [4, 1, 2, 1, 3, 1]
    tensors = [of_bytes(size * MIB) for size in sizes]
    places = [tensor.data_ptr() for tensor in tensors]
    del tensors[4], tensors[2], tensors[0]  # gaps of 3, 2 and 4
    two = of_bytes(2 * MIB - 5000)
    assert two.data_ptr() == places[2]
    three = of_bytes(2 * MIB)
    assert three.data_ptr() == places[4]
    four = of_bytes(4 * MIB)
    assert four.data_ptr() == places[0]
    del two, three, four, tensors[:]


def test_neighbours_that_were_freed_are_one_gap(together: None) -> None:
    for order in (0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0):
        tensors: dict[int, Tensor] = {at: of_bytes(MIB) for at in range(4)}
        place = tensors[0].data_ptr()
        for at in order:
            del tensors[at]
        whole = of_bytes(3 * MIB)
        assert whole.data_ptr() == place
        del whole, tensors


def test_small_tensors_are_elsewhere(together: None) -> None:
    before = tensor_memory()
    small, large = of_bytes(MIB // 4 - 1), of_bytes(MIB // 4)
    assert tensor_memory().in_use == before.in_use + large.nbytes
    del small, large
    assert tensor_memory() == before


def test_a_profiler_sees_what_is_taken_and_freed(together: None) -> None:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        tensor = of_bytes(5 * MIB)
        del tensor
    sizes = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert 5 * MIB in sizes
    assert -5 * MIB in sizes


# Each of these has a process of its own, where nobody else keeps tensors together.
BEGINNING = """
import os, resource, sys, threading, torch
from megatron.host import resident_bytes
from megatron.ops.cpu_memory import keep_tensors_together, tensor_memory
MIB = 1 << 20
"""
UNDONE = """
undo = keep_tensors_together()
kept, freed = torch.ones(MIB), torch.ones(64 * MIB)
second = keep_tensors_together()  # changes nothing, and undoes nothing
second()
assert tensor_memory().in_use == 260 * MIB
last = torch.ones(MIB)
assert tensor_memory().in_use == 264 * MIB
del freed
before = resident_bytes("VmRSS")
undo()
assert before - resident_bytes("VmRSS") > 250 * MIB, "the memory went back"
other = torch.ones(MIB)
assert tensor_memory().in_use == 8 * MIB
assert kept.sum() + last.sum() == 2 * MIB, "tensors stay what they are"
del kept, last
assert tensor_memory() == (0, 0)
again = keep_tensors_together()
new = torch.ones(MIB)
assert tensor_memory().in_use == 4 * MIB
"""
# What is freed is kept, but for a GiB of one tensor.
GIVEN_BACK = """
keep_tensors_together()
large, _, smaller, last = (torch.ones(count * MIB) for count in (256, 1, 255, 1))
del smaller
before = resident_bytes("VmRSS")
del large
assert before - resident_bytes("VmRSS") > 1000 * MIB
again = torch.empty(255 * MIB)
before = resident_bytes("VmRSS")
again.fill_(1)
assert resident_bytes("VmRSS") - before < 100 * MIB, "its memory was kept"
"""
# A start without room for the range, which is as large as the machine's memory.
LIMITED = """
limit = resident_bytes("VmSize") + 256 * MIB
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
keep_tensors_together()
tensor = torch.ones(MIB)
assert tensor_memory() == (0, 0)
assert tensor.sum() == MIB
"""
# The limit comes later: the C library is asked as well, and PyTorch says that it has none either.
FULL = """
keep_tensors_together()
first = torch.ones(MIB)
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))
try:
    torch.ones(512 * MIB)
except RuntimeError as error:
    assert "allocate memory" in str(error), error
else:
    sys.exit("no error")
second = torch.ones(MIB)
assert tensor_memory() == (8 * MIB, 8 * MIB)
"""
# PyTorch's first tensor sets up what a child would wait for, if the fork came in between.
FORKED = """
keep_tensors_together()
torch.ones(MIB)
def churn():
    while not ended:
        torch.empty(MIB)
ended = False
threads = [threading.Thread(target=churn) for _ in range(2)]
for thread in threads: thread.start()
for _ in range(60):
    child = os.fork()
    if not child:
        torch.ones(MIB)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
ended = True
for thread in threads: thread.join()
assert tensor_memory() == (0, 0)
"""
OTHER_SYSTEM = """
sys.platform = "darwin"
keep_tensors_together()
tensor = torch.ones(MIB)
assert tensor_memory() == (0, 0)
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(UNDONE, id="undone"),
        pytest.param(GIVEN_BACK, id="given back"),
        pytest.param(LIMITED, id="no addresses"),
        pytest.param(FULL, id="no memory"),
        pytest.param(FORKED, id="forked"),
        pytest.param(OTHER_SYSTEM, id="other system"),
    ],
)
def test_a_process_of_its_own(program: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", BEGINNING + program],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("content", "version", "said"),
    [
        (None, "2.13.0", "is not built"),
        (b"no library", "2.13.0", "cannot be used with torch 2.13.0"),
        ("as built", "1.0.0+cpu", "and this is torch 1.0.0+cpu"),
    ],
)
def test_a_library_that_does_not_fit_is_not_used(
    content: bytes | str | None,
    version: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = cpu_memory._LIBRARY if content == "as built" else tmp_path / "library.so"
    if isinstance(content, bytes):
        file.write_bytes(content)
    monkeypatch.setattr(cpu_memory, "_LIBRARY", file)
    monkeypatch.setattr(torch, "__version__", version)
    for _ in range(2):
        keep_tensors_together()()
    assert capsys.readouterr().err.count(said) == 1
    assert tensor_memory() == TensorMemory(0, 0)


def test_copies_stay_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_memory, "_CHUNK", 4096)
    copies = CopiesInLargePages()
    tensors = [torch.randn(size).bfloat16() for size in (5, 700, 1300, 3000, 1)]
    tensors += [torch.randn(3, 7), torch.randn(0)]
    kept = [copies.keep(each) for each in tensors]
    for copy, tensor in zip(kept, tensors):
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert all(copy.data_ptr() % 64 == 0 for copy in kept if copy.numel())
    assert len({copy.untyped_storage().data_ptr() for copy in kept}) == 3


def test_memory_outlives_what_gave_it() -> None:
    kept = [CopiesInLargePages().keep(torch.full((1 << 20,), float(at))) for at in range(3)]
    assert [copy.mean().item() for copy in kept] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("advice", [None, 12_345])
def test_a_system_without_large_pages_gives_small_ones(
    monkeypatch: pytest.MonkeyPatch, advice: int | None
) -> None:
    if advice is None:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", advice, raising=False)
    found = cpu_memory.large_pages(10_000)
    assert found.shape == (10_000,)
    assert not found.any()
