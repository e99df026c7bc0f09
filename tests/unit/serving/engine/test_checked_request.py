"""A request is refused before it waits, or goes on with all that it asks for."""

import pytest

from megatron.inference.grammar import Grammar, GrammarKind
from megatron.inference.sampling_params import SamplingParams
from megatron.scheduling.limits import SchedulerLimits
from megatron.serving.engine.checked_request import checked_request, sampling_params
from megatron.serving.engine_client import EngineRequest, RequestRefusedError, SamplingOptions

LIMITS = SchedulerLimits(blocks=16, block_size=4, max_length=32, vocab_size=100)


def test_the_scheduler_and_draws_get_what_is_asked_for() -> None:
    options = SamplingOptions(temperature=0.5, top_k=3, seed=7, logit_bias={3: -1.0})
    request = EngineRequest(
        id="a", prompt=(1, 2), max_new_tokens=5, samples=2, stop_tokens=frozenset({9}),
        min_new_tokens=1, deadline_ns=99, salt=b"s", sampling=options, logprobs=2,
    )  # fmt: skip
    checked = checked_request(request, LIMITS, None, arrival_ns=17)
    scheduled = checked.scheduled
    assert (scheduled.arrival_ns, scheduled.deadline_ns, scheduled.salt) == (17, 99, b"s")
    assert (scheduled.samples, scheduled.stop_tokens) == (2, frozenset({9}))
    draw = checked.draw(1, (5,))
    assert (draw.seed, draw.choice, draw.prompt, draw.output) == (7, 1, (1, 2), (5,))
    assert (draw.params, draw.top_logprobs) == (sampling_params(options), 2)


def test_options_that_limit_nothing_are_no_limits() -> None:
    assert sampling_params(SamplingOptions()) == SamplingParams()
    assert not sampling_params(SamplingOptions(top_p=1.0)).has_limits


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 31}, "longer than the model"),
        ({"sampling": SamplingOptions(logit_bias={100: 1.0})}, "not in the vocabulary"),
        ({"sampling": SamplingOptions(temperature=-1.0)}, "temperature"),
        ({"grammar": Grammar(GrammarKind.REGEX, "a")}, "cannot be constrained by a grammar"),
    ],
)
def test_what_could_never_be_served_is_refused(changes: dict[str, object], message: str) -> None:
    given = {"id": "a", "prompt": (1, 2), "max_new_tokens": 5} | changes
    with pytest.raises(RequestRefusedError, match=message) as caught:
        checked_request(EngineRequest(**given), LIMITS, None, arrival_ns=0)  # type: ignore[arg-type]
    assert caught.value.fix
