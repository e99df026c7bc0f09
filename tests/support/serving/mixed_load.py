"""A load of all sorts for a server of text: good requests, bad ones, and clients that leave.

Each sort says in which ways its requests may end. A request that ends in another way, or in none
within its deadline, is a fault of the server.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.inference.http_client import HttpAnswer, http_request

# How requests end. What is no answer is `hung` or `broken`, which no sort may be.
COMPLETED, ABORTED, EXPIRED, FAILED = "completed", "aborted", "expired", "failed"
REFUSED, BUSY = "refused", "refused: busy"
HUNG, BROKEN = "hung", "broken"
LOST = "server lost"  # broken or failed, because a rank of the server was killed
_ENDS = {400: REFUSED, 404: REFUSED, 413: REFUSED, 429: BUSY, 503: BUSY, 504: EXPIRED}
_RETRY_S = 0.5
_SERVED = frozenset({COMPLETED, EXPIRED, BUSY})
_LEFT = _SERVED | {ABORTED}
_ONLY_REFUSED = frozenset({REFUSED})


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """One request of a load.

    Attributes:
        sort: what kind of request it is.
        may_end: the ways in which it may end.
        leave_after: see `http_request`.
    """

    sort: str
    may_end: frozenset[str]
    body: bytes
    path: str = "/v1/completions"
    method: str = "POST"
    leave_after: int | None = None


@dataclass(slots=True)
class LoadReport:
    """What came of a load: requests by sort and end, and those that ended as they may not."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def of_end(self, end: str) -> int:
        """Return how many requests ended so."""
        return sum(count for (_, each), count in self.ends.items() if each == end)

    def add(self, request: LoadRequest, end: str, detail: str) -> None:
        """Count a request."""
        self.ends[request.sort, end] += 1
        if end not in request.may_end and end != LOST:
            self.problems.append(f"{request.sort}: {end} {detail}")


def draw_load_request(drawn: random.Random, context: int) -> LoadRequest:
    """Draw a request to a server whose sequences have `context` tokens of one byte each."""
    sort = drawn.choices(list(_SORTS), [weight for weight, _ in _SORTS.values()])[0]
    return _SORTS[sort][1](sort, drawn, context)


async def run_mixed_load(
    port: int,
    *,
    clients: int,
    until: asyncio.Event,
    seed: int,
    context: int,
    deadline_s: float,
    was_lost: Callable[[float], bool] = lambda since: False,
) -> LoadReport:
    """Let clients send one request after another until an event, and return what came of them.

    Args:
        was_lost: whether the server has been without a rank at any time since one of the monotonic
            clock; its requests may break off then, or be refused for a while.
    """
    report = LoadReport()

    async def client(number: int) -> None:
        drawn = random.Random(f"{seed} {number}")
        while not until.is_set():
            request = draw_load_request(drawn, context)
            began = time.monotonic()
            end, detail = await _end_of(port, request, deadline_s)
            if end in (FAILED, BROKEN, BUSY) and end not in request.may_end and was_lost(began):
                end = LOST
            report.add(request, end, detail)
            await asyncio.sleep(_RETRY_S if end in (BUSY, LOST) else 0)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return report


async def _end_of(port: int, request: LoadRequest, deadline_s: float) -> tuple[str, str]:
    try:
        async with asyncio.timeout(deadline_s):
            answer = await http_request(
                port, request.method, request.path, request.body, leave_after=request.leave_after
            )
    except TimeoutError:
        return HUNG, f"no end in {deadline_s} s"
    except OSError as error:
        return BROKEN, str(error)
    return end_of_answer(answer)


def end_of_answer(answer: HttpAnswer) -> tuple[str, str]:
    """Return how a request ended whose answer this is, with a detail for the reader."""
    if answer.has_left:
        return ABORTED, ""
    if not answer.is_complete:
        return BROKEN, f"status {answer.status}, and the connection ended"
    if answer.status != 200:
        return _ENDS.get(answer.status, FAILED), f"status {answer.status}: {answer.body[:200]!r}"
    if answer.body.startswith(b"data:") or answer.body.startswith(b":"):
        *_, last = [data for _, data in answer.events()]
        if last == "[DONE]":
            return COMPLETED, ""
        code = json.loads(last).get("error", {}).get("code", "no [DONE]")
        return (EXPIRED if code == "deadline_exceeded" else FAILED), str(code)
    return COMPLETED, ""


def _request(sort: str, may_end: frozenset[str], body: Any, **more: Any) -> LoadRequest:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return LoadRequest(sort=sort, may_end=may_end, body=data, **more)


def _prompt(drawn: random.Random, tokens: int) -> str:
    return "".join(drawn.choices("the cat sat", k=tokens))


def _fields(drawn: random.Random, context: int) -> dict[str, Any]:
    """Return a prompt and answer of a size drawn evenly from short, half and nearly full ones."""
    whole = drawn.choice((context // 16, context // 4, context // 2))
    prompt = drawn.randint(1, whole - 1)
    return {"prompt": _prompt(drawn, prompt), "max_tokens": drawn.randint(1, whole - prompt)}


def _whole(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    return _request(sort, _SERVED, _fields(drawn, context))


def _stream(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    return _request(sort, _SERVED, _fields(drawn, context) | {"stream": True, "logprobs": 3})


def _samples(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    more = {"n": drawn.randint(2, 4), "stream": drawn.random() < 0.5}
    return _request(sort, _SERVED, _fields(drawn, context) | more)


def _stops(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    stop = drawn.choices("aeiost ", k=4)
    return _request(sort, _SERVED, _fields(drawn, context) | {"stop": stop, "stream": True})


def _chat(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    messages = [{"role": "user", "content": _prompt(drawn, context // 16)}]
    body = {"messages": messages, "max_tokens": context // 8, "stream": True}
    return _request(sort, _SERVED, body, path="/v1/chat/completions")


def _megatron(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    body = {"prompts": [_prompt(drawn, 9), _prompt(drawn, 3)], "tokens_to_generate": 9}
    return _request(sort, _SERVED, body, path="/api", method="PUT")


def _scored(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    body = {"prompt": _prompt(drawn, context // 4), "max_tokens": 1, "echo": True, "logprobs": 2}
    return _request(sort, _SERVED, body)


def _endless(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    body = {"prompt": "a", "max_tokens": context - 1, "ignore_eos": True, "stream": True, "n": 4}
    return _request(sort, _SERVED, body)


def _leaves(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    fields = _fields(drawn, context) | {"stream": drawn.random() < 0.7}
    return _request(sort, _LEFT, fields, leave_after=drawn.choice((0, 1, 5)))


def _huge(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    return _request(sort, _ONLY_REFUSED, {"prompt": "x" * drawn.choice((2 * context, 200_000))})


def _oversized(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    return _request(sort, _ONLY_REFUSED, {"prompt": "x" * (2 << 20)})


def _bad(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    whole = json.dumps(_fields(drawn, context)).encode()
    bad = (whole[: len(whole) // 2], b"[" * 99, b"\xff\xfe", b'{"prompt": {"a": 1}}', b"")
    return _request(sort, _ONLY_REFUSED, drawn.choice(bad))


def _watch(sort: str, drawn: random.Random, context: int) -> LoadRequest:
    path = drawn.choice(("/health", "/metrics", "/state", "/", "/v1/models"))
    return _request(sort, frozenset({COMPLETED}), b"", path=path, method="GET")


# Sorts with their weights.
_SORTS: Mapping[str, tuple[int, Callable[[str, random.Random, int], LoadRequest]]] = {
    "whole answer": (6, _whole),
    "stream with log-probabilities": (6, _stream),
    "several samples": (4, _samples),
    "stop strings": (4, _stops),
    "chat": (4, _chat),
    "PUT /api": (2, _megatron),
    "scored prompt": (2, _scored),
    "longer than the deadline": (1, _endless),
    "client leaves": (6, _leaves),
    "prompt too long": (2, _huge),
    "body too large": (1, _oversized),
    "bad body": (3, _bad),
    "page, state, metrics": (3, _watch),
}
