"""Kills replicas with kill -9 while they answer, then replaces all of them while they answer.

    python benchmarks/replica_kills.py        # 200 requests, 5 kills -> benchmarks/results/replica-kills.json

Needs `hasten[ray]`. A tiny model in float32, three replicas on this machine behind the real HTTP server. Every text
is compared with what the model says by itself: a whole answer must be it; a stream must be it, or end with an error
and be the beginning of it. Some clients leave in the middle. Afterwards every block of every replica must be free. Exit
status 1 where something hung, was wrong, failed that should not have, or was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

import hasten
from hasten.engine.settings import EngineSettings
from hasten.machine import configure, describe
from hasten.machine.files import save_json
from hasten.replicas.settings import ReplicaSettings
from hasten.server.app import make_app
from hasten.server.server import Server, bind, url_of
from hasten.server.service import Service
from hasten.server.settings import ServerSettings

sys.path.append(str(Path(__file__).parents[1] / "tests"))

if TYPE_CHECKING:
    from hasten.engine.async_engine import AsyncEngine

RESULT = Path(__file__).parent / "results" / "replica-kills.json"
PATIENCE = 180.0  # seconds after which a request counts as hung
SHARED = "def add(a, b):\n    return a + b\n\n"


def engine_of(folder: str, secret: bytes) -> AsyncEngine:
    """What each replica runs."""
    from hasten.engine.async_engine import AsyncEngine
    from hasten.engine.llm import make_engine

    configure(threads=1)
    model = hasten.load(folder)
    settings = EngineSettings(max_sequences=16, token_budget=64, cache_bytes=1 << 20)
    return AsyncEngine(make_engine(model, model.tokenizer, settings, secret=secret))


class Kills:
    """The server in a thread, the clients in this one."""

    def __init__(self, folder: str, arguments: argparse.Namespace) -> None:
        from hasten.replicas.ray_serve import Replicas

        self.arguments, self.draw = arguments, random.Random(arguments.seed)
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
        """Of the replicas that there are and that have reported."""
        return [state.report["process"] for state in self.replicas.board.states.values() if state.report is not None]

    def text(self, prompt: str, tokens: int) -> str:
        """What the model says by itself."""
        key = prompt, tokens
        if key not in self.expected:
            self.expected[key] = "".join(hasten.stream(self.model, prompt, temperature=0, max_new_tokens=tokens))
        return self.expected[key]

    def draw_request(self) -> dict[str, Any]:
        names = "".join(self.draw.choices("abcdefgh", k=4))
        prompt = SHARED * self.draw.randrange(3) + f"for {names} in names:"
        return {"model": "tiny", "prompt": prompt, "max_tokens": self.draw.randrange(40, 200), "temperature": 0}

    async def requests(self, count: int, *, disturb: Any) -> None:
        """So many, `concurrency` at a time, while `disturb` is awaited."""
        bodies = [self.draw_request() for _ in range(count)]
        for body in bodies:
            self.text(body["prompt"], body["max_tokens"])
        kinds = self.draw.choices(("whole", "stream", "leaves"), (45, 45, 10), k=count)
        work = iter(zip(bodies, kinds, strict=True))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=url_of(self.sock, "127.0.0.1"), limits=limits, timeout=PATIENCE
        ) as client:

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
            await asyncio.gather(*(worker() for _ in range(self.arguments.concurrency)))
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
            full = len(stats) == self.arguments.replicas and all(one.free_blocks == one.blocks for one in stats)
            if (idle and full) or time.monotonic() > end:
                wrong = [state.report["check"] for state in states if state.report and state.report["check"]]
                return {
                    "replicas": len(stats),
                    "blocks": [one.blocks for one in stats],
                    "free_blocks": [one.free_blocks for one in stats],
                    "board_is_empty": idle,
                    "books": wrong,
                }
            await asyncio.sleep(0.2)

    async def killed(self) -> dict[str, Any]:
        """Requests and kills."""
        kills: list[dict[str, Any]] = []
        given = self.arguments
        began = time.perf_counter()

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

        done = asyncio.Event()

        async def until_restarted() -> None:
            await restart()
            done.set()

        rounds, task = 0, asyncio.create_task(until_restarted())
        while not done.is_set():
            rounds += 1
            await self.requests(4 * self.arguments.concurrency, disturb=partial(asyncio.sleep, 0))
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


def table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for docs/replicas.md."""
    head = ["", f"{len(report['killed']['kills'])} kills", "all replaced"]
    names = ("whole: complete", "stream: complete", "stream: ended by an error", "left")
    phases = [report["killed"], report["restarted"]]
    rows = [[name, *(str(phase["ends"].get(name, 0)) for phase in phases)] for name in names]
    rows.append(["restarted elsewhere", *(str(phase["begun_anew"]) for phase in phases)])
    rows.append(
        ["hung, wrong or failed", *(str(len(phase["wrong"]) + phase["ends"].get("hung", 0)) for phase in phases)]
    )
    rows.append(["blocks lost", *(str(sum(p["after"]["blocks"]) - sum(p["after"]["free_blocks"])) for p in phases)])
    rows.append(["slowest request", *(f"{phase['slowest_seconds']:.1f} s" for phase in phases)])
    return head, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    given = parser.parse_args()
    from tiny_model import tiny_llama

    configure(threads=1)
    with tempfile.TemporaryDirectory() as folder:
        hasten.save(tiny_llama(), folder)
        kills = Kills(folder, given)
        try:
            killed = asyncio.run(kills.killed())
            print(json.dumps(killed, indent=1), flush=True)
            restarted = asyncio.run(kills.restarted())
            print(json.dumps(restarted, indent=1), flush=True)
        finally:
            kills.close()
    passed = good(killed, cuts=True) and good(restarted, cuts=False) and len(killed["kills"]) == given.kills
    settings = {name: getattr(given, name) for name in ("requests", "kills", "replicas", "concurrency", "seed")}
    report = {"schema": 1, "kind": "replica-kills", "machine": describe().to_json(), "settings": settings}
    save_json(given.json, report | {"passed": passed, "killed": killed, "restarted": restarted}, indent=1)
    print("passed" if passed else "FAILED", file=sys.stderr)
    raise SystemExit(not passed)


if __name__ == "__main__":
    main()
