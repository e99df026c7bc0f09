"""Which splitter is chosen, what is logged, and what a corpus records."""

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.sentences import RULES_VERSION
from megatron.tokenizer.splitters import Splitter, choose_splitter
from tests.unit.tokenizer.test_punkt import write_model


def test_the_rules_are_taken_whatever_is_installed() -> None:
    splitter = choose_splitter("rules")
    assert splitter == Splitter()
    assert splitter.description() == f"rules {RULES_VERSION}"
    assert splitter.description(keep_newlines=True) == f"rules {RULES_VERSION}, newlines kept"
    assert splitter.build()("One. Two.") == ["One.", "Two."]
    assert splitter.build(keep_newlines=True)("One. Two.") == ["One. ", "Two."]


def test_punkt_is_taken_by_name(tmp_path: Path) -> None:
    folder = str(write_model(tmp_path / "german"))
    splitter = choose_splitter("nltk", "german", folder)
    assert splitter.description().startswith("nltk ")
    assert " german " in splitter.description()
    assert splitter.build()("Dr. Smith left. He did.") == ["Dr. Smith left.", "He did."]
    assert splitter.build() is splitter.build()
    assert splitter.build(keep_newlines=True)("So. He did.") == ["So. ", "He did."]


def test_auto_says_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_model(tmp_path / "model"))
    assert choose_splitter("auto", None, folder) == choose_splitter("nltk", "english", folder)
    assert "auto takes nltk" in capsys.readouterr().out
    assert choose_splitter("auto", "german", str(tmp_path)) == Splitter()
    assert "auto splits by rules: nltk is installed, but not" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    assert choose_splitter("auto") == Splitter()
    assert "auto splits by rules: sentences by Punkt need" in capsys.readouterr().err


def test_punkt_by_name_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="not its Punkt model"):
        choose_splitter("nltk", "english", str(tmp_path))
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    with pytest.raises(ConfigError, match="need the package nltk"):
        choose_splitter("nltk")


@pytest.mark.parametrize(("language", "folder"), [("german", None), (None, "data")])
def test_the_rules_have_no_models(language: str | None, folder: str | None) -> None:
    with pytest.raises(ConfigError, match="chooses a model of Punkt"):
        choose_splitter("rules", language, folder)
