"""Renders a dialogue as text, and marks the part of it that a model is to learn.

Templates are Jinja's, as the folders of Hugging Face have them: two of ours, or a model's own. An
answer is the text of a template between its prompt for it and the end of its message. The text
before an answer is tokenized as a whole, like a prompt; answers and their ends separately, so the
border between given and learned text is a border of tokens. What a reader would get wrong: the end
of an assistant's turn is learned with it, or the model never stops; the header before it is not.
"""

import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError
from megatron.json_values import JsonObject

if TYPE_CHECKING:
    from jinja2 import Template

ROLES = ("system", "user", "assistant")
LEARNED_ROLE = "assistant"


class ChatMessage(NamedTuple):
    """One turn of a dialogue."""

    role: str  # one of ROLES
    content: str


class TextPiece(NamedTuple):
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
    """The source of a template, and the texts of tokens that it may write."""

    name: str
    source: str
    tokens: Mapping[str, str]  # tokens of the tokenizer for the template: eos_token ...
    reserved: tuple[str, ...]  # texts that no message may contain, as they would end its turn

    @property
    def ends_document(self) -> bool:
        """Whether answers end with the tokenizer's end-of-document token, whatever its text."""
        return END_OF_DOCUMENT in self.tokens.values()

    @property
    def end(self) -> str:
        """The text that ends an answer; empty where it is a token, or nothing."""
        targets = [p.text for p in self.render(_EXAMPLE) if p.is_target]
        return targets[1] if len(targets) > 1 else ""

    def prompt(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text of `messages` up to where the assistant's answer begins."""
        return self._written(messages, add_generation_prompt=True)

    def check_contents(self, messages: Sequence[tuple[str, str]]) -> None:
        """Check that no message imitates the template; raises DataError otherwise."""
        for number, (role, content) in enumerate(messages, 1):
            if found := [text for text in self.reserved if text in content]:
                raise DataError(
                    f"the content of a message holds what the template {self.name} writes itself",
                    found=f"{found[0]!r} in message {number} ({role})",
                    fix="take it out of the content, or use another template",
                )

    def render(self, messages: Sequence[ChatMessage]) -> tuple[TextPiece, ...]:
        """Return the dialogue as pieces, with one for all that is given between two answers.

        Raises:
            DataError: content that imitates the template, or a dialogue that it cannot write.
        """
        self.check_contents(messages)
        pieces: list[TextPiece] = []
        before = given = ""
        for number, (role, content) in enumerate(messages):
            if role != LEARNED_ROLE:
                continue
            prompt = self.prompt(messages[:number])
            text = self._written(messages[: number + 1])
            given += self._rest(prompt, before, number)
            answer = self._rest(text, prompt, number)
            # Some templates strip what they are given.
            body = content if answer.startswith(content) else content.strip()
            ending = self._rest(answer, body, number)
            then_eod = ending.startswith(END_OF_DOCUMENT)
            ending = ending.removeprefix(END_OF_DOCUMENT)
            end = ending.rstrip()
            pieces += [
                TextPiece(given, False),
                TextPiece(body, True, then_eod),
                TextPiece(end, True),
            ]
            before, given = text, ending[len(end) :]
        given += self._rest(self._written(messages), before, len(messages) - 1)
        pieces.append(TextPiece(given, False))
        return tuple(piece for piece in pieces if piece.text or piece.then_eod)

    def _rest(self, text: str, start: str, number: int) -> str:
        """Return the rest of `text` after `start`; `text` ends with message `number`."""
        if not text.startswith(start):
            raise DataError(
                f"the template {self.name} does not write a dialogue from start to end: what it "
                "has written changes with later messages, or an answer is not written whole",
                found=f"message {number + 1}",
                fix="use --template chatml, or leave the dialogue out",
            )
        return text[len(start) :]

    def _written(
        self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = False
    ) -> str:
        given = [message._asdict() for message in messages]
        return self.written(given, add_generation_prompt=add_generation_prompt)

    def written(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] = (),
        add_generation_prompt: bool = False,
    ) -> str:
        """Return the text of messages, which may have other fields beside `role` and `content`.

        Args:
            tools: functions that may be called, as transformers gives them to templates.

        Raises:
            DataError: the template cannot write them.
        """
        import jinja2  # not needed by training, which reads what was written

        beside = {"tools": list(tools)} if tools else {}
        try:
            return _compiled(self.source).render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                **beside,
                **self.tokens,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            roles = ", ".join(str(message["role"]) for message in messages) or "nobody"
            raise DataError(
                f"the template {self.name} cannot write a dialogue",
                found=f"{error} (messages of {roles})",
                fix="leave the dialogue out, or use another --template",
            ) from error


END_OF_DOCUMENT = "\0end of document\0"  # placeholder in rendered text for the tokenizer's token
_EXAMPLE = (ChatMessage("user", "a"), ChatMessage(LEARNED_ROLE, "b"))
CHATML = ChatTemplate(
    name="chatml",
    source=r"""{% for message in messages -%}
{{ "<|im_start|>" + message.role + "\n" + message.content + "<|im_end|>\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}""",
    tokens={},
    reserved=("<|im_start|>", "<|im_end|>"),
)
PLAIN = ChatTemplate(
    name="plain",
    source=r"""{% for message in messages -%}
{{ "### " + message.role | capitalize + ":\n" + message.content }}
{%- if message.role == "assistant" %}{{ eos_token }}{% endif %}{{ "\n\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "### Assistant:\n" }}{% endif %}""",
    tokens={"eos_token": END_OF_DOCUMENT},
    reserved=(END_OF_DOCUMENT, *(f"### {role.capitalize()}:\n" for role in ROLES)),
)
TEMPLATES = {template.name: template for template in (CHATML, PLAIN)}


def template_of(name: str) -> ChatTemplate:
    """Return the template called `name`, or that of the Hugging Face folder `name`.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    file, settings_file = Path(name) / "chat_template.jinja", Path(name) / "tokenizer_config.json"
    try:
        settings = json.loads(settings_file.read_bytes()) if settings_file.is_file() else {}
        source = file.read_text(encoding="utf-8") if file.is_file() else settings["chat_template"]
        if isinstance(source, list):  # several named templates; transformers uses this one
            source = {entry["name"]: entry["template"] for entry in source}["default"]
        known = {key: _text(value) for key, value in settings.items() if key.endswith("_token")}
        tokens = {key: text for key, text in known.items() if text is not None}
        added = settings.get("added_tokens_decoder", {}).values()
        special = {_text(token) for token in added if token.get("special")}
        _compiled(source)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            "there is no such chat template",
            found=f"{name}: {type(error).__name__}: {error}",
            fix=f"use {', '.join(TEMPLATES)}, or a folder with a chat_template.jinja or a "
            "tokenizer_config.json that has a chat_template",
        ) from error
    reserved = tuple(sorted(text for text in {*tokens.values(), *special} if text))
    return ChatTemplate(name=name, source=source, tokens=tokens, reserved=reserved)


def _text(token: Any) -> str | None:
    """Return the text of a token of tokenizer_config.json, which is written in two ways."""
    text: str | None = token["content"] if isinstance(token, dict) else token
    return text


@lru_cache(maxsize=8)
def _compiled(source: str) -> "Template":
    """Return the template as transformers runs it: in a sandbox, blocks leaving no blank lines.

    The time of day is left out, so that the same dialogue gives the same text every day.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _refuse
    environment.filters["tojson"] = _as_json
    # The tag with which transformers marks answers does not change the text.
    source = re.sub(r"\{%(-?)\s*generation\s*(-?)%\}", r"{%\1 if true \2%}", source)
    source = re.sub(r"\{%(-?)\s*endgeneration\s*(-?)%\}", r"{%\1 endif \2%}", source)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _as_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def messages_of(value: object) -> tuple[ChatMessage, ...]:
    """Return the messages of a JSON list of `{"role": ..., "content": ...}`, other keys ignored.

    Raises DataError for anything else, and if no message of the assistant has content.
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
    pieces: Sequence[TextPiece],
    encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
    *,
    eod: int | None,
) -> EncodedDialogue:
    """Return the tokens of a rendered dialogue; `encode` gives the ids of several texts at once."""
    tokens: list[int] = []
    mask: list[int] = []
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


def _message(entry: object, number: int) -> ChatMessage:
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
            f"message {number} of a dialogue has a role that no template has",
            found=f"{role!r}",
            fix=f"use {near[0] if near else ', '.join(ROLES)}",
        )
    return ChatMessage(role, content)
