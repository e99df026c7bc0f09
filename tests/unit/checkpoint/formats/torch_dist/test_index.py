"""An index of torch's is read without running any of it, and is held against the files."""

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.torch_dist.index import Item, StoredIndex
from megatron.errors import CheckpointError
from tests.support.checkpoints.torch_dist_folders import Boxes, save_chunks
from tests.support.examples import examples

TENSORS = {
    "a": torch.arange(24.0).view(4, 3, 2),
    "b": torch.arange(6).to(torch.bfloat16),
    "scalar": torch.tensor(5.0),
    "turned": torch.arange(12.0).view(3, 4).t(),
}


def _halves(key: str, tensor: Tensor) -> Boxes:
    """Halves along every axis of an even length."""
    counts = [2 if size % 2 == 0 else 1 for size in tensor.shape]
    cell = tuple(size // count for size, count in zip(tensor.shape, counts))
    places = itertools.product(*map(range, counts))
    return [(tuple(i * n for i, n in zip(place, cell)), cell) for place in places]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_chunks(tmp_path, TENSORS, {"object": {"n": 1}}, cut=_halves)
    return tmp_path


@pytest.mark.parametrize("by_torch", [True, False])
def test_tensors_and_objects_are_found_by_key(tmp_path: Path, by_torch: bool) -> None:
    if by_torch:
        state = {**TENSORS, "object": [{"n": 1}]}
        planner = DefaultSavePlanner(flatten_state_dict=False)
        save_by_torch(state, checkpoint_id=tmp_path, planner=planner, no_dist=True)
    else:
        save_chunks(tmp_path, TENSORS, {"object": {"n": 1}}, cut=_halves)
    index = StoredIndex(tmp_path)
    assert set(index.tensors) == set(TENSORS)
    for key, tensor in TENSORS.items():
        assert index.tensors[key][:2] == (tensor.dtype, tuple(tensor.shape))
        everything = Box((0,) * tensor.dim(), tuple(tensor.shape))
        assert torch.equal(index.read(key, everything), tensor)
    assert index.read_object("object") == {"n": 1}
    parts = 5 if by_torch else 4 + 2 + 1 + 2 + 1
    assert len(list(index.items)) == parts


@examples(40)
@given(data=st.data())
def test_any_box_is_put_together_from_any_chunks(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    save_chunks(folder, TENSORS, {}, cut=_halves)
    index = StoredIndex(folder)
    for key, tensor in TENSORS.items():
        edges = [
            sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in tensor.shape
        ]
        box = Box(tuple(low for low, _ in edges), tuple(high - low for low, high in edges))
        assert torch.equal(index.read(key, box), tensor[box.slices])


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.mkdir, (self.path,)


def test_an_index_that_names_other_code_is_refused_unexecuted(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(_Runs(folder / "made")))
    with pytest.raises(CheckpointError, match="names code that it is not allowed to run"):
        StoredIndex(folder)
    assert not (folder / "made").exists()


def _edit(folder: Path, change: Callable[[Any], None]) -> None:
    with open(folder / ".metadata", "rb") as file:
        content = pickle.load(file)
    change(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def _lose_entry(key: str) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        at = next(index for index in content.storage_data if index.fqn == key)
        del content.storage_data[at]

    return change


def _move(**fields: Any) -> Callable[[Any], None]:
    def change(content: Any) -> None:
        at = next(index for index in content.storage_data if index.fqn == "a")
        content.storage_data[at].__dict__.update(fields)

    return change


def _chunk(content: Any) -> None:
    content.state_dict_metadata["a"].chunks.pop()


def _no_size(content: Any) -> None:
    del content.state_dict_metadata["a"].__dict__["size"]


def _no_entry(content: Any) -> None:
    content.state_dict_metadata["a"] = 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_lose_entry("a"), "says of no file that it holds a from"),
        (_lose_entry("object"), "says of no file that it holds object"),
        (_move(relative_path="../other"), "names the file '../other', outside of the folder"),
        (_move(relative_path="__9_0.distcp"), "names __9_0.distcp, which is not there"),
        (_move(offset=1 << 20), "and .metadata names bytes up to 1,0"),
        (_move(transform_descriptors=["zstd"]), "is transformed by ['zstd']"),
        (_chunk, "chunks of a in .metadata: 18 of 24 elements are there"),
        (_no_size, ".metadata: AttributeError"),
        (_no_entry, "a is neither a tensor nor an object"),
    ],
)
def test_an_index_that_promises_too_much_is_refused(
    folder: Path, change: Callable[[Any], None], words: str
) -> None:
    _edit(folder, change)
    with pytest.raises(CheckpointError, match="does not hold what its index says") as error:
        StoredIndex(folder)
    assert words in str(error.value.found)


def test_a_cut_file_and_a_missing_one_are_named(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="does not hold what its index says") as error:
        StoredIndex(folder)
    assert "__1_0.distcp has" in str(error.value.found)
    path.unlink()
    with pytest.raises(CheckpointError) as error:
        StoredIndex(folder)
    assert "names __1_0.distcp, which is not there" in str(error.value.found)


def _item(folder: Path, key: str) -> Item:
    return StoredIndex(folder).tensors[key].chunks[0].item


def _overwrite(folder: Path, item: Item, data: bytes) -> None:
    with open(folder / item.file, "r+b") as file:
        file.seek(item.offset)
        file.write(data)


def test_an_archive_that_is_damaged_is_named_with_its_bytes(folder: Path) -> None:
    item = _item(folder, "b")
    _overwrite(folder, item, bytes(item.length))
    index = StoredIndex(folder)
    with pytest.raises(CheckpointError, match="cannot be read as tensors") as error:
        index.read("b", Box((0,), (6,)))
    assert f"{item.file} at bytes {item.offset} to" in str(error.value.found)


def test_an_archive_of_another_tensor_is_refused(folder: Path) -> None:
    def swap(content: Any) -> None:
        first, second = (
            next(index for index in content.storage_data if index.fqn == key)
            for key in ("a", "turned")
        )
        infos = content.storage_data
        infos[first], infos[second] = infos[second], infos[first]

    _edit(folder, swap)
    index = StoredIndex(folder)
    with pytest.raises(CheckpointError, match="does not hold what its index says") as error:
        index.read("a", Box((0, 0, 0), (4, 3, 2)))
    assert "where .metadata promises torch.float32 [2, 3, 1]" in str(error.value.found)


def test_elements_that_are_cut_off_after_the_check_are_missed(folder: Path) -> None:
    index, item = StoredIndex(folder), _item(folder, "a")
    everything = Box((0, 0, 0), (4, 3, 2))
    index.read("a", everything)  # where the elements are is known from now on
    with open(folder / item.file, "r+b") as file:
        file.truncate(item.offset + 10)
    with pytest.raises(CheckpointError, match="does not hold what its index says") as error:
        index.read("a", everything)
    assert "ends within the elements of a" in str(error.value.found)
