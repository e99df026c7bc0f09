"""tools/inspect_dataset.py: what a corpus holds, whether it is whole, and adopting one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.corpus.metadata import CorpusMetadata, read_metadata
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.errors import ConfigError, DataError
from tests.unit.data.corpus.test_legacy_index import write_legacy
from tools.inspect_dataset import main

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "inspect_dataset.py"
BYTES = ("--tokenizer-type", "ByteTokenizer")
EOD = 256
TEXTS = ("first", "", "zweites \u00e9")
MISSING_OR_DAMAGED = DataError.exit_code


def tokens_of(text: str) -> list[int]:
    return [*text.encode(), EOD] if text else []


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    metadata = CorpusMetadata(tokenizer_type="ByteTokenizer", vocab_size=257, eod=EOD)
    with MMapIndexedDatasetBuilder(tmp_path / "c", np.uint16, metadata=metadata) as builder:
        for text in TEXTS:
            builder.add_document(tokens_of(text))
    return str(tmp_path / "c")


@pytest.fixture
def bare(prefix: str) -> str:
    """The same corpus as another tool would have left it."""
    for suffix in (".sums", ".meta.json"):
        Path(prefix + suffix).unlink()
    return prefix


def flip(path: str, at: int) -> None:
    content = bytearray(Path(path).read_bytes())
    content[at] ^= 1
    Path(path).write_bytes(content)


def test_it_says_what_a_corpus_holds(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([prefix])
    output = capsys.readouterr().out
    for text in (
        f"{prefix}.bin  34 bytes",
        "3 items in 3 documents, 17 tokens of uint16",
        "tokens per item: 0 to 11, 5.7 on average; 1 items are empty",
        "of 2 items looked at: highest token 256, 2 end with token 256",
        'tokenizer_type: "ByteTokenizer"',
        "checksums: 1 blocks of 262,144 bytes, pair id ",
    ):
        assert text in output


def test_samples_are_text_with_a_tokenizer_and_ids_without(
    prefix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([prefix, "--sample", "5", *BYTES])
    output = capsys.readouterr().out
    assert 'item 0 (6 tokens): "first<|endoftext|>"' in output
    assert 'item 2 (11 tokens): "zweites \u00e9<|endoftext|>"' in output
    main([prefix, "--sample", "1"])
    assert f"item 0 (6 tokens): {tokens_of('first')}" in capsys.readouterr().out


def test_json_is_for_programs(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([prefix, "--json", "--verify", "--sample", "1", *BYTES])
    content = json.loads(capsys.readouterr().out)
    assert (content["items"], content["tokens"], content["level"]) == (3, 17, "document")
    assert content["metadata"]["pair_id"] == content["checksums"]["pair_id"]
    assert content["samples"][0]["text"] == "first<|endoftext|>"
    assert content["look"] == {
        "items": 2, "highest_token": 256, "last_token": 256, "ends_with_it": 2,
    }  # fmt: skip


@pytest.mark.parametrize("at", range(0, 34, 5))
def test_verify_reads_every_byte(prefix: str, at: int, capsys: pytest.CaptureFixture[str]) -> None:
    main([prefix, "--verify"])
    assert "verified: 1 blocks, 34 bytes" in capsys.readouterr().out
    flip(prefix + ".bin", at)
    main([prefix])
    with pytest.raises(DataError, match=r"not those that were written: .*c\.bin"):
        main([prefix, "--verify"])
    assert "verified" not in capsys.readouterr().out


def test_verify_compares_tokens_with_the_vocabulary(prefix: str) -> None:
    small = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "200")
    with pytest.raises(DataError, match="holds tokens that its tokenizer does not have") as raised:
        main([prefix, "--verify", *small])
    assert "token 256; NullTokenizer has 201 tokens" in str(raised.value)
    with pytest.raises(DataError, match="holds tokens that its tokenizer does not have"):
        main([prefix, "--sample", "3", *small])


def test_a_corpus_without_checksums_cannot_be_verified(
    bare: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main([bare])
    output = capsys.readouterr().out
    assert "no sidecar; by its borders each item is a document" in output
    assert "no checksums: changed tokens cannot be found" in output
    with pytest.raises(DataError, match="has no checksums, so its tokens cannot be verified"):
        main([bare, "--verify"])


def test_signs_that_two_files_are_no_pair_are_said_where_nothing_else_can(
    bare: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([bare])
    assert capsys.readouterr().err == ""
    os.utime(bare + ".idx", ns=(1, 1))
    main([bare])
    assert f"{bare}.idx is older than {bare}.bin" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    Path(bare + ".bin").rename(tmp_path / "other" / "c.bin")
    Path(bare + ".bin").symlink_to(tmp_path / "other" / "c.bin")
    main([bare, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert len(content["doubts"]) == 2
    assert f"different folders, {tmp_path} and {tmp_path / 'other'}" in content["doubts"][1]
    main([bare, "--write-sidecar", "--json"])  # from now on the checksums show it
    assert json.loads(capsys.readouterr().out)["doubts"] == []


def test_a_corpus_of_another_tool_is_adopted(bare: str) -> None:
    main([bare, "--write-sidecar", "--verify", *BYTES])
    metadata = read_metadata(bare)
    assert metadata is not None
    assert (metadata.tokenizer_type, metadata.vocab_size, metadata.eod) == (
        "ByteTokenizer",
        257,
        256,
    )
    assert (metadata.num_items, metadata.num_tokens, metadata.level) == (3, 17, "document")
    flip(bare + ".bin", 4)
    with pytest.raises(DataError, match="not those that were written"):
        MMapIndexedDataset(bare)[0]


def test_adopting_without_a_tokenizer_writes_checksums_alone_and_a_sidecar_may_follow(
    bare: str,
) -> None:
    main([bare, "--write-sidecar"])
    assert Path(bare + ".sums").is_file()
    assert read_metadata(bare) is None
    main([bare, "--write-sidecar", *BYTES])
    with pytest.raises(DataError, match="has checksums already"):
        main([bare, "--write-sidecar", *BYTES])


def test_a_sidecar_without_a_pair_id_gets_one(prefix: str) -> None:
    path = Path(prefix + ".meta.json")
    fields = json.loads(path.read_text())
    pair_id = fields.pop("pair_id")
    path.write_text(json.dumps(fields))
    Path(prefix + ".sums").unlink()
    main([prefix, "--write-sidecar"])
    metadata = read_metadata(prefix)
    assert metadata is not None
    assert metadata.pair_id == pair_id


def test_a_corpus_is_not_adopted_for_a_tokenizer_that_is_too_small(bare: str) -> None:
    with pytest.raises(DataError, match="holds tokens that its tokenizer does not have"):
        main([bare, "--write-sidecar", "--tokenizer-type", "NullTokenizer", "--vocab-size", "200"])
    assert not Path(bare + ".sums").exists()


def test_a_legacy_corpus_is_adopted_like_any_other(tmp_path: Path) -> None:
    legacy = write_legacy(tmp_path / "old", [[[1, 2], [3]], [[4]]])
    main([legacy, "--write-sidecar", "--verify", *BYTES])
    metadata = read_metadata(legacy)
    assert metadata is not None
    assert (metadata.level, metadata.eod, metadata.num_documents) == ("sentence", None, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--sample", "-1"), "the number of samples is negative"),
        (("--vocab-file", "v.json"), "not which kind it is"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    prefix: str, flags: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        main([prefix, *flags])


def test_the_program_works_from_any_folder_without_torch(prefix: str, tmp_path: Path) -> None:
    program = (
        "import runpy, sys\n"
        "sys.modules['torch'] = None  # an import of it would raise\n"
        f"sys.argv = ['inspect', {prefix!r}, '--verify', '--sample', '1', {BYTES[0]!r}, "
        f"{BYTES[1]!r}]\n"
        f"runpy.run_path({str(TOOL)!r}, run_name='__main__')\n"
    )
    for change, status, words in (
        (lambda: None, 0, "verified: 1 blocks"),
        (lambda: flip(prefix + ".idx", 40), MISSING_OR_DAMAGED, "c.idx"),
    ):
        change()
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=60,
        )
        assert ended.returncode == status, ended.stderr
        assert words in ended.stdout + ended.stderr
        assert "Traceback" not in ended.stderr
