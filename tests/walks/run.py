"""The walks that docs/architecture.md describes, made by public entry points on a tiny model.

python tests/walks/run.py             # a table of functions and files beside the committed one
python tests/walks/run.py decode      # the functions of one walk, in the order of their first calls
python tests/walks/run.py --write     # commit what it is now as the table
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # of tiny_model, when run as a script

import hasten
from tiny_model import tiny_llama
from walks.tracer import Walk, traced

TABLE = Path(__file__).with_name("walks.json")
AIMS = {"load": 20, "decode": 12, "chat request": 20, "training step": 20, "training set-up": 40}  # files
_WARM = 8  # steps before the one that counts: buffers are made, drafts have had their try


def load(folder: Path) -> Walk:
    """Open a bfloat16 folder."""
    with traced() as walk:
        hasten.load(folder)
    return walk


def load_int4(folder: Path) -> Walk:
    """Open an int4 folder."""
    target = folder.parent / "int4"
    if not target.exists():
        hasten.save(hasten.quantize(hasten.load(folder), hasten.Int4(group_size=32)), target)
    return load(target)


def decode(folder: Path) -> Walk:
    """Take one piece of text from `hasten.stream`."""
    pieces = hasten.stream(hasten.load(folder), "def add(", temperature=0.8, seed=1, max_new_tokens=64, ignore_eos=True)
    return _shortest(lambda: next(pieces))


def engine_step(folder: Path) -> Walk:
    """Make one step of the engine behind `hasten.LLM`, which continues one text."""
    from hasten.engine.params import SamplingParams
    from hasten.engine.request import Request

    engine = hasten.LLM(hasten.load(folder)).engine
    params = SamplingParams(temperature=0.8, seed=1, max_new_tokens=64, ignore_eos=True)
    engine.add(Request(id="walk", prompt=[5, 6, 7], params=params))
    return _shortest(engine.step)


def chat_request(folder: Path) -> Walk:
    """Answer a chat request of three tokens over HTTP."""
    import httpx

    from hasten.engine.async_engine import AsyncEngine
    from hasten.engine.llm import make_engine
    from hasten.engine.settings import EngineSettings
    from hasten.model.fused import fuse_where_it_fits
    from hasten.server.app import make_app
    from hasten.server.service import Service
    from hasten.server.settings import ServerSettings

    model = fuse_where_it_fits(hasten.load(folder))  # as `hasten serve` does

    async def ask(walk: Walk) -> None:
        engine = AsyncEngine(make_engine(model, model.tokenizer, EngineSettings()))
        service = Service(engine, model_name="tiny", settings=ServerSettings())
        service.ready = True
        transport = httpx.ASGITransport(app=make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for text in ("hi", "hello there"):
                walk.calls.clear()  # of the first request, which imports and compiles
                body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 3}
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
            calls = walk.calls.copy()
        await engine.close()
        walk.calls[:] = calls

    with traced() as walk:  # before the engine starts its thread
        asyncio.run(ask(walk))
    return walk


def training(folder: Path) -> tuple[Walk, Walk]:
    """Set a run of six steps up, whose text is prepared, and make one of them."""
    from hasten.training.recipes import RECIPES

    source = folder.parent / "text.txt"
    source.write_text(Path(asyncio.__file__).with_name("tasks.py").read_text())
    demo = RECIPES["demo"]
    recipe = replace(
        demo,
        name="walk",
        data=replace(demo.data, source=str(source), tokenizer=str(folder)),
        model=replace(demo.model, layers=2, hidden_size=64, heads=2, kv_heads=2),
        techniques=replace(demo.techniques, compile=False, precision="float32"),
        run=replace(demo.run, steps=6, minutes=None, folder=str(folder.parent), validate_every=100),
    )
    hasten.train(recipe, progress=False)  # prepares the text
    with traced() as walk:
        hasten.train(recipe, progress=False, resume="never")
    return walk.before("TrainStep.run"), walk.between("TrainStep.run", 2)


def _shortest(step: Callable[[], object]) -> Walk:
    """The walk of the step that calls the fewest functions, of several warm ones."""
    for _ in range(_WARM):
        step()
    walks = []
    for _ in range(4):
        with traced() as walk:
            step()
        walks.append(walk)
    return min(walks, key=lambda one: len(one.functions))


def all_walks(folder: Path) -> dict[str, Walk]:
    """Every walk by its name. folder: an empty one."""
    torch.set_num_threads(1)
    model = folder / "model"
    hasten.save(tiny_llama().to(torch.bfloat16), model)
    set_up, step = training(model)
    return {
        "load": load(model),
        "load int4": load_int4(model),
        "decode": decode(model),
        "engine step": engine_step(model),
        "chat request": chat_request(model),
        "training step": step,
        "training set-up": set_up,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        walks = all_walks(Path(folder))
    if sys.argv[1:2] == ["--write"]:
        TABLE.write_text(json.dumps({name: walk.counts() for name, walk in walks.items()}, indent=2) + "\n")
    elif sys.argv[1:]:
        for file, name in walks[sys.argv[1]].functions:
            print(f"{file}:{name}")
        return
    committed = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    print(f"{'walk':<18}{'functions':>10}{'files':>7}{'aim':>6}   committed")
    for name, walk in walks.items():
        functions, files = walk.counts().values()
        print(f"{name:<18}{functions:>10}{files:>7}{AIMS.get(name, ''):>6}   {committed.get(name, '')}")


if __name__ == "__main__":
    main()
