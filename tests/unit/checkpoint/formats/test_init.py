"""The registry of formats."""

import pytest

from megatron.checkpoint import formats
from megatron.errors import CheckpointError


def test_a_format_is_found_by_name():
    for name in formats.REGISTRY:
        assert formats.get(name).name == name


def test_an_unknown_format_lists_the_known_ones():
    with pytest.raises(CheckpointError, match="no such checkpoint format") as caught:
        formats.get("zip")
    assert "sharded" in caught.value.fix


def test_a_folder_of_no_known_format_says_what_is_in_it(tmp_path):
    with pytest.raises(CheckpointError, match=r"manifest\.json: no such file; beside it: nothing"):
        formats.recognise(tmp_path)
    (tmp_path / "mp_rank_00").mkdir()
    with pytest.raises(CheckpointError, match="mp_rank_00"):
        formats.recognise(tmp_path)
    (tmp_path / "manifest.json").write_text("damaged")
    assert formats.recognise(tmp_path).name == "sharded"
