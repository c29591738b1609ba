"""The multi-token head of a checkpoint drafts: what its formulas say, and no answer is another one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from checkpoint_folders import write_folder
from drafting import KINDS, PROMPTS, answers, engine_of, requests
from hasten.checkpoints.load import open_checkpoint
from hasten.cli.generate import Generate
from hasten.cli.main import main
from hasten.cli.room import use_of
from hasten.engine import admission
from hasten.engine.settings import EngineSettings
from hasten.engine.speculation import make_speculator
from hasten.errors import CheckpointError, ConfigError, HastenWarning
from hasten.planning.memory import inference_memory
from hasten.quantization import Int8, quantize_to_folder
from instruction_sets import needs_native
from multi_token_head import FAMILIES, drafted, write_with_head
from references import make_reference
from serving_cases import run

pytestmark = pytest.mark.filterwarnings("ignore:.* of the multi-token prediction head")


def drafting(model, **how):
    """An engine that checks every draft of the model's head, and the drafts it makes: (text, draft) pairs."""
    engine, made = engine_of(model, **how.pop("engine", {})), []
    engine.speculator = speculator = make_speculator(model, "mtp", **how)
    speculator.always = True
    propose = speculator.proposer.propose

    def kept(texts, **more):
        drafts = propose(texts, **more)
        made.extend((list(text.tokens), list(draft.tokens)) for text, draft in zip(texts, drafts, strict=True))
        return drafts

    speculator.proposer.propose = kept
    return engine, made


@pytest.mark.parametrize(
    ("family", "agrees"), [*((family, False) for family in FAMILIES), ("qwen3_5_text", True)], ids=str
)
def test_it_drafts_what_the_formulas_do(family, agrees, tmp_path):
    """Prompts in pieces, texts side by side, drafts that are rejected or taken, states that are computed again."""
    reference, head = write_with_head(tmp_path, family, agrees=agrees)
    model = hasten.load(tmp_path, dtype="float32")
    engine, made = drafting(model, speculate=3)
    run(engine, requests(8, {"greedy": {}}))
    made = [one for one in made if one[1]]
    assert len(made) >= (6 if agrees else 12)
    assert max(len(draft) for _, draft in made) == 3
    assert (engine.stats().accepted_tokens > 6) == agrees
    for text, draft in made:
        assert drafted(reference, head, text, len(draft)) == draft, len(text)


def test_it_is_read_in_fp8_and_around_a_text_model(tmp_path):
    """As the files of models that also read images have it, with scales of rows."""
    _, head = write_with_head(tmp_path, "qwen3_5_text")
    file, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    state, rounded = {}, {}
    for name, tensor in load_file(file).items():
        own = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        state[own] = tensor
        if name.endswith("_proj.weight") or name == "mtp.fc.weight":
            scale = tensor.abs().amax(1, keepdim=True) / 448
            state[own] = (tensor / scale).to(torch.float8_e4m3fn)
            state[own.replace("weight", "weight_scale")] = scale
            rounded[name] = state[own].float() * scale
    save_file(state, file, metadata={"format": "pt"})
    outer = {"model_type": "qwen3_5", "text_config": config, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    model = hasten.load(tmp_path, dtype="float32")
    own = make_speculator(model, "mtp").proposer.head
    names = {"joined": "mtp.fc", "blocks.0.attention.q": "mtp.layers.0.self_attn.q_proj"}
    names["blocks.0.mlp.down"] = "mtp.layers.0.mlp.down_proj"
    for ours, name in names.items():
        assert torch.equal(own.get_submodule(ours).dequantize(torch.float32), rounded[f"{name}.weight"])
    assert torch.equal(own.norm.weight, head["mtp.norm.weight"])
    params = hasten.SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    plain = hasten.generate(model, PROMPTS[0], params)
    assert hasten.generate(model, PROMPTS[0], params, draft="mtp")[0].tokens == plain[0].tokens


@needs_native
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_without_drafts(family, tmp_path):
    write_with_head(tmp_path, family, agrees=True)
    model = hasten.fuse(hasten.load(tmp_path, dtype="bfloat16"))
    kinds = KINDS if family == "qwen3_5_text" else {name: KINDS[name] for name in ("greedy", "draws")}
    plain = answers(run(engine_of(model), requests(30, kinds)))
    engine, _ = drafting(model)
    assert not engine.speculator.proposer.head.readable, "it is fused as its model is"
    assert answers(run(engine, requests(30, kinds))) == plain
    stats = engine.stats()
    assert stats.accepted_tokens > 50 * len(kinds), "though a draft knows nothing of penalties and constraints"
    assert stats.prefix_hits > 0
    assert answers(run(engine, requests(30, kinds))) == plain, "from snapshots"
    proposer = engine.speculator.proposer
    assert not proposer._known  # nothing is kept of texts that have ended
    assert proposer._blocks.free == proposer._blocks.blocks


@needs_native
def test_a_preempted_text_goes_on_with_drafts(tmp_path):
    write_with_head(tmp_path, "qwen3_5_text", agrees=True)
    model = hasten.fuse(hasten.load(tmp_path, dtype="bfloat16"))
    kinds = {"greedy": {}, "draws": KINDS["draws"]}
    plain = answers(run(engine_of(model), requests(110, kinds)))
    engine, _ = drafting(model, engine={"blocks": 8, "sequences": 3, "prefix_cache": False})
    assert answers(run(engine, requests(110, kinds))) == plain
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.accepted_tokens > 200


def test_it_accepts_more_than_a_token_a_step(tmp_path):
    """In `hasten.generate`, `stream` and `LLM`, with as many drafts as pay."""
    write_with_head(tmp_path, "qwen3_5_text", agrees=True)
    model = hasten.load(tmp_path, dtype="float32")
    params = hasten.SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
    plain = [one.tokens for one in hasten.generate(model, PROMPTS, params)]
    assert [one.tokens for one in hasten.generate(model, PROMPTS, params, draft="mtp")] == plain
    llm = hasten.LLM(model, draft="mtp", accept="distribution", max_sequences=3, cache_bytes=1 << 22)
    llm.engine.speculator.always = True
    assert [one.tokens for one in llm.generate(PROMPTS, params)] == plain
    stats = llm.engine.speculator.stats
    assert stats.accepted_tokens > 2 * stats.drafts, "three tokens a step of each text"
    llm.close()


@needs_native
def test_the_fused_head_errs_as_the_readable_one(tmp_path):
    """At most twice its error in bfloat16, and both near the head in float32."""
    write_with_head(tmp_path, "qwen3_5_text")
    tokens, found = torch.tensor([PROMPTS[0]]), {}
    states = torch.randn(len(PROMPTS[0]), 64, generator=torch.Generator().manual_seed(0))
    for name, dtype in {"exact": "float32", "readable": "bfloat16", "fused": "bfloat16"}.items():
        model = hasten.load(tmp_path, dtype=dtype)
        model.auto_fuse = False
        if name == "fused":
            hasten.fuse(model)
        proposer = make_speculator(model, "mtp").proposer
        proposer._blocks.begin(0, ())
        proposer._blocks.reserve(0, tokens.shape[1])
        step = proposer.cache.step([_rows(proposer, tokens.shape[1])])
        with torch.inference_mode():
            found[name] = proposer.head.after(tokens, states.to(model.compute_dtype), step.positions, step).float()
    errors = {name: (found[name] - found["exact"]).square().mean().sqrt() for name in ("readable", "fused")}
    assert 0 < errors["fused"] <= 2 * errors["readable"] < 0.1 * found["exact"].square().mean().sqrt()


def _rows(proposer, count):
    from hasten.engine.block_table import Rows

    return Rows(proposer._blocks.block_table(0), 0, count)


def test_it_is_kept_by_what_writes_the_model(tmp_path):
    _, head = write_with_head(tmp_path / "model", "qwen3_5_text")
    model = hasten.load(tmp_path / "model", dtype="float32")
    hasten.save(model, tmp_path / "saved")
    quantize_to_folder(model, Int8(), tmp_path / "int8")
    params = hasten.SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    for name in ("saved", "int8"):
        stored = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(stored[tensor], own) for tensor, own in head.items())
        other = hasten.load(tmp_path / name, dtype="float32")
        plain = hasten.generate(other, PROMPTS[0], params)
        assert hasten.generate(other, PROMPTS[0], params, draft="mtp")[0].tokens == plain[0].tokens
    quantization = json.loads((tmp_path / "int8" / "config.json").read_text())["quantization_config"]
    assert {"mtp.fc", "mtp.layers.0.self_attn.q_proj"} <= set(quantization["ignore"])


def test_its_memory_is_counted_where_it_drafts(tmp_path):
    _, head = write_with_head(tmp_path, "qwen3_5_text")
    source = open_checkpoint(tmp_path)
    uses = [
        use_of(Generate(model="", prompt_ids=(1,), dtype="float32", draft=draft), source, "cpu")
        for draft in ("none", "mtp")
    ]
    assert uses[1].weights - uses[0].weights == sum(tensor.nbytes for tensor in head.values())
    kept = [inference_memory(source.config, use).parts["states for drafts"] for use in uses]
    assert kept == [0, 128 * source.config.hidden_size * 4]


def test_a_cache_leaves_room_for_the_states_that_it_reads(tmp_path, monkeypatch):
    write_with_head(tmp_path, "qwen3_5_text")
    model = hasten.load(tmp_path, dtype="float32")
    monkeypatch.setattr(admission, "available_memory", lambda device: 1 << 30)
    settings = EngineSettings(max_sequences=3, fit=True)
    free = [
        admission.cache_memory(model, settings, head_states=states)[0]
        for states in (0, make_speculator(model, "mtp").head_states)
    ]
    assert free[0] - free[1] == 3 * 128 * model.config.hidden_size * 4
    assert make_speculator(model, "suffix").head_states == 0


def test_a_head_that_cannot_be_read_again_is_not_left_out_in_silence(tmp_path):
    write_with_head(tmp_path / "model", "qwen3_5_text")
    model = hasten.load(tmp_path / "model", dtype="float32")
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.warns(HastenWarning, match=r"a multi-token head, if .*model had one, is not written again: .*model"):
        hasten.save(model, tmp_path / "saved")
    assert not any(name.startswith("mtp.") for name in load_file(tmp_path / "saved" / "model.safetensors"))


def test_a_draft_of_its_own_layers_points_to_it(tmp_path):
    write_with_head(tmp_path / "with", "qwen3_5_text")
    make_reference("qwen3_5_text").save_pretrained(tmp_path / "without")
    for name, instead in (("with", "take mtp, the multi-token head"), ("without", "take suffix, or a model")):
        model = hasten.load(tmp_path / name, dtype="float32")
        with pytest.raises(
            ConfigError, match=f"keep states, from which rejected tokens cannot be taken back; {instead}"
        ):
            make_speculator(model, "self:2-layers")


def test_the_command_line_refuses_its_own_layers_before_they_are_loaded_again(tmp_path, capsys, monkeypatch):
    write_with_head(tmp_path, "qwen3_5_text")
    monkeypatch.setattr(Generate, "in_int4", lambda *_: pytest.fail("loaded"))
    with pytest.raises(SystemExit):
        main(["generate", str(tmp_path), "--prompt-ids", "3", "--dtype", "float32", "--draft", "self:int4"])
    assert "self:int4: this model is a qwen3_5_text" in (said := capsys.readouterr().err)
    assert "take mtp, the multi-token head of its checkpoint" in said


def test_the_command_line_takes_it(tmp_path, capsys):
    write_with_head(tmp_path, "qwen3_5_text")
    said = []
    for draft in ("none", "MTP"):
        options = ["--temperature", "0", "--ignore-eos", "--max-new-tokens", "12", "--dtype", "float32", "--json", "-"]
        main(["generate", str(tmp_path), "--prompt-ids", *map(str, PROMPTS[1]), *options, "--draft", draft])
        said.append(json.loads(capsys.readouterr().out)["tokens"])
    assert said[0] == said[1]


def test_what_has_no_head_is_refused(tmp_path):
    write_folder(tmp_path / "llama")
    with pytest.raises(
        ConfigError, match=r"the draft mtp is for models with a multi-token head \(qwen3_next, .*not llama"
    ):
        make_speculator(hasten.load(tmp_path / "llama"), "mtp")
    reference = make_reference("qwen3_5_text")
    with pytest.raises(ConfigError, match="this model was made in memory"):
        make_speculator(hasten.load(reference), "mtp")
    reference.save_pretrained(tmp_path / "without")
    with pytest.raises(ConfigError, match=r"has no multi-token head: none of its \d+ tensors is called mtp"):
        make_speculator(hasten.load(tmp_path / "without"), "mtp")
    write_with_head(tmp_path / "model", "qwen3_5_text")
    model, file = hasten.load(tmp_path / "model", dtype="float32"), tmp_path / "model" / "model.safetensors"
    with pytest.raises(ConfigError, match="compiled blocks do not give"):
        hasten.generate(model, [3, 4], draft="mtp", compiled=True)
    whole = load_file(file)
    model = hasten.load(tmp_path / "model", dtype="float32")  # for which no head was read yet
    for error, match, changed in (
        (CheckpointError, "the multi-token head is not whole", {"mtp.fc.weight": None}),
        (ConfigError, "has 'mtp.layers.1.x', and hasten drafts with heads of one", {"mtp.layers.1.x": torch.ones(1)}),
        (CheckpointError, "mtp.fc.weight has shape", {"mtp.fc.weight": torch.zeros(64, 64)}),
    ):
        kept = {name: tensor for name, tensor in (whole | changed).items() if tensor is not None}
        save_file(kept, file, metadata={"format": "pt"})
        with pytest.raises(error, match=match):
            make_speculator(model, "mtp")
