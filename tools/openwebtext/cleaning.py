"""What is done to one web document: its text is repaired, then it is kept or refused for a reason.

After Megatron's cleanup_dataset and cleanup_fix_dataset. The steps run in the order of the fields
of `CleaningSteps`, and the first that refuses a document is its reason. What a reader would get
wrong: the length is that of the repaired text, and white space between words is no reason to be
long.
"""

import difflib
import functools
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec
from tools.openwebtext.json_lines import json_line, line_of
from tools.openwebtext.packages import package
from tools.preprocessing.documents import fields_of, record_of
from tools.preprocessing.encoding import BAD_LINES_SHOWN, Chunk

LENGTH_UNITS = ("words", "characters", "tokens")
REASONS = ("empty", "javascript", "too short", "language", "bad line")

_SPACES = re.compile(r"[^\S\n]+")
_AROUND_BREAK = re.compile(r" ?\n ?")
_BREAKS = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class CleaningSteps:
    """The chosen steps; hashable, so that each process prepares once for them."""

    key: str = "text"
    repair_unicode: bool = True
    tidy_white_space: bool = False
    javascript_below: int = 0  # characters; shorter documents that mention JavaScript go
    min_length: int = 128  # in units of `length_unit`
    length_unit: str = "words"
    tokenizer: TokenizerSpec | None = None
    languages: tuple[str, ...] = ("en",)  # none: all are kept
    language_below: int | None = None  # characters; longer documents keep their language
    skip_bad_lines: bool = False

    def prepare(self) -> None:
        """Check packages, languages and the tokenizer before any work."""
        if self.repair_unicode:
            _ftfy()
        if self.languages:
            _check_languages(self.languages)
        if self.tokenizer is not None:
            _tokenizer(self.tokenizer)


class Verdict(NamedTuple):
    """The cleaned text, and the reason to drop the document (or None to keep it)."""

    text: str
    reason: str | None = None
    detail: str = ""


class CleanedChunk(NamedTuple):
    """The result of a chunk: lines for two files, and messages about them."""

    kept: list[bytes]
    rejected: list[bytes]
    reasons: Counter[str]
    changed: int  # kept documents whose text is not what it was
    bad_examples: list[str]
    disk_bytes: int


def clean(text: str, steps: CleaningSteps) -> Verdict:
    """Apply every step to one document."""
    if steps.repair_unicode:
        text = _ftfy().fix_text(text)
    if steps.tidy_white_space:
        text = tidied(text)
    if not text or text.isspace():
        return Verdict(text, "empty")
    if len(text) < steps.javascript_below and "javascript" in text.lower():
        return Verdict(text, "javascript", f"{len(text)} characters")
    if (length := _length(text, steps)) < steps.min_length:
        return Verdict(text, "too short", f"{length} {steps.length_unit}")
    if steps.languages and (steps.language_below is None or len(text) < steps.language_below):
        language = language_of(text)
        if language not in steps.languages:
            return Verdict(text, "language", language)
    return Verdict(text)


def clean_chunk(steps: CleaningSteps, chunk: Chunk) -> CleanedChunk:
    """Clean the documents of a chunk, in any process."""
    result = CleanedChunk([], [], Counter(), 0, [], chunk.disk_bytes)
    changed = 0
    for row in chunk.rows:
        place = f"{chunk.path}:{row.line}"
        try:
            before = fields_of(chunk.path, row, [steps.key])[0]
        except DataError as error:
            if not steps.skip_bad_lines:
                raise
            result.reasons["bad line"] += 1
            if len(result.bad_examples) < BAD_LINES_SHOWN:
                result.bad_examples.append(f"{error.found} ({error.problem})")
            result.rejected.append(_rejected("bad line", error.problem, place, None))
            continue
        verdict = clean(before, steps)
        if verdict.reason is not None:
            result.reasons[verdict.reason] += 1
            record = record_of(chunk.path, row)
            result.rejected.append(_rejected(verdict.reason, verdict.detail, place, record))
        elif verdict.text == before:
            result.kept.append(line_of(row))
        else:
            changed += 1
            result.kept.append(json_line(record_of(chunk.path, row) | {steps.key: verdict.text}))
    return result._replace(changed=changed)


def tidied(text: str) -> str:
    """Replace runs of spaces by one, runs of blank lines by one, and strip the ends.

    Unlike Megatron's cleaning, which removes every line break that follows a word, this leaves
    lines and paragraphs as they are.
    """
    return _BREAKS.sub("\n\n", _AROUND_BREAK.sub("\n", _SPACES.sub(" ", text))).strip()


def language_of(text: str) -> str:
    """Return the code of the text's main language; deterministic."""
    language: str = _identifier().classify(text)[0]
    return language


def _rejected(reason: str, detail: str, place: str, document: dict[str, object] | None) -> bytes:
    return json_line({"reason": reason, "detail": detail, "place": place, "document": document})


def _length(text: str, steps: CleaningSteps) -> int:
    if steps.length_unit == "characters":
        return len(text)
    if steps.length_unit == "tokens" and steps.tokenizer is not None:
        return len(_tokenizer(steps.tokenizer).tokenize(text))
    return len(text.split())


def _check_languages(languages: tuple[str, ...]) -> None:
    supported: list[str] = sorted(set(_identifier().nb_classes))
    for language in languages:
        if language not in supported:
            near = difflib.get_close_matches(language, supported, n=1, cutoff=0.3)
            raise ConfigError(
                "the language is none that can be detected",
                found=f"--language {language}",
                fix=f"use an ISO 639 code such as {near[0] if near else 'en'}; "
                f"known are {' '.join(supported)}",
            )


@functools.cache
def _ftfy() -> Any:
    return package(
        "ftfy", pip="ftfy", task="the repair of Unicode", otherwise="add --no-unicode-repair"
    )


@functools.cache
def _identifier() -> Any:
    module = package(
        "py3langid.langid",
        pip="'py3langid>=0.4'",
        task="telling languages apart",
        otherwise="add --language any",
    )
    return module.LanguageIdentifier.from_model_file(module.MODEL_FILE)


@functools.cache
def _tokenizer(spec: TokenizerSpec) -> Tokenizer:
    return spec.build()
