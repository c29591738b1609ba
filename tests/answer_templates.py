"""Chat templates that write reasoning and calls in the shapes of published ones, for tests of reading answers."""

_TURNS = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "{% if m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% else %}HEAD"
    "{% if m.reasoning_content %}REASONING{% endif %}"
    "CONTENT{% for call in m.tool_calls %}{% if loop.first %}FIRST{% endif %}"
    "{% set f = call.function %}CALL{% if not loop.last %}BETWEEN{% else %}LAST{% endif %}{% endfor %}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}PROMPT{% endif %}"
)
_PAIRS = "{% for key, value in f.arguments.items() %}PAIR{% endfor %}"
_PLAIN = "{{ value if value is string else value | tojson }}"


def template(call, **parts):
    """A template that writes calls as `call`, with these parts."""
    filled = {
        "HEAD": "<|assistant|>",
        "PROMPT": "<|assistant|>",
        "REASONING": "<think>\n{{ m.reasoning_content }}\n</think>\n\n",
        "CONTENT": "{{ m.content }}",
        "FIRST": "",
        "BETWEEN": "",
        "LAST": "",
        "CALL": call,
    } | parts
    text = _TURNS
    for name, value in filled.items():
        text = text.replace(name, value)
    return text


def _pairs(pair):
    return _PAIRS.replace("PAIR", pair)


_LOOSE = (
    "{% macro loose(v) %}{% if v is string %}<|q|>{{ v }}<|q|>{% elif v is mapping %}"
    "{% raw %}{{% endraw %}{% for k, x in v.items() %}{{ ', ' if not loop.first }}{{ k }}:{{ loose(x) }}{% endfor %}"
    "{% raw %}}{% endraw %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
_PYTHON = "{{ \"'\" ~ value ~ \"'\" if value is string else value | tojson | replace('true', 'True') }}"

TEMPLATES = {
    "tagged objects": template(
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>', BETWEEN="\n"
    ),
    "objects": template(
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
        FIRST="<call>",
        BETWEEN="\n",
        LAST="</call>",
    ),
    "list": template(
        '{"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}',
        FIRST="<|ACTION|>[\n",
        BETWEEN=",\n",
        LAST="\n]<|END_ACTION|>",
    ),
    "name as key": template(
        '{"{{ f.name }}": {{ f.arguments | tojson }}}', FIRST="<|calls|>[", BETWEEN=", ", LAST="]<|end_calls|>"
    ),
    "ids": template(
        "<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|arguments|>{{ f.arguments | tojson }}<|end_call|>",
        FIRST="<|section|>",
        LAST="<|end_section|>",
    ),
    "given ids": template(
        "<|call|>{{ call.id }}<|name|>{{ f.name }}<|arguments|>{{ f.arguments | tojson }}<|end_call|>",
        FIRST="<|calls|>",
    ),
    "parameters": template(
        "<tool_call>\n<function={{ f.name }}>\n"
        + _pairs("<parameter={{ key }}>\n" + _PLAIN + "\n</parameter>\n")
        + "</function>\n</tool_call>",
        BETWEEN="\n",
        PROMPT="<|assistant|><think>\n{% if enable_thinking == false %}\n</think>\n\n{% endif %}",
    ),
    "keys and values": template(
        "\n<tool_call>{{ f.name }}\n"
        + _pairs("<arg_key>{{ key }}</arg_key>\n<arg_value>" + _PLAIN + "</arg_value>\n")
        + "</tool_call>"
    ),
    "hints": template(
        '<|X|invoke name="{{ f.name }}">\n'
        + _pairs(
            '<|X|parameter name="{{ key }}" string="{{ "true" if value is string else "false" }}">' + _PLAIN
        ).replace("{% endfor %}", "</|X|parameter>\n{% endfor %}")
        + "</|X|invoke>\n",
        FIRST="\n\n<|X|calls>\n",
        LAST="</|X|calls>",
    ),
    "key in the closing": template(
        '<invoke name="{{ f.name }}">' + _pairs("<{{ key }}>" + _PLAIN + "</{{ key }}>") + "</invoke>\n",
        FIRST="<calls>\n",
        LAST="</calls>",
    ),
    "loose": _LOOSE + template("<|call>call:{{ f.name }}{{ loose(f.arguments) }}<call|>"),
    "python": template(
        "{{ f.name }}(" + _pairs("{{ ', ' if not loop.first }}{{ key }}=" + _PYTHON) + ")",
        FIRST="<|calls|>[",
        BETWEEN=", ",
        LAST="]<|end_calls|>",
    ),
    "channels": template(
        " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}",
        HEAD="<|start|>assistant",
        PROMPT="<|start|>assistant",
        REASONING="<|channel|>analysis<|message|>{{ m.reasoning_content }}<|close|><|start|>assistant",
        CONTENT="{% if m.content %}<|channel|>final<|message|>{{ m.content }}{% endif %}",
    ),
}
