"""Names of corpora, and the errors about wrong ones."""

import os
from pathlib import Path

import pytest

from megatron.data.corpus.paths import (
    both_files_exist,
    corpus_files,
    data_file_path,
    index_file_path,
    pairing_doubts,
    refuse_suffix,
    require_regular_file,
)
from megatron.errors import DataError
from tests.unit.data.corpora import METADATA, write_corpus


def test_suffixes_are_appended_to_prefixes_with_dots():
    assert index_file_path("a/v1.2") == "a/v1.2.idx"
    assert data_file_path("a/v1.2") == "a/v1.2.bin"


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_name_given_as_a_prefix_is_refused_with_the_prefix_it_should_be(suffix):
    with pytest.raises(DataError, match="named by its prefix") as raised:
        refuse_suffix("data/wiki" + suffix)
    assert "fix: use data/wiki" in str(raised.value)


def test_a_missing_corpus_names_its_nearest_neighbours(tmp_path):
    write_corpus(tmp_path / "wiki_text_document", [3])
    write_corpus(tmp_path / "unrelated", [3])
    (tmp_path / "wiki_text_documents.idx").touch()  # no .bin: no candidate
    for wanted in ("wiki_text_documnet", "wiki"):
        path = index_file_path(str(tmp_path / wanted))
        with pytest.raises(DataError, match="cannot be opened") as raised:
            require_regular_file(str(tmp_path / wanted), path)
        assert "No such file" in str(raised.value)
        assert f"fix: use {tmp_path / 'wiki_text_document'}" in str(raised.value)
        assert "unrelated" not in str(raised.value)


def test_a_missing_folder_has_no_neighbours(tmp_path):
    with pytest.raises(DataError, match="similar names there: none"):
        require_regular_file(str(tmp_path / "x" / "y"), str(tmp_path / "x" / "y.idx"))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "c.idx").mkdir()
    with pytest.raises(DataError, match="not a regular file"):
        require_regular_file(str(tmp_path / "c"), str(tmp_path / "c.idx"))


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "c.idx").touch()
    with pytest.raises(DataError, match="an empty file"):
        require_regular_file(str(tmp_path / "c"), str(tmp_path / "c.idx"))


def test_a_corpus_exists_when_both_of_its_files_do(tmp_path):
    prefix = write_corpus(tmp_path / "c", [1])
    assert both_files_exist(prefix)
    (tmp_path / "c.bin").unlink()
    assert not both_files_exist(prefix)


def test_every_file_of_a_corpus_has_its_name(tmp_path):
    prefix = write_corpus(tmp_path / "v1.2", [3], metadata=METADATA)
    assert set(corpus_files(prefix)) == set(tmp_path.iterdir())
    assert corpus_files(prefix)[0] == tmp_path / "v1.2.idx"


def test_age_and_folders_make_a_pair_doubtful(tmp_path):
    prefix = write_corpus(tmp_path / "c", [1])
    assert pairing_doubts(prefix) == []
    os.utime(prefix + ".idx", ns=(1, 1))
    (older,) = pairing_doubts(prefix)
    assert older.startswith(f"{prefix}.idx is older than {prefix}.bin")
    (tmp_path / "other").mkdir()
    Path(prefix + ".bin").rename(tmp_path / "other" / "c.bin")
    Path(prefix + ".bin").symlink_to(tmp_path / "other" / "c.bin")
    assert f"links into different folders, {tmp_path} and" in pairing_doubts(prefix)[1]
