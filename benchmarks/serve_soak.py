"""A soak of the server: mixed requests, many of which are broken off; afterwards nothing may be left behind.

    python benchmarks/serve_soak.py                                  # 2,000 requests, a tiny model
    python benchmarks/serve_soak.py --requests 200 --json soak.json

Completions and chats, streamed or whole, several samples and prompts, beginnings that are shared, structured output,
forced tools, embeddings, tokenizing, bodies that are wrong, and clients that go away: before the answer, in the middle
of it, in the middle of their own request. Ends with status 1 unless every block of the cache is free, the server's loop
has no task but its own, no connection is open, and memory after the last half is what it was after the first.
"""

import argparse
import asyncio
import collections
import json
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil

from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from hasten.machine import configure, describe
from hasten.machine.files import write_json
from hasten.server.app import make_app
from hasten.server.server import Server, bind, url_of
from hasten.server.service import Service
from hasten.server.settings import ServerSettings

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tiny_model import tiny_llama

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n"
    "{% endfor %}<|assistant|>"
)
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}


class Soak:
    """The server in a thread, the clients in this one. The cache is so small that requests are preempted."""

    def __init__(self, *, requests: int, concurrency: int, seed: int) -> None:
        self.requests, self.concurrency = requests, concurrency
        self.random = random.Random(seed)
        model = tiny_llama(max_position_embeddings=1024)
        model.tokenizer = model.tokenizer.with_chat_template(TEMPLATE)
        settings = EngineSettings(max_sequences=64, token_budget=128, cache_bytes=1 << 19, queue_limit=64)
        self.engine = AsyncEngine(Engine(model, model.tokenizer, settings))
        service = Service(
            self.engine,
            model_name="tiny",
            settings=ServerSettings(write_timeout=2.0, body_timeout=2.0, request_timeout=60.0),
        )
        app = make_app(service)
        self.sock = bind("127.0.0.1", 0)
        self.url = url_of(self.sock, "127.0.0.1")
        self.server = Server(app, ServerSettings(), listening=self._listening)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self.server.run_on, args=(self.sock,), daemon=True)
        self.kinds: collections.Counter[str] = collections.Counter()
        self.ends: collections.Counter[str] = collections.Counter()
        self.memory: list[tuple[int, int]] = []

    def _listening(self) -> None:
        self.loop = asyncio.get_running_loop()

    def run(self) -> dict[str, Any]:
        """Everything, and what was found at the end."""
        self.thread.start()
        while self.loop is None:
            time.sleep(0.01)
        started = time.perf_counter()
        asyncio.run(self._clients())
        seconds = time.perf_counter() - started
        end = time.monotonic() + 20
        while (self.server.server_state.connections or not self.engine.engine.idle) and time.monotonic() < end:
            time.sleep(0.05)
        tasks = asyncio.run_coroutine_threadsafe(self._tasks(), self.loop).result(10)
        stats = self.engine.stats()
        self.engine.engine.check()
        half = [memory for done, memory in self.memory if done >= self.requests // 2]
        found = {
            "seconds": seconds,
            "kinds": dict(sorted(self.kinds.items())),
            "ends": dict(sorted(self.ends.items())),
            "blocks": stats.blocks,
            "free_blocks": stats.free_blocks,
            "preemptions": stats.preemptions,
            "blocks_copied": stats.copied_blocks,
            "generated_tokens": stats.generated_tokens,
            "aborted": stats.aborted,
            "tasks_left": tasks,
            "connections_left": len(self.server.server_state.connections),
            "healthy": self.engine.healthy,
            "memory_bytes": [{"requests": done, "bytes": memory} for done, memory in self.memory],
            "growth_bytes_second_half": half[-1] - half[0],
        }
        self.server.should_exit = True
        self.thread.join(30)
        found["ended"] = not self.thread.is_alive()
        return found

    async def _tasks(self) -> list[str]:
        """Tasks of the server's loop beside the server's own and this one."""
        own = ("Server.serve", "LifespanOn.main", "Soak._tasks")
        names = [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]
        return [name for name in names if name not in own]

    async def _clients(self) -> None:
        numbers = iter(range(self.requests))
        process = psutil.Process()
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, timeout=90) as client:

            async def worker() -> None:
                for number in numbers:
                    if number % max(1, self.requests // 10) == 0:
                        self.memory.append((number, process.memory_info().rss))
                    await self._one(client)

            await asyncio.gather(*(worker() for _ in range(self.concurrency)))
        self.memory.append((self.requests, process.memory_info().rss))

    async def _one(self, client: httpx.AsyncClient) -> None:
        kind, path, body = self._draw()
        self.kinds[kind] += 1
        leaves = self.random.random()
        try:
            if leaves < 0.05:
                await self._half_a_request(path, body)
                self.ends["left while sending"] += 1
            elif leaves < 0.15:
                async with asyncio.timeout(self.random.uniform(0.0, 0.1)):
                    await client.post(path, json=body)
                self.ends["200"] += 1
            elif leaves < 0.35 and body.get("stream"):
                async with client.stream("POST", path, json=body) as answer:
                    left = self.random.randrange(1, 6)
                    async for _ in answer.aiter_lines():
                        left -= 1
                        if not left:
                            break
                self.ends["left in the stream"] += 1
            else:
                answer = await client.post(path, json=body)
                self.ends[str(answer.status_code)] += 1
        except TimeoutError:
            self.ends["left before the answer"] += 1
        except httpx.HTTPError as error:
            self.ends[type(error).__name__] += 1

    async def _half_a_request(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(*self.url.removeprefix("http://").split(":"))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data[: self.random.randrange(len(data))])
        await writer.drain()
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()
        del reader

    def _draw(self) -> tuple[str, str, dict[str, Any]]:
        draw = self.random
        shared = "def add(a, b):\n    return a + b\n" * 3
        prompt = (shared if draw.random() < 0.5 else "") + "name " * draw.randrange(1, 40)
        talk = [{"role": "user", "content": prompt}]
        base = {"model": "tiny", "max_tokens": draw.randrange(1, 80), "stream": draw.random() < 0.6}
        base |= {"seed": draw.randrange(100)} if draw.random() < 0.5 else {"temperature": 0}
        kind = draw.choices(
            ("completion", "prompts", "samples", "best", "chat", "schema", "tool", "embedding", "tokenize", "wrong"),
            (20, 8, 14, 6, 20, 8, 6, 6, 4, 8),
        )[0]
        chat, completions = "/v1/chat/completions", "/v1/completions"
        if kind == "completion":
            return kind, completions, base | {"prompt": prompt, "ignore_eos": draw.random() < 0.5}
        if kind == "prompts":
            return kind, completions, base | {"prompt": [prompt, "for", "x"], "logprobs": draw.randrange(5)}
        if kind == "samples":
            return kind, completions, base | {"prompt": prompt, "n": draw.randrange(2, 8), "temperature": 1.0}
        if kind == "best":
            return kind, completions, base | {"prompt": prompt, "best_of": 4, "stream": False, "temperature": 1.0}
        if kind == "chat":
            return kind, chat, base | {"messages": talk, "stop": ["zz"]}
        if kind == "schema":
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
            return kind, chat, base | {"messages": talk, "response_format": form}
        if kind == "tool":
            return kind, chat, base | {"messages": talk, "tools": [TOOL], "tool_choice": "required"}
        if kind == "embedding":
            return kind, "/v1/embeddings", {"model": "tiny", "input": [prompt, "x"]}
        if kind == "tokenize":
            return kind, "/tokenize", {"prompt": prompt}
        wrong = (
            {"prompt": [10**6]},
            {"prompt": "x", "no_such": 1},
            {"prompt": "x", "model": "no"},
            {"prompt": "x" * 10**6},
        )
        return kind, completions, base | draw.choice(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write what was found to this file")
    options = parser.parse_args()
    configure(threads=1)
    soak = Soak(requests=options.requests, concurrency=options.concurrency, seed=options.seed)
    found = soak.run()
    good = (
        found["free_blocks"] == found["blocks"]
        and not found["tasks_left"]
        and not found["connections_left"]
        and found["healthy"]
        and found["ended"]
        and found["growth_bytes_second_half"] < 16 << 20
        and not any(end.startswith("5") and end != "503" for end in found["ends"])
    )
    settings = vars(options) | {"model": "tiny random Llama"}
    del settings["json"]
    report = {"schema": 1, "kind": "serve-soak", "machine": describe().to_json(), "settings": settings, "passed": good}
    report["found"] = found
    print(json.dumps(found, indent=1))
    print("passed" if good else "FAILED", file=sys.stderr)
    if options.json:
        write_json(options.json, report)
    raise SystemExit(not good)


if __name__ == "__main__":
    main()
