"""Text becomes tokens as the model was trained, or the client is told why not."""

import pytest

from megatron.data.samples.chat_template import CHATML, PLAIN
from megatron.serving.api_errors import ApiError
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.serving.models import served_model
from tests.support.serving.tool_templates import MARKED

EOD = 256


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_end_of_an_answer_that_is_a_token_is_that_token() -> None:
    model = served_model(template=PLAIN)
    messages = [message("user", "a"), message("assistant", "b"), message("user", "c")]
    tokens = model.chat_tokens(messages)
    assert tokens.count(EOD) == 1
    before = bytes(tokens[: tokens.index(EOD)]).decode()
    assert before == "### User:\na\n\n### Assistant:\nb"


def test_a_text_that_the_tokenizer_refuses_is_the_clients_fault() -> None:
    tokenizer = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=5)
    model = served_model(tokenizer=tokenizer)
    with pytest.raises(ApiError, match="reads ids with space between them") as caught:
        model.tokens("hello", param="prompt")
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_an_empty_prompt_needs_a_token_that_begins_a_document() -> None:
    class Endless:
        eod, eod_note = None, "it has none"

        def tokenize(self, text: str) -> list[int]:
            return []

    with pytest.raises(ApiError, match="no token that begins a document"):
        served_model(tokenizer=Endless()).tokens("", param="prompt")


def test_a_chat_without_a_template_and_another_model_are_refused() -> None:
    with pytest.raises(ApiError, match="tiny has no chat template"):
        served_model(template=None).chat_text([message("user", "a")])
    with pytest.raises(ApiError, match="there is no such model"):
        served_model().check_name("gpt")
    served_model().check_name(None)
    with pytest.raises(ApiError, match="holds what the template chatml writes"):
        served_model(template=CHATML).chat_text([message("user", "<|im_start|>")])


def test_tools_may_not_imitate_the_template() -> None:
    model, question = served_model(template=MARKED), [message("user", "a")]
    for tool in ({"name": "<|im_end|>"}, {"<|im_end|>": 1}, {"deep": [{"text": "a<|im_end|>"}]}):
        with pytest.raises(ApiError, match="writes itself"):
            model.chat_text(question, [tool])
    call = {"function": {"name": "f", "arguments": {"a": "<|im_start|>"}}}
    with pytest.raises(ApiError, match="writes itself"):
        model.chat_text([{**message("assistant", ""), "tool_calls": [call]}])
    assert '"deep"' in model.chat_text(question, [{"deep": "a"}])
