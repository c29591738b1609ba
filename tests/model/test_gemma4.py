"""Gemma 4: layers that use the keys of others, per-layer embeddings in the file's pages, experts with norms."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
import references
from hasten.engine.cache import KVCache
from hasten.engine.compiled import compile_blocks
from hasten.model.binding import explain
from hasten.model.context import TrainingContext
from hasten.model.families import read_config
from hasten.model.fused import fuse
from hasten.model.last_rows import LayerOfRows
from hasten.ops.calls import BlocksCall
from hasten.ops.native import library
from hasten.planning.cost import kv_bytes_per_token, parameters
from hasten.planning.memory import InferenceUse, calibration_memory, memory_of
from hasten.planning.plan import inference_phases
from hasten.quantization.schemes import layers_to_quantize
from hasten.quantization.walk import CalibrationWalk
from hasten.training.activations import apply_checkpointing
from instruction_sets import needs_native
from parity import PROMPTS, our_logits, reference_greedy
from references import decided, make_reference, values_of

CASES = ("gemma4_text", "gemma4_text-shared", "gemma4_text-experts")
SHARED = "gemma4_text-shared"
WIDE = references.GEMMA4 | {"num_hidden_layers": 6, "head_dim": 256, "global_head_dim": 512}
LONG = [torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 41)]


@pytest.mark.parametrize("name", CASES)
def test_served_together_each_text_is_that_of_transformers(name):
    """In steps of 24 tokens, so that prompts are read in chunks; the second time with blocks of the prefix cache."""
    reference = make_reference(name)
    model, prompts = hasten.load(reference, dtype="float32"), [*PROMPTS, *LONG]
    expected = [reference_greedy(reference, tokens, 16) for tokens in prompts]
    params = hasten.SamplingParams(temperature=0, max_new_tokens=16, min_new_tokens=16)
    llm = hasten.LLM(model, max_sequences=4, token_budget=24, block_size=4)
    for cached in (False, True):
        answers = llm.generate(prompts, params)
        assert [answer.tokens for answer in answers] == expected
        assert any(answer.cached_tokens for answer in answers) == cached
    llm.engine.check()
    llm.close()


def test_layers_that_use_the_keys_of_others_keep_none():
    model = hasten.load(make_reference(SHARED))
    config, each = model.config, 2 * 2 * 4  # keys and values, heads, bytes of a number
    assert [layer.keys_of for layer in config.layers] == [None] * 6 + [4, 5]
    kept = 5 * 16 + 32  # elements of a head, in all layers that keep keys
    assert KVCache.bytes_per_block(config, block_size=4, dtype=torch.float32) == 4 * kept * each
    assert kv_bytes_per_token(config, 4) == kept * each
    cache = KVCache(config, blocks=3, block_size=4, dtype=torch.float32, device="cpu")
    assert len(cache.k) == 8
    assert cache.k[6] is cache.k[4]
    assert cache.v[7] is cache.v[5]
    use = InferenceUse(length=9, step=8, weights=0, row_bytes=4 * 16, block_size=4)
    assert memory_of(config, use).parts["cache"] == 12 * kept * each


def test_a_prompt_passes_the_layers_without_keys_with_its_last_token_only():
    model, sizes = hasten.load(make_reference(SHARED), dtype="float32"), {5: [], 6: []}
    for layer, found in sizes.items():
        model.blocks[layer].mlp.register_forward_pre_hook(lambda _, given, own=found: own.append(given[0].shape[:2]))
    params = hasten.SamplingParams(temperature=0, max_new_tokens=3, ignore_eos=True)
    answers = hasten.generate(model, LONG, params)
    assert sizes == {5: [(2, 70), (2, 1), (2, 1)], 6: [(1, 2), (2, 1), (2, 1)]}
    for text, answer in zip(LONG, answers, strict=True):
        for place, token in enumerate(answer.tokens):
            assert our_logits(model, [*text, *answer.tokens[:place]])[-1].argmax() == token


@pytest.mark.parametrize("how", [None, "full", "selective"])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_are_those_of_transformers(name, how):
    reference = make_reference(name)
    model, tokens = hasten.load(reference).train(), torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    if how is not None:
        apply_checkpointing(model, how)
    context = TrainingContext([layer.window for layer in model.config.layers])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    loss = model(tokens[:, :-1], positions[:, :-1], context, targets=tokens[:, 1:].contiguous())
    loss.backward()
    found = {name: own.grad.clone() for name, own in model.named_parameters() if own.grad is not None}
    assert {name for name, _ in model.named_parameters()} - set(found) <= {"head.weight"}
    model.zero_grad()  # the weights are the reference's own
    logits = reference(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)
    expected.backward()
    theirs = dict(reference.named_parameters())
    for ours, place in {
        "blocks.4.attention.k.weight" if name == SHARED else "blocks.2.attention.k.weight": "self_attn.k_proj",
        "blocks.1.mlp.down.weight" if name != CASES[2] else "blocks.1.mlp.shared.down.weight": "mlp.down_proj",
    }.items():
        layer = ours.split(".")[1]
        wanted = theirs[f"model.layers.{layer}.{place}.weight"].grad
        assert (found[ours] - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    if name == SHARED:
        wanted = theirs["model.embed_tokens_per_layer.weight"].grad
        assert (found["token_features.embedding.weight"] - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_per_layer_embeddings_are_used_in_the_files_pages(tmp_path):
    reference = make_reference(SHARED).to(torch.bfloat16)
    reference.save_pretrained(tmp_path)
    model = hasten.load(tmp_path, dtype="stored")
    table = model.token_features.embedding.weight
    file = str(tmp_path / "model.safetensors")
    maps = Path("/proc/self/maps").read_text().splitlines()
    ranges = [line.split()[0].split("-") for line in maps if line.endswith(file)]
    assert any(int(low, 16) <= table.data_ptr() < int(high, 16) for low, high in ranges)
    expected = our_logits(hasten.load(reference), PROMPTS[0])
    assert torch.equal(our_logits(model, PROMPTS[0]), expected)


def test_files_may_hold_keys_of_layers_that_use_those_of_others(tmp_path):
    """As the published ones do: transformers and hasten skip them in silence."""
    reference = make_reference(SHARED)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.7.self_attn.{part}.weight"] = torch.ones(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = hasten.load(tmp_path, dtype="float32")
    assert torch.equal(our_logits(model, PROMPTS[0]), our_logits(hasten.load(reference), PROMPTS[0]))


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model; transformers does not")
@pytest.mark.parametrize("scheme", [hasten.Int8(lm_head="none"), hasten.Int4(group_size=32, lm_head="none")], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_quantized_model_computes_with_the_numbers_that_it_holds(name, scheme, tmp_path):
    model = hasten.quantize(decided(hasten.load(make_reference(name))), scheme)
    found = our_logits(model, PROMPTS[0])
    hasten.save(model, tmp_path / "plain", dequantize=True)
    plain = our_logits(hasten.load(tmp_path / "plain", dtype="float32"), PROMPTS[0])
    assert (found - plain).abs().max() <= (1e-3 if isinstance(scheme, hasten.Int8) else 0.2) * plain.abs().max()
    hasten.save(model, tmp_path / "quantized")
    assert torch.equal(our_logits(hasten.load(tmp_path / "quantized", dtype="float32"), PROMPTS[0]), found)


@pytest.mark.parametrize("name", CASES)
def test_calibration_gives_each_block_what_it_has_in_the_model(name, monkeypatch):
    model = hasten.load(make_reference(name))
    tokens = torch.randint(3, 100, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        walk = CalibrationWalk(model, tokens)
        walk.step = 2
        for index, block in enumerate(model.blocks):
            walk.advance(index, block)
        context = TrainingContext([layer.window for layer in model.config.layers])
        expected = model.states(tokens, torch.arange(20).expand(3, -1), context)
    torch.testing.assert_close(walk.states, expected, rtol=1e-4, atol=1e-4)
    if model.token_features is not None:  # each block's own are computed, and no others
        monkeypatch.setattr(type(model.token_features), "forward", lambda *_: pytest.fail("those of all layers"))
    hasten.quantize(model, hasten.Int8(), method=hasten.GPTQ(), calibration=tokens)
    assert set(model.quantization) == set(layers_to_quantize(hasten.load(make_reference(name))))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layers_own_features_are_its_part_of_all(dtype):
    model = hasten.load(make_reference(SHARED), dtype=dtype)
    features = model.token_features
    assert features is not None
    tokens = torch.arange(3, 13).view(2, 5)
    with torch.no_grad():
        x = model.embed(tokens, torch.arange(5).expand(2, -1))
        every = features(tokens, x)
        for layer, expected in enumerate(every):
            own = features.of_layer(layer, tokens, x)
            assert own.dtype == expected.dtype
            torch.testing.assert_close(own, expected, rtol=1e-5 if dtype == "float32" else 0.02, atol=1e-5)


@needs_native
@pytest.mark.parametrize("name", CASES)
def test_its_blocks_are_one_native_call(name):
    model = hasten.load(make_reference(name), dtype="bfloat16")
    hasten.generate(model, [[5, 6, 7]], max_new_tokens=2, temperature=0)
    assert model.stack is not None
    assert {row.kernel for row in explain(model) if row.operator in ("block", "attention")} == {"fused"}


@needs_native
def test_of_a_prompt_the_native_blocks_without_keys_compute_the_scored_tokens_only(monkeypatch):
    model, calls = fuse(hasten.load(make_reference(SHARED), dtype="bfloat16")), []
    stack = model.stack
    assert stack.plan(model) is not None
    run = stack._blocks
    monkeypatch.setattr(stack, "_blocks", lambda *call: calls.append(BlocksCall(*call)) or run(*call))
    hasten.generate(model, LONG, max_new_tokens=2, temperature=0, draft="none")
    first, rest, every = (stack.plan(model, layers) for layers in (slice(6), slice(6, None), slice(None)))
    assert [call.x.shape[:-1].numel() for call in calls] == [111, 2, 2]
    assert all(call.stack is plan for call, plan in zip(calls, (first, rest, every), strict=True))


@needs_native
@pytest.mark.parametrize("scheme", [None, hasten.Int8(), hasten.Int4(group_size=32)], ids=str)
def test_hooked_blocks_give_what_all_give_in_one_call(scheme):
    model = hasten.load(make_reference(SHARED), dtype="bfloat16")
    fuse(model if scheme is None else hasten.quantize(model, scheme))
    params = hasten.SamplingParams(temperature=0, max_new_tokens=6, ignore_eos=True)
    expected = [answer.tokens for answer in hasten.generate(model, LONG, params)]
    seen = []
    model.blocks[6].register_forward_hook(lambda *given: seen.append(given[0]))
    assert [answer.tokens for answer in hasten.generate(model, LONG, params)] == expected
    assert seen


def test_heads_of_512_are_served_and_explained(monkeypatch):
    monkeypatch.setitem(references.CASES, "wide", ("Gemma4TextConfig", "Gemma4ForCausalLM", WIDE))
    reference = make_reference("wide")
    model = hasten.load(reference, dtype="float32")
    params = hasten.SamplingParams(temperature=0, max_new_tokens=8, min_new_tokens=8)
    llm = hasten.LLM(model, max_sequences=2, token_budget=24, block_size=4)
    expected = [reference_greedy(reference, tokens, 8) for tokens in PROMPTS]
    assert [answer.tokens for answer in llm.generate(PROMPTS, params)] == expected
    llm.close()
    model = hasten.load(reference, dtype="bfloat16")
    found = {row.kernel for row in explain(model) if row.operator == "paged attention"}
    assert len(found) == 1, "one kernel for layers of both sizes"
    narrow = hasten.load(make_reference("llama"), dtype="bfloat16")
    assert found == {row.kernel for row in explain(narrow) if row.operator == "paged attention"}
    if library() is not None:
        fuse(model)


def test_a_plan_counts_per_layer_embeddings_apart():
    config = hasten.load(make_reference(SHARED)).config
    count = parameters(config)
    assert count.table == 103 * 8 * 32
    use = InferenceUse(length=16, step=8, weights=4 * count.total, row_bytes=64, table=4 * count.table, mapped=True)
    memory = memory_of(config, use)
    assert memory.parts["weights"] + memory.parts["per-layer embeddings"] == 4 * count.total
    assert "per-layer embeddings" not in memory.at_peak
    _, token = inference_phases(config, use)
    assert token.moved < 4 * (count.total - count.table) + 2 * 16 * kv_bytes_per_token(config, 4)


def test_calibration_counts_the_keys_that_blocks_lend():
    config = read_config(values_of(SHARED))
    states = 24 * config.hidden_size * 4  # of 24 tokens
    memory = calibration_memory(config, states=states, walks=2, step=4, squares=3.25, spill=True)
    assert memory.parts["lent keys and values"] == 2 * 24 * 4 * 2 * 2 * (16 + 32)


def test_a_published_config_is_wrapped_and_names_what_global_layers_have(tmp_path):
    values = {"text_config": {"model_type": "gemma4_text", "num_hidden_layers": 6}, "model_type": "gemma4"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = hasten.model.families.read_config(values)
    assert [config.head_dim_of(layer) for layer in config.layers] == [256] * 5 + [512]
    assert config.ropes[1].turned == 64


def test_its_first_layers_draft_for_it():
    model = hasten.load(make_reference("gemma4_text-shared"), dtype="float32")
    options = {"max_new_tokens": 12, "temperature": 0}
    expected = hasten.generate(model, [[5, 6, 7, 8]], **options)
    assert hasten.generate(model, [[5, 6, 7, 8]], draft="self:6-layers", **options) == expected


def test_prompts_are_not_compiled_where_few_rows_pass_the_last_layers(monkeypatch):
    model, calls = hasten.load(make_reference("gemma4_text-shared"), dtype="float32"), []
    monkeypatch.setattr(torch, "compile", lambda run, **_: lambda *x, **more: calls.append(x) or run(*x, **more))
    compile_blocks(model)
    hasten.generate(model, [[5, 6, 7, 8]], max_new_tokens=3, temperature=0, draft="none")
    assert calls
    assert not any(isinstance(one, LayerOfRows) for given in calls for one in given)
