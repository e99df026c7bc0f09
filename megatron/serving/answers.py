"""The bodies of answers: OpenAI's for completions and chats, whole or streamed, and Megatron's."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from megatron.json_values import JsonObject, JsonValue
from megatron.serving.chat_tools.call_reader import CallReader, ReadPart, ToolCall
from megatron.serving.conversion import TextJob
from megatron.serving.engine_client import FinishedBy, TokenScore
from megatron.serving.generation import AnswerPart, Usage
from megatron.serving.sample_text import SamplePart, ShownToken
from megatron.serving.served_model import ServedModel

_MINUS_INFINITY = -9999.0  # which JSON does not have


@dataclass(slots=True)
class WholeAnswer:
    """All parts of one answer."""

    text: list[str] = field(default_factory=list)
    tokens: list[ShownToken] = field(default_factory=list)
    finish: FinishedBy | None = None


class AnswerWriter:
    """Writes answers of one job.

    Args:
        is_chat: whether they are messages of a chat.
    """

    def __init__(self, job: TextJob, model: ServedModel, *, is_chat: bool) -> None:
        self._job, self._model, self._is_chat = job, model, is_chat
        self._readers: dict[int, CallReader] = {}  # of streamed answers
        self._calls: Counter[int] = Counter()

    def whole(self, parts: Iterable[AnswerPart], usage: Usage) -> JsonObject:
        """Return the body of an answer that is not streamed."""
        answers = joined_answers(parts, len(self._job.prompts) * self._job.samples)
        choices = [
            self._choice(
                AnswerPart(index, SamplePart("".join(each.text), (*each.tokens,)), each.finish)
            )
            for index, each in enumerate(answers)
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage_body(usage)}

    def first_chunks(self) -> Sequence[JsonObject]:
        """Return what a stream begins with: the role of every answer, in a chat."""
        if not self._is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._chunk([self._delta(index, delta)]) for index in range(self._job.samples)]

    def chunks(self, part: AnswerPart) -> Sequence[JsonObject]:
        """Return the chunks of a stream for a part of an answer."""
        if not self._is_chat:
            return [self._chunk([self._choice(part)])]
        chunks, index = [], part.index
        text, calls = self._read(index, part)
        if text or (part.part.tokens and self._job.logprobs is not None):
            scores = self._scores(part.part.tokens)
            delta = self._delta(index, {"content": text} if text else {}, scores)
            chunks.append(self._chunk([delta]))
        for call in calls:
            number = self._calls[index]
            told = {"index": number, **self._call(index, number, call)}
            chunks.append(self._chunk([self._delta(index, {"tool_calls": [told]})]))
            self._calls[index] += 1
        if part.finish is not None:
            finish = _finish_reason(part.finish, has_calls=self._calls[index] > 0)
            chunks.append(self._chunk([self._delta(index, {}, finish=finish)]))
        return chunks

    def _read(self, index: int, part: AnswerPart) -> ReadPart:
        """Return the text and the calls that a part of an answer makes certain."""
        if self._job.tools is None:
            return ReadPart(part.part.text)
        reader = self._readers.setdefault(index, self._job.tools.reader())
        found = reader.add(part.part.text)
        if part.finish is None:
            return found
        rest = reader.end()
        return ReadPart(found.text + rest.text, found.calls + rest.calls)

    def _call(self, index: int, number: int, call: ToolCall) -> dict[str, JsonValue]:
        return {
            "id": f"call_{self._job.id.partition('-')[2]}_{index}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }

    def last_chunks(self, usage: Usage) -> Sequence[JsonObject]:
        """Return what a stream ends with: the counts of tokens, if they were asked for."""
        if not self._job.include_usage:
            return []
        return [{**self._chunk([]), "usage": usage_body(usage)}]

    def _head(self, kind: str) -> dict[str, JsonValue]:
        return {
            "id": self._job.id,
            "object": kind,
            "created": self._job.created,
            "model": self._model.name,
            "system_fingerprint": None,
        }

    def _chunk(self, choices: Sequence[JsonObject]) -> dict[str, JsonValue]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        chunk = {**self._head(kind), "choices": choices}
        return chunk | {"usage": None} if self._job.include_usage else chunk

    def _choice(self, answer: AnswerPart) -> JsonObject:
        choice: dict[str, JsonValue] = {"index": answer.index, "finish_reason": answer.finish}
        if not self._is_chat:
            choice["text"] = answer.part.text
        else:
            text, calls = self._read(answer.index, answer)
            told = [self._call(answer.index, at, call) for at, call in enumerate(calls)]
            message: dict[str, JsonValue] = {"role": "assistant", "content": text, "refusal": None}
            if told and answer.finish is not None:
                message |= {"content": text or None, "tool_calls": told}
                choice["finish_reason"] = _finish_reason(answer.finish, has_calls=True)
            choice["message"] = message
        return choice | {"logprobs": self._scores(answer.part.tokens)}

    def _delta(
        self,
        index: int,
        delta: JsonObject,
        scores: JsonValue = None,
        *,
        finish: str | None = None,
    ) -> JsonObject:
        return {"index": index, "delta": delta, "logprobs": scores, "finish_reason": finish}

    def _scores(self, tokens: Sequence[ShownToken]) -> JsonValue:
        if self._job.logprobs is None:
            return None
        if self._is_chat:
            return {"content": [self._chat_score(each) for each in tokens], "refusal": None}
        return {
            "tokens": [self._name(each.token) for each in tokens],
            "token_logprobs": [_logprob(each.score) for each in tokens],
            "top_logprobs": [self._top(each) for each in tokens] if self._job.logprobs else None,
            "text_offset": [each.offset for each in tokens],
        }

    def _top(self, token: ShownToken) -> JsonValue:
        """Return the likeliest tokens and the chosen one, by name; None before the first token."""
        if token.score is None:
            return None
        top = {self._name(other): _finite(logprob) for other, logprob in token.score.top}
        return {self._name(token.token): _finite(token.score.logprob)} | top

    def _chat_score(self, token: ShownToken) -> JsonObject:
        score = token.score or TokenScore(0.0)
        top: list[JsonValue] = [self._chat_token(other, logprob) for other, logprob in score.top]
        return {**self._chat_token(token.token, score.logprob), "top_logprobs": top}

    def _chat_token(self, token: int, logprob: float) -> dict[str, JsonValue]:
        spelled = self._model.rules.bytes_of(token)
        return {
            "token": spelled.decode(errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(spelled),
        }

    def _name(self, token: int) -> str:
        """Return the text of a token; of a part of a character, OpenAI's name of its bytes."""
        spelled = self._model.rules.bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finish_reason(finish: FinishedBy, *, has_calls: bool) -> str:
    """Return OpenAI's name of the end of an answer; one that was cut is called so."""
    return "tool_calls" if has_calls and finish == "stop" else finish


def usage_body(usage: Usage) -> JsonObject:
    """Return the counts of tokens as OpenAI has them."""
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def megatron_answer(job: TextJob, model: ServedModel, parts: Iterable[AnswerPart]) -> JsonObject:
    """Return the body of Megatron's `PUT /api`.

    `text` has prompt and answer, `tokens` their ids, `segments` the text of each, and `logprobs`,
    if they were asked for, those of every token but the first.
    """
    answers = joined_answers(parts, len(job.prompts))
    shown = [[each.token for each in answer.tokens] for answer in answers]
    if job.logprobs is None:  # otherwise the tokens of prompts have scores, and are among them
        shown = [[*prompt.tokens, *ids] for prompt, ids in zip(job.prompts, shown, strict=True)]
    spell = model.rules.bytes_of
    body: dict[str, JsonValue] = {
        "text": ["".join(answer.text) for answer in answers],
        "segments": [[spell(token).decode(errors="replace") for token in ids] for ids in shown],
        "tokens": shown,
    }
    if job.logprobs is not None:
        scores = [[_logprob(token.score) for token in answer.tokens[1:]] for answer in answers]
        body["logprobs"] = scores
    return body


def joined_answers(parts: Iterable[AnswerPart], count: int) -> list[WholeAnswer]:
    """Return the answers whose parts these are."""
    answers = [WholeAnswer() for _ in range(count)]
    for part in parts:
        answer = answers[part.index]
        answer.text.append(part.part.text)
        answer.tokens += part.part.tokens
        answer.finish = part.finish
    return answers


def _logprob(score: TokenScore | None) -> float | None:
    return None if score is None else _finite(score.logprob)


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MINUS_INFINITY
