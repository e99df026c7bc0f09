"""What JSON cannot say is said otherwise; test_app.py has the shapes of all answers."""

import math

from megatron.serving.answers import AnswerWriter, joined_answers
from megatron.serving.bodies import CompletionBody
from megatron.serving.conversion import JobContext, completion_job
from megatron.serving.engine_client import TokenScore
from megatron.serving.generation import AnswerPart, Usage
from megatron.serving.limits import ServerLimits
from megatron.serving.sample_text import SamplePart, ShownToken
from tests.support.serving.models import served_model


def test_a_probability_of_zero_is_a_number() -> None:
    model = served_model()
    at = JobContext(model, ServerLimits(), "a", 0, 0)
    job = completion_job(CompletionBody(prompt="a", logprobs=1), at)
    score = TokenScore(-math.inf, ((66, -math.inf),))
    part = AnswerPart(0, SamplePart("A", (ShownToken(65, 0, score),)), "length")
    answer = AnswerWriter(job, model, is_chat=False).whole([part], Usage(2, 1))
    scores = answer["choices"][0]["logprobs"]  # type: ignore[index, call-overload]
    assert scores["token_logprobs"] == [-9999.0]
    assert scores["top_logprobs"] == [{"A": -9999.0, "B": -9999.0}]


def test_parts_of_several_answers_are_joined_by_their_number() -> None:
    parts = [AnswerPart(number % 2, SamplePart(str(number))) for number in range(4)]
    parts.append(AnswerPart(1, SamplePart("!"), "stop"))
    first, second = joined_answers(parts, 2)
    assert ("".join(first.text), first.finish) == ("02", None)
    assert ("".join(second.text), second.finish) == ("13!", "stop")
