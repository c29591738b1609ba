"""Published chat templates: a call that one writes is read back, whole and in two pieces cut anywhere.

HASTEN_CHAT_TEMPLATES names folders of .jinja files: those in llama-cpp-python's source distribution
(vendor/llama.cpp/models/templates) and in trl's wheel (trl/chat_templates), say.
"""

import json
import os
from pathlib import Path

import pytest

from hasten.text.answer_format import find_answer_format
from hasten.text.answer_reader import AnswerReader, TemplateCallReader
from hasten.text.chat import ChatTemplate
from hasten.text.markers import common_prefix

pytestmark = pytest.mark.real
FOLDERS = [Path(name) for name in os.environ.get("HASTEN_CHAT_TEMPLATES", "").split(os.pathsep) if name]
FILES = sorted(file for folder in FOLDERS for file in folder.glob("*.jinja") if "training" not in file.stem)
TEMPLATES = [file for file in FILES if "tools" in file.read_text()]
WITHOUT = {  # file -> why no format is found
    "LFM2-8B-A1B": "leaves calls of earlier answers out",
    "LFM2.5-Instruct": "leaves calls of earlier answers out",
    "lfm2": "leaves calls of earlier answers out",
    "ibm-granite-granite-3.3-2B-Instruct": "leaves calls of earlier answers out",
    "fireworks-ai-llama-3-firefunction-v2": "needs variables of its own instead of tools",
    "llama-cpp-deepseek-r1": "writes a generator as JSON, which fails in transformers, too",
    "meetkai-functionary-medium-v3.2": "wants arguments as text",
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<p>", "unk_token": "<u>"}
ARGUMENTS = {"city": 'Zürich "x"', "days": 3, "on": True}
KINDS = {"city": "string", "days": "integer", "on": "boolean"}
SCHEMA = {"type": "object", "properties": {name: {"type": kind, "description": "x"} for name, kind in KINDS.items()}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "x", "parameters": SCHEMA}}]
CALL = {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}


def calls_in(form, prompt, pieces):
    reader = AnswerReader(form, prompt=prompt, calls=TemplateCallReader(form.calls, {"get_weather": SCHEMA}))
    found = [call for piece in (*map(reader.push, pieces), reader.finish()) for call in piece.calls]
    names = [call.name for call in found if call.name is not None]
    return names, "".join(call.arguments for call in found)


@pytest.mark.skipif(not TEMPLATES, reason="HASTEN_CHAT_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.stem)
def test_a_published_template_reads_its_own_calls(file):
    source = ChatTemplate(file.read_text(), file.name)
    form = find_answer_format(source, special_tokens=NAMED)
    if file.stem in WITHOUT:
        assert form.calls is None
        return
    assert form.calls is not None
    options = {"special_tokens": NAMED, "tools": TOOLS}
    asked = [{"role": "user", "content": "hi"}]
    prompt = source.render(asked, add_generation_prompt=True, **options)
    turns = [*asked, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    whole = source.render(turns, add_generation_prompt=False, **options)
    shared = common_prefix(prompt, whole)
    shared = shared[: shared.rfind("<")] if shared.rfind("<") > shared.rfind(">") else shared
    answer = whole[len(shared) :]
    for pieces in ([answer], *([answer[:i], answer[i:]] for i in range(1, len(answer)))):
        names, arguments = calls_in(form, shared, pieces)
        assert (names, json.loads(arguments)) == (["get_weather"], ARGUMENTS)
