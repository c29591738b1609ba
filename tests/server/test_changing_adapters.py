"""Adapters that are loaded and unloaded while the model is served: places, running texts, cached prefixes, paths."""

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
import torch

from hasten.checkpoints.adapter_files import load_adapter, save_adapter
from hasten.checkpoints.adapters import load_adapters, place_adapter
from hasten.cli.serve import Serve
from hasten.engine import adapters
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.request import Request, RequestRefused
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError, ResourceError
from hasten.model.context import training_context
from hasten.model.fused import fuse
from hasten.model.lora import new_adapter
from hasten.quantization import Int4, quantize
from hasten.replicas.settings import ReplicaSettings
from hasten.server.settings import ServerSettings
from instruction_sets import needs_native
from server_case import app_of, serving
from tiny_model import tiny_llama

TOKENS = torch.arange(40)[None] * 7 % 300
BODY = {"prompt": "def add(a, b): return", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
KINDS = [pytest.param("bfloat16", marks=needs_native), pytest.param("int4", marks=needs_native), "float32"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with three adapters of the tiny model, of different ranks and layers."""
    folder, config = tmp_path_factory.mktemp("root"), tiny_llama().config
    kinds = [(3, ["q_proj", "v_proj"]), (40, ["all-linear"]), (5, ["down_proj", "gate_proj"])]
    for number, (rank, targets) in enumerate(kinds):
        adapter = new_adapter(config, rank=rank, alpha=2 * rank, targets=targets, seed=number)
        for index, own in enumerate(adapter.values()):
            torch.nn.init.normal_(own.b, std=0.2, generator=torch.Generator().manual_seed(index + 10 * number))
        save_adapter(folder / f"a{number}", adapter, config)
    return folder


def made(kind):
    if kind == "float32":
        return tiny_llama()
    model = tiny_llama().to(torch.bfloat16)
    return fuse(quantize(model, Int4(group_size=32)) if kind == "int4" else model)


def logits(model, tokens):
    with torch.inference_mode():
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return model(tokens, positions, training_context(model, tokens.shape[1]))


def scores(model, number):
    model.adapters.choose([number] * TOKENS.shape[1], model.device)
    return logits(model, TOKENS)


@pytest.mark.parametrize("kind", KINDS)
def test_one_by_one_they_are_what_they_are_at_the_start(kind, root):
    """Logits have every bit of a model that was loaded with all; other rows keep theirs; places are used again."""
    folders = [root / name for name in ("a0", "a1", "a2")]
    whole, model = made(kind), made(kind)
    plain = logits(model, TOKENS)
    load_adapters(whole, folders)
    for number, folder in enumerate(folders):
        place_adapter(model, number, load_adapter(folder, model))
        for before in range(number + 1):
            assert torch.equal(scores(model, before), scores(whole, before))
        assert torch.equal(scores(model, -1), plain)
    place_adapter(model, 1, None)
    assert torch.equal(scores(model, 1), plain)
    assert torch.equal(scores(model, 2), scores(whole, 2))
    place_adapter(model, 1, load_adapter(folders[0], model))
    assert torch.equal(scores(model, 1), scores(whole, 0))
    assert torch.equal(scores(model, 2), scores(whole, 2))


@needs_native
def test_a_lack_of_memory_changes_nothing(root, monkeypatch):
    model = made("bfloat16")
    plain = logits(model, TOKENS)
    adapter = load_adapter(root / "a1", model)
    monkeypatch.setattr("hasten.checkpoints.adapters.available_memory", lambda _: 1000)
    with pytest.raises(ResourceError, match="1,000 are free"):
        place_adapter(model, 0, adapter)
    assert model.adapters is None
    assert torch.equal(logits(model, TOKENS), plain)


def engine_of(kind="float32", **settings):
    model = made(kind)
    how = {"block_size": 4, "max_length": 256, "cache_bytes": 1 << 22} | settings
    return Engine(model, model.tokenizer, EngineSettings(**how))


def request(engine, name, adapter, prompt="def add(a, b):\n    return a", tokens=24):
    params = SamplingParams(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
    return Request(id=name, prompt=engine.tokenizer.encode(prompt), params=params, adapter=adapter)


def run(engine, *names, until=None):
    """The tokens of requests, and the cached tokens of the first, until all have ended or `until` steps were taken."""
    found, cached, steps = {name: [] for name in names}, {}, 0
    while not engine.idle and steps != until:
        for output in engine.step():
            found[output.request_id] += output.tokens
            cached.setdefault(output.request_id, output.cached_tokens)
        steps += 1
    return found, cached


@pytest.mark.parametrize("kind", [pytest.param("int4", marks=needs_native), "float32"])
def test_a_running_text_goes_on_with_an_adapter_that_is_unloaded(kind, root):
    engine = engine_of(kind)
    adapters.load(engine, "law", load_adapter(root / "a0", engine.model))
    engine.add(request(engine, "alone", "law"))
    whole = run(engine, "alone")[0]["alone"]
    engine.add(request(engine, "again", "law"))
    first = run(engine, "again", until=4)[0]["again"]
    adapters.unload(engine, "law")
    with pytest.raises(RequestRefused, match="no adapter 'law' here; loaded: none"):
        engine.add(request(engine, "late", "law"))
    adapters.load(engine, "code", load_adapter(root / "a1", engine.model))
    engine.add(request(engine, "code", "code"))
    found, _ = run(engine, "again", "code")
    assert first + found["again"] == whole
    assert engine.adapters.number("code") == 1  # the place of the other was still used
    adapters.load(engine, "third", load_adapter(root / "a2", engine.model))
    assert engine.adapters.number("third") == 0
    assert engine.adapters.names == ["third", "code"]
    alone = engine_of(kind)
    adapters.load(alone, "code", load_adapter(root / "a1", alone.model))
    alone.add(request(alone, "code", "code"))
    assert run(alone, "code")[0]["code"] == found["code"]


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_the_model_itself_run_through_the_first_load(kind, root):
    engine = engine_of(kind)
    engine.add(request(engine, "alone", ""))
    whole = run(engine, "alone")[0]["alone"]
    engine.add(request(engine, "again", ""))
    found = run(engine, "again", until=4)[0]["again"]
    adapters.load(engine, "law", load_adapter(root / "a1", engine.model))
    engine.add(request(engine, "law", "law"))
    found += run(engine, "again", "law", until=5)[0]["again"]
    adapters.unload(engine, "law")
    found += run(engine, "again", "law")[0]["again"]
    assert found == whole


def test_cached_prefixes_of_an_earlier_adapter_are_never_used(root, tmp_path):
    engine = engine_of(prefix_cache=tmp_path / "cache")
    texts = []
    for number, folder in enumerate(("a0", "a1", "a0")):
        adapters.load(engine, "law", load_adapter(root / folder, engine.model))
        engine.add(request(engine, f"first{number}", "law"))
        found, cached = run(engine, f"first{number}")
        texts += found.values()
        assert set(cached.values()) == {0}
        engine.add(request(engine, "again", "law"))
        assert run(engine, "again")[1]["again"] > 0
        adapters.unload(engine, "law")
    engine.close()
    assert texts[0] == texts[2] != texts[1]


def test_embeddings_of_several_texts_are_of_the_adapter_that_they_began_with(root):
    async def found():
        engine = AsyncEngine(engine_of())
        embed = lambda: engine.embed([[number + 1] * 40 for number in range(40)], adapter="law")  # noqa: E731
        await engine.load_adapter("law", root / "a0")
        whole = await embed()
        await engine._ask(lambda: None)  # until what was held has been released
        running = asyncio.ensure_future(embed())
        while not engine.engine.adapters.held:
            await asyncio.sleep(0)
        await engine.unload_adapter("law")
        await engine.load_adapter("law", root / "a1")
        assert not running.done()
        again, other = await running, await embed()
        await engine.close()
        assert torch.equal(again, whole)
        assert not torch.equal(other, whole)
        assert not engine.engine.adapters.held

    asyncio.run(found())


def test_names_are_used_once(root):
    engine = engine_of()
    adapter = load_adapter(root / "a0", engine.model)
    adapters.load(engine, "law", adapter)
    for name in ("law", ""):
        with pytest.raises(RequestRefused, match="a name that no other has"):
            adapters.load(engine, name, adapter)
    with pytest.raises(RequestRefused, match="no adapter 'code' here"):
        adapters.unload(engine, "code")


def test_names_that_are_gone_take_no_memory(root):
    engine = engine_of()
    adapters.load(engine, "law", load_adapter(root / "a0", engine.model))
    adapters.unload(engine, "law")
    assert not engine.adapters._versions


def change(url, what, status=200, **body):
    answer = httpx.post(f"{url}/v1/{what}_lora_adapter", json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


def text_of(url, model):
    return httpx.post(f"{url}/v1/completions", json=BODY | {"model": model}).json()["choices"][0]["text"]


def test_clients_load_and_unload_them(root):
    engine = AsyncEngine(engine_of())
    with serving(app_of(engine, adapter_folder=root)) as (url, _):
        names = lambda: [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]]  # noqa: E731
        base = text_of(url, "tiny")
        change(url, "load", lora_name="law", lora_path=str(root / "a0"))
        change(url, "load", lora_name="code", lora_path="a1")
        assert names() == ["tiny", "law", "code"]
        texts = [text_of(url, name) for name in ("law", "code")]
        assert len({base, *texts}) == 3
        assert text_of(url, "tiny") == base
        for name in ("law", "tiny:latest", "tiny", "a\nb", " "):
            answer = change(url, "load", 400, lora_name=name, lora_path="a1")
            assert "is in use, or cannot be printed" in answer["error"]["message"]
        change(url, "unload", lora_name="law")
        assert names() == ["tiny", "code"]
        assert httpx.post(f"{url}/v1/completions", json=BODY | {"model": "law"}).status_code == 404
        assert text_of(url, "code") == texts[1]
        for name in ("law", "tiny"):
            assert change(url, "unload", 404, lora_name=name)["error"]["param"] == "lora_name"
        change(url, "load", lora_name="law", lora_path="a0")
        assert text_of(url, "law") == texts[0]


def test_only_what_is_below_the_folder_is_opened(root, tmp_path):
    below = tmp_path / "below"
    below.mkdir()
    shutil.copytree(root / "a0", below / "good")
    (below / "linked").symlink_to(root / "a0")
    (below / "loop").symlink_to(below / "loop")
    (below / "within").symlink_to(below / "good")
    (below / "files").mkdir()
    for file in (root / "a0").iterdir():
        (below / "files" / file.name).symlink_to(file)
    (below / "empty").mkdir()
    engine = AsyncEngine(engine_of())
    with serving(app_of(engine, adapter_folder=below)) as (url, _):
        outside = [
            str(root / "a0"),
            f"../{root.name}/a0",
            "linked",
            "loop",
            "files",
            "/",
            "/proc/self",
            "a\0b",
            "~",
            "x" * 4000,
        ]
        messages = set()
        for path in outside:
            error = change(url, "load", 400, lora_name="law", lora_path=path)["error"]
            messages.add(error["message"].replace(repr(path[:200]), "PATH"))
            assert path == "~" or error["param"] == "lora_path"
        assert len([message for message in messages if "PATH" in message]) == 1  # whether it exists is not said
        assert "holds no adapter" in change(url, "load", 400, lora_name="law", lora_path="empty")["error"]["message"]
        change(url, "load", lora_name="law", lora_path="within")


def test_errors_name_a_folder_as_the_client_does(root, tmp_path, monkeypatch):
    shutil.copytree(root / "a0", tmp_path / "law")
    (tmp_path / "empty").mkdir()
    engine = AsyncEngine(engine_of())
    with serving(app_of(engine, adapter_folder=tmp_path)) as (url, _):
        monkeypatch.setattr("hasten.checkpoints.adapters.available_memory", lambda _: 1000)
        error = change(url, "load", 503, lora_name="law", lora_path="law")["error"]
        assert error["message"].startswith("law takes")
        assert error["code"] == "out_of_memory"
        assert [one["id"] for one in httpx.get(f"{url}/v1/models").json()["data"]] == ["tiny"]
        message = change(url, "load", 400, lora_name="law", lora_path="empty")["error"]["message"]
        assert message.startswith("empty holds no adapter")
        assert str(tmp_path) not in message


def test_without_a_folder_nothing_changes(root):
    engine = AsyncEngine(engine_of())
    with serving(app_of(engine)) as (url, _):
        for what, body in (("load", {"lora_path": "a0"}), ("unload", {})):
            error = change(url, what, 403, lora_name="law", **body)["error"]
            assert error["code"] == "not_allowed"
            assert "--adapter-folder DIR" in error["message"]


def test_a_client_that_goes_leaves_engine_and_list_alike(root):
    engine = AsyncEngine(engine_of())
    app = app_of(engine, adapter_folder=root)
    service = app.state.service

    async def ask_and_go():
        from hasten.server.adapters import _load

        task = asyncio.ensure_future(_load(service, "law", root / "a0", called="a0"))
        waiting = asyncio.ensure_future(asyncio.shield(task))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await task

    asyncio.run(ask_and_go())
    assert service.models == ["tiny", "law"]
    assert engine.engine.adapters.names == ["law"]
    asyncio.run(engine.close())


REFUSED = [
    ({"fleet": ReplicaSettings(replicas=2)}, "--replicas"),
    ({"device": "cuda"}, "GPU"),
    ({"draft": "self:2-layers"}, "--draft self:2-layers"),
]


@pytest.mark.parametrize(("options", "named"), REFUSED)
def test_where_adapters_cannot_change_the_option_is_refused(options, named):
    with pytest.raises(ConfigError, match=named):
        Serve(model="m", server=ServerSettings(adapter_folder=Path("x")), **options)


def test_the_folder_must_be_one(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        Serve(model="m", port=0, server=ServerSettings(adapter_folder=tmp_path / "none")).check_inputs()


def test_replicas_refuse_in_words():
    from hasten.replicas.engine import ReplicatedEngine

    engine = ReplicatedEngine.__new__(ReplicatedEngine)
    for work in (engine.load_adapter("law", Path("x")), engine.unload_adapter("law")):
        with pytest.raises(ConfigError, match="replicas have the adapters that they began with"):
            asyncio.run(work)
