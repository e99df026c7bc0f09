"""The sidecar is read back as written, and refused when it is not one."""

import dataclasses
import json

import pytest

from megatron.data.corpus.metadata import (
    digests_of_files,
    metadata_file_path,
    read_metadata,
    write_metadata,
)
from megatron.errors import DataError, MachineError
from tests.unit.data.corpora import METADATA


def test_what_is_written_is_read(tmp_path):
    write_metadata(str(tmp_path / "c"), METADATA)
    assert read_metadata(str(tmp_path / "c")) == METADATA
    assert [path.name for path in tmp_path.iterdir()] == ["c.meta.json"]


def test_a_corpus_may_have_no_sidecar_and_no_end_of_document(tmp_path):
    prefix = str(tmp_path / "c")
    assert read_metadata(prefix) is None
    without = dataclasses.replace(METADATA, eod=None)
    write_metadata(prefix, without)
    assert read_metadata(prefix) == without


def test_a_sidecar_from_before_checksums_is_read(tmp_path):
    fields = dataclasses.asdict(METADATA)
    del fields["pair_id"], fields["tokenizer_files"], fields["sentence_splitter"]
    (tmp_path / "c.meta.json").write_text(json.dumps(fields))
    assert read_metadata(str(tmp_path / "c")) == METADATA


def test_the_files_of_a_tokenizer_are_told_by_their_digests(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name in ("tokenizer.json", "vocab.txt", "model.safetensors"):
        (folder / name).write_bytes(b"abc")
    abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digests_of_files([folder]) == {"tokenizer.json": abc, "vocab.txt": abc}
    assert digests_of_files([folder / "vocab.txt", tmp_path / "none"]) == {"vocab.txt": abc}
    described = dataclasses.replace(METADATA, tokenizer_files=digests_of_files([folder]))
    write_metadata(str(tmp_path / "c"), described)
    assert read_metadata(str(tmp_path / "c")) == described


def test_fields_of_later_versions_of_the_tools_are_left_alone(tmp_path):
    path = tmp_path / "c.meta.json"
    path.write_text(json.dumps(dataclasses.asdict(METADATA) | {"checksums": ["abc"]}))
    assert read_metadata(str(tmp_path / "c")) == METADATA


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 9}, "format_version 9, this program reads 1"),
        ({"vocab_size": "many"}, "wrong type: vocab_size"),
        ({"vocab_size": True}, "wrong type: vocab_size"),
        ({"tokenizer_type": None}, "wrong type: tokenizer_type"),
        ({"pair_id": 7}, "wrong type: pair_id"),
        ({"tokenizer_files": {"vocab.json": 7}}, "wrong type: tokenizer_files"),
        ({"level": "chapter"}, "level 'chapter'"),
    ],
)
def test_a_sidecar_with_a_wrong_field_is_refused(tmp_path, change, message):
    path = tmp_path / "c.meta.json"
    path.write_text(json.dumps(dataclasses.asdict(METADATA) | change))
    with pytest.raises(DataError, match="the sidecar of a corpus cannot be used") as raised:
        read_metadata(str(tmp_path / "c"))
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "no JSON"), (b"[]", "a JSON list"), (b"\xff\xfe", "codec"), (b"{}", "format_version")],
)
def test_a_sidecar_that_is_no_object_is_refused(tmp_path, content, message):
    (tmp_path / "c.meta.json").write_bytes(content)
    with pytest.raises(DataError) as raised:
        read_metadata(str(tmp_path / "c"))
    assert message in str(raised.value)


def test_a_sidecar_that_cannot_be_written_is_a_machine_error(tmp_path):
    with pytest.raises(MachineError, match="cannot write"):
        write_metadata(str(tmp_path / "nowhere" / "c"), METADATA)


def test_the_sidecar_is_named_after_the_prefix():
    assert metadata_file_path("a/b.v2") == "a/b.v2.meta.json"
