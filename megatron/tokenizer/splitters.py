"""Which sentence splitter a run uses: the rules of this package, or nltk's Punkt where asked for.

What a reader would get wrong: the default never depends on what is installed. `auto` does, logs its
choice, and a corpus records it (`Splitter.description`), as it does for every splitter.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from megatron import log
from megatron.errors import ConfigError, MegatronError
from megatron.tokenizer.punkt import PunktModel, build_punkt, find_punkt
from megatron.tokenizer.sentences import RULES_VERSION, split_sentences

SPLITTERS = ("rules", "nltk", "auto")
_ENGLISH = "english"


@dataclass(frozen=True)
class Splitter:
    """A sentence splitter by its full name: equal ones give equal sentences in any process."""

    punkt: PunktModel | None = None  # None: by the rules

    def description(self, *, keep_newlines: bool = False) -> str:
        """Return the splitter's name, version and model (if any), for a sidecar."""
        name = f"rules {RULES_VERSION}" if self.punkt is None else str(self.punkt)
        return f"{name}, newlines kept" if keep_newlines else name

    def build(self, *, keep_newlines: bool = False) -> Callable[[str], list[str]]:
        """Return the function that splits a text into sentences; built once in each process."""
        return _built(self, keep_newlines)


def choose_splitter(
    wanted: str, language: str | None = None, folder: str | None = None
) -> Splitter:
    """Return the splitter for `--sentence-splitter wanted`.

    `language` and `folder` (--lang, --nltk-data) choose a model of Punkt: ConfigError with the
    rules, which have none. `auto` is Punkt where nltk and the model are installed, and logs its
    choice.
    """
    if wanted == "rules":
        for flag, value in (("--lang", language), ("--nltk-data", folder)):
            if value is not None:
                raise ConfigError(
                    f"{flag} chooses a model of Punkt, and sentences are split by rules",
                    found=f"{flag} {value} with --sentence-splitter rules",
                    fix=f"add --sentence-splitter nltk, or leave {flag} out",
                )
        return Splitter()
    try:
        model = find_punkt(language or _ENGLISH, folder)
    except MegatronError as error:
        if wanted != "auto":
            raise
        log.warning(
            f"--sentence-splitter auto splits by rules: {error.problem}; name rules or nltk to "
            "have the same sentences on every machine"
        )
        return Splitter()
    if wanted == "auto":
        log.info(f"--sentence-splitter auto takes {model}")
    return Splitter(model)


@functools.cache
def _built(splitter: Splitter, keep_newlines: bool) -> Callable[[str], list[str]]:
    if splitter.punkt is None:
        return functools.partial(split_sentences, keep_newlines=keep_newlines)
    return build_punkt(splitter.punkt, keep_newlines=keep_newlines)
