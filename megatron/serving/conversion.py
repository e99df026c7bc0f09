"""From bodies to requests of the engine: defaults, limits, and what values mean.

One body becomes one job, with a request for each of its prompts. Nothing is cut to fit: a prompt or
an answer that is longer than the model is refused, with the numbers.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from megatron.data.samples.chat_template import ROLES
from megatron.json_values import JsonObject, JsonValue
from megatron.serving.answer_grammars import answer_grammar
from megatron.serving.api_errors import ApiError, ErrorCode, invalid_value
from megatron.serving.bodies import (
    ChatBody,
    ChatMessageBody,
    CompletionBody,
    EmbeddingBody,
    MegatronBody,
    SamplingBody,
    TextPart,
)
from megatron.serving.chat_tools.tool_choice import (
    ToolUse,
    called_tools,
    check_calls_are_written,
    tool_use,
)
from megatron.serving.engine_client import EngineRequest, SamplingOptions
from megatron.serving.limits import ServerLimits
from megatron.serving.served_model import ServedModel

_DEFAULT_COMPLETION = 16  # tokens, in OpenAI's /v1/completions
_DEFAULT_MEGATRON = 64  # in Megatron's /api
_HIGHEST_TEMPERATURE = 100.0
_LONGEST_STOP = 256  # characters; each token is compared with all of them
_NS = 1_000_000_000
_NEWER_ROLES = {"developer": "system"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptText:
    """A prompt: its tokens, and its text as the client gave it, or as the tokens spell it."""

    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TextJob:
    """One body, as requests of the engine and how their tokens become answers.

    Attributes:
        requests: one for each prompt.
        stops: strings that end a sample, and are not part of it.
        logprobs: how many of the likeliest tokens stand beside each one; None: no scores.
        echo: answers begin with their prompt.
        tools: calls in answers are told from their text.
    """

    id: str
    created: int
    prompts: tuple[PromptText, ...]
    requests: tuple[EngineRequest, ...]
    samples: int = 1
    stops: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False
    tools: ToolUse | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(prompt.tokens) for prompt in self.prompts)


class JobContext(NamedTuple):
    """What a job takes from the server and the moment.

    Attributes:
        id: of the answer; requests have a number behind it.
        created: seconds of Unix time.
        now_ns: by `time.monotonic_ns`.
        salt: cached prefixes are shared between equal ones only, such as clients of one key.
    """

    model: ServedModel
    limits: ServerLimits
    id: str
    created: int
    now_ns: int
    salt: bytes = b""


def completion_job(body: CompletionBody, at: JobContext) -> TextJob:
    """Return the job of `POST /v1/completions`; raises ApiError."""
    prompts = prompts_of(body.prompt, at, param="prompt")
    wanted = _DEFAULT_COMPLETION if body.max_tokens is None else body.max_tokens
    if wanted == 0 and not body.echo:
        raise invalid_value("max_tokens", 0, "use 1 or more, or echo to score a prompt")
    if body.max_tokens is None:
        wanted = min(wanted, min(_room(prompt, at) for prompt in prompts))
    logprobs = _check_logprobs(body.logprobs, at, param="logprobs")
    echoes = bool(body.echo)
    return _job(
        body,
        at,
        prompts,
        _Answer(
            [wanted] * len(prompts),
            logprobs,
            prompt_logprobs=logprobs if echoes else None,
            echo=echoes,
        ),
    )


def embedding_job(body: EmbeddingBody, at: JobContext) -> TextJob:
    """Return the job of `POST /v1/embeddings`; raises ApiError."""
    at.model.check_name(body.model)
    if body.encoding_format not in (None, "float", "base64"):
        raise invalid_value("encoding_format", repr(body.encoding_format), "use float or base64")
    prompts = prompts_of(body.input, at, param="input")
    for prompt in prompts:
        _check_length(prompt, 0, at, param="input")
    requests = tuple(
        EngineRequest(
            id=f"{at.id}-{number}",
            prompt=prompt.tokens,
            max_new_tokens=0,
            deadline_ns=at.now_ns + at.limits.request_timeout * _NS,
            salt=at.salt,
            embeds=True,
        )
        for number, prompt in enumerate(prompts)
    )
    return TextJob(id=at.id, created=at.created, prompts=tuple(prompts), requests=requests)


def chat_job(body: ChatBody, at: JobContext) -> TextJob:
    """Return the job of `POST /v1/chat/completions`; raises ApiError."""
    messages = chat_messages(body.messages, at)
    use = tool_use(body, at.model.template, at.limits)
    if use is None and any("tool_calls" in message for message in messages):
        check_calls_are_written(at.model.template)
    tools = () if use is None else use.tools
    prompt = PromptText(tokens=at.model.chat_tokens(messages, tools), text="")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    if most == 0:
        raise invalid_value("max_tokens", 0, "use 1 or more")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid_value("top_logprobs", body.top_logprobs, "set logprobs to true as well")
    wanted = (body.top_logprobs or 0) if body.logprobs else None
    logprobs = _check_logprobs(wanted, at, param="top_logprobs")
    room = _room(prompt, at)
    answer = _Answer([room if most is None else most], logprobs, chat=True, tools=use)
    return _job(body, at, [prompt], answer)


def megatron_job(body: MegatronBody, at: JobContext) -> TextJob:
    """Return the job of Megatron's `PUT /api`; raises ApiError."""
    prompts = prompts_of(list(body.prompts), at, param="prompts")
    if body.add_BOS:
        first = at.model.tokenizer.bos
        first = at.model.tokenizer.eod if first is None else first
        if first is None:
            raise invalid_value("add_BOS", True, "leave it out: the tokenizer has no such token")
        prompts = [PromptText(tokens=(first, *p.tokens), text=p.text) for p in prompts]
    wanted = _DEFAULT_MEGATRON if body.tokens_to_generate is None else body.tokens_to_generate
    if wanted == 0 and not body.logprobs:
        raise invalid_value("tokens_to_generate", 0, "use 1 or more, or logprobs to score a prompt")
    if body.top_k and body.top_p:
        raise invalid_value("top_p", body.top_p, "use top_k or top_p, not both")
    stops = ["\n\n"] if body.stop_on_double_eol else []
    stops += ["\n"] if body.stop_on_eol else []
    same = SamplingBody(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p or None,  # 0 is no limit there
        seed=body.random_seed,
        stop=stops,
        stop_token_ids=None if body.stop_token is None else [body.stop_token],
    )
    scores = 0 if body.logprobs else None
    return _job(same, at, prompts, _Answer([wanted] * len(prompts), scores, scores, echo=True))


def prompts_of(
    given: str | Sequence[str | int | list[int]], at: JobContext, *, param: str
) -> list[PromptText]:
    """Return the prompts of a body: a text, texts, the tokens of one, or of several.

    Raises:
        ApiError: a mixture of these forms, too many, or what is not in the vocabulary.
    """
    items: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
    if items and all(isinstance(item, int) for item in items):
        items = [[item for item in items if isinstance(item, int)]]
    kinds = {type(item) for item in items}
    if len(kinds) != 1 or int in kinds:
        raise invalid_value(
            param,
            "an empty list" if not items else "a mixture of forms",
            "send a text, a list of texts, a list of token ids, or a list of such lists",
        )
    if len(items) > at.limits.max_prompts:
        raise invalid_value(
            param, f"{len(items)} prompts", f"send {at.limits.max_prompts} at a time or fewer"
        )
    return [_prompt(item, at, param) for item in items]


def chat_messages(given: Sequence[ChatMessageBody], at: JobContext) -> list[JsonObject]:
    """Return the messages of a chat as templates get them.

    Raises:
        ApiError: none, too many, or what is no text.
    """
    if not 0 < len(given) <= at.limits.max_messages:
        raise invalid_value(
            "messages", f"{len(given)} messages", f"send 1 to {at.limits.max_messages} messages"
        )
    return [_message(message, number) for number, message in enumerate(given)]


class _Answer(NamedTuple):
    """What is asked for beside how tokens are drawn."""

    new_tokens: Sequence[int]  # for each prompt
    logprobs: int | None
    prompt_logprobs: int | None = None
    echo: bool = False
    chat: bool = False
    tools: ToolUse | None = None


def _job(
    body: SamplingBody, at: JobContext, prompts: Sequence[PromptText], answer: _Answer
) -> TextJob:
    at.model.check_name(body.model)
    samples = body.n or 1
    if samples > at.limits.max_samples:
        raise invalid_value("n", samples, f"use {at.limits.max_samples} or fewer")
    if samples > 1 and 0 in answer.new_tokens:
        raise invalid_value("n", samples, "use 1: without new tokens all answers are equal")
    stops = _stop_strings(body, at)
    stop_tokens = set(body.stop_token_ids or ())
    at.model.check_tokens(stop_tokens, param="stop_token_ids")
    eod = at.model.tokenizer.eod
    if eod is not None and not body.ignore_eos:
        stop_tokens.add(eod)
    if answer.chat and at.model.template is not None and not body.ignore_eos:
        end = at.model.template.end
        ids = at.model.tokenizer.tokenize(end.strip()) if end.strip() else []
        if len(ids) == 1:
            stop_tokens.add(ids[0])
        elif ids:
            stops = (*stops, end.strip())
    sampling, grammar = _sampling(body, at), answer_grammar(body, at.limits)
    if answer.tools is not None:
        if grammar is not None:
            fix = "leave one out, or set tool_choice to none"
            raise invalid_value("tools", "tools beside what an answer has to match", fix)
        grammar = answer.tools.grammar
    salt = at.salt + (body.cache_salt or "").encode()
    requests = []
    for number, (prompt, tokens) in enumerate(zip(prompts, answer.new_tokens, strict=True)):
        _check_length(prompt, tokens, at, param="messages" if answer.chat else "prompt")
        if (body.min_tokens or 0) > tokens:
            raise invalid_value("min_tokens", body.min_tokens, f"use {tokens} or fewer")
        requests.append(
            EngineRequest(
                id=f"{at.id}-{number}",
                prompt=prompt.tokens,
                max_new_tokens=tokens,
                samples=samples,
                stop_tokens=frozenset(stop_tokens),
                min_new_tokens=body.min_tokens or 0,
                deadline_ns=at.now_ns + at.limits.request_timeout * _NS,
                salt=salt,
                sampling=sampling,
                logprobs=answer.logprobs,
                prompt_logprobs=answer.prompt_logprobs,
                grammar=grammar,
            )
        )
    return TextJob(
        id=at.id,
        created=at.created,
        prompts=tuple(prompts),
        requests=tuple(requests),
        samples=samples,
        stops=stops,
        logprobs=answer.logprobs,
        echo=answer.echo,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        tools=answer.tools,
    )


def _sampling(body: SamplingBody, at: JobContext) -> SamplingOptions:
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature > _HIGHEST_TEMPERATURE:
        raise invalid_value("temperature", temperature, f"use {_HIGHEST_TEMPERATURE:g} or less")
    if body.top_p == 0:
        raise invalid_value(
            "top_p", 0, "use a number above 0, or temperature 0 for the likeliest token"
        )
    is_greedy = temperature == 0
    seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
    return SamplingOptions(
        greedy=is_greedy,
        temperature=1.0 if is_greedy else temperature,
        top_k=0 if is_greedy else max(0, body.top_k or 0),
        top_p=1.0 if is_greedy or body.top_p is None else body.top_p,
        min_p=0.0 if is_greedy else body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_biases(body.logit_bias or {}, at),
        seed=seed,
    )


def _biases(given: Mapping[str, float], at: JobContext) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, bias in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise invalid_value("logit_bias", repr(name), "use token ids as names")
        biases[int(name)] = bias
    at.model.check_tokens(biases, param="logit_bias")
    return biases


def _stop_strings(body: SamplingBody, at: JobContext) -> tuple[str, ...]:
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stops) > at.limits.max_stop_strings:
        raise invalid_value(
            "stop", f"{len(stops)} strings", f"use {at.limits.max_stop_strings} or fewer"
        )
    for stop in stops:
        if not 0 < len(stop) <= _LONGEST_STOP:
            raise invalid_value(
                "stop", f"a string of {len(stop)} characters", f"use 1 to {_LONGEST_STOP}"
            )
    return stops


def _check_logprobs(wanted: int | None, at: JobContext, *, param: str) -> int | None:
    most = min(at.limits.max_logprobs, at.model.vocab_size)
    if wanted is not None and wanted > most:
        raise invalid_value(param, wanted, f"use {most} or fewer")
    return wanted


def _room(prompt: PromptText, at: JobContext) -> int:
    """Return how many tokens an answer may have; one at least, which is refused later."""
    return max(1, at.model.context_length - len(prompt.tokens))


def _check_length(prompt: PromptText, new_tokens: int, at: JobContext, *, param: str) -> None:
    room = at.model.context_length - len(prompt.tokens)
    if new_tokens > room:
        raise ApiError(
            ErrorCode.CONTEXT_LENGTH,
            f"prompt and answer are longer than the {at.model.context_length} tokens of the model",
            found=f"{len(prompt.tokens)} tokens of prompt and {new_tokens} new ones",
            fix=f"ask for {room} new tokens or fewer" if room > 0 else "shorten the prompt",
            param="max_tokens" if room > 0 else param,
        )


def _prompt(item: str | int | list[int], at: JobContext, param: str) -> PromptText:
    if isinstance(item, str):
        return PromptText(tokens=at.model.tokens(item, param=param), text=item)
    assert isinstance(item, list)  # noqa: S101  # invariant: checked by prompts_of
    at.model.check_tokens(item, param=param)
    tokens = tuple(item) or at.model.start(param)
    return PromptText(tokens=tokens, text=at.model.rules.text(tokens))


def _message(message: ChatMessageBody, number: int) -> JsonObject:
    param = f"messages[{number}]"
    role = _NEWER_ROLES.get(message.role, message.role)
    if role not in (*ROLES, "tool"):
        raise invalid_value(
            f"{param}.role", repr(message.role), "use developer, system, user, assistant or tool"
        )
    calls = message.tool_calls if role == "assistant" else None
    if message.content is None and not calls:
        raise invalid_value(f"{param}.content", "none", "send a text")
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(_part(part, param) for part in content)
    made: dict[str, JsonValue] = {"role": role, "content": content}
    if calls:
        made["tool_calls"] = called_tools(msgspec.to_builtins(calls), f"{param}.tool_calls")
    if role == "tool":
        beside = {"tool_call_id": message.tool_call_id, "name": message.name}
        made |= {name: value for name, value in beside.items() if value is not None}
    return made


def _part(part: TextPart, param: str) -> str:
    if part.type != "text" or part.text is None:
        raise ApiError(
            ErrorCode.UNSUPPORTED,
            "a message may have text only",
            found=f"a part of the type {part.type!r}",
            fix='send {"type": "text", "text": "..."}',
            param=f"{param}.content",
        )
    return part.text
