"""What two ranks that hold a model do with drafts, adapters, beams and schemas: what one process does."""

import json
import os
import shutil
import signal
import subprocess
import sys

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
import ranks
from hasten.checkpoints.adapter_files import save_adapter
from hasten.checkpoints.adapters import load_adapters
from hasten.checkpoints.load import load
from hasten.cli.serve import Serve
from hasten.engine.params import SamplingParams
from hasten.engine.speculation import make_speculator
from hasten.errors import CheckpointError, ConfigError, ResourceError
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.model.lora import new_adapter
from hasten.ops.collective import RankGroup
from hasten.quantization import Int4, quantize
from server_case import app_of, serving
from tiny_model import tiny_llama

PROMPTS = [
    [5, 9, 13, 9, 13, 7, 9, 13],
    [7 * number % 299 + 1 for number in range(299)],
]  # the second has every token once
SETTINGS = {
    "greedy": {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True},
    "repeating": {"temperature": 0.0, "frequency_penalty": -2.0, "max_new_tokens": 16, "ignore_eos": True},
    "drawn": {"temperature": 0.9, "seed": 4, "max_new_tokens": 16, "ignore_eos": True},
    "penalties": {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "max_new_tokens": 16, "ignore_eos": True},
}

# Writes what one rank generates: without drafts, with drafts of each kind, with adapters; then what it serves.
WORKER = """
import json, sys
import torch
import hasten
from hasten.distributed.launch import joined
from hasten.distributed.tensor_parallel import tensor_parallel
from hasten.engine.generate import Generation
from hasten.engine.speculation import make_speculator
from hasten.checkpoints.adapters import load_adapters
from hasten.model.fused import fuse_where_it_fits
from hasten.checkpoints.load import load
from hasten.engine.engine import Engine
from hasten.engine.following import follow
from hasten.engine.settings import EngineSettings
torch.set_num_threads(1)
folder, adapters, draft, prompts, settings = sys.argv[1:4] + [json.loads(one) for one in sys.argv[4:6]]
adapters = json.loads(adapters)
said = {}
def generated(model, draft, accept="exact", **settings):
    speculator = make_speculator(model, draft, accept=accept)
    if speculator is not None:
        speculator.always = True
    run = Generation(model, prompts, speculator=speculator, **settings)
    for _ in run:
        pass
    proposed = 0 if speculator is None else speculator.stats.draft_tokens
    return [one.tokens for one in run.results()], proposed
with joined() as ranks, tensor_parallel(ranks) as group:
    model = fuse_where_it_fits(load(folder, dtype="stored", group=group))
    for name, own in settings.items():
        said[name] = {kind: generated(model, kind, **own) for kind in ("none", "suffix", draft, "self:1-layers")}
    said["distribution"] = [generated(model, draft, "distribution", **settings["drawn"]) for _ in range(2)]
    model = fuse_where_it_fits(load(folder, dtype="stored", group=group))
    load_adapters(model, list(adapters.values())[:1])
    said["adapter"] = {kind: generated(model, kind, **settings["greedy"]) for kind in ("none", "suffix")}
    model = fuse_where_it_fits(load(folder, dtype="stored", group=group))
    how = {"adapters": adapters, "draft": "suffix"}
    if ranks.first:
        params = hasten.SamplingParams(**settings["greedy"])
        llm = hasten.LLM(model, block_size=4, **how)
        llm.engine.speculator.always = True
        answers = {name: llm.generate(prompts, params, adapter=name) for name in ("", *adapters)}
        said["served"] = {name: [one.tokens for one in own] for name, own in answers.items()}
        beams = llm.generate(prompts, params, n=2, beam_width=3)
        said["beams"] = [[one.tokens for one in own.completions] for own in beams]
        embedded = [llm.engine.embed(prompts[0], adapter=name).tolist() for name in ("", *adapters)]
        said["embedded"] = embedded
        said["proposed"] = llm.stats().draft_tokens
        llm.close()
    else:
        follow(model, EngineSettings(block_size=4), **how)
with open(f"{folder}/rank-{ranks.rank}.json", "w") as file:
    json.dump(said, file)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The tiny model in float32 and in int4, two adapters of it, and a smaller model of its vocabulary."""
    root, model = tmp_path_factory.mktemp("features"), tiny_llama()
    hasten.save(model, root / "float32")
    hasten.save(quantize(tiny_llama().to(torch.bfloat16), Int4(group_size=32)), root / "int4")
    for number, (rank, targets) in enumerate([(3, ["q_proj", "v_proj", "down_proj"]), (17, ["all-linear"])]):
        adapter = new_adapter(model.config, rank=rank, alpha=2 * rank, targets=targets, seed=number)
        for index, own in enumerate(adapter.values()):
            torch.nn.init.normal_(own.b, std=0.2, generator=torch.Generator().manual_seed(index))
        save_adapter(root / f"a{number}", adapter, model.config)
    small = dict(model.config.source) | {"num_hidden_layers": 1}
    hasten.save(initialize(read_config(small), seed=3).eval(), root / "draft")
    return root


@pytest.fixture(scope="module", params=["float32", "int4"])
def said(request, folders):
    """(the format, what each rank says)."""
    folder, adapters = folders / request.param, {name: str(folders / name) for name in ("a0", "a1")}
    given = (folder, json.dumps(adapters), folders / "draft", json.dumps(PROMPTS), json.dumps(SETTINGS))
    found = ranks.run(WORKER, *given, ranks=2)
    assert [status for status, _, _ in found] == [0, 0], found
    return request.param, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_drafts_change_no_bit(said, folders):
    first, second = said[1]
    for name in SETTINGS:
        plain = first[name]["none"][0]
        for kind, (tokens, _) in first[name].items():
            assert tokens == plain == second[name][kind][0], (name, kind)
        assert first[name][str(folders / "draft")][1] > 0
        assert first[name]["self:1-layers"][1] > 0
    assert first["repeating"]["suffix"][1] > 0
    assert first["adapter"]["suffix"][0] == first["adapter"]["none"][0] == second["adapter"]["none"][0]


def test_drafts_by_distribution_are_the_same_on_every_rank_and_run(said):
    first, second = said[1]
    (tokens, proposed), again = first["distribution"]
    assert proposed > 0
    assert tokens == again[0] == second["distribution"][0][0]


def test_adapters_and_beams_are_those_of_one_process(said, folders):
    name, (first, _) = said
    llm = hasten.LLM(
        folders / name, dtype="stored", block_size=4, adapters={one: folders / one for one in ("a0", "a1")}
    )
    params = SamplingParams(**SETTINGS["greedy"])
    if name == "float32":  # another degree rounds otherwise
        for adapter, tokens in first["served"].items():
            assert [one.tokens for one in llm.generate(PROMPTS, params, adapter=adapter)] == tokens
        beams = llm.generate(PROMPTS, params, n=2, beam_width=3)
        assert [[one.tokens for one in own.completions] for own in beams] == first["beams"]
    assert len({str(tokens) for tokens in first["served"].values()}) == 3
    assert first["served"][""] == first["greedy"]["none"][0]
    assert first["served"]["a0"] == first["adapter"]["none"][0]
    assert first["proposed"] > 0
    for adapter, state in zip(("", "a0", "a1"), first["embedded"], strict=True):
        alone, state = llm.engine.embed(PROMPTS[0], adapter=adapter), torch.tensor(state)
        assert (state - alone).norm() <= (1e-4 if name == "float32" else 0.1) * alone.norm()
    llm.close()


def test_a_share_of_an_adapter_is_what_its_layers_share_takes(folders):
    whole = load(folders / "float32", dtype="stored")
    load_adapters(whole, [folders / "a1"])
    held = 0
    for rank in range(2):
        share = load(folders / "float32", dtype="stored", group=RankGroup(rank, 2))
        load_adapters(share, [folders / "a1"])
        held += sum(one.numel() for name, one in share.named_parameters() if ".b." in name)
    outputs = sum(one.numel() for name, one in whole.named_parameters() if ".b." in name)
    both = sum(one.numel() for n, one in whole.named_parameters() if ".b." in n and ("output" in n or "down" in n))
    assert held == outputs + both  # those of output and down are whole on each


def test_the_first_rank_drafts_with_whole_layers_of_its_model(folders):
    share, other = (load(folders / "float32", dtype="stored", group=RankGroup(rank, 2)) for rank in range(2))
    whole = load(folders / "float32", dtype="stored")
    draft = make_speculator(share, "self:1-layers").proposer.model
    assert (draft.config.heads, len(draft.blocks)) == (whole.config.heads, 1)
    assert make_speculator(other, "self:1-layers").proposer.name == "suffix", "which nobody asks"
    with pytest.raises(ConfigError, match="self:9-layers: this model has"):
        make_speculator(share, "self:9-layers")
    with pytest.raises(ConfigError, match="load it without group"):
        make_speculator(share, share)
    for one in (share, other):
        with pytest.raises(ConfigError, match="the draft mtp is for a model that one process holds"):
            make_speculator(one, "mtp")


@pytest.mark.parametrize("kind", ["float32", "int4"])
def test_no_further_layers_are_loaded_to_draft(kind, folders, tmp_path, monkeypatch):
    """A folder whose last layer cannot be read; then a machine whose memory is full."""
    share = load(folders / kind, dtype="stored", group=RankGroup(0, 2))
    shutil.copytree(folders / kind, damaged := tmp_path / "damaged")
    tensors = load_file(damaged / "model.safetensors")
    last = len(share.config.layers) - 1
    for name, tensor in tensors.items():
        if f"layers.{last}." in name and tensor.is_floating_point():
            tensor.fill_(torch.nan)
    save_file(tensors, damaged / "model.safetensors", metadata={"format": "pt"})
    share.origin = str(damaged)
    draft = make_speculator(share, "self:1-layers").proposer.model
    assert len(draft.blocks) == len(draft.config.layers) == 1
    with pytest.raises(CheckpointError):
        load(damaged, dtype="stored")
    monkeypatch.setattr("hasten.engine.speculation.build.available_memory", lambda _: 1000)
    with pytest.raises(ResourceError, match=r"self:1-layers: .* and 1,000 are free; take fewer layers, or suffix"):
        make_speculator(share, "self:1-layers")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
COMMON = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True}
BODIES = {
    "plain": {"model": "m", "prompt": "def add(a, b):", **COMMON},
    "adapter": {"model": "a1", "prompt": "def add(a, b):", **COMMON},
    "beams": {"model": "m", "prompt": "def", "use_beam_search": True, "best_of": 3, "n": 2, "max_tokens": 8},
    "schema": {"model": "m", "prompt": "def", "max_tokens": 60, "temperature": 1.0, "seed": 3, "response_format": FORM},
}


def texts_of(url, body):
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    return [one["text"] for one in answer["choices"]]


@pytest.mark.slow  # a server of several processes
def test_a_server_of_two_ranks_answers_as_one_of_one_process(folders):
    """Through the command line: drafts, adapters, beams and a schema, then it drains."""
    options = {"model": str(folders / "float32"), "adapter": (f"a1={folders / 'a1'}",), "draft": "suffix"}
    alone = Serve(**options)
    model = alone.load()
    app = app_of(alone.start_engine(model, model.tokenizer, adapters=alone.adapters()))
    with serving(app) as (url, _):
        expected = {
            name: texts_of(url, body | {"model": body["model"].replace("m", "tiny")}) for name, body in BODIES.items()
        }
    command = [sys.executable, "-m", "hasten", "serve", options["model"], "--port", "0", "--served-model-name", "m"]
    command += ["--adapter", *options["adapter"], "--draft", "suffix", "--tensor-parallel", "2", "--cache-gib", "0.02"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        line = process.stdout.readline()
        assert "is served at http://127.0.0.1:" in line, process.stderr.read()
        url = line.split("is served at ")[1].split("/v1")[0]
        assert {name: texts_of(url, body) for name, body in BODIES.items()} == expected
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM, "as torchrun's agent ends"
        assert "drained and closed" in process.stderr.read()
    finally:
        process.kill()
