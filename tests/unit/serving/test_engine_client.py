"""The defaults of a request ask for one plain sample."""

from megatron.serving.engine_client import EngineRequest, SamplingOptions


def test_a_request_without_options_changes_no_score() -> None:
    request = EngineRequest(id="a", prompt=(1,), max_new_tokens=1)
    assert (request.samples, request.stop_tokens, request.logprobs) == (1, frozenset(), None)
    assert request.sampling == SamplingOptions(temperature=1.0, top_p=1.0, logit_bias={})
