"""The manifest: readable, exact, and refused whenever a byte of it is not as it was written."""

import json
import random
import re

import pytest
import xxhash

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import manifest as manifests
from megatron.checkpoint.folder.manifest import (
    FileRecord,
    GridLayout,
    Manifest,
    SavedPiece,
    SavedTensor,
)
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from megatron.mpu.topology import Topology

DIGEST = "0123456789abcdef" * 2


def example(**changes):
    pieces = (
        SavedPiece("shard-0.safetensors", Box((0, 0), (2, 3)), DIGEST),
        SavedPiece("shard-1.safetensors", Box((2, 0), (2, 3)), DIGEST),
    )
    fields = {
        "iteration": 100,
        "layout": GridLayout(tp=2, pp=1, dp=1),
        "progress": {"iteration": 100},
        "scalars": {"loss_scale": 2.0**16},
        "config": {"model": {"hidden_size": 6}},
        "tensors": {"model/w": SavedTensor("F32", (4, 3), pieces)},
        "files": {f"shard-{i}.safetensors": FileRecord(100, DIGEST) for i in (0, 1)},
        "generators": (),
        "written_by": {"megatron": "0.1.0", "torch": "2"},
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**{**fields, **changes})


def edited(path, **changes):
    """The example with top-level fields changed and the digest made right again."""
    fields = {**json.loads(manifests.encode(example())), **changes, "manifest_xxh3": ""}
    fields = {name: value for name, value in fields.items() if value is not ...}
    text = json.dumps(fields)
    digest = xxhash.xxh3_128_hexdigest(text.encode())
    return text.replace('"manifest_xxh3": ""', f'"manifest_xxh3": "{digest}"').encode()


def test_a_manifest_is_read_back_as_it_was(tmp_path):
    (tmp_path / "manifest.json").write_bytes(manifests.encode(example()))
    content, digest = manifests.load(tmp_path)
    assert content == example()
    assert len(digest) == 32
    assert content.bytes == 200
    assert content.tensors["model/w"].bytes == 48


def test_a_person_finds_one_line_for_each_tensor_and_file():
    lines = manifests.encode(example()).decode().splitlines()
    assert sum('"model/w"' in line for line in lines) == 1
    assert sum('"bytes": 100' in line for line in lines) == 2


def test_what_was_read_is_kept_and_older_manifests_do_not_say_it(tmp_path):
    sources = {"index of corpus": "xxh3_128 12", "--paths file": '"T: 1 0:1 corpus"'}
    kept = manifests.decode(manifests.encode(example(data=sources)), tmp_path)
    assert kept.data == sources
    older = manifests.decode(edited(tmp_path, data=...), tmp_path)
    assert older == example()
    assert older.data == {}


def test_a_layout_without_shared_sequences_needs_not_say_so(tmp_path):
    grid = {"tp": 2, "pp": 1, "dp": 1, "world": 2}
    assert manifests.decode(edited(tmp_path, layout=grid), tmp_path).layout.cp == 1
    shared = manifests.GridLayout.of(Topology(tp=2, cp=3))
    assert (shared.cp, shared.world, str(shared)) == (3, 6, "tp=2 pp=1 dp=1 cp=3")


def test_an_empty_checkpoint_has_a_manifest_too(tmp_path):
    empty = example(tensors={}, files={}, progress={}, scalars={}, config={})
    assert manifests.decode(manifests.encode(empty), tmp_path) == empty


def test_every_flipped_bit_is_found(tmp_path):
    text = manifests.encode(example())
    draw = random.Random(1)
    for at in range(len(text)):
        damaged = bytearray(text)
        damaged[at] ^= 1 << draw.randrange(8)
        with pytest.raises(CheckpointError, match="damaged or was edited"):
            manifests.decode(bytes(damaged), tmp_path)


def test_an_edit_by_hand_is_found(tmp_path):
    text = manifests.encode(example()).replace(b'"iteration": 100', b'"iteration": 200')
    with pytest.raises(CheckpointError, match=r"damaged or was edited(.|\n)*expected"):
        manifests.decode(text, tmp_path)


def test_a_name_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="named twice in one object"):
        manifests.decode(b'{"iteration": 100, "iteration": 200}', tmp_path)


def test_a_newer_version_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="newer version") as caught:
        manifests.decode(edited(tmp_path, version=2), tmp_path)
    assert "version 2, this program reads up to 1" in str(caught.value)


TENSOR = {"dtype": "F32", "shape": [4, 3], "pieces": []}
PIECE = {"file": "shard-0.safetensors", "offset": [0, 0], "shape": [4, 3], "xxh3": DIGEST}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "format 'other'"),
        ({"version": "1"}, "version '1'"),
        ({"iteration": -1}, "-1 in iteration"),
        ({"iteration": True}, "no int called 'iteration'"),
        ({"progress": ...}, "no dict called 'progress'"),
        ({"data": []}, "no dict called 'data'"),
        ({"layout": {"tp": 0, "pp": 1, "dp": 1, "world": 0}}, "layout"),
        ({"layout": {"tp": 2, "pp": 1, "dp": 1, "world": 3}}, "layout"),
        ({"layout": {"tp": 2, "pp": 1, "world": 2}}, "no int called 'dp'"),
        ({"generators": ["shard-0.safetensors"]}, "1 generator files"),
        ({"generators": ["a", "b"]}, "generators in 'a'"),
        ({"generators": [[], []]}, "generators in []"),
        ({"config": {}}, "does not match its fingerprint"),
        ({"files": {"../x": {"bytes": 1, "xxh3": DIGEST}}}, "may lead out"),
        ({"files": {"/etc/x": {"bytes": 1, "xxh3": DIGEST}}}, "may lead out"),
        ({"files": {"a..b": {"bytes": 1, "xxh3": DIGEST}}}, "may lead out"),
        ({"files": {"a/../../b": {"bytes": 1, "xxh3": DIGEST}}}, "may lead out"),
        ({"files": {"a/b/c": {"bytes": 1, "xxh3": DIGEST}}}, "may lead out"),
        ({"files": {"a": {"bytes": -1, "xxh3": DIGEST}}}, "-1 in a"),
        ({"files": {"a": {"bytes": 1, "xxh3": "zz"}}}, "digest 'zz'"),
        ({"tensors": {"w": 3}}, "no str called 'dtype' in w"),
        ({"tensors": {"w": {**TENSOR, "dtype": "F31"}}}, "unknown dtype"),
        ({"tensors": {"w": {**TENSOR, "shape": [4, -3]}}}, "in w"),
        ({"tensors": {"w": TENSOR}}, "do not make it up: 0 of 12"),
        ({"tensors": {"w": {**TENSOR, "pieces": [PIECE, PIECE]}}}, "overlap"),
        ({"tensors": {"w": {**TENSOR, "pieces": [{**PIECE, "file": "x"}]}}}, "no file of it"),
        ({"tensors": {"w": {**TENSOR, "pieces": [{**PIECE, "offset": [1, 0]}]}}}, "outside"),
    ],
)
def test_what_contradicts_itself_is_refused_even_with_a_right_digest(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match="damaged or was edited") as caught:
        manifests.decode(edited(tmp_path, **changes), tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\xff"])
def test_what_is_no_json_object_is_refused(tmp_path, text):
    with pytest.raises(CheckpointError, match="damaged or was edited"):
        manifests.decode(text, tmp_path)


def test_a_folder_without_a_manifest_names_the_file_and_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: no such file; beside it: nothing"):
        manifests.load(tmp_path)
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match=r"has no manifest(.|\n)*mp_rank_00") as raised:
        manifests.load(tmp_path)
    assert f"{tmp_path / manifests.NAME}: no such file" in str(raised.value)
    assert "copy the folder whole" in str(raised.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), object(), {1, 2}])
@pytest.mark.parametrize("field", ["scalars", "progress", "config"])
def test_a_value_that_json_cannot_hold_exactly_is_refused(value, field):
    with pytest.raises(CheckpointError, match="cannot be written to a checkpoint"):
        manifests.encode(example(**{field: {"x": value}}))


def test_the_fingerprint_is_that_of_the_run_config():
    class Plain(RunConfig):
        def __init__(self):
            pass

        def to_plain(self):
            return example().config

    assert example().config_fingerprint == Plain().fingerprint()
    assert re.fullmatch("[0-9a-f]{16}", example().config_fingerprint)


def test_a_piece_is_named_after_its_box_unless_it_is_whole():
    assert manifests.entry_name("w", Box((0, 0), (4, 3)), (4, 3)) == "w"
    assert manifests.entry_name("w", Box((2, 0), (2, 3)), (4, 3)) == "w[2:4, 0:3]"
