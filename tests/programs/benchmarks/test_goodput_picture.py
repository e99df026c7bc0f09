"""The picture of where the time of a run went."""

import json
from pathlib import Path

import pytest

from benchmarks.reliability.goodput_picture import COLOURS, main
from megatron.errors import ConfigError
from megatron.peers.activity import SAVE, START, STEP
from megatron.peers.goodput import Account, goodput


def account(began: float, first: int, iteration: int) -> Account:
    seconds = {STEP: 40.0, SAVE: 4.0, START: 10.0}
    return Account(began, began + 60, first, iteration, seconds)


def test_a_picture_of_two_starts_is_written(tmp_path: Path) -> None:
    for name, kept in (("1", account(0, 0, 25)), ("2", account(65, 20, 60))):
        (tmp_path / f"{name}.json").write_text(json.dumps(kept._asdict()))
    main([str(tmp_path), str(tmp_path / "goodput.png")])
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_every_part_of_the_time_has_a_colour() -> None:
    assert list(goodput([account(0, 0, 25)], began=0, ended=80).parts) == list(COLOURS)


def test_a_folder_without_accounts_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no account to draw"):
        main([str(tmp_path), str(tmp_path / "goodput.png")])
