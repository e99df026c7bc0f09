"""Chat templates that write tools, in the three forms that are usual."""

from megatron.data.samples.chat_template import ChatTemplate

_START = """{% for message in messages -%}
{{ "<|im_start|>" + message.role + "\\n" + message.content }}"""
_END = """{{ "<|im_end|>\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
_TOOLS = """{% if tools -%}
{{ "<|im_start|>tools\\n" + tools | tojson + "<|im_end|>\\n" }}{% endif %}"""
_RESERVED = ("<|im_start|>", "<|im_end|>")


def _template(name: str, calls: str) -> ChatTemplate:
    source = _TOOLS + _START + calls + _END
    return ChatTemplate(name=name, source=source, tokens={}, reserved=_RESERVED)


# Each call between two marks, as Hermes and Qwen have it.
MARKED = _template(
    "marked",
    """{% for call in message.tool_calls or [] %}
{{- "\\n" if not loop.first }}{{ "<tool_call>\\n" -}}
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson -}}
{{ "\\n</tool_call>" }}
{%- endfor %}""",
)
# A list behind a mark, as Mistral has it.
LISTED = _template(
    "listed",
    """{% for call in message.tool_calls or [] %}
{{- "[TOOL_CALLS] [" if loop.first else ", " -}}
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson -}}
{{- "]" if loop.last }}
{%- endfor %}""",
)
# One object and nothing else, as Llama 3.1 has it.
SINGLE = _template(
    "single",
    """{% if message.tool_calls and message.tool_calls | length > 1 -%}
{{ raise_exception("one call only") }}{% endif -%}
{% for call in message.tool_calls or [] -%}
{{ {"name": call.function.name, "parameters": call.function.arguments} | tojson }}
{%- endfor %}""",
)
