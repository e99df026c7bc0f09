"""How a dialogue is written as text, and which of that text a model is to learn.

A template turns messages into pieces. What is given up to an answer is tokenized as one text, as a
prompt will be; answers and their ends by themselves, so the border between given and learned is a
border of tokens. What a reader would get wrong: the end of an assistant's turn is learned with it
(or the model never stops), the header before it is not.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError

ROLES = ("system", "user", "assistant")
LEARNED_ROLE = "assistant"


class Message(NamedTuple):
    """One turn of a dialogue."""

    role: str  # one of ROLES
    content: str


class Piece(NamedTuple):
    """A part of a rendered dialogue."""

    text: str
    is_target: bool
    then_eod: bool = False  # the tokenizer's end-of-document token follows the text


class EncodedDialogue(NamedTuple):
    """The tokens of a dialogue, and 1 for each that is to be learned."""

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A message is its header, its content, an end, and what stands between two messages."""

    name: str
    headers: tuple[tuple[str, str], ...]  # (role, what opens its messages)
    end: str  # text that ends a message; "": the assistant's end with the end-of-document token
    between: str
    reserved: tuple[str, ...]  # what no message may contain, as it would pass for another turn

    def header(self, role: str) -> str:
        """What opens a message of `role`; the assistant's is the prompt for an answer."""
        return dict(self.headers)[role]

    def render(self, messages: Sequence[Message]) -> tuple[Piece, ...]:
        """The dialogue as pieces; raises DataError for content that imitates the template."""
        pieces: list[Piece] = []
        for number, (role, content) in enumerate(messages, 1):
            found = [text for text in self.reserved if text in content]
            if found:
                raise DataError(
                    f"the content of a message holds what the template {self.name} writes itself",
                    found=f"{found[0]!r} in message {number} ({role})",
                    fix="take it out of the content, or use another template",
                )
            learned = role == LEARNED_ROLE
            ends_document = learned and not self.end
            pieces.append(Piece(self.header(role), False))
            pieces.append(Piece(content, learned, ends_document))
            pieces.append(Piece(self.end, learned))
            pieces.append(Piece(self.between, False))
        return tuple(piece for piece in pieces if piece.text or piece.then_eod)


CHATML = ChatTemplate(
    name="chatml",
    headers=tuple((role, f"<|im_start|>{role}\n") for role in ROLES),
    end="<|im_end|>",
    between="\n",
    reserved=("<|im_start|>", "<|im_end|>"),
)
PLAIN = ChatTemplate(
    name="plain",
    headers=tuple((role, f"### {role.capitalize()}:\n") for role in ROLES),
    end="",
    between="\n\n",
    reserved=tuple(f"### {role.capitalize()}:\n" for role in ROLES),
)
TEMPLATES = {template.name: template for template in (CHATML, PLAIN)}


def messages_of(value: object) -> tuple[Message, ...]:
    """The messages of a JSON list of `{"role": ..., "content": ...}`; other keys are not read.

    Raises DataError for anything else, and where the assistant says nothing to learn from.
    """
    if not isinstance(value, list) or not value:
        raise DataError(
            "a dialogue is a list of messages, and this is none",
            found="an empty list" if value == [] else f"a {type(value).__name__}",
            fix='write [{"role": "user", "content": "..."}, {"role": "assistant", ...}]',
        )
    messages = tuple(_message(entry, number) for number, entry in enumerate(value, 1))
    if not any(role == LEARNED_ROLE and content for role, content in messages):
        raise DataError(
            "there is nothing to learn from a dialogue in which the assistant says nothing",
            found=f"messages of {', '.join(role for role, _ in messages)}",
            fix="leave it out, or give the assistant's messages their content",
        )
    return messages


def encode_dialogue(
    pieces: Sequence[Piece],
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    *,
    eod: int | None,
) -> EncodedDialogue:
    """The tokens of a rendered dialogue; `encode` gives the ids of several texts at once."""
    tokens: list[int] = []
    mask: list[int] = []
    pieces = _given_joined(pieces)
    for piece, ids in zip(pieces, encode([piece.text for piece in pieces]), strict=True):
        tokens += ids
        if piece.then_eod:
            if eod is None:
                raise DataError(
                    "the template ends a message with a token that the tokenizer does not have",
                    found="no end-of-document token",
                    fix="use a tokenizer that has one, or the template chatml",
                )
            tokens.append(eod)
        mask += [int(piece.is_target)] * (len(tokens) - len(mask))
    return EncodedDialogue(np.array(tokens, np.int64), np.array(mask, np.uint8))


def _given_joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same text with one piece for all that is given between two that are learned."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and not (piece.is_target or last.is_target or last.then_eod):
            joined[-1] = Piece(last.text + piece.text, False, piece.then_eod)
        else:
            joined.append(piece)
    return joined


def _message(entry: object, number: int) -> Message:
    role, content = (
        (entry.get("role"), entry.get("content")) if isinstance(entry, dict) else (None, None)
    )
    if not isinstance(role, str) or not isinstance(content, str):
        raise DataError(
            f"message {number} of a dialogue has no role and content that are strings",
            found=f"keys {', '.join(map(repr, entry)) or '(none)'}"
            if isinstance(entry, dict)
            else f"a {type(entry).__name__}",
            fix='write {"role": "user", "content": "..."}',
        )
    if role not in ROLES:
        near = difflib.get_close_matches(role.lower(), ROLES, n=1, cutoff=0.5)
        raise DataError(
            f"message {number} of a dialogue has a role that no template knows",
            found=f"{role!r}",
            fix=f"use {near[0] if near else ', '.join(ROLES)}",
        )
    return Message(role, content)
