"""Sentences by Punkt (Kiss and Strunk 2006), the trained splitter of the optional package nltk.

Models are read from the text files of nltk's `punkt_tab`; a pickle is never opened. What a reader
would get wrong: keeping white space moves boundaries among dense punctuation too, because Megatron
widens Punkt's pattern for it, and its corpora are what this reproduces.
"""

import hashlib
import importlib
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from megatron.errors import ConfigError, DataError

Split = Callable[[str], list[str]]

# The files of a model, as nltk's own writer names them.
_ABBREVIATIONS, _COLLOCATIONS = "abbrev_types.txt", "collocations.tab"
_CONTEXTS, _STARTERS = "ortho_context.tab", "sent_starters.txt"
_FILES = (_ABBREVIATIONS, _COLLOCATIONS, _CONTEXTS, _STARTERS)

# Megatron's widening of Punkt's pattern: a possible end takes its word along and the white space
# behind it, and needs none. Its words are unbounded, which takes a minute for 100,000 letters
# without a space; the bound only shortens what is looked at of such a word.
_KEEPING = r"\S{0,500}%(SentEndChars)s\s*(?=(?P<after_tok>%(NonWord)s|(?P<next_tok>\S+)))"


class PunktModel(NamedTuple):
    """The files of a trained model."""

    language: str
    folder: str
    digest: str  # SHA-256 of the names and bytes of its files, in hex
    version: str  # of nltk

    def __str__(self) -> str:
        return f"nltk {self.version} punkt_tab {self.language} {self.digest[:16]}"


def find_punkt(language: str = "english", folder: str | None = None) -> PunktModel:
    """Return the model of `language`: in `folder`, else where nltk looks for its data.

    `folder` may hold the files themselves, a folder named after the language, or be an nltk_data.
    Raises ConfigError where nltk is missing, DataError where the model is missing or damaged.
    """
    _punkt_module()
    if not re.fullmatch(r"[a-z_]+", language):
        raise ConfigError(
            "the language of sentences is the name of a Punkt model",
            found=f"--lang {language}",
            fix="use a name such as english, german or french",
        )
    nltk = importlib.import_module("nltk")
    below = Path("tokenizers", "punkt_tab", language)
    if folder is None:
        places = [Path(each, below) for each in importlib.import_module("nltk.data").path]
    else:
        places = [Path(folder), Path(folder, language), Path(folder, below)]
    for place in places:
        if all((place / name).is_file() for name in _FILES):
            digest = _digest(place)
            _parameters(place)
            return PunktModel(language, str(place.resolve()), digest, str(nltk.__version__))
    raise DataError(
        f"nltk is installed, but not its Punkt model of {language}",
        found=f"none of {len(places)} folders has {', '.join(_FILES)}, the first {places[0]}",
        fix="python -m nltk.downloader punkt_tab, or give the folder of a copy with --nltk-data, "
        "or use --sentence-splitter rules",
    )


def build_punkt(model: PunktModel, *, keep_newlines: bool = False) -> Split:
    """Return a splitter by `model`; `keep_newlines` as Megatron's flag of that name.

    A sentence then keeps the white space behind it, except at the end of the text and behind a
    quotation mark that follows a full stop.
    """
    punkt: Any = _punkt_module()
    folder = Path(model.folder)
    if _digest(folder) != model.digest:
        raise DataError(
            "the Punkt model changed while it was in use",
            found=str(folder),
            fix="leave it alone until preprocessing ends, and start again",
        )
    parameters = _parameters(folder)
    trained = punkt.PunktParameters()
    for name in ("abbrev_types", "collocations", "sent_starters", "ortho_context"):
        setattr(trained, name, getattr(parameters, name))
    language = punkt.PunktLanguageVars()
    if keep_newlines:
        language = type(
            "_KeepingVars", (punkt.PunktLanguageVars,), {"_period_context_fmt": _KEEPING}
        )()
    split: Split = punkt.PunktSentenceTokenizer(trained, lang_vars=language).tokenize
    return split


class _Parameters(NamedTuple):
    abbrev_types: set[str]
    collocations: set[tuple[str, str]]
    sent_starters: set[str]
    ortho_context: defaultdict[str, int]


def _parameters(folder: Path) -> _Parameters:
    try:
        pairs = [line.split("\t") for line in _lines(folder / _COLLOCATIONS)]
        contexts = [line.split("\t") for line in _lines(folder / _CONTEXTS)]
        return _Parameters(
            set(_lines(folder / _ABBREVIATIONS)),
            {(first, second) for first, second in pairs},
            set(_lines(folder / _STARTERS)),
            defaultdict(int, {word: int(flags) for word, flags in contexts}),
        )
    except ValueError as error:  # bytes that are no UTF-8 among them
        raise DataError(
            "the files of a Punkt model are not what nltk writes",
            found=f"{folder}: {error}",
            fix="python -m nltk.downloader --force punkt_tab, or copy them again",
        ) from error


def _lines(path: Path) -> list[str]:
    # Not splitlines(): a word may hold one of the rarer line ends of Unicode.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [line.strip("\r") for line in lines if line.strip()]


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        content = (folder / name).read_bytes()
        digest.update(f"{name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()


def _punkt_module() -> ModuleType:
    try:
        return importlib.import_module("nltk.tokenize.punkt")
    except ImportError as error:
        raise ConfigError(
            "sentences by Punkt need the package nltk, which is not installed",
            found=f"--sentence-splitter nltk: {error}",
            fix="pip install nltk, then python -m nltk.downloader punkt_tab; or use "
            "--sentence-splitter rules",
        ) from error
