"""Servers and runs that are disturbed on purpose: nothing may hang, be wrong or be left behind.

    python benchmarks/soak.py server --output benchmarks/results/serve-soak.json
    python benchmarks/soak.py grammar --model MODEL --output benchmarks/results/grammar-pause.json
    python benchmarks/soak.py ranks --output benchmarks/results/kill-ranks.json

Replicas that are killed: replicas.py.
"""

import asyncio
import collections
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.settings import EngineSettings
from hasten.machine import configure
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.timing import timed
from hasten.measure.workers import serving
from hasten.server.app import make_app
from hasten.server.server import Server, bind, url_of
from hasten.server.service import Service
from hasten.server.settings import ServerSettings
from hasten.training.checkpoint_state import INDEX
from hasten.training.journal import read
from hasten.training.run_folder import RunFolder

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))


@dataclass(frozen=True, kw_only=True)
class ServeSoak(Script):
    """Mixed requests to a server of a tiny model, many of which are broken off.

    Completions, chats, responses, messages and Ollama's, streamed or whole, several samples and prompts, beginnings
    that are shared, structured output, forced tools, embeddings, ranks, tokenizing, bodies that are wrong, and clients
    that go away: before the answer, in the middle of it, in the middle of their own request. Passes if every block of
    the cache is free, the server's loop has no task but its own, no connection is open, and memory after the last half
    is what it was after the first.
    """

    requests: int = 2000
    concurrency: int = 32
    seed: int = 0

    def measure(self) -> Report:
        configure(threads=1)
        found = Soak(requests=self.requests, concurrency=self.concurrency, seed=self.seed).run()
        clean = found["free_blocks"] == found["blocks"] and not found["tasks_left"] and not found["connections_left"]
        steady = found["healthy"] and found["ended"] and found["growth_bytes_second_half"] < 16 << 20
        failed = [end for end in found["ends"] if end.startswith("5") and end != "503"]
        print(json.dumps(found, indent=1))
        return {"kind": "serve-soak", "passed": clean and steady and not failed, "found": found}


@dataclass(frozen=True, kw_only=True)
class GrammarPause(Script):
    """How long another client's stream pauses while JSON schemas that cannot be followed are asked for.

    Reads one stream of `hasten serve`, and meanwhile sends schemas: patterns that explode at once, and behind other
    fields, and objects of very many optional fields. The statuses of these have to be 400. Times are in seconds.
    """

    model: Path

    def measure(self) -> Report:
        with serving(self.model) as url:
            return {"kind": "grammar-pause", "seconds": asyncio.run(paused(url))}


@dataclass(frozen=True, kw_only=True)
class KillRanks(Script):
    """Kills one of two ranks with kill -9 at random moments; torchrun starts them again. The run must end the same.

    A rank is killed after up to twice the work that a start takes, so about half of the moments come before the first
    new step. `same`: no loss and no weight differs in a bit.
    """

    result = "kill-ranks"
    moments: int = 20
    steps: int = 600
    seed: int = 0

    def measure(self) -> Report:
        draw, kills = random.Random(self.seed), []
        with tempfile.TemporaryDirectory() as temporary:
            whole, killed = (RunFolder(path=Path(temporary) / name) for name in ("whole", "killed"))
            run = start_training(whole, self.steps, 0)
            while not whole.journal.exists() and run.poll() is None:
                time.sleep(0.1)
            starting = max(map(worked, workers(run).values()), default=0.0)
            if run.wait():
                raise SystemExit(f"the untouched run failed: {run.communicate()[1][-2000:]}")
            run = start_training(killed, self.steps, self.moments)
            while run.poll() is None and len(kills) < self.moments:
                if found := kill(run, killed, draw.randrange(2), draw.uniform(0, 2 * starting)):
                    kills.append(found)
                time.sleep(0.5)  # or the one that was killed would be found again
            _, errors = run.communicate()
            same = run.returncode == 0 and outcome(killed) == outcome(whole)
        print(f"{len(kills)} kills; the run ended with status {run.returncode}; bit for bit the same: {same}")
        if not same:
            print(errors[-2000:])
        facts = {"kind": "kills", "steps": self.steps, "checkpoint_every": EVERY, "status": run.returncode}
        return facts | {"same": same, "passed": same and len(kills) == self.moments, "kills": kills}


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
COUNTED = ("blocks", "free_blocks", "preemptions", "copied_blocks", "generated_tokens", "aborted")
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}


class Soak:
    """The server in a thread, the clients in this one. The cache is so small that requests are preempted."""

    def __init__(self, *, requests: int, concurrency: int, seed: int) -> None:
        self.requests, self.concurrency = requests, concurrency
        self.random = random.Random(seed)
        from tiny_model import tiny_llama

        model = tiny_llama(max_position_embeddings=1024)
        model.tokenizer = model.tokenizer.with_chat_template(TEMPLATE)
        settings = EngineSettings(max_sequences=64, token_budget=128, cache_bytes=1 << 19, queue_limit=64)
        self.engine = AsyncEngine(Engine(model, model.tokenizer, settings))
        timeouts = ServerSettings(write_timeout=2.0, body_timeout=2.0, request_timeout=60.0)
        app = make_app(Service(self.engine, model_name="tiny", settings=timeouts))
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
        seconds = timed(lambda: asyncio.run(self._clients()))
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
            **{name: getattr(stats, name) for name in COUNTED},
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
        names = [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]
        return [name for name in names if name not in ("Server.serve", "LifespanOn.main", "Soak._tasks")]

    async def _clients(self) -> None:
        numbers = iter(range(self.requests))
        process = psutil.Process()
        async with httpx.AsyncClient(
            base_url=self.url, limits=httpx.Limits(max_connections=None), timeout=90
        ) as client:

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
        _, writer = await asyncio.open_connection(*self.url.removeprefix("http://").split(":"))
        head = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + data[: self.random.randrange(len(data))])
        await writer.drain()
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()

    def _draw(self) -> tuple[str, str, dict[str, Any]]:
        draw = self.random
        shared = "def add(a, b):\n    return a + b\n" * 3
        prompt = (shared if draw.random() < 0.5 else "") + "name " * draw.randrange(1, 40)
        talk = [{"role": "user", "content": prompt}]
        base = {"model": "tiny", "max_tokens": draw.randrange(1, 80), "stream": draw.random() < 0.6}
        base |= {"seed": draw.randrange(100)} if draw.random() < 0.5 else {"temperature": 0}
        chat, completions = "/v1/chat/completions", "/v1/completions"
        responses, messages = "/v1/responses", "/v1/messages"
        limited = {name: value for name, value in base.items() if name != "max_tokens"}
        limited["max_output_tokens"] = base["max_tokens"]
        predicted = {"options": {"num_predict": base["max_tokens"], "temperature": 0}}
        flat = {"tools": [{"type": "function", **TOOL["function"]}]}
        asked = {"tools": [{"name": "pick", "input_schema": SCHEMA}]}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        wrong = (
            {"prompt": [10**6]},
            {"prompt": "x", "no_such": 1},
            {"prompt": "x", "model": "no"},
            {"prompt": "x" * 10**6},
        )
        kinds: dict[str, tuple[int, str, dict[str, Any]]] = {  # how often, where, and what is sent
            "completion": (20, completions, base | {"prompt": prompt, "ignore_eos": draw.random() < 0.5}),
            "prompts": (8, completions, base | {"prompt": [prompt, "for", "x"], "logprobs": draw.randrange(5)}),
            "samples": (14, completions, base | {"prompt": prompt, "n": draw.randrange(2, 8), "temperature": 1.0}),
            "best": (6, completions, base | {"prompt": prompt, "best_of": 4, "stream": False, "temperature": 1.0}),
            "chat": (20, chat, base | {"messages": talk, "stop": ["zz"]}),
            "schema": (8, chat, base | {"messages": talk, "response_format": form}),
            "tool": (6, chat, base | {"messages": talk, "tools": [TOOL], "tool_choice": "required"}),
            "response": (12, responses, {**limited, "input": prompt}),
            "response tool": (6, responses, {**limited, "input": prompt, **flat, "tool_choice": "required"}),
            "message": (12, messages, base | {"messages": talk, "stop_sequences": ["zz"]}),
            "message tool": (6, messages, base | {"messages": talk, **asked, "tool_choice": {"type": "any"}}),
            "count": (3, f"{messages}/count_tokens", {"model": "tiny", "messages": talk, **asked}),
            "ollama": (12, "/api/chat", {"model": "tiny", "messages": talk, "stream": base["stream"], **predicted}),
            "ollama raw": (6, "/api/generate", {"model": "tiny", "prompt": prompt, "raw": True, **predicted}),
            "rerank": (4, "/v1/rerank", {"model": "tiny", "query": "x", "documents": [prompt, "x"]}),
            "embedding": (6, "/v1/embeddings", {"model": "tiny", "input": [prompt, "x"]}),
            "tokenize": (4, "/tokenize", {"prompt": prompt}),
            "wrong": (8, completions, base | draw.choice(wrong)),
        }
        kind = draw.choices(list(kinds), [often for often, *_ in kinds.values()])[0]
        return kind, *kinds[kind][1:]


BOMB = {"type": "string", "pattern": "^((a{100}){100}){100}$"}
LATE = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["x"]},
        "text": {"type": "string", "minLength": 30, "maxLength": 400},
        "name": BOMB,
    },
    "required": ["kind", "text", "name"],
    "additionalProperties": False,
}
MANY = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 0),
    "one exploding pattern": (BOMB, 1),
    "twelve": (BOMB, 12),
    "one behind other fields": (LATE, 1),
    "twelve behind other fields": (LATE, 12),
    "four objects of 2,000 optional fields": (MANY, 4),
}


async def gaps_of_stream(client: httpx.AsyncClient, name: str) -> list[float]:
    """Seconds between the events of a stream."""
    body = {"model": name, "prompt": "bb", "max_tokens": 900, "ignore_eos": True, "stream": True}
    times = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data"):
                times.append(time.perf_counter())
    return [b - a for a, b in itertools.pairwise(times)]


async def status_of_schema(client: httpx.AsyncClient, name: str, schema: dict[str, Any], title: str) -> int:
    """The status of a request with a schema that was not seen before."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"title": title}}}
    body = {"model": name, "prompt": "a", "max_tokens": 600, "response_format": form}
    await asyncio.sleep(0.15)
    return (await client.post("/v1/completions", json=body)).status_code


async def paused(url: str) -> list[dict[str, Any]]:
    rows = []
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        name = (await client.get("/v1/models")).json()["data"][0]["id"]
        await gaps_of_stream(client, name)
        for case, (schema, count) in CASES.items():
            others = [status_of_schema(client, name, schema, f"{case} {i}") for i in range(count)]
            gaps, statuses = await asyncio.gather(gaps_of_stream(client, name), asyncio.gather(*others))
            rows.append({"case": case, "longest": max(gaps), "median": statistics.median(gaps), "statuses": statuses})
    return rows


EVERY = 5  # steps from one checkpoint to the next
OPTIONS = "--model.layers 2 --model.hidden-size 64 --model.heads 2 --data.vocab-size 512 --data.context 64"
OPTIONS += " --data.batch-size 4 --dropout 0.1 --minutes None --data.limit-bytes 300000 --techniques.no-compile"
OPTIONS += " --threads 1 --device cpu --techniques.precision float32 --parallel.zero 3 --run.validate-every 30"
OPTIONS += f" --run.background-checkpoints --run.checkpoint-every {EVERY}"


def start_training(folder: RunFolder, steps: int, restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hasten", "train", "demo", *OPTIONS.split(), "--steps", str(steps)]
    command += ["--name", folder.path.name, "--run.folder", str(folder.path.parent), "--no-progress"]
    command += ["--processes", "2", "--max-restarts", str(restarts)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def outcome(folder: RunFolder) -> tuple[object, bytes]:
    keys = ("step", "loss", "gradient_norm", "validation_loss")
    kept = [{key: line.get(key) for key in keys} for line in read(folder.journal)]
    return kept, (folder.model / "model.safetensors").read_bytes()


def workers(run: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    """The ranks that are there now."""
    found = {}
    with suppress(psutil.Error):  # they end, or begin
        for one in psutil.Process(run.pid).children():
            if "RANK" in (variables := one.environ()):
                found[int(variables["RANK"])] = one
    return found


def worked(process: psutil.Process) -> float:
    """Seconds it has computed: a clock that stops while a busy machine lets it wait. 0 where it is gone."""
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def kill(run: subprocess.Popen[str], folder: RunFolder, rank: int, after: float) -> dict[str, Any] | None:
    """Kill a rank when it has worked for `after` seconds; what the run was at, or None if the rank was gone."""
    while (process := workers(run).get(rank)) is not None and worked(process) < after:
        time.sleep(0.05)
    if process is None:
        return None
    lines, index = read(folder.journal), folder.last / INDEX
    writing = folder.last.is_dir() and any(path.suffix == ".partial" for path in folder.last.iterdir())
    kept = json.loads(index.read_text())["progress"]["step"] if index.exists() else 0
    with suppress(psutil.Error):
        process.kill()
        return {"rank": rank, "step": lines[-1]["step"] if lines else 0, "checkpoint": kept, "while_writing": writing}
    return None


def kill_table(report: Report) -> str:
    """What the run was at when a rank was killed."""
    names = ("starting", "training", "training, a checkpoint half written")
    counts, last = dict.fromkeys(names, 0), 0
    for kill in report["kills"]:
        counts[names[2 if kill["while_writing"] else int(kill["step"] != last)]] += 1
        last = kill["step"]
    head = [f"{len(report['kills'])} kills in a run of {report['steps']} steps, while it was", "kills"]
    return markdown(head, [[name, str(count)] for name, count in counts.items()])


TABLES: dict[str, Table] = {"kill-ranks": kill_table}


if __name__ == "__main__":
    main({"server": ServeSoak, "grammar": GrammarPause, "ranks": KillRanks}, TABLES)
