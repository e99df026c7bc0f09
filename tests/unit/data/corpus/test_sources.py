"""The description of a run's data lets two runs, and two ranks, be compared."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.corpus.checksums import read_checksums, recorded_digests
from megatron.data.corpus.sources import (
    ABSENT,
    PAIR_ID,
    announce_doubtful_pairs,
    announce_shared_corpora,
    changed_sources,
    data_sources,
    files_of_paths,
)
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.errors import DataError
from tests.unit.data.corpora import flip, write_corpus


def reading(**flags):
    return DataConfig(seq_length=8, **flags)


@pytest.fixture
def prefix(tmp_path):
    return write_corpus(tmp_path / "c", [5, 3])


def test_a_corpus_is_its_index_its_length_and_its_pair_id(prefix):
    checksums = read_checksums(prefix)
    assert checksums is not None
    assert data_sources(reading(data_path=(prefix,))) == {
        f"index of {prefix}": f"xxh3_128 {checksums.index_digest.hex()}",
        f"tokens of {prefix}": "16 bytes",
        f"pair id of {prefix}": checksums.pair_id,
    }


def test_a_corpus_without_checksums_says_the_same_of_its_index(prefix):
    before = data_sources(reading(data_path=(prefix,)))
    os.unlink(prefix + ".sums")
    after = data_sources(reading(data_path=(prefix,)))
    assert after == {key: value for key, value in before.items() if not key.startswith(PAIR_ID)}
    assert changed_sources(before, after) == changed_sources(after, before) == []


def test_every_way_to_name_corpora_is_followed_and_each_is_said_once(tmp_path):
    names = [write_corpus(tmp_path / name, [4]) for name in "abc"]
    blend = ("0.5", names[0], "0.5", names[1])
    both = data_sources(reading(data_path=blend))
    assert {key for key in both if key.startswith("index")} == {f"index of {p}" for p in names[:2]}
    apart = reading(train_data_path=(names[0],), valid_data_path=(names[2],), split="1")
    assert {key for key in data_sources(apart) if key.startswith("index")} == {
        f"index of {names[0]}",
        f"index of {names[2]}",
    }
    weighted = reading(
        train_weighted_split_paths=(f"T: 1 0:0.9 {names[0]}",),
        valid_weighted_split_paths=(f"V: 1 0.9:1 {names[0]}, 1 0:1 {names[1]}",),
    )
    assert len(data_sources(weighted)) == 6


def test_pairs_and_dialogues_are_known_by_their_parts(tmp_path):
    for part in ("_inputs_document", "_targets_document"):
        write_corpus(tmp_path / f"p{part}", [4])
    found = data_sources(reading(data_path=(str(tmp_path / "p"),)))
    assert sorted(key for key in found if key.startswith("index")) == [
        f"index of {tmp_path}/p_inputs_document",
        f"index of {tmp_path}/p_targets_document",
    ]


def test_a_file_of_paths_is_its_text(tmp_path, prefix):
    path = tmp_path / "train.txt"
    path.write_text(f'"T: 1   0:1 {prefix}"\n')
    data = reading(train_weighted_split_paths_path=str(path))
    name = f"--train-weighted-split-paths-path {path}"
    assert files_of_paths(data) == {name: f'"T: 1 0:1 {prefix}"'}
    before = data_sources(data)
    assert f"index of {prefix}" in before
    path.write_text(f'"T: 1 0:0.5 {prefix}"\n')
    assert changed_sources(before, data_sources(data)) == [
        f'{name}: "T: 1 0:1 {prefix}" -> "T: 1 0:0.5 {prefix}"'
    ]


def test_a_long_file_of_paths_is_cut_and_still_told_from_others(tmp_path):
    path = tmp_path / "train.txt"
    texts = []
    for last in "ab":
        path.write_text('"T: 1 0:1 ' + "x" * 1000 + last + '"')
        (text,) = files_of_paths(
            reading(
                valid_weighted_split_paths_path=str(path),
                train_data_path=None,
                data_path=None,
                train_weighted_split_paths=("T: 1 0:1 c",),
            )
        ).values()
        texts.append(text)
    assert texts[0][:200] == texts[1][:200]
    assert texts[0] != texts[1]
    assert len(texts[0]) < 300


def test_what_is_not_there_or_no_paths_at_all_is_absent_and_no_error(tmp_path, prefix):
    gone = str(tmp_path / "gone")
    assert data_sources(reading(data_path=(gone,))) == {f"index of {gone}": ABSENT}
    missing = reading(train_weighted_split_paths_path=gone)
    assert data_sources(missing) == {f"--train-weighted-split-paths-path {gone}": ABSENT}
    assert data_sources(reading(data_path=("1", prefix, "2"))) == {}
    Path(prefix + ".sums").write_bytes(b"nonsense" * 10)
    assert data_sources(reading(data_path=(prefix,))) == {f"index of {prefix}": ABSENT}


def rewrite_tokens(prefix):
    with MMapIndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_document([9, 9, 9, 9, 9])
        builder.add_document([9, 9, 9])


def rewrite_sizes(prefix):
    write_corpus(Path(prefix), [3, 5])


def append(prefix):
    write_corpus(Path(prefix), [5, 3, 1])


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        (rewrite_tokens, ["pair id"]),
        (rewrite_sizes, ["index", "pair id"]),
        (append, ["index", "pair id", "tokens"]),
    ],
)
def test_whatever_changes_a_corpus_changes_what_is_said_of_it(prefix, change, kinds):
    before = data_sources(reading(data_path=(prefix,)))
    change(prefix)
    changes = changed_sources(before, data_sources(reading(data_path=(prefix,))))
    assert sorted(text.partition(" of ")[0] for text in changes) == kinds
    assert all(" -> " in text and prefix in text for text in changes)


def test_copies_are_the_same_wherever_they_lie(prefix, tmp_path):
    (tmp_path / "other").mkdir()
    for suffix in (".bin", ".idx", ".sums"):
        shutil.copy(prefix + suffix, tmp_path / "other" / f"c{suffix}")
    copy = str(tmp_path / "other" / "c")
    one, other = (data_sources(reading(data_path=(p,))) for p in (prefix, copy))
    assert list(one.values()) == list(other.values())


def test_validation_on_a_corpus_of_training_is_announced_under_any_name(
    prefix, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(log._OUTPUT, "warned", set())
    other = write_corpus(tmp_path / "other", [7])
    (tmp_path / "copies").mkdir()
    for suffix in (".bin", ".idx", ".sums"):
        shutil.copy(prefix + suffix, tmp_path / "copies" / f"d{suffix}")
    copy = str(tmp_path / "copies" / "d")
    data = reading(
        train_data_path=(prefix,), valid_data_path=(copy,), test_data_path=("1", other, "1", prefix)
    )
    announce_shared_corpora(data, data_sources(data))
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2
    assert (
        f"--valid-data-path names {copy}, which is what --train-data-path names as {prefix}"
        in (warnings[0])
    )
    assert f"--test-data-path names {prefix}, which is" in warnings[1]
    apart = reading(train_data_path=(prefix,), valid_data_path=(other,))
    announce_shared_corpora(apart, data_sources(apart))
    announce_shared_corpora(
        reading(data_path=(prefix,)), data_sources(reading(data_path=(prefix,)))
    )
    announce_shared_corpora(reading(train_data_path=("1", prefix, "x")), {})
    assert capsys.readouterr().err == ""


def test_only_a_few_bytes_of_checksums_are_looked_at(prefix):
    assert recorded_digests(prefix + "x") is None
    digests = recorded_digests(prefix)
    flip(prefix + ".sums", 60)  # a block's checksum
    assert recorded_digests(prefix) == digests
    flip(prefix + ".sums", 0)
    with pytest.raises(DataError, match="the checksums of a corpus cannot be used"):
        recorded_digests(prefix)
    Path(prefix + ".sums").write_bytes(b"MV")
    with pytest.raises(DataError, match="the checksums of a corpus cannot be used"):
        recorded_digests(prefix)


def test_files_that_may_be_of_two_corpora_are_announced_where_nothing_else_can(tmp_path, capsys):
    """Of pairs of corpora too; checksums know better, and a missing file is said elsewhere."""
    first, second = (write_corpus(tmp_path / name, [5, 3]) for name in ("c", "p_inputs_document"))
    for prefix in (first, second):
        os.utime(prefix + ".idx", ns=(1, 1))
    both = reading(data_path=("0.5", first, "0.5", str(tmp_path / "p")))
    announce_doubtful_pairs(both)
    assert capsys.readouterr().err == ""
    for prefix in (first, second):
        os.unlink(prefix + ".sums")
    announce_doubtful_pairs(both)
    announce_doubtful_pairs(both)
    said = capsys.readouterr().err
    for prefix in (first, second):
        assert said.count(f"{prefix}.idx is older than {prefix}.bin") == 1
    assert f"inspect_dataset.py {second} --sample 1" in said
    announce_doubtful_pairs(reading(data_path=(str(tmp_path / "none"),)))
    assert capsys.readouterr().err == ""
