"""Chat templates give what transformers gives; bad ones one clear error."""

import itertools
from pathlib import Path

import pytest

from hasten.errors import CheckpointError, ConfigError
from hasten.text.chat import plain_messages
from tokenizer_folders import FAST, TRAINED, byte_level, load, transformers, write

# -- chat templates ---------------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": """{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}
{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.role == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}{% set loop_messages = messages %}{% set system = '' %}{% endif %}
{% for message in loop_messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant/...') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}
{% endfor %}""",
    "llama-3": """{{- bos_token }}{%- set ns = namespace(turns=0) %}
{%- for message in messages %}
{%- set ns.turns = ns.turns + 1 %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- if ns.turns >= 50 %}{%- break %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "gemma": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}""",
    "mistral": """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set rest = messages[1:] %}{%- else %}{%- set rest = messages %}{%- endif %}
{{- bos_token }}{%- for message in rest %}
{%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
{{- raise_exception("conversation roles must alternate user and assistant roles") }}{%- endif %}
{%- if message["role"] == "user" %}
{%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}
{%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
{%- elif message.tool_calls is defined %}{{- message.tool_calls | map(attribute="name") | list | tojson(indent=1) }}
{%- else %}{{- " " + message["content"] + eos_token }}{%- endif %}{%- endfor %}""",
}

SYSTEM, USER, ANSWER = (
    {"role": role, "content": content}
    for role, content in (("system", "Be <b>brief</b> & kind. "), ("user", " hi \n"), ("assistant", "héllo 🙂"))
)
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "clock", "arguments": {"zone": "é<"}}]}
THOUGHT = {"role": "assistant", "content": "so", "thinking": "hm"}
TOOL = {"type": "function", "function": {"name": "clock", "description": "time & <zone>", "parameters": {}}}
CHATS = [[USER], [SYSTEM, USER], [USER, ANSWER, USER], [SYSTEM, USER, ANSWER], [USER, USER], [USER, CALL, USER]]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_templates_render_as_transformers_does(tmp_path: Path, name: str) -> None:
    config = FAST | {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATES[name]}
    write(tmp_path, byte_level(), tokenizer_config=config)
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    rendered = 0
    for chat, prompt, tools in itertools.product([*CHATS, [USER, THOUGHT]], (True, False), (None, [TOOL])):
        options = {"add_generation_prompt": prompt, "tools": tools}
        try:
            expected = theirs.apply_chat_template(chat, tokenize=False, **options)
        except Exception:
            with pytest.raises(ConfigError, match="chat template"):
                ours.render_chat(chat, **options)
            continue
        rendered += 1
        assert ours.render_chat(chat, **options) == expected
        assert ours.encode_chat(chat, **options) == theirs.apply_chat_template(chat, return_dict=False, **options)
    assert rendered >= 12


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_the_last_message_is_continued_as_in_transformers(tmp_path: Path, name: str) -> None:
    config = FAST | {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": TEMPLATES[name]}
    write(tmp_path, byte_level(), tokenizer_config=config)
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for content in ("héllo", "so it is ", " \n1. ", "a {{ b }}"):
        chat = [USER, {"role": "assistant", "content": content}]
        expected = theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        assert ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True) == expected


def test_what_cannot_be_continued_says_why() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    tokenizer = TRAINED.with_chat_template("{{ messages[0].content }}")
    with pytest.raises(ConfigError, match="leaves out the end of the last message"):
        tokenizer.render_chat([USER, ANSWER], **options)
    with pytest.raises(ConfigError, match="needs text in the last message's content"):
        tokenizer.render_chat([USER, CALL], **options)
    with pytest.raises(ConfigError, match="needs add_generation_prompt=False"):
        tokenizer.render_chat([USER, ANSWER], continue_final_message=True)


def test_a_template_gets_the_variables_that_are_given(tmp_path: Path) -> None:
    template = "{{ enable_thinking }}{{ bos_token }}{{ x | tojson }}{{ add_generation_prompt }}"
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"bos_token": "<|begin|>", "chat_template": template})
    ours, theirs = load(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    given = {"enable_thinking": False, "x": {"y": [1, "é"]}, "bos_token": "<b>"}
    expected = theirs.apply_chat_template([USER], tokenize=False, add_generation_prompt=True, **given)
    assert ours.render_chat([USER], chat_template_kwargs=given) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"messages": []}, "'messages' cannot be given"),
        ({"range": 1}, "'range' cannot be given"),
        ({"x": print}, r"\['x'\] is a builtin_function_or_method"),
        ([1], "must be a mapping"),
    ],
)
def test_variables_that_cannot_be_given(given: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TRAINED.with_chat_template("x").render_chat([USER], chat_template_kwargs=given)


def test_messages_as_openais_api_has_them() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = [{"role": "developer", "content": parts}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert plain_messages(chat) == [
        {"role": "system", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
    ]
    with pytest.raises(ConfigError, match=r"messages\[0\].content\[0\] must be .*only kind of part that is read"):
        plain_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(ConfigError, match=r"messages\[0\]\['tool_calls'\] must be a list of calls, found 5"):
        plain_messages([{"role": "assistant", "tool_calls": 5}])


def test_a_template_that_refuses_says_why() -> None:
    tokenizer = TRAINED.with_chat_template(TEMPLATES["mistral"])
    with pytest.raises(ConfigError, match="refuses these messages: conversation roles must alternate"):
        tokenizer.render_chat([USER, USER])


def test_without_a_template_it_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"hasten generate.*--chat-template FILE"):
        TRAINED.render_chat([USER])


def test_named_templates_and_the_file_that_wins(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    write(tmp_path, byte_level(), tokenizer_config=FAST | {"chat_template": both})
    tokenizer = load(tmp_path)
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], tools=[TOOL]) == "clock"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load(tmp_path).render_chat([USER], tools=[TOOL]) == "from the file"
    (tmp_path / "chat_template.jinja").unlink()
    write(tmp_path, None, tokenizer_config=FAST | {"chat_template": both[1:]})
    with pytest.raises(ConfigError, match="named tool_use"):
        load(tmp_path).render_chat([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages.__class__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}", "sandbox"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "sandbox"),
        ("{{ dict.mro() }}", "Undefined|sandbox|no attribute"),
        ("{% set ns = namespace(__class__=1) %}", "sandbox"),
        ("{{ messages.insert(0, 1) }}", "sandbox"),
        ("{% for m in messages %}{{ messages.append(m) }}{% endfor %}", "past 10,000 items"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "1,000,000 loop steps"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1,000,000 loop steps"),
        ("{{ 'a' * 1000000000000 }}", "repeating"),
        ("{{ [1] * 1000000000000 }}", "repeating"),
        ("{{ 10 ** 10000000000 }}", "power"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for m in messages %}", "line 1"),
        ("{% include 'other' %}", "failed with TypeError"),
    ],
)
def test_a_hostile_template_gives_one_error(template: str, message: str) -> None:
    with pytest.raises((CheckpointError, ConfigError), match=message):
        TRAINED.with_chat_template(template).render_chat([USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "empty"),
        ("hi", "found str"),
        (USER, "found dict"),
        (["hi"], r"messages\[0\]"),
        ([{1: 2}], "keys must be strings"),
        ([USER, {"role": "user", "content": object()}], r"messages\[1\]\['content'\] is a object"),
        ([{"role": "user"}], "needs something these messages do not have"),
    ],
)
def test_bad_messages_are_named(messages: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TRAINED.with_chat_template(TEMPLATES["chatml"]).render_chat(messages)  # type: ignore[arg-type]


def test_a_template_may_append_to_lists() -> None:
    source = "{% set own = [] %}{% for m in messages[:1] %}{% set _ = own.append(m) %}{% set _ = messages.append(m) %}"
    source += "{% endfor %}{{ own | length }}{{ messages | length }}"
    messages = [USER]
    assert TRAINED.with_chat_template(source).render_chat(messages) == "12"
    assert messages == [USER]


def test_strftime_now() -> None:
    text = TRAINED.with_chat_template("{{ strftime_now('%Y') }}").render_chat([USER])
    assert len(text) == 4
    assert text.isdigit()
