"""How soon a server begins to answer the first request of a coding agent, before and after a restart.

What was recorded is the shape of the first request that Claude Code 2.1.197 sends (its texts are not ours to publish):
77,938 bytes of JSON, three system blocks, one message of two parts, one turn of the system, 24 tools. Texts of known
length have that length; what is left is divided between the third system block and the other 23 tools. They are filled
with the book and the code that come with hasten (`hasten.data.book`).
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from hasten.data.book import texts
from hasten.measure.workers import serving

BYTES, TOOLS = 77_938, 24
# Shows the tools, as an agent needs it; for models that come without a template.
TEMPLATE = (
    "{% if tools %}tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %} answer with <tool_call>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def agent_request(model: str, *, max_tokens: int, size: int = BYTES) -> dict[str, Any]:
    """A body for /v1/messages of `size` bytes as JSON; greedy, streamed."""
    found = texts()
    plain = " ".join((found["alice"] + found["code"]).encode("ascii", "ignore").decode().replace('"', "'").split())
    letters = itertools.cycle(plain.replace("\\", "/"))  # none of which JSON escapes
    body = _body(model, max_tokens, letters, {"system": 0, "tool": 0})
    rest = size - len(json.dumps(body))
    each = rest // TOOLS
    return _body(model, max_tokens, letters, {"system": rest - each * (TOOLS - 1), "tool": each})


def _body(model: str, max_tokens: int, letters: Iterator[str], lengths: dict[str, int]) -> dict[str, Any]:
    def text(length: int) -> str:
        return "".join(itertools.islice(letters, length))

    def tool(number: int, length: int) -> dict[str, Any]:
        schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
        return {"name": f"Tool{number:02}", "description": text(length), "input_schema": schema}

    return {
        "model": model,
        "system": [{"type": "text", "text": text(length)} for length in (74, 62, lengths["system"])],
        "tools": [tool(number, lengths["tool"] if number else 1227) for number in range(TOOLS)],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": text(306)}, {"type": "text", "text": text(9)}]},
            {"role": "system", "content": text(6062)},
        ],
        "metadata": {"user_id": text(150)},
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Send it; returns seconds to the first token, tokens of the prompt and cached ones, and the answer's text."""
    started, first, pieces = time.perf_counter(), None, []
    usage: dict[str, int] = {}
    with httpx.stream("POST", f"{url}/v1/messages", json=body, timeout=600) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {}
            if event.get("type") == "content_block_delta":
                first = first or time.perf_counter() - started
                pieces.append(event["delta"].get("text", ""))
            usage |= event.get("usage", {})
    cached = usage["cache_read_input_tokens"]
    return {
        "first_token": first,
        "prompt_tokens": usage["input_tokens"] + cached,
        "cached_tokens": cached,
        "text": "".join(pieces),
    }


def restart_round(model: str, *, max_tokens: int) -> dict[str, dict[str, Any]]:
    """What `ask` returns: without the folder, while it is filled, after a restart (with its bytes), and from memory."""
    found: dict[str, dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        (template := Path(folder) / "template.jinja").write_text(TEMPLATE)
        (cache := Path(folder) / "cache").mkdir()
        options = ["--served-model-name", "model", "--chat-template", str(template)]
        body = agent_request("model", max_tokens=max_tokens)
        for ways, keeps in (("without", False), ("written", True), ("restarted in-memory", True)):
            drop_from_page_cache(cache)
            with serving(model, *options, *(["--prefix-cache", str(cache)] if keeps else [])) as url:
                say_something(url)
                found |= {way: ask(url, body) for way in ways.split()}
        found["restarted"]["bytes"] = sum(file.stat().st_size for file in cache.glob("??/*.kv"))
    return found


def say_something(url: str) -> None:
    """Get one token of a short prompt."""
    name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = {"model": name, "prompt": list(range(300, 316)), "max_tokens": 1, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text


def drop_from_page_cache(folder: Path) -> None:
    """Write the folder's files to the disk and have the system forget what they hold."""
    for file in folder.rglob("*.kv"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
