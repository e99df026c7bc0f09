"""What the server needs of an engine: requests in, tokens out, and its state.

An engine steps in a thread or process of its own. Everything here is called in the event loop of
the server and returns at once; results come back through `deliver`, in the same loop. Text, stop
strings and HTTP are the server's: an engine sees token ids only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, Protocol, TypeAlias

from megatron.errors import MegatronError
from megatron.inference.grammar import Grammar

EndState = Literal["completed", "failed", "aborted", "expired"]
FinishedBy = Literal["stop", "length"]
END_STATES: Mapping[str, EndState] = {
    "completed": "completed",
    "failed": "failed",
    "aborted": "aborted",
    "expired": "expired",
}
"""By what the scheduler and the control plane call them."""


class RequestRefusedError(MegatronError):
    """A request that the engine cannot serve as it is: the client has to change it."""


class EngineQueueFullError(MegatronError):
    """So many requests wait that another one is refused; it may be sent again later."""


class EngineUnavailableError(MegatronError):
    """The engine takes no requests: it is loading, paused, stopped, or has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen; every value is within its range already.

    Attributes:
        greedy: the likeliest token, after penalties and biases.
        top_k: 0 means all.
        top_p: 1 means all.
        seed: with the number of a sample it determines all draws.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """Samples that continue one prompt.

    Attributes:
        id: unique among requests that have not ended.
        prompt: token ids, one at least.
        samples: independent continuations.
        stop_tokens: ids that end a sample, which keeps the one that it drew.
        min_new_tokens: tokens of a sample before a stop token counts.
        deadline_ns: when it expires, by `time.monotonic_ns`.
        salt: cached keys and values are shared between requests of equal salts only.
        max_new_tokens: 0: only the prompt is computed, for one sample.
        logprobs: how many of the likeliest tokens are reported with every token drawn, beside its
            own log-probability; None: neither.
        prompt_logprobs: the same for the tokens of the prompt.
        grammar: what the text of each sample has to match; None: anything.
        embeds: whether the embedding of the prompt is wanted; there are no new tokens then.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    samples: int = 1
    stop_tokens: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    deadline_ns: int | None = None
    salt: bytes = b""
    sampling: SamplingOptions = SamplingOptions()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    embeds: bool = False


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Natural log-probabilities, of scores without penalties and temperature.

    Attributes:
        logprob: of the token itself.
        top: the likeliest tokens with theirs, best first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PromptComputed:
    """A prompt was computed; comes once, before any token is drawn.

    Attributes:
        scores: of its tokens but the first, which has none; None where they were not asked for.
        cached_tokens: whose keys and values were found in the prefix cache.
        embedding: of length 1; None where it was not asked for.
    """

    scores: tuple[TokenScore, ...] | None = None
    cached_tokens: int = 0
    embedding: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """The next token of one sample; `finish` says that it is the last one."""

    sample: int
    token: int
    score: TokenScore | None = None
    finish: FinishedBy | None = None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The last event of every request, which comes exactly once."""

    state: EndState
    detail: str = ""


EngineEvent: TypeAlias = PromptComputed | TokenDrawn | RequestEnded


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """The state of an engine, and what it has done since it started.

    Attributes:
        state: one word, such as running, paused, failed.
        takes_requests: whether a request may be submitted.
        is_alive: whether it makes progress; False when it has ended, or a step takes too long.
        detail: a sentence on a state in which it does not.
        running, waiting: requests.
        blocks, used_blocks: of the cache of keys and values.
        prompt_tokens, generated_tokens, preemptions: totals.
        is_batch_invariant: whether a request gets the same bits whatever runs beside it; None where
            that is not known.
        prefix_queries, prefix_hits: tokens looked for and found in the prefix cache.
        drafts, draft_tokens, accepted_tokens: how often tokens were proposed for a sequence, how
            many, and how many of those were drawn as well.
        live_replicas, lost_replicas: numbers of replicas, where there are several.
    """

    state: str
    takes_requests: bool = True
    is_alive: bool = True
    detail: str = ""
    running: int = 0
    waiting: int = 0
    blocks: int = 0
    used_blocks: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    is_batch_invariant: bool | None = None
    prefix_queries: int = 0
    prefix_hits: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    live_replicas: tuple[int, ...] = ()
    lost_replicas: tuple[int, ...] = ()


class EngineClient(Protocol):
    """An engine, as the server sees it."""

    def submit(self, request: EngineRequest, deliver: Callable[[EngineEvent], None]) -> None:
        """Queue a request; its events come through `deliver`, the last is a `RequestEnded`.

        Raises:
            RequestRefusedError: it could never be served.
            EngineQueueFullError: too many wait.
            EngineUnavailableError: the engine takes no requests.
        """

    def abort(self, request: str) -> None:
        """End a request early; no effect on one that has ended or is not known."""

    def end_sample(self, request: str, sample: int) -> None:
        """End one sample, whose text is complete; tokens that were drawn meanwhile may follow."""

    def status(self) -> EngineStatus:
        """Return the state of the engine as it was last known."""
