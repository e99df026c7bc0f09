"""Punkt models: found, read, named by their bytes, and split by as Megatron does."""

import random
import sys
import time
from pathlib import Path
from typing import Any

import nltk
import nltk.data
import pytest
from nltk.tokenize import punkt

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.punkt import PunktModel, build_punkt, find_punkt

pytestmark = pytest.mark.slow

TRAINING_TEXT = (
    "Dr. Smith met Mr. Jones at 5 p.m. near the old mill. They talked. Mr. Jones left early. "
    "The vols. were heavy. Dr. Smith stayed. It rained, etc. and so on. He went home. "
) * 40
# Far above the second that it takes, far below the hour that quadratic time would take.
LINEAR_SECONDS = 20.0


def trained() -> Any:
    """What nltk itself learns from the text."""
    trainer = punkt.PunktTrainer()
    trainer.INCLUDE_ALL_COLLOCS = True
    trainer.train(TRAINING_TEXT, finalize=True)
    return trainer.get_params()


def write_model(folder: Path, parameters: Any = None) -> Path:
    """The files of a model, as nltk's punkt_tab has them."""
    parameters = trained() if parameters is None else parameters
    folder.mkdir(parents=True)
    lines = {
        "abbrev_types.txt": sorted(parameters.abbrev_types),
        "sent_starters.txt": sorted(parameters.sent_starters),
        "collocations.tab": ["\t".join(pair) for pair in sorted(parameters.collocations)],
        "ortho_context.tab": [f"{k}\t{v}" for k, v in sorted(parameters.ortho_context.items())],
    }
    for name, content in lines.items():
        (folder / name).write_text("\n".join(content))
    return folder


class MegatronVars(punkt.PunktLanguageVars):  # type: ignore[misc]  # nltk has no types
    """What Megatron-LM splits by with --keep-newlines, its words unbounded."""

    _period_context_fmt = r"""
        \S*
        %(SentEndChars)s
        \s*
        (?=(?P<after_tok> %(NonWord)s | (?P<next_tok>\S+) ))"""


def texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = [
        "a",
        "Be",
        " ",
        " ",
        "\n",
        ".",
        "?",
        "!",
        "Dr.",
        ")",
        '"',
        ",",
        "Yes",
        "3",
        "...",
        "x.Y",
    ]
    return ["".join(draw.choices(words, k=draw.randrange(40))) for _ in range(count)]


def test_sentences_are_those_of_nltk_with_the_same_model(tmp_path: Path) -> None:
    parameters = trained()
    assert "dr" in parameters.abbrev_types
    model = find_punkt("english", str(write_model(tmp_path / "model", parameters)))
    split, split_keeping = (build_punkt(model, keep_newlines=keep) for keep in (False, True))
    plain = punkt.PunktSentenceTokenizer(parameters)
    keeping = punkt.PunktSentenceTokenizer(parameters, lang_vars=MegatronVars())
    for text in [TRAINING_TEXT, *texts(3000)]:
        assert split(text) == plain.tokenize(text)
        assert split_keeping(text) == keeping.tokenize(text)
    assert split("Dr. Smith came.\n He left.") == ["Dr. Smith came.", "He left."]
    assert split_keeping("Dr. Smith came.\n He left.") == ["Dr. Smith came.\n ", "He left."]
    assert any(split(text) != [s.strip() for s in split_keeping(text)] for text in texts(100))


def test_a_word_without_an_end_takes_linear_time(tmp_path: Path) -> None:
    model = find_punkt("english", str(write_model(tmp_path / "model")))
    split = build_punkt(model, keep_newlines=True)
    started = time.perf_counter()
    assert len(split("a" * 300_000 + ". B")) == 2
    assert time.perf_counter() - started < LINEAR_SECONDS


def test_a_model_is_found_by_its_folder_its_language_or_as_nltk_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "data" / "tokenizers" / "punkt_tab" / "german")
    plain = write_model(tmp_path / "plain" / "german")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "none"), str(tmp_path / "data")])
    models = [find_punkt("german", given and str(given)) for given in (None, plain, plain.parent)]
    assert [Path(model.folder) for model in models] == [folder, plain, plain]
    assert len({model.digest for model in models}) == 1
    assert str(models[0]) == f"nltk {nltk.__version__} punkt_tab german {models[0].digest[:16]}"
    (plain / "sent_starters.txt").write_text("other")
    assert find_punkt("german", str(plain)).digest != models[0].digest


def test_a_missing_model_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    for folder in (None, str(tmp_path)):
        with pytest.raises(DataError, match="not its Punkt model of english") as caught:
            find_punkt("english", folder)
        assert "python -m nltk.downloader punkt_tab" in str(caught.value)
        assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("language", ["../english", "English", ""])
def test_a_language_is_a_plain_name(language: str) -> None:
    with pytest.raises(ConfigError, match="the language of sentences"):
        find_punkt(language)


def test_without_nltk_the_way_to_get_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nltk.tokenize.punkt", None)
    with pytest.raises(ConfigError, match="need the package nltk") as caught:
        find_punkt()
    assert "pip install nltk" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ortho_context.tab", b"word\tmany"),
        ("collocations.tab", b"one\n"),
        ("abbrev_types.txt", b"\xff"),
    ],
)
def test_a_damaged_model_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    folder = write_model(tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match="are not what nltk writes"):
        find_punkt("english", str(folder))


def test_a_model_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    model: PunktModel = find_punkt("english", str(write_model(tmp_path / "model")))
    with (tmp_path / "model" / "abbrev_types.txt").open("a") as file:
        file.write("\nnew")
    with pytest.raises(DataError, match="the Punkt model changed"):
        build_punkt(model)
