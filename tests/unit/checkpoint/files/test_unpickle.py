"""Old files are read as tensors and plain values; others are refused unexecuted."""

import argparse
import builtins
import codecs
import enum
import os
import pickle
import random
import sys
import tracemalloc
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megatron.checkpoint.files import unpickle
from megatron.checkpoint.files.file_window import FileWindow
from megatron.checkpoint.files.unpickle import EnumValue, Inert
from megatron.errors import CheckpointError


class _Calls:
    """Pickles as a call of `function(*arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def _saved(tmp_path: Path, value: Any, **options: Any) -> Path:
    path = tmp_path / "file.pt"
    torch.save(value, path, **options)
    return path


def test_tensors_args_and_random_states_are_read(tmp_path: Path) -> None:
    content = {
        "args": argparse.Namespace(lr=np.float64(0.25), seed=np.int64(3), flag=True, names=["a"]),
        "model": {"w": torch.arange(6.0).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        found = unpickle.load(_saved(tmp_path, content, **options))
        assert vars(found["args"]) == {"lr": 0.25, "seed": 3, "flag": True, "names": ["a"]}
        assert torch.equal(found["model"]["w"], content["model"]["w"])
        assert found["model"]["half"].dtype == torch.bfloat16
        assert found["random_rng_state"] == content["random_rng_state"]
        assert found["np_rng_state"][2:] == content["np_rng_state"][2:]


def test_zipped_files_are_mapped_and_older_ones_are_read(tmp_path: Path) -> None:
    path = _saved(tmp_path, {"w": torch.zeros(4)})
    assert unpickle.is_mapped(path)
    old = _saved(tmp_path, {"w": torch.zeros(4)}, _use_new_zipfile_serialization=False)
    assert not unpickle.is_mapped(old)
    unpickle.check(old)  # has no sums to compare


def test_an_enum_of_a_program_that_is_not_here_becomes_its_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("megatron.enums")
    kind = enum.Enum("PositionEmbeddingType", {"rotary": 1}, module="megatron.enums")
    module.PositionEmbeddingType = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.enums", module)
    path = _saved(tmp_path, argparse.Namespace(position=kind.rotary))
    monkeypatch.delitem(sys.modules, "megatron.enums")
    found = unpickle.load(path)
    assert found.position == EnumValue("megatron.enums.PositionEmbeddingType", 1)


@pytest.mark.parametrize(
    ("hostile", "asked"),
    [
        (_Calls(os.system, "touch {mark}"), "system"),
        (_Calls(builtins.eval, "open('{mark}', 'w')"), "eval"),
        (_Calls(builtins.exec, "open('{mark}', 'w')"), "exec"),
        (_Calls(builtins.getattr, "text", "upper"), "getattr"),
        (_Calls(__import__("subprocess").Popen, ["touch", "{mark}"]), "Popen"),
        (_Calls(__import__("shutil").rmtree, "{mark}"), "rmtree"),
        (_Calls(torch.load, "{mark}"), "torch.serialization.load"),
        (_Calls(torch.hub.load, "{mark}", "x"), "torch.hub.load"),
        (_Calls(__import__("functools").partial, os.system, "touch {mark}"), "partial"),
        (_Calls(__import__("pathlib").Path.write_text, "x"), "getattr"),
        (_Calls(np.load, "{mark}"), "load"),
        (_Calls(__import__("importlib").import_module, "antigravity"), "import_module"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_file_is_refused_by_name_and_nothing_runs(
    tmp_path: Path, hostile: _Calls, asked: str, zipped: bool
) -> None:
    mark = tmp_path / "mark"
    function, arguments = hostile.call
    filled = [text.format(mark=mark) if isinstance(text, str) else text for text in arguments]
    content = {"model": {"w": torch.zeros(2)}, "args": _Calls(function, *filled)}
    path = _saved(tmp_path, content, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="code that it is not allowed to run") as caught:
        unpickle.load(path)
    assert asked in str(caught.value.found)
    assert "nothing of it was run" in str(caught.value.found)
    assert not mark.exists()


def test_the_list_of_what_is_allowed_is_not_left_open(tmp_path: Path) -> None:
    unpickle.load(_saved(tmp_path, {"w": torch.zeros(1)}))
    left = torch.serialization.get_safe_globals()
    assert not [one for one in left if isinstance(one, tuple) and one[1] in unpickle.ALLOWED]


def test_a_caller_may_allow_more_inert_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("elsewhere")
    exec_free = type("Scaler", (), {"__module__": "elsewhere"})
    module.Scaler = exec_free  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    scaler = exec_free()
    scaler.scale = 8.0  # type: ignore[attr-defined]
    path = _saved(tmp_path, {"scaler": scaler})
    monkeypatch.delitem(sys.modules, "elsewhere")
    with pytest.raises(CheckpointError, match="not allowed to run"):
        unpickle.load(path)
    found = unpickle.load(path, also={"elsewhere.Scaler": Inert})
    assert vars(found["scaler"]) == {"scale": 8.0}


def test_values_of_numpy_beyond_numbers_are_not_read(tmp_path: Path) -> None:
    path = _saved(tmp_path, {"when": np.datetime64("2020-01-01")})
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        unpickle.load(path)


def test_a_missing_and_a_garbled_file_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        unpickle.load(tmp_path / "none.pt")
    garbled = tmp_path / "garbled.pt"
    garbled.write_bytes(b"\x80\x02 this is no pickle")
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        unpickle.load(garbled)


def test_a_flipped_bit_anywhere_in_the_records_is_found(tmp_path: Path) -> None:
    path = _saved(tmp_path, {"w": torch.arange(64.0), "v": torch.ones(8)})
    unpickle.check(path)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        records = [record for record in archive.infolist() if "/data/" in record.filename]
    for record in records:
        sizes = data[record.header_offset + 26 : record.header_offset + 30]
        name, extra = int.from_bytes(sizes[:2], "little"), int.from_bytes(sizes[2:], "little")
        start = record.header_offset + 30 + name + extra  # where its data begin
        damaged = bytearray(data)
        damaged[start] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="a checkpoint file is damaged") as caught:
            unpickle.check(path)
        assert str(path) in str(caught.value.found)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError):
        unpickle.load(path)
    with pytest.raises(CheckpointError, match="No such file"):
        unpickle.check(tmp_path / "none.pt") or unpickle.load(tmp_path / "none.pt")


def _pickled(tmp_path: Path, value: Any) -> Path:
    path = tmp_path / "file.pickle"
    path.write_bytes(pickle.dumps(value))
    return path


def test_a_pickle_is_read_with_what_a_list_allows(tmp_path: Path) -> None:
    path = _pickled(tmp_path, {"size": torch.Size((2, 3)), "path": Path("/a/b")})
    found = unpickle.load_pickle(path, {"torch.Size": tuple, **unpickle.PATHS})
    assert found["size"] == (2, 3)
    assert type(found["size"]) is tuple
    assert isinstance(found["path"], unpickle.FilePath)


def test_a_pickle_runs_nothing_that_the_list_lacks(tmp_path: Path) -> None:
    path = _pickled(tmp_path, _Calls(os.mkdir, str(tmp_path / "made")))
    with pytest.raises(CheckpointError, match="names code that it is not allowed to run") as error:
        unpickle.load_pickle(path, {"torch.Size": tuple})
    assert f"names {os.mkdir.__module__}.mkdir; nothing of it was run" in str(error.value.found)
    assert not (tmp_path / "made").exists()


def test_a_pickle_that_is_cut_or_missing_is_refused(tmp_path: Path) -> None:
    path = _pickled(tmp_path, list(range(100)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="cannot be read as tensors and plain values"):
        unpickle.load_pickle(path, {})
    with pytest.raises(CheckpointError, match="reading a file of a checkpoint failed: No such"):
        unpickle.load_pickle(tmp_path / "none", {})


def _in_the_middle(tmp_path: Path, value: Any) -> FileWindow:
    """`value`, saved as an archive between other bytes, at an odd place."""
    archive = _saved(tmp_path, value).read_bytes()
    (tmp_path / "many").write_bytes(b"before" * 3 + b"!" + archive + b"after")
    return FileWindow(tmp_path / "many", 19, len(archive))


def test_an_archive_within_a_file_is_read_and_checked(tmp_path: Path) -> None:
    with _in_the_middle(tmp_path, [{"a": 1, "b": torch.arange(3)}]) as window:
        found = unpickle.load_window(window)
        assert found[0]["a"] == 1
        assert found[0]["b"].tolist() == [0, 1, 2]
        unpickle.check(window)
    content = bytearray((tmp_path / "many").read_bytes())
    at = content.index(torch.arange(3).numpy().tobytes())
    content[at] ^= 1
    (tmp_path / "many").write_bytes(content)
    with (
        FileWindow(tmp_path / "many", 19, len(content) - 24) as window,
        pytest.raises(CheckpointError, match="a checkpoint file is damaged") as error,
    ):
        unpickle.check(window)
    assert "many at bytes 19 to" in str(error.value.found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_within_a_file_is_found_without_being_read(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    whole = torch.arange(60).to(dtype)
    tensor = whole[10:34].view(4, 6).t()  # an offset, and strides of its own
    with _in_the_middle(tmp_path, tensor) as window:
        record = unpickle.tensor_record(window)
        assert (record.dtype, record.shape, record.strides) == (dtype, (6, 4), (1, 6))
        window.seek(record.start)
        data = bytearray(window.read(24 * dtype.itemsize))
    found = torch.frombuffer(data, dtype=dtype).as_strided((6, 4), record.strides)
    assert torch.equal(found, tensor)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([torch.zeros(2)], "a list where a tensor should be"),
        ([torch.zeros(2), torch.zeros(3)], "2 tensors, or compressed ones, where one should be"),
        ("text", "0 tensors"),
    ],
)
def test_what_is_not_one_tensor_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    with _in_the_middle(tmp_path, value) as window, pytest.raises(CheckpointError) as error:
        unpickle.tensor_record(window)
    assert words in str(error.value.found)


@pytest.mark.parametrize(
    ("record", "data", "words"),
    [
        ("byteorder", b"big", "elements that are not little-endian"),
        ("data/0", b"1234", "4 bytes for a tensor that needs 8"),
    ],
)
def test_elements_that_are_not_as_described_are_refused(
    tmp_path: Path, record: str, data: bytes, words: str
) -> None:
    path = _saved(tmp_path, torch.zeros(2))
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    changed = tmp_path / "changed.pt"
    with zipfile.ZipFile(changed, "w", zipfile.ZIP_STORED) as archive:
        for name, content in records.items():
            archive.writestr(name, data if name.partition("/")[2] == record else content)
    with (
        FileWindow(changed, 0, changed.stat().st_size) as window,
        pytest.raises(CheckpointError) as error,
    ):
        unpickle.tensor_record(window)
    assert words in str(error.value.found)


@pytest.mark.parametrize(
    "opcode",
    [
        b"B\xff\xff\xff\x7f",
        b"\x8e" + b"\xff" * 6 + b"\0\0",
        b"r\xff\xff\xff\x01",
        b"p99999999\n",
        b"\xff",
    ],
)
def test_a_pickle_does_not_ask_for_more_memory_than_its_file_has_bytes(
    tmp_path: Path, opcode: bytes
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\x80\x04N" + opcode + b".")
    tracemalloc.start()
    with pytest.raises(
        CheckpointError, match=r"UnpicklingError: (no opcode|[\d,]+ bytes or places)"
    ):
        unpickle.load_pickle(path, {})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


@pytest.mark.parametrize("protocol", range(6))
def test_pickles_of_every_protocol_are_within_their_files(tmp_path: Path, protocol: int) -> None:
    long = ["x" * 300, b"y" * 300, "\u20ac", -1, 2**70, 1.5, None, (1, 2, 3, 4), {3}, [[]] * 400]
    value = [*long, *map(str, range(600)), {"a": long}]  # more than 256 objects to remember
    path = tmp_path / "x"
    path.write_bytes(pickle.dumps(value, protocol))
    allowed = {"_codecs.encode": codecs.encode, "builtins.set": set, "__builtin__.set": set}
    assert unpickle.load_pickle(path, allowed | {"copy_reg._reconstructor": None}) == value
