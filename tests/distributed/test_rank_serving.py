"""What two ranks that hold a model do while it is served: adapters that come and go, and blocks on the disk."""

import json

import pytest
import torch

import hasten
import ranks
from hasten.checkpoints.adapter_files import save_adapter
from hasten.engine.params import SamplingParams
from hasten.model.lora import new_adapter
from hasten.quantization import Int4, quantize
from tiny_model import tiny_llama

PROMPT = [7 * number * number % 250 + 1 for number in range(61)]
FULL = 60  # tokens of its full blocks of 4
GREEDY = {"temperature": 0.0, "max_new_tokens": 9, "ignore_eos": True}

WORKER = """
import asyncio, json, sys, threading
from pathlib import Path
import torch
import hasten
from hasten.distributed.launch import joined
from hasten.distributed.tensor_parallel import tensor_parallel
from hasten.engine import following
from hasten.engine.block_files import BlockFiles
from hasten.engine.following import follow
from hasten.engine.settings import EngineSettings
from hasten.errors import ResourceError
from hasten.model.fused import fuse_where_it_fits
from hasten.checkpoints.load import load
torch.set_num_threads(1)
root, prompt, greedy = Path(sys.argv[1]), *map(json.loads, sys.argv[2:4])
said = {}
read_adapter, read, logits = following.read_adapter, BlockFiles.read, following.ModelRunner._scores
stepped = threading.Event()
def slow(*given):  # until this rank has computed six steps
    return stepped.wait(20) and read(*given)
def counted(self, *given):
    steps.append(1)
    if len(steps) > 5:
        stepped.set()
    return logits(self, *given)
def refusing(model, folder):
    if folder.name == "refused":
        raise ResourceError("no memory")
    return read_adapter(model, folder)
def answered(llm, name=""):
    answer = llm.generate([prompt], hasten.SamplingParams(**greedy), adapter=name)[0]
    return answer.tokens, answer.cached_tokens
def change(llm):
    engine, tokens = llm._started(), {"": answered(llm)[0]}
    for name in ("a0", "a1"):
        asyncio.run(engine.load_adapter(name, root / name))
        tokens[name] = answered(llm, name)[0]
    try:
        asyncio.run(engine.load_adapter("late", root / "refused"))
    except ResourceError as error:
        tokens["refused"] = str(error)
    asyncio.run(engine.unload_adapter("a0"))
    asyncio.run(engine.load_adapter("again", root / "a1"))  # in the place of a0
    tokens["again"], tokens["names"] = answered(llm, "again")[0], engine.engine.adapters.names
    tokens["after"] = answered(llm)[0]
    return tokens
with joined() as ranks, tensor_parallel(ranks) as group:
    for name in ("float32", "int4"):
        model = fuse_where_it_fits(load(root / name, dtype="stored", group=group))
        own = {"block_size": 4, "prefix_cache": root / f"cache-{name}", "max_sequences": 4}
        found = []
        for turn in range(6):
            if turn == 2 + ranks.rank:  # one rank has lost its parts of the blocks
                BlockFiles.read = lambda *given: False
            if turn == 4 and ranks.rank:
                BlockFiles.read, steps = slow, []
                following.ModelRunner._scores = counted
                stepped.clear()
            if ranks.first:
                llm = hasten.LLM(model, **own)
                if turn == 4:  # beside a text that runs
                    settings = hasten.SamplingParams(**greedy)
                    answer = llm.generate([prompt[:2], prompt], settings)[1]
                    found.append((answer.tokens, answer.cached_tokens, llm.stats().disk_hits))
                else:
                    found.append((*answered(llm), llm.stats().disk_hits))
                llm.close()
            else:
                follow(model, EngineSettings(**own))
            BlockFiles.read, following.ModelRunner._scores = read, logits
        own = {"block_size": 4}
        if ranks.first:
            llm = hasten.LLM(model, **own)
            said[name] = {"disk": found, "adapters": change(llm)}
            llm.close()
        else:
            following.read_adapter = refusing
            follow(model, EngineSettings(**own))
if ranks.first:
    (root / "said.json").write_text(json.dumps(said))
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The tiny model in float32 and in int4, and two adapters of it."""
    root, model = tmp_path_factory.mktemp("serving"), tiny_llama()
    hasten.save(model, root / "float32")
    hasten.save(quantize(tiny_llama().to(torch.bfloat16), Int4(group_size=32)), root / "int4")
    for number, (rank, targets) in enumerate([(3, ["q_proj", "down_proj"]), (17, ["all-linear"])]):
        adapter = new_adapter(model.config, rank=rank, alpha=2 * rank, targets=targets, seed=number)
        for index, own in enumerate(adapter.values()):
            torch.nn.init.normal_(own.b, std=0.2, generator=torch.Generator().manual_seed(index))
        save_adapter(root / f"a{number}", adapter, model.config)
    (root / "refused").symlink_to(root / "a0")
    return root


@pytest.fixture(scope="module")
def said(root):
    found = ranks.run(WORKER, root, json.dumps(PROMPT), json.dumps(GREEDY), ranks=2)
    assert [status for status, _, _ in found] == [0, 0], found
    return json.loads((root / "said.json").read_text())


@pytest.mark.parametrize("name", ["float32", "int4"])
def test_a_block_on_disk_is_found_where_every_rank_has_its_part(name, said, root):
    first, *later = said[name]["disk"]
    assert first[1:] == [0, 0]
    assert [tokens for tokens, _, _ in later] == [first[0]] * 5
    assert [found for _, *found in later] == [[FULL, FULL], [0, 0], [0, 0], [FULL, FULL], [FULL, FULL]]
    files = {path.name for path in (root / f"cache-{name}").glob("??/*.kv")}
    blocks = sum((tokens + GREEDY["max_new_tokens"] - 1) // 4 for tokens in (len(PROMPT), 2))
    assert len(files) == 2 * blocks, "each rank has written its part"
    llm = hasten.LLM(root / name, dtype="stored", block_size=4, prefix_cache=root / f"cache-{name}")
    (alone,) = llm.generate([PROMPT], SamplingParams(**GREEDY))
    llm.close()
    assert alone.cached_tokens == 0, "a whole block is another thing"
    if name == "float32":  # another degree rounds otherwise
        assert alone.tokens == first[0]


@pytest.mark.parametrize("name", ["float32", "int4"])
def test_adapters_that_come_and_go_are_those_of_the_start(name, said, root):
    found = said[name]["adapters"]
    assert found["after"] == found[""] == said[name]["disk"][0][0]
    assert found["again"] == found["a1"] != found["a0"] != found[""]
    assert found["names"] == ["again", "a1"]
    assert found["refused"].startswith("rank 1 cannot take the adapter: ")
    if name == "float32":
        folders = {one: root / one for one in ("a0", "a1")}
        llm = hasten.LLM(root / name, dtype="stored", block_size=4, adapters=folders)
        for one in folders:
            assert llm.generate([PROMPT], SamplingParams(**GREEDY), adapter=one)[0].tokens == found[one]
        llm.close()
