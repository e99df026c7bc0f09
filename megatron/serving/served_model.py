"""The model that a server offers: its name, how text becomes tokens, and how many fit."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.data.samples.chat_template import END_OF_DOCUMENT, ChatTemplate
from megatron.errors import MegatronError
from megatron.json_values import JsonObject, JsonValue
from megatron.serving.api_errors import ApiError, ErrorCode, refused_by
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.token_text import TextRules


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as clients know it.

    Attributes:
        created: when the server was started, in seconds of Unix time.
        vocab_size: token ids are below it.
        context_length: tokens of prompt and answer together.
        template: how chats are written; None where the model has none.
    """

    name: str
    created: int
    tokenizer: Tokenizer
    rules: TextRules
    vocab_size: int
    context_length: int
    template: ChatTemplate | None = None

    def check_name(self, name: str | None) -> None:
        """Check that a client means this model, or none by name; raises ApiError otherwise."""
        if name is not None and name != self.name:
            raise ApiError(
                ErrorCode.MODEL_NOT_FOUND,
                "there is no such model",
                found=repr(name),
                fix=f"use {self.name}",
                param="model",
            )

    def tokens(self, text: str, *, param: str) -> tuple[int, ...]:
        """Return the tokens of a prompt; an empty one begins a new document."""
        try:
            tokens = self.tokenizer.tokenize(text)
        except MegatronError as error:
            raise refused_by(error, param=param) from error
        return tuple(tokens) or self.start(param)

    def check_tokens(self, tokens: Collection[int], *, param: str) -> None:
        """Check that tokens that a client sent are of the vocabulary; raises ApiError otherwise."""
        outside = [token for token in tokens if not 0 <= token < self.vocab_size]
        if outside:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{param} has a token that the vocabulary does not have",
                found=outside[0],
                fix=f"use ids from 0 to {self.vocab_size - 1}",
                param=param,
            )

    def chat_tokens(
        self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()
    ) -> tuple[int, ...]:
        """Return the tokens of a chat up to where the answer begins; raises ApiError."""
        text = self.chat_text(messages, tools)
        tokens: list[int] = []
        for number, part in enumerate(text.split(END_OF_DOCUMENT)):
            if number:
                tokens += self.start("messages")  # the end of a message, not of this text
            tokens += self.tokens(part, param="messages") if part else ()
        return tuple(tokens) or self.start("messages")

    def chat_text(self, messages: Sequence[JsonObject], tools: Sequence[JsonObject] = ()) -> str:
        """Return a chat as the model's template writes it; raises ApiError."""
        if self.template is None:
            raise ApiError(
                ErrorCode.UNSUPPORTED,
                f"{self.name} has no chat template",
                fix="use /v1/completions, or start the server with --chat-template chatml",
                param="messages",
            )
        try:
            contents = [(str(each["role"]), "\x1f".join(_texts(each))) for each in messages]
            self.template.check_contents([*contents, ("tools", "\x1f".join(_texts(list(tools))))])
            return self.template.written(messages, tools=tools, add_generation_prompt=True)
        except MegatronError as error:
            raise refused_by(error, param="messages") from error

    def start(self, param: str) -> tuple[int, ...]:
        """Return the tokens of an empty prompt; raises ApiError where there are none."""
        if self.tokenizer.eod is None:
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                f"{param} is empty, and the tokenizer has no token that begins a document",
                found=self.tokenizer.eod_note,
                fix="send a prompt with text",
                param=param,
            )
        return (self.tokenizer.eod,)


def _texts(value: JsonValue) -> Iterator[str]:
    """Yield all texts of a JSON value, and the names in it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _texts(each)
    elif isinstance(value, Sequence):
        for each in value:
            yield from _texts(each)
