"""A request for text: what is asked, and its life from the queue to exactly one end.

Times are integers of nanoseconds of the caller's monotonic clock. Token ids outside of the
vocabulary, and requests that no step could ever serve, are refused by the scheduler.
"""

from dataclasses import dataclass
from enum import StrEnum

from megatron.errors import MegatronError


class RequestError(MegatronError):
    """A request that cannot be served as it is: the caller has to change it."""


class DuplicateRequestError(RequestError):
    """A request has the id of one that has not ended."""


class QueueFullError(RequestError):
    """So many requests wait that another one is refused; the same request may be sent again."""

    retryable = True


class RequestTransitionError(MegatronError):
    """The state of a request was changed in a way that does not exist: a bug of the caller."""


class RequestState(StrEnum):
    """Where a request is in its life."""

    QUEUED = "queued"  # waits for blocks; also after a preemption
    PREFILL = "prefill"  # its prompt, or what was computed before a preemption, is computed
    DECODE = "decode"  # every sample draws one token a step
    COMPLETED = "completed"
    FAILED = "failed"
    ABORTED = "aborted"
    EXPIRED = "expired"

    @property
    def is_end(self) -> bool:
        """Whether nothing follows this state."""
        return not _NEXT[self]

    @property
    def is_running(self) -> bool:
        """Whether the request holds blocks."""
        return self in (RequestState.PREFILL, RequestState.DECODE)


_EARLY_ENDS = frozenset({RequestState.FAILED, RequestState.ABORTED, RequestState.EXPIRED})
_NEXT: dict[RequestState, frozenset[RequestState]] = {
    # COMPLETED without a step: the caller found a stop string in the text of each sample.
    RequestState.QUEUED: _EARLY_ENDS | {RequestState.PREFILL, RequestState.COMPLETED},
    RequestState.PREFILL: _EARLY_ENDS
    | {RequestState.DECODE, RequestState.QUEUED, RequestState.COMPLETED},
    RequestState.DECODE: _EARLY_ENDS | {RequestState.QUEUED, RequestState.COMPLETED},
    **{end: frozenset() for end in (*_EARLY_ENDS, RequestState.COMPLETED)},
}


def require_transition(request: str, before: RequestState, after: RequestState) -> None:
    """Check that a request may go from one state to another.

    Raises:
        RequestTransitionError: it may not.
    """
    if after not in _NEXT[before]:
        possible = ", ".join(sorted(_NEXT[before])) or "none, it has ended"
        raise RequestTransitionError(
            f"a request cannot go from {before} to {after}",
            found=f"request {request!r}; states that may follow: {possible}",
            fix="report this as a bug of the scheduler",
        )


class FinishReason(StrEnum):
    """Why one sample of a completed request is at its end."""

    STOP = "stop"  # a stop token, or a stop string that the caller found
    LENGTH = "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for.

    Attributes:
        id: chosen by the caller; unique among requests that have not ended.
        prompt: token ids, one at least.
        max_new_tokens: most tokens of each sample; 0: only the prompt is computed, for one sample.
        arrival_ns: when it came.
        deadline_ns: when it expires, whatever it has by then; None means never.
        samples: independent continuations of the one prompt.
        stop_tokens: ids that end a sample, which keeps the one that it drew.
        min_new_tokens: tokens of a sample before a stop token or a stop string counts.
        priority: smaller numbers are served first.
        salt: cached keys and values are shared between requests of equal salts only.
        prompt_logprobs: how many of the likeliest tokens are reported beside the log-probability of
            each token of the prompt; None: neither is computed.
        embeds: whether the hidden states of the prompt are wanted; there are no new tokens then.
        sampling: how tokens are drawn; not looked at here.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    arrival_ns: int
    deadline_ns: int | None = None
    samples: int = 1
    stop_tokens: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    priority: int = 0
    salt: bytes = b""
    prompt_logprobs: int | None = None
    embeds: bool = False
    sampling: object = None

    def __post_init__(self) -> None:
        for name in ("arrival_ns", "deadline_ns"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise RequestError(
                    "a time is not an integer of nanoseconds",
                    found=f"{name} {value!r} of request {self.id!r}",
                    fix="give time.monotonic_ns() of the process that schedules",
                )
        if not self.prompt:
            raise RequestError(
                "a request has no prompt",
                found=f"0 tokens in request {self.id!r}",
                fix="begin with one token, such as that which separates documents",
            )
        for name, least in (("max_new_tokens", 0), ("samples", 1), ("prompt_logprobs", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(
                    f"{name} is too small",
                    found=f"{value} in request {self.id!r}",
                    fix=f"use {least} or more",
                )
        if self.max_new_tokens == 0 and self.samples > 1:
            raise RequestError(
                "without new tokens all samples of a request are equal",
                found=f"max_new_tokens 0, {self.samples} samples in request {self.id!r}",
                fix="use 1 sample, or ask for new tokens",
            )
        if self.embeds and self.max_new_tokens > 0:
            raise RequestError(
                "an embedding is of a prompt alone",
                found=f"max_new_tokens {self.max_new_tokens} in request {self.id!r}",
                fix="use max_new_tokens 0",
            )
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise RequestError(
                "a sample would have to be longer than it may become, or shorter than empty",
                found=f"min_new_tokens {self.min_new_tokens}, max_new_tokens "
                f"{self.max_new_tokens} in request {self.id!r}",
                fix=f"use a min_new_tokens from 0 to {self.max_new_tokens}",
            )

    @property
    def reuses_prefix(self) -> bool:
        """Whether cached keys and values may stand for part of the prompt.

        Log-probabilities and hidden states of a prompt are not stored, so all of its tokens are
        computed for them.
        """
        return self.prompt_logprobs is None and not self.embeds

    @property
    def longest(self) -> int:
        """The most positions of a sample; its last token is drawn and never computed."""
        return len(self.prompt) + max(1, self.max_new_tokens) - 1


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """The one end of a request.

    Attributes:
        request: its id.
        state: COMPLETED, FAILED, ABORTED or EXPIRED.
        finishes: why each sample ended; None for those that had not.
        new_tokens: how many tokens each sample has.
        detail: a sentence on an end other than completion.
    """

    request: str
    state: RequestState
    finishes: tuple[FinishReason | None, ...]
    new_tokens: tuple[int, ...]
    detail: str = ""
