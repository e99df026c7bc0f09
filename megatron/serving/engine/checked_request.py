"""What a request is for the scheduler, how its tokens are drawn, and what they have to match."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ConfigError
from megatron.inference.constraint import GrammarConstraint, GrammarTable
from megatron.inference.sampling import SequenceDraw, check_draw
from megatron.inference.sampling_params import SamplingParams
from megatron.scheduling.limits import SchedulerLimits
from megatron.scheduling.requests import Request, RequestError
from megatron.serving.engine_client import EngineRequest, RequestRefusedError, SamplingOptions


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be served.

    Attributes:
        scheduled: what the scheduler gets.
        params: how each token is drawn.
        constraint: what the text of each sample has to match, before its first token.
    """

    request: EngineRequest
    scheduled: Request
    params: SamplingParams
    constraint: GrammarConstraint | None

    def draw(
        self, sample: int, output: Sequence[int], constraint: GrammarConstraint | None = None
    ) -> SequenceDraw:
        """Return the draw of the token of a sample that follows its output."""
        return SequenceDraw(
            params=self.params,
            seed=self.request.sampling.seed,
            choice=sample,
            prompt=self.request.prompt,
            output=output,
            constraint=constraint,
            top_logprobs=self.request.logprobs,
        )


def checked_request(
    request: EngineRequest,
    limits: SchedulerLimits,
    grammars: GrammarTable | None,
    *,
    arrival_ns: int,
) -> CheckedRequest:
    """Return a request with what an engine of these limits makes of it.

    Args:
        grammars: makes constraints of grammars; None: there are none.

    Raises:
        RequestRefusedError: it could never be served.
    """
    try:
        scheduled = _scheduled(request, arrival_ns)
        limits.check_request(scheduled)
        params = sampling_params(request.sampling)
        checked = CheckedRequest(request, scheduled, params, _constraint(request, grammars))
        # One rank alone finds this error of a step, and the others would wait for it.
        check_draw(checked.draw(0, ()), limits.vocab_size)
    except (RequestError, ConfigError) as error:
        raise RequestRefusedError(error.problem, found=error.found, fix=error.fix) from error
    return checked


def sampling_params(options: SamplingOptions) -> SamplingParams:
    """Return the engine's way to say how tokens are drawn."""
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=0.0 if options.top_p == 1 else options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=tuple(sorted(options.logit_bias.items())),
        greedy=options.greedy,
    )


def _scheduled(request: EngineRequest, arrival_ns: int) -> Request:
    return Request(
        id=request.id,
        prompt=request.prompt,
        max_new_tokens=request.max_new_tokens,
        arrival_ns=arrival_ns,
        deadline_ns=request.deadline_ns,
        samples=request.samples,
        stop_tokens=request.stop_tokens,
        min_new_tokens=request.min_new_tokens,
        salt=request.salt,
        prompt_logprobs=request.prompt_logprobs,
        embeds=request.embeds,
    )


def _constraint(request: EngineRequest, grammars: GrammarTable | None) -> GrammarConstraint | None:
    if request.grammar is None:
        return None
    if grammars is None:
        raise ConfigError(
            "texts of this model cannot be constrained by a grammar",
            found="a tokenizer without bytes of its tokens, or without an end of documents",
            fix="leave the grammar out",
        )
    if request.min_new_tokens:
        raise ConfigError(
            "a text that has to match a grammar ends where it is complete",
            found=f"min_tokens {request.min_new_tokens}",
            fix="leave min_tokens out, and say the least length in the grammar",
        )
    return grammars.constraint(request.grammar, request.stop_tokens)
