"""A template is asked how it writes calls; what it does not say is refused."""

from dataclasses import replace

import pytest

from megatron.data.samples.chat_template import CHATML, ChatTemplate
from megatron.errors import ConfigError
from megatron.serving.chat_tools.call_format import CallFormat, call_format
from tests.support.serving.tool_templates import LISTED, MARKED, SINGLE


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            MARKED,
            CallFormat(
                before='<tool_call>\n{"name": "',
                between='", "arguments": ',
                after="}\n</tool_call>",
                separator='}\n</tool_call>\n<tool_call>\n{"name": "',
            ),
        ),
        (LISTED, CallFormat('[TOOL_CALLS] [{"name": "', '", "arguments": ', "}]", '}, {"name": "')),
        (SINGLE, CallFormat('{"name": "', '", "parameters": ', "}")),
    ],
    ids=["marked", "listed", "single"],
)
def test_the_form_of_calls_is_that_of_the_template(
    template: ChatTemplate, expected: CallFormat
) -> None:
    assert call_format(template) == expected


AS_TEXT = MARKED.source.replace("call.function.arguments} | tojson", "1} | tojson")
OTHER_PROMPT = MARKED.source.replace('{{ "<|im_start|>assistant', '{{ "<|im_start|>model')


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (CHATML, "a prompt is the same with and without them"),
        (replace(MARKED, source=AS_TEXT), "it writes a call as '<tool_call>"),
        (replace(MARKED, source=OTHER_PROMPT), "other text before an answer"),
        (replace(MARKED, source="{{ raise_exception('no') }}"), "no (messages of user)"),
    ],
    ids=["no tools", "no JSON", "another prompt", "no dialogue"],
)
def test_a_template_that_does_not_write_tools_is_refused(
    template: ChatTemplate, found: str
) -> None:
    with pytest.raises(ConfigError, match="does not write tools") as caught:
        call_format(template)
    assert found in (caught.value.found or "")
