"""Whatever bytes a file holds: its content, or an error of ours, within bounds of time and memory.

Each kind of file is written once; examples damage the bytes of one, or replace values in its JSON.
"""

import contextlib
import copy
import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from megatron.arguments import parse_args
from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files import safetensors_header, safetensors_index
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.formats.torch_dist.index import StoredIndex
from megatron.config.files.reading import read_content
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import MegatronError
from tests.support.checkpoints.torch_dist_folders import save_chunks
from tests.support.examples import examples
from tests.unit.checkpoint.folder.test_manifest import example as example_manifest
from tests.unit.data.corpora import write_documents

MOST_SECONDS = 5.0  # of this thread; an example takes milliseconds
MOST_BYTES = 64 * 2**20  # the files have a few hundred

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2**31, 2**63, 2**64, 10**30, 0.5, 1e308])
    | st.sampled_from(["", "../x", "/etc/passwd", "F32", "x\0", "\ud800", "a" * 300])
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


class Target(NamedTuple):
    """A file that is damaged, and the reading of it."""

    path: Path
    read: Callable[[], object]


def corpus_index(folder: Path) -> Target:
    prefix = write_documents(folder / "c")
    for suffix in (".sums", ".meta.json"):
        Path(prefix + suffix).unlink(missing_ok=True)

    def read() -> None:
        corpus = MMapIndexedDataset(prefix)
        corpus.join(np.arange(len(corpus)))

    return Target(Path(prefix + ".idx"), read)


def manifest_file(folder: Path) -> Target:
    (folder / manifest.NAME).write_bytes(manifest.encode(example_manifest()))
    return Target(folder / manifest.NAME, lambda: manifest.load(folder))


def safetensors_file(folder: Path) -> Target:
    path = folder / "x.safetensors"
    header = safetensors_header.encode([("a", "F32", (2, 3)), ("b", "U8", ())], {"k": "v"})
    path.write_bytes(header + bytes(25))
    return Target(path, lambda: safetensors_header.read(path))


def index_file(folder: Path) -> Target:
    path = folder / safetensors_index.NAME
    (folder / "a.safetensors").touch()
    path.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "a.safetensors"}}))
    return Target(path, lambda: safetensors_index.read(path))


def torch_dist_index(folder: Path) -> Target:
    save_chunks(folder, {"a": torch.ones(3)}, {"o": {"n": 1}}, files=1)
    return Target(folder / ".metadata", lambda: StoredIndex(folder))


def torch_dist_data(folder: Path) -> Target:
    save_chunks(folder, {"a": torch.ones(3)}, {"o": {"n": 1}}, files=1)
    (path,) = folder.glob("*.distcp")

    def read() -> None:
        index = StoredIndex(folder)
        index.read("a", Box((0,), (3,)))
        index.read_object("o")

    return Target(path, read)


def config_in(suffix: str, text: str) -> Callable[[Path], Target]:
    def write(folder: Path) -> Target:
        path = folder / f"run{suffix}"
        path.write_text(text)
        return Target(path, lambda: read_content(str(path)))

    return write


def config_of_a_run(folder: Path) -> Target:
    path = folder / "run.json"
    path.write_text(json.dumps(RUN))
    return Target(path, lambda: parse_args(["--config", str(path)]))


RUN = {
    "model": {"hidden_size": 64, "num_layers": 1, "num_attention_heads": 4, "seq_length": 8},
    "micro_batch_size": 1,
    "train_iters": 1,
    "tokenizer_type": "ByteTokenizer",
    "data_path": ["0.5", "x"],
    "bf16": True,
}
TOML = 'hidden_size = 64\nlr = 1e-3\nbf16 = true\ndata_path = ["0.5", "x"]\n[a]\nsplit = "9,1,0"\n'
YAML = "hidden_size: 64\nlr: 1.0e-3\nbf16: true\ndata_path: &x [0.5, x]\na: {split: '9,1,0'}\n"
FILES = {
    "idx": corpus_index,
    "manifest": manifest_file,
    "safetensors": safetensors_file,
    "safetensors index": index_file,
    "torch_dist index": torch_dist_index,
    "torch_dist data": torch_dist_data,
    "json config": config_in(".json", json.dumps(RUN)),
    "toml config": config_in(".toml", TOML),
    "yaml config": config_in(".yaml", YAML),
}


@pytest.fixture(scope="module", params=FILES)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = FILES[request.param](tmp_path_factory.mktemp("file"))
    found.read()  # whole, it is what it should be
    return found, found.path.read_bytes()


def assert_refused_or_read(target: Target, content: bytes) -> None:
    """Put `content` into the file and read it."""
    target.path.write_bytes(content)
    tracemalloc.start()
    began = time.thread_time()
    try:
        with contextlib.suppress(MegatronError):
            target.read()
    finally:
        seconds, (_, most) = time.thread_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert seconds < MOST_SECONDS
    assert most < MOST_BYTES


@examples(120)
@given(
    damage=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 8), st.binary(max_size=9)),
        min_size=1,
        max_size=3,
    )
)
def test_bytes_that_are_replaced_left_out_and_put_in(
    target: Any, damage: list[tuple[float, int, bytes]]
) -> None:
    file, whole = target
    content = bytearray(whole)
    for place, removed, added in damage:
        at = int(place * (len(content) + 1))
        content[at : at + removed] = added
    assert_refused_or_read(file, bytes(content))


@examples(60)
@given(content=st.binary(max_size=300))
def test_any_bytes(target: Any, content: bytes) -> None:
    assert_refused_or_read(target[0], content)


@pytest.mark.parametrize("text", ["[" * 400, "[{}]" * 10**4, "{'a':" * 3000, "9" * 10**5])
def test_texts_that_are_deep_or_long(target: Any, text: str) -> None:
    assert_refused_or_read(target[0], text.replace("'", '"').encode())


# JSON whose values are other ones.


def json_manifest(fields: Any) -> bytes:
    """Return a manifest with these fields and the digest that belongs to them."""
    if not isinstance(fields, dict):
        return json.dumps(fields).encode()
    text = json.dumps(fields | {"manifest_xxh3": ""})
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return text.replace('"manifest_xxh3": ""', f'"manifest_xxh3": "{digest}"').encode()


def json_header(fields: Any) -> bytes:
    """Return a safetensors file with this header."""
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text + bytes(25)


class Parts(NamedTuple):
    """A file of JSON: the object in it, and the file around an object."""

    write: Callable[[Path], Target]
    fields: Callable[[bytes], Any]
    content: Callable[[Any], bytes]


def plain(fields: Any) -> bytes:
    return json.dumps(fields).encode()


JSON_FILES = {
    "manifest": Parts(manifest_file, json.loads, json_manifest),
    "safetensors": Parts(
        safetensors_file, lambda whole: json.loads(whole[8:-25].rstrip()), json_header
    ),
    "safetensors index": Parts(index_file, json.loads, plain),
    "json config": Parts(config_of_a_run, json.loads, plain),
}


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return every container with each of its keys or indices."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += places(value[key])
    return found


@pytest.fixture(scope="module", params=JSON_FILES)
def parts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = JSON_FILES[request.param]
    file = found.write(tmp_path_factory.mktemp("json"))
    return file, found.fields(file.path.read_bytes()), found.content


@examples(100)
@given(data=st.data())
def test_values_of_other_kinds(parts: Any, data: st.DataObject) -> None:
    file, valid, content = parts
    fields = copy.deepcopy(valid)
    for _ in range(data.draw(st.integers(1, 2))):
        container, key = data.draw(st.sampled_from(places(fields)))
        if isinstance(container, dict) and data.draw(st.booleans()):
            container[data.draw(st.text(max_size=4))] = container.pop(key)
        else:
            container[key] = data.draw(VALUES)
        if not places(fields):
            break
    assert_refused_or_read(file, content(fields))
