"""The routes of the server, as one ASGI application."""

import asyncio
import base64
import struct
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from typing import TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron import log
from megatron.errors import MegatronError, first_line
from megatron.json_values import JsonObject, JsonValue
from megatron.serving import conversion
from megatron.serving.answers import AnswerWriter, megatron_answer
from megatron.serving.api_errors import ApiError, ErrorCode
from megatron.serving.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    MegatronBody,
    TokenizeBody,
    json_object,
    read_fields,
)
from megatron.serving.conversion import JobContext, TextJob
from megatron.serving.engine_client import EngineCannotError, EngineUnavailableError
from megatron.serving.generation import AnswerPart, JobRun, ServerBackend
from megatron.serving.guard import SALT, Guard
from megatron.serving.metrics import TokenRate
from megatron.serving.page import page_response
from megatron.serving.responses import (
    Chunks,
    ClientGoneError,
    EventStream,
    error_response,
    json_response,
    read_body,
    unless_client_leaves,
)

_BIG_BODY = 1 << 16  # bytes: tokens of larger ones are made in a thread, beside other requests
Body = TypeVar("Body", bound=msgspec.Struct)
Answer = TypeVar("Answer")
Handler = Callable[[Request], Awaitable[ASGIApp]]


class Api:
    """The handlers of all routes.

    Args:
        is_strict: whether a field that nothing reads is an error.
    """

    def __init__(self, backend: ServerBackend, *, is_strict: bool = False) -> None:
        self._backend, self._is_strict = backend, is_strict
        self._rate = TokenRate()

    def routes(self) -> list[Route]:
        """Return the routes with their methods."""
        table: Mapping[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/v1/chat/completions"): self.chat,
            ("POST", "/v1/embeddings"): self.embeddings,
            ("GET", "/v1/models"): self.models,
            ("GET", "/v1/models/{name:path}"): self.model,
            ("PUT", "/api"): self.megatron,
            ("POST", "/tokenize"): self.tokenize,
            ("POST", "/detokenize"): self.detokenize,
            ("GET", "/health"): self.health,
            ("GET", "/metrics"): self.metrics,
            ("GET", "/state"): self.state,
            ("GET", "/"): self.page,
        }
        return [
            Route(path, _Endpoint(handler), methods=[method])
            for (method, path), handler in table.items()
        ]

    async def completions(self, request: Request) -> ASGIApp:
        """`POST /v1/completions`."""
        job, ignored = await self._job(request, CompletionBody, conversion.completion_job, "cmpl")
        return await self._answer(request, job, ignored, is_chat=False)

    async def chat(self, request: Request) -> ASGIApp:
        """`POST /v1/chat/completions`."""
        job, ignored = await self._job(request, ChatBody, conversion.chat_job, "chatcmpl")
        return await self._answer(request, job, ignored, is_chat=True)

    async def megatron(self, request: Request) -> ASGIApp:
        """`PUT /api`, as Megatron's server has it."""
        job, ignored = await self._job(request, MegatronBody, conversion.megatron_job, "api")
        parts, _ = await unless_client_leaves(request, self._all_parts(job))
        return json_response(megatron_answer(job, self._backend.model, parts), ignored=ignored)

    async def embeddings(self, request: Request) -> ASGIApp:
        """`POST /v1/embeddings`."""
        body, ignored = await self._body(request, EmbeddingBody)
        self._backend.model.check_name(body.model)
        if body.encoding_format not in (None, "float", "base64"):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "encoding_format has a wrong value",
                found=repr(body.encoding_format),
                fix="use float or base64",
                param="encoding_format",
            )
        prompts = conversion.prompts_of(body.input, self._context(request, "embd"), param="input")
        tokens = [prompt.tokens for prompt in prompts]
        try:
            vectors = await unless_client_leaves(request, self._backend.engine.embed(tokens))
        except EngineCannotError as error:
            raise ApiError(
                ErrorCode.NOT_IMPLEMENTED, error.problem, found=error.found, fix=error.fix
            ) from error
        except EngineUnavailableError as error:
            raise ApiError(
                ErrorCode.ENGINE_UNAVAILABLE, error.problem, found=error.found, fix=error.fix
            ) from error
        count = sum(map(len, tokens))
        is_packed = body.encoding_format == "base64"
        data: list[JsonValue] = [
            {
                "object": "embedding",
                "index": index,
                "embedding": _packed(vector) if is_packed else vector,
            }
            for index, vector in enumerate(vectors)
        ]
        answer: dict[str, JsonValue] = {
            "object": "list",
            "data": data,
            "model": self._backend.model.name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
        return json_response(answer, ignored=ignored)

    async def models(self, request: Request) -> ASGIApp:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model_entry()]})

    async def model(self, request: Request) -> ASGIApp:
        """`GET /v1/models/{name}`."""
        self._backend.model.check_name(request.path_params["name"])
        return json_response(self._model_entry())

    async def tokenize(self, request: Request) -> ASGIApp:
        """`POST /tokenize`: the tokens of a text, or of a chat."""
        body, ignored = await self._body(request, TokenizeBody)
        model = self._backend.model
        model.check_name(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(
                ErrorCode.INVALID_VALUE,
                "either a text or a chat becomes tokens",
                found="both" if body.prompt is not None else "neither prompt nor messages",
                fix="send prompt or messages",
                param="prompt",
            )
        answer: dict[str, JsonValue] = {}
        if body.messages is not None:
            at = self._context(request, "tok")
            messages = conversion.chat_messages(body.messages, at)
            tokens = model.chat_tokens(messages)
            answer["prompt"] = model.rules.text(tokens)
        else:
            tokens = model.tokens(body.prompt, param="prompt") if body.prompt else ()
        answer |= {"tokens": tokens, "count": len(tokens), "max_model_len": model.context_length}
        return json_response(answer, ignored=ignored)

    async def detokenize(self, request: Request) -> ASGIApp:
        """`POST /detokenize`: the text of tokens."""
        body, ignored = await self._body(request, DetokenizeBody)
        model = self._backend.model
        model.check_name(body.model)
        model.check_tokens(body.tokens, param="tokens")
        return json_response({"prompt": model.rules.text(body.tokens)}, ignored=ignored)

    async def health(self, request: Request) -> ASGIApp:
        """`GET /health`: 200 while the engine lives and the server takes requests."""
        status = self._backend.engine.status()
        is_well = status.is_alive and status.state not in ("loading", "failed", "stopped")
        is_draining = self._backend.admission.is_draining
        word = "stopping" if is_draining else (status.state if is_well else "unavailable")
        body = {"status": word, "engine": msgspec.to_builtins(status)}
        response = json_response(body)
        response.status_code = 200 if is_well and not is_draining else 503
        return response

    async def metrics(self, request: Request) -> ASGIApp:
        """`GET /metrics`, for Prometheus."""
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(self._backend.metrics.text(), headers={"content-type": kind})

    async def state(self, request: Request) -> ASGIApp:
        """`GET /state`: what the page shows of model, limits and engine."""
        backend, status = self._backend, self._backend.engine.status()
        model, limits = backend.model, backend.limits
        return json_response(
            {
                "model": model.name,
                "context_length": model.context_length,
                "chat_template": None if model.template is None else model.template.name,
                "limits": {
                    "n": limits.max_samples,
                    "logprobs": min(limits.max_logprobs, model.vocab_size),
                    "stop": limits.max_stop_strings,
                    "request_timeout": limits.request_timeout,
                },
                "is_stopping": backend.admission.is_draining,
                "engine": msgspec.to_builtins(status),
                "tokens_per_second": round(self._rate.rate(status.generated_tokens), 2),
            }
        )

    async def page(self, request: Request) -> ASGIApp:
        """`GET /`: the page."""
        return page_response()

    async def _job(
        self,
        request: Request,
        kind: type[Body],
        convert: Callable[[Body, JobContext], TextJob],
        prefix: str,
    ) -> tuple[TextJob, tuple[str, ...]]:
        body, ignored = await self._body(request, kind)
        at = self._context(request, prefix)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) < _BIG_BODY:
            return convert(body, at), ignored
        return await asyncio.to_thread(convert, body, at), ignored

    async def _body(self, request: Request, kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        limits = self._backend.limits
        data = await read_body(request, most=limits.max_body_bytes, timeout_s=limits.body_timeout)
        fields = json_object(data, max_depth=limits.max_json_depth)
        body, ignored = read_fields(kind, fields)
        if ignored and self._is_strict:
            raise ApiError(
                ErrorCode.UNKNOWN_FIELD,
                "the body has a field that nothing reads",
                found=", ".join(ignored),
                fix="leave it out, or start the server without --strict-api",
                param=ignored[0],
            )
        return body, ignored

    def _context(self, request: Request, prefix: str) -> JobContext:
        return JobContext(
            model=self._backend.model,
            limits=self._backend.limits,
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            now_ns=time.monotonic_ns(),
            salt=request.scope[SALT],
        )

    async def _answer(
        self, request: Request, job: TextJob, ignored: tuple[str, ...], *, is_chat: bool
    ) -> ASGIApp:
        writer = AnswerWriter(job, self._backend.model, is_chat=is_chat)
        if job.stream:
            return EventStream(self._chunks(job, writer), ignored=ignored)
        parts, tokens = await unless_client_leaves(request, self._all_parts(job))
        return json_response(writer.whole(parts, tokens), ignored=ignored)

    async def _all_parts(self, job: TextJob) -> tuple[list[AnswerPart], int]:
        generation = JobRun(job, self._backend)
        async with aclosing(generation.parts()) as parts:
            found = [part async for part in parts if part is not None]
        return found, generation.completion_tokens

    async def _chunks(self, job: TextJob, writer: AnswerWriter) -> Chunks:
        generation = JobRun(job, self._backend)
        async with aclosing(generation.parts()) as parts:
            await anext(parts)  # accepted
            yield None
            for chunk in writer.first_chunks():
                yield chunk
            async for part in parts:
                if part is None:
                    yield None
                    continue
                for chunk in writer.chunks(part):
                    yield chunk
        for chunk in writer.last_chunks(generation.completion_tokens):
            yield chunk

    def _model_entry(self) -> JsonObject:
        model = self._backend.model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "megatron",
            "max_model_len": model.context_length,
        }


def server_app(
    backend: ServerBackend,
    *,
    keys: Collection[str] = (),
    is_local: bool = True,
    is_strict: bool = False,
) -> ASGIApp:
    """Return the application: `Api` behind `Guard`.

    Args:
        keys: API keys; none are needed if there are none.
        is_local: whether only programs of this machine can connect.
        is_strict: whether a field that nothing reads is an error.
    """
    app = Starlette(
        routes=Api(backend, is_strict=is_strict).routes(),
        exception_handlers={HTTPException: no_route},
    )
    return Guard(
        app, keys=keys, max_header_bytes=backend.limits.max_header_bytes, is_local=is_local
    )


class _Endpoint:
    """A handler as an ASGI application: whatever it raises becomes an answer."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._handler(Request(scope, receive))
            await response(scope, receive, send)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
        except ClientGoneError:
            return  # whoever would read an answer is gone
        except Exception as error:
            log.error(f"a request failed unexpectedly\n{traceback.format_exc()}")
            await error_response(_internal(error))(scope, receive, send)


def _internal(error: Exception) -> ApiError:
    is_ours = isinstance(error, MegatronError)
    return ApiError(
        ErrorCode.INTERNAL,
        "the request failed unexpectedly",
        found=first_line(error) if is_ours else type(error).__name__,
        fix="tell whoever runs the server; its log has more",
    )


async def no_route(request: Request, error: Exception) -> Response:
    """Answer a path, or a method of one, that does not exist."""
    assert isinstance(error, HTTPException)  # noqa: S101  # invariant: registered for it
    is_method = error.status_code == 405
    return error_response(
        ApiError(
            ErrorCode.METHOD if is_method else ErrorCode.NOT_FOUND,
            "the path takes another method" if is_method else "there is no such path",
            found=f"{request.method} {request.url.path}",
            fix="see docs/serving.md for the paths and their methods",
        )
    )


def _packed(vector: list[float]) -> str:
    """Return an embedding as the official client asks for it: float32, little-endian, base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
