"""Bodies become requests with the defaults of the interface; test_app.py has every refusal."""

import pytest

from megatron.data.samples.chat_template import PLAIN, ChatTemplate
from megatron.serving.api_errors import ApiError
from megatron.serving.bodies import ChatBody, ChatMessageBody, CompletionBody, MegatronBody
from megatron.serving.conversion import JobContext, chat_job, completion_job, megatron_job
from megatron.serving.limits import ServerLimits
from megatron.serving.served_model import ServedModel
from tests.support.serving.models import served_model

S = 1_000_000_000
EOD = 256


def context(model: ServedModel | None = None) -> JobContext:
    limits = ServerLimits(request_timeout=7)
    return JobContext(model or served_model(), limits, "cmpl-1", created=5, now_ns=3, salt=b"key")


def chat_of(text: str = "a", **fields: object) -> ChatBody:
    return ChatBody(messages=[ChatMessageBody(role="user", content=text)], **fields)


def test_a_request_has_a_deadline_a_number_and_the_salt_of_its_key() -> None:
    job = completion_job(CompletionBody(prompt=["a", "b"], cache_salt="mine"), context())
    assert [request.id for request in job.requests] == ["cmpl-1-0", "cmpl-1-1"]
    assert {request.deadline_ns for request in job.requests} == {3 + 7 * S}
    assert {request.salt for request in job.requests} == {b"keymine"}
    assert job.prompt_tokens == 2


def test_requests_without_a_seed_draw_differently_and_a_seed_of_zero_is_one() -> None:
    seeds = {
        completion_job(CompletionBody(prompt="a", seed=seed), context()).requests[0].sampling.seed
        for seed in (None, None, 0, -1)
    }
    assert len(seeds) == 4
    assert {0, 2**64 - 1} < seeds


def test_a_chat_may_use_the_rest_of_the_context() -> None:
    job = chat_job(chat_of(), context())
    (request,) = job.requests
    assert len(request.prompt) + request.max_new_tokens == 128
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat_job(chat_of(**{name: 9}), context()).requests[0].max_new_tokens == 9


def test_a_chat_ends_with_the_text_or_the_token_of_its_template() -> None:
    assert chat_job(chat_of(stop="x"), context()).stops == ("x", "<|im_end|>")
    assert chat_job(chat_of(), context(served_model(template=PLAIN))).stops == ()
    short = ChatTemplate(
        name="short",
        source="{% for m in messages %}{{ m.content + '~' }}{% endfor %}",
        tokens={},
        reserved=(),
    )
    (request,) = chat_job(chat_of(), context(served_model(template=short))).requests
    assert request.stop_tokens == {EOD, ord("~")}
    (request,) = chat_job(chat_of(ignore_eos=True), context()).requests
    assert request.stop_tokens == frozenset()


def test_a_chat_that_fills_the_context_is_refused_by_its_messages() -> None:
    with pytest.raises(ApiError, match="longer than the 128 tokens of the model") as caught:
        chat_job(chat_of("a" * 200), context())
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_megatrons_fields_mean_what_they_mean_there() -> None:
    body = MegatronBody(
        prompts=["ab"], top_k=1, random_seed=4, stop_token=66, stop_on_double_eol=True
    )
    job = megatron_job(body, context())
    (request,) = job.requests
    assert (request.max_new_tokens, request.sampling.top_k, request.sampling.seed) == (64, 1, 4)
    assert request.stop_tokens == {EOD, 66}
    assert (job.stops, job.echo, request.prompt_logprobs) == (("\n\n",), True, None)
