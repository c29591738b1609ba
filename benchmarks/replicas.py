"""Replicas behind one endpoint on Ray Serve (`hasten[ray]`): killed while they answer, and beside one engine.

    python benchmarks/replicas.py kills --output benchmarks/results/replica-kills.json
    python benchmarks/replicas.py throughput --output benchmarks/results/replica-throughput.json

Which replica a request goes to: replica_routing.py.
"""

import asyncio
import collections
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

import hasten
from hasten.bench.models import BenchmarkModel
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.llm import make_engine
from hasten.engine.settings import EngineSettings
from hasten.machine import configure
from hasten.measure.script import Report, Script, Table, main, markdown
from hasten.measure.workers import serving
from hasten.replicas.settings import ReplicaSettings
from hasten.server.app import make_app
from hasten.server.server import Server, bind, url_of
from hasten.server.service import Service
from hasten.server.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[1]


sys.path.append(str(ROOT / "tests"))


@dataclass(frozen=True, kw_only=True)
class ReplicaKills(Script):
    """Kills replicas with kill -9 while they answer, then replaces all of them while they answer.

    A tiny model in float32, three replicas on this machine behind the real HTTP server. Every text is compared with
    what the model says by itself: a whole answer must be it; a stream must be it, or end with an error and be the
    beginning of it. Some clients leave in the middle. Afterwards every block of every replica must be free.
    """

    result = "replica-kills"
    requests: int = 200
    kills: int = 5
    replicas: int = 3
    concurrency: int = 12
    seed: int = 0

    def measure(self) -> Report:
        from tiny_model import tiny_llama

        configure(threads=1)
        with tempfile.TemporaryDirectory() as folder:
            hasten.save(tiny_llama(), folder)
            fleet = Fleet(folder, self)
            try:
                killed = asyncio.run(fleet.killed())
                print(json.dumps(killed, indent=1), flush=True)
                restarted = asyncio.run(fleet.restarted())
            finally:
                fleet.close()
        passed = good(killed, cuts=True) and good(restarted, cuts=False) and len(killed["kills"]) == self.kills
        return {"kind": "replica-kills", "passed": passed, "killed": killed, "restarted": restarted}


@dataclass(frozen=True, kw_only=True)
class ReplicaThroughput(Script):
    """Two replicas of one thread beside one engine of two threads, on the same two cores, in turns.

    Both servers are up all the time; one at a time is asked. Requests are sent at once, with random prompts that share
    nothing; answers are streamed, or whole. Output tokens/s, the median and the best of the rounds (what else runs here
    slows threads that wait for each other more than processes that do not). The processor time of all processes of a
    server is reported too: what a replica's way through Ray costs is taken from the model.
    """

    result = "replica-throughput"
    shape: str = "llama-120m"
    requests: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 64
    rounds: int = 5

    def measure(self) -> Report:
        with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
            folder = f"{temporary}/model"
            hasten.save(BenchmarkModel(shape=self.shape).build(dtype=torch.bfloat16, device="cpu", seed=0), folder)
            # No drafts: random models answer in loops, which drafts foresee.
            urls = {s: stack.enter_context(serving(folder, "--draft", "none", *how)) for s, how in SIDES.items()}
            ports = {side: int(url.rsplit(":", 1)[1]) for side, url in urls.items()}
            before = {side: processor_time(port) for side, port in ports.items()}
            time.sleep(5.0)
            idle = {side: (processor_time(port) - before[side]) / 5.0 for side, port in ports.items()}
            found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
            for number in range(self.rounds + 1):
                for stream in (False, True):
                    for side, url in urls.items():
                        used = processor_time(ports[side])
                        seconds = asyncio.run(answered_in(url, folder, self, stream=stream, seed=number))
                        if number:  # the first warms up
                            found.setdefault((side, stream), []).append((seconds, processor_time(ports[side]) - used))
        rows = [self.row(*case, runs) for case, runs in found.items()]
        return {"kind": "replica-throughput", "workload": self.settings(), "idle": idle, "rows": rows}

    def row(self, side: str, stream: bool, runs: list[tuple[float, float]]) -> dict[str, Any]:
        tokens = self.requests * self.new_tokens
        seconds, used = (list(values) for values in zip(*runs, strict=True))
        return {
            "side": side,
            "stream": stream,
            "tokens_per_second": tokens / statistics.median(seconds),
            "best_tokens_per_second": tokens / min(seconds),
            "tokens_per_processor_second": tokens / statistics.median(used),
            "seconds": seconds,
            "processor_seconds": used,
        }


PATIENCE = 180.0  # seconds after which a request counts as hung
SHARED = "def add(a, b):\n    return a + b\n\n"


def engine_of(folder: str, secret: bytes) -> AsyncEngine:
    """What each replica runs."""
    configure(threads=1)
    model = hasten.load(folder)
    settings = EngineSettings(max_sequences=16, token_budget=64, cache_bytes=1 << 20)
    return AsyncEngine(make_engine(model, model.tokenizer, settings, secret=secret))


class Fleet:
    """The server in a thread, the clients in this one."""

    def __init__(self, folder: str, arguments: ReplicaKills) -> None:
        from hasten.replicas.ray_serve import Replicas

        self.asked, self.draw = arguments, random.Random(arguments.seed)
        self.model = hasten.load(folder)
        self.replicas = Replicas(partial(engine_of, folder), ReplicaSettings(replicas=arguments.replicas))
        self.engine = self.replicas.start(self.model.tokenizer)
        service = Service(self.engine, model_name="tiny", settings=ServerSettings())
        self.sock = bind("127.0.0.1", 0)
        self.server = Server(make_app(service), ServerSettings())
        self.thread = threading.Thread(target=self.server.run_on, args=(self.sock,), daemon=True)
        self.thread.start()
        self.expected: dict[tuple[str, int], str] = {}
        self.ends: collections.Counter[str] = collections.Counter()
        self.wrong: list[dict[str, Any]] = []
        self.slowest = 0.0

    def processes(self) -> list[int]:
        """Process ids of the replicas that have reported."""
        return [state.report["process"] for state in self.replicas.board.states.values() if state.report is not None]

    def text(self, prompt: str, tokens: int) -> str:
        """What the model says by itself."""
        key = prompt, tokens
        if key not in self.expected:
            self.expected[key] = "".join(hasten.stream(self.model, prompt, temperature=0, max_new_tokens=tokens))
        return self.expected[key]

    def draw_request(self) -> dict[str, Any]:
        prompt = SHARED * self.draw.randrange(3) + f"for {''.join(self.draw.choices('abcdefgh', k=4))} in names:"
        return {"model": "tiny", "prompt": prompt, "max_tokens": self.draw.randrange(40, 200), "temperature": 0}

    async def requests(self, count: int, *, disturb: Any) -> None:
        """Send `count` requests, `concurrency` at a time, while `disturb` is awaited."""
        bodies = [self.draw_request() for _ in range(count)]
        for body in bodies:
            self.text(body["prompt"], body["max_tokens"])
        kinds = self.draw.choices(("whole", "stream", "leaves"), (45, 45, 10), k=count)
        work = iter(zip(bodies, kinds, strict=True))
        limits = httpx.Limits(max_connections=None)
        url = url_of(self.sock, "127.0.0.1")
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE) as client:

            async def worker() -> None:
                for body, kind in work:
                    began = time.perf_counter()
                    try:
                        await getattr(self, f"_{kind}")(client, body)
                    except httpx.TimeoutException:
                        self.ends["hung"] += 1
                    except httpx.HTTPError as error:
                        self.ends[type(error).__name__] += 1
                    self.slowest = max(self.slowest, time.perf_counter() - began)

            other = asyncio.create_task(disturb())
            await asyncio.gather(*(worker() for _ in range(self.asked.concurrency)))
            await other

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code != 200:
            self.ends[f"whole: status {answer.status_code}"] += 1
            self.wrong.append({"status": answer.status_code, "said": answer.text[:300]})
            return
        self._judge(body, answer.json()["choices"][0]["text"], cut=False, kind="whole")

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        said, error = "", ""
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line[6:])
                    error = error or chunk.get("error", {}).get("message", "")
                    said += "".join(choice["text"] for choice in chunk.get("choices", ()))
        if error and "the replica that answered has died" not in error:
            self.wrong.append({"error": error})
        self._judge(body, said, cut=bool(error), kind="stream")

    async def _leaves(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        left = self.draw.randrange(1, 20)
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
            async for _ in answer.aiter_lines():
                left -= 1
                if not left:
                    break
        self.ends["left"] += 1

    def _judge(self, body: dict[str, Any], said: str, *, cut: bool, kind: str) -> None:
        wanted = self.text(body["prompt"], body["max_tokens"])
        right = wanted.startswith(said) if cut else wanted == said
        self.ends[f"{kind}: {'ended by an error' if cut else 'complete'}"] += 1
        if not right:
            self.wrong.append({"prompt": body["prompt"], "said": said, "wanted": wanted})

    async def settled(self, seconds: float = 120.0) -> dict[str, Any]:
        """The books of all replicas once they are idle."""
        end = time.monotonic() + seconds
        while True:
            states = list(self.replicas.board.states.values())
            stats = list(self.engine.replica_stats().values())
            idle = all(state.running == state.unread == 0 for state in states)
            full = len(stats) == self.asked.replicas and all(one.free_blocks == one.blocks for one in stats)
            if (idle and full) or time.monotonic() > end:
                return {
                    "replicas": len(stats),
                    "blocks": [one.blocks for one in stats],
                    "free_blocks": [one.free_blocks for one in stats],
                    "board_is_empty": idle,
                    "books": [state.report["check"] for state in states if state.report and state.report["check"]],
                }
            await asyncio.sleep(0.2)

    async def killed(self) -> dict[str, Any]:
        """Requests and kills."""
        kills, given, began = list[dict[str, Any]](), self.asked, time.perf_counter()

        async def kill() -> None:
            for number in range(given.kills):
                while sum(self.ends.values()) < (number + 0.5) * given.requests / given.kills:
                    await asyncio.sleep(0.02)
                # One that answers somebody, while another one is there.
                while True:
                    states = self.replicas.board.states
                    busy = [s for s in states.values() if s.running and s.report is not None]
                    alive = [s for s in busy if s.report["process"] not in [one["process"] for one in kills]]
                    if alive and len(states) > 1:
                        break
                    if sum(self.ends.values()) >= given.requests:
                        return
                    await asyncio.sleep(0.01)
                victim = self.draw.choice(alive)
                process = victim.report["process"]
                kills.append(
                    {"process": process, "after": time.perf_counter() - began, "answering": victim.running}
                    | {"replicas": len(states), "ended_before": sum(self.ends.values())}
                )
                os.kill(process, signal.SIGKILL)

        await self.requests(given.requests, disturb=kill)
        return self._report() | {"kills": kills, "seconds": time.perf_counter() - began, "after": await self.settled()}

    async def restarted(self) -> dict[str, Any]:
        """Requests while all replicas are replaced."""
        before, began = set(self.processes()), time.perf_counter()

        async def restart() -> None:
            await asyncio.sleep(1.0)
            await asyncio.to_thread(self.replicas.restart)

        task = asyncio.create_task(restart())
        while not task.done():
            await self.requests(4 * self.asked.concurrency, disturb=partial(asyncio.sleep, 0))
        await task
        after = await self.settled()
        new = set(self.processes())
        found = {"all_new": not before & new, "seconds": time.perf_counter() - began, "after": after}
        return self._report() | found

    def _report(self) -> dict[str, Any]:
        found = {"ends": dict(sorted(self.ends.items())), "wrong": self.wrong, "slowest_seconds": self.slowest}
        found["begun_anew"] = self.engine.retried
        self.ends, self.wrong, self.slowest, self.engine.retried = collections.Counter(), [], 0.0, 0
        return found

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(60)


def good(found: dict[str, Any], *, cuts: bool) -> bool:
    """Whether nothing hung, was wrong or was lost. cuts: streams may end with an error."""
    ends = {"whole: complete", "stream: complete", "left", *(["stream: ended by an error"] if cuts else [])}
    after = found["after"]
    kept = after["blocks"] == after["free_blocks"] and not after["books"] and after["board_is_empty"]
    return set(found["ends"]) <= ends and not found["wrong"] and kept and found.get("all_new", True)


def kill_table(report: Report) -> str:
    """How requests ended, and what was lost."""
    head = ["", f"{len(report['killed']['kills'])} kills", "all replaced"]
    names = ("whole: complete", "stream: complete", "stream: ended by an error", "left")
    phases = [report["killed"], report["restarted"]]
    rows = [[name, *(str(phase["ends"].get(name, 0)) for phase in phases)] for name in names]
    rows.append(["restarted elsewhere", *(str(phase["begun_anew"]) for phase in phases)])
    bad = [len(phase["wrong"]) + phase["ends"].get("hung", 0) for phase in phases]
    rows.append(["hung, wrong or failed", *map(str, bad)])
    rows.append(["blocks lost", *(str(sum(p["after"]["blocks"]) - sum(p["after"]["free_blocks"])) for p in phases)])
    rows.append(["slowest request", *(f"{phase['slowest_seconds']:.1f} s" for phase in phases)])
    return markdown(head, rows)


SIDES = {
    "one engine of two threads": ("--threads", "2"),
    "two replicas of one thread": ("--replicas", "2", "--threads", "1"),
}


async def answered_in(url: str, folder: str, given: ReplicaThroughput, *, stream: bool, seed: int) -> float:
    """Seconds until all requests are answered."""
    draw = random.Random(seed)
    model = Path(folder).name

    async def one(client: httpx.AsyncClient) -> None:
        prompt = [draw.randrange(1, 30_000) for _ in range(given.prompt_tokens)]
        body = {"model": model, "prompt": prompt, "max_tokens": given.new_tokens, "temperature": 0, "ignore_eos": True}
        if not stream:
            answer = await client.post("/v1/completions", json=body)
            assert answer.json()["usage"]["completion_tokens"] == given.new_tokens, answer.text
            return
        more = {"stream": True, "stream_options": {"include_usage": True}}
        usage: Any = None
        async with client.stream("POST", "/v1/completions", json=body | more) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    usage = json.loads(line[6:])["usage"] or usage
        assert usage["completion_tokens"] == given.new_tokens, usage

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client) for _ in range(given.requests)))
        return time.perf_counter() - began


def processor_time(port: int) -> float:
    """Processor seconds of the process that listens on a port, and of all that it has started."""
    listening = [one for one in psutil.net_connections("tcp") if one.status == "LISTEN" and one.laddr.port == port]
    owner = next(one.pid for one in listening if one.pid)
    total = 0.0
    for process in (psutil.Process(owner), *psutil.Process(owner).children(recursive=True)):
        with suppress(psutil.Error):
            total += sum(process.cpu_times()[:2])
    return total


def throughput_table(report: Report) -> str:
    """Output tokens a second of both."""
    head = ["output tokens/s, median (best round)", "whole answers", "streamed", "idle, share of a core"]
    rows = []
    for side in SIDES:
        own = [one for one in report["rows"] if one["side"] == side]  # whole answers, then streamed
        rates = [f"{one['tokens_per_second']:.0f} ({one['best_tokens_per_second']:.0f})" for one in own]
        rows.append([side, *rates, f"{report['idle'][side]:.1%}"])
    return markdown(head, rows)


TABLES: dict[str, Table] = {"replica-kills": kill_table, "replica-throughput": throughput_table}


if __name__ == "__main__":
    main({"kills": ReplicaKills, "throughput": ReplicaThroughput}, TABLES)
