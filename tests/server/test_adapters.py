"""Several adapters in one engine: each row has what it has alone, rows of the model itself keep every bit."""

import json

import httpx
import pytest
import torch

import hasten
from hasten.checkpoints.adapter_files import load_adapter, save_adapter
from hasten.checkpoints.adapters import load_adapters
from hasten.cli.serve import Serve
from hasten.engine.async_engine import AsyncEngine
from hasten.engine.engine import Engine
from hasten.engine.params import SamplingParams
from hasten.engine.request import RequestRefused
from hasten.engine.settings import EngineSettings
from hasten.errors import CheckpointError, ConfigError
from hasten.model.context import training_context
from hasten.model.families import read_config
from hasten.model.fused import fuse
from hasten.model.initialize import initialize
from hasten.model.lora import attach, new_adapter
from hasten.planning.shapes import gpt2
from hasten.quantization import Int4, Int8, quantize
from instruction_sets import needs_native
from server_case import app_of, serving
from tiny_model import tiny_llama

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True)
PROMPTS = ["def add(a, b):", "for name in names:", "print(", "def add(a, b):\n    return"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two adapters of the tiny model, of other ranks and layers."""
    folder, config = tmp_path_factory.mktemp("adapters"), tiny_llama().config
    for number, (rank, targets) in enumerate([(3, ["q_proj", "v_proj", "down_proj"]), (17, ["all-linear"])]):
        adapter = new_adapter(config, rank=rank, alpha=2 * rank, targets=targets, seed=number)
        for index, own in enumerate(adapter.values()):
            torch.nn.init.normal_(own.b, std=0.2, generator=torch.Generator().manual_seed(index))
        save_adapter(folder / f"a{number}", adapter, config)
    return {name: folder / name for name in ("a0", "a1")}


def bases(kind):
    """The tiny model in a format that the fused steps take, fused."""
    if kind == "bfloat16":
        return fuse(tiny_llama().to(torch.bfloat16))
    scheme = Int8() if kind == "int8" else Int4(group_size=32)
    return fuse(quantize(tiny_llama().to(torch.bfloat16), scheme))


def logits(model, tokens):
    with torch.inference_mode():
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        return model(tokens, positions, training_context(model, tokens.shape[1]))


@needs_native
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4"])
def test_inside_the_fused_steps_they_add_their_definition(kind, folders):
    """Against the readable float32 model of the same weights, off by no more than twice what the fused base is."""
    tokens = torch.arange(40)[None] * 7 % 300
    model = bases(kind)
    plain = logits(model, tokens)
    choice = load_adapters(model, list(folders.values()))
    readable = hasten.unfuse(bases(kind)).float()
    base_error = (plain - logits(readable, tokens)).norm() / plain.norm()
    for number, folder in enumerate(folders.values()):
        wanted = hasten.unfuse(bases(kind)).float()
        attach(wanted, [load_adapter(folder, wanted)])
        expected, choice.every = logits(wanted, tokens), number
        found = logits(model, tokens)
        assert (found - expected).norm() / expected.norm() <= 2 * base_error + 1e-3
        assert (found - plain).norm() / plain.norm() > 20 * base_error
    choice.every = -1
    assert torch.equal(logits(model, tokens), plain)
    with pytest.raises(ConfigError, match="has adapters"):
        hasten.unfuse(model)
    with pytest.raises(ConfigError, match="has adapters already"):
        load_adapters(model, list(folders.values()))


@needs_native
def test_a_fused_projection_without_gate(tmp_path):
    """GPT-2: biases, one c_attn, no gate; sizes that fill no panel."""
    config = read_config(gpt2(48, 2, 2, n_inner=90, n_positions=64) | {"vocab_size": 300, "initializer_range": 0.15})
    adapter = new_adapter(config, rank=5, alpha=10, targets=["all-linear"])
    for index, own in enumerate(adapter.values()):
        torch.nn.init.normal_(own.b, std=0.2, generator=torch.Generator().manual_seed(index))
    save_adapter(tmp_path, adapter, config)
    plain, wanted, model = (initialize(config, seed=0).to(torch.bfloat16).eval() for _ in range(3))
    tokens, model = torch.arange(30)[None] * 7 % 300, fuse(model)
    error = (logits(model, tokens) - logits(plain.float(), tokens)).norm()
    load_adapters(model, [tmp_path])
    load_adapters(wanted.float(), [tmp_path])
    expected = logits(wanted, tokens)
    assert (logits(model, tokens) - expected).norm() <= 2 * error + 1e-3 * expected.norm()
    assert (expected - logits(plain, tokens)).norm() > 20 * error


@needs_native
@pytest.mark.parametrize("kind", ["bfloat16", "int4"])
def test_a_mixed_batch_has_every_bit_of_rows_alone(kind, folders):
    """The logits of each sequence in a batch of both adapters and the model itself are those that it has alone."""
    model, batch = bases(kind), torch.randint(0, 300, (6, 9), generator=torch.Generator().manual_seed(0))
    plain = logits(model, batch)
    choice = load_adapters(model, list(folders.values()))
    numbers = [0, -1, 1, 1, -1, 0]
    choice.choose([number for number in numbers for _ in range(9)], model.device)
    mixed = logits(model, batch)
    assert torch.equal(mixed[[1, 4]], plain[[1, 4]])
    for row, number in enumerate(numbers):
        choice.choose([number] * 9, model.device)
        assert torch.equal(logits(model, batch[row : row + 1])[0], mixed[row])


@pytest.mark.parametrize("kind", [pytest.param("int4", marks=needs_native), "float32"])
def test_an_engine_serves_them_together(kind, folders):
    """Tokens alone, in a mixed batch, and again from the prefix cache; the model's own are those without adapters."""
    make = (lambda: tiny_llama()) if kind == "float32" else (lambda: bases(kind))
    without = hasten.LLM(make())
    base = [answer.tokens for answer in without.generate(PROMPTS, GREEDY)]
    without.close()
    llm = hasten.LLM(make(), adapters=folders, block_size=4)
    alone = {
        name: [llm.generate(prompt, GREEDY, adapter=name)[0].tokens for prompt in PROMPTS] for name in ("", "a0", "a1")
    }
    assert alone[""] == base
    assert alone["a0"] != base != alone["a1"] != alone["a0"]
    requests = [(name, i) for i in range(len(PROMPTS)) for name in ("a1", "", "a0")]
    made = [llm._requests(PROMPTS[i], GREEDY, {"adapter": name})[0] for name, i in requests]
    found = {one.id: [] for one in made}
    for output in llm._run(made):
        found[output.request_id] += output.tokens
    for one, (name, i) in zip(made, requests, strict=True):
        assert found[one.id] == alone[name][i]
    with pytest.raises(RequestRefused, match=r"no adapter 'a2' here; loaded: a0, a1"):
        llm.generate("x", GREEDY, adapter="a2")
    llm.close()


def test_their_prompts_share_no_cached_blocks(folders):
    llm = hasten.LLM(tiny_llama(), adapters=folders, block_size=4)
    prompt = PROMPTS[3]
    cached = [
        llm.generate(prompt, GREEDY, **how)[0].cached_tokens
        for how in ({}, {"adapter": "a0"}, {"salt": "a0\0"}, {"salt": "\0a0"}, {"adapter": "a0"}, {"adapter": "a1"})
    ]
    assert [count > 0 for count in cached] == [False, False, False, False, True, False]
    llm.close()


def test_a_request_chooses_by_its_model(folders):
    """/v1/models lists them, `model` chooses, the answer says which it was; an unknown name is 404."""
    model = tiny_llama()
    load_adapters(model, list(folders.values()))
    settings = EngineSettings(block_size=4, max_length=512)
    engine = AsyncEngine(Engine(model, model.tokenizer, settings, adapters=list(folders)))
    texts = {}
    with serving(app_of(engine)) as (url, _):
        listed = httpx.get(f"{url}/v1/models").json()["data"]
        assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("a0", "tiny"), ("a1", "tiny")]
        assert httpx.get(f"{url}/v1/models/a1").json()["id"] == "a1"
        for name in ("tiny", "a0", "a1", "a2"):
            body = {"model": name, "prompt": "def add", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body)
            if name == "a2":
                assert answer.status_code == 404
                assert "served: 'tiny', 'a0', 'a1'" in answer.json()["error"]["message"]
            else:
                assert answer.json()["model"] == name
                texts[name] = answer.json()["choices"][0]["text"]
        vectors = [
            httpx.post(f"{url}/v1/embeddings", json={"model": name, "input": "def"}).json()["data"][0]["embedding"]
            for name in ("tiny", "a0")
        ]
    assert len(set(texts.values())) == 3
    assert vectors[0] != vectors[1]


def test_names_of_adapters_are_refused_in_words():
    for wrong in ("folder", "=folder", "a=", "m=folder"):
        with pytest.raises(ConfigError, match="give NAME=FOLDER"):
            Serve(model="m", adapter=(wrong,)).adapters()
    with pytest.raises(ConfigError, match="that nothing else here has"):
        Serve(model="m", adapter=("a=x", "a=y")).adapters()


def test_a_hostile_adapter_loads_nothing(folders, tmp_path):
    model = tiny_llama()
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_adapters(model, [folders["a0"], tmp_path])
    assert model.adapters is None
