"""Latent attention: its two forms are one function, and what a cache keeps is the latent and one key for all heads."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
from hasten.checkpoints.adapter_files import save_adapter
from hasten.checkpoints.adapters import load_adapters
from hasten.engine.block_table import Rows
from hasten.engine.cache import ROW_FORMATS, KVCache
from hasten.errors import CheckpointError, ConfigError
from hasten.model.binding import explain
from hasten.model.context import TrainingContext
from hasten.model.families import read_config
from hasten.model.fused import fuse
from hasten.model.fused_block import unknown_parts
from hasten.model.lora import attach, new_adapter
from hasten.model.shares import shares
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.planning.cost import forward_flops_per_token, kv_bytes_per_token, parameters
from hasten.planning.memory import InferenceUse, memory_of
from hasten.quantization.schemes import layers_to_quantize
from hasten.quantization.walk import CalibrationWalk
from hasten.training.activations import apply_checkpointing
from instruction_sets import needs_native
from parity import PROMPTS, TOLERANCE, our_logits, reference_greedy
from references import decided, make_reference, values_of

CASES = ("deepseek_v3", "deepseek_v3-plain", "deepseek_v2", "deepseek_v2-lite", "glm4_moe_lite", "mistral4", "youtu")
LONG = [torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (70, 41)]
SOME = [[5, 6, 7, 8, 9, 10], [90, 3, 4]]


def cached_logits(model, tokens, parts, kept="auto"):
    """Logits (T, V) over a cache of blocks, the tokens in steps of these sizes."""
    like = {"dtype": model.compute_dtype, "device": "cpu", "row_format": ROW_FORMATS[kept]}
    cache, found, at = KVCache(model.config, blocks=8, block_size=16, **like), [], 0
    for count in parts:
        step = cache.step([Rows(list(range(8)), at, count)])
        with torch.no_grad():
            found.append(model(torch.tensor([tokens[at : at + count]]), step.positions, step)[0])
        at += count
    return torch.cat(found)


def greedy(model, prompts, count, **options):
    """By readable blocks."""
    model.auto_fuse = False
    params = hasten.SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    return [answer.tokens for answer in hasten.generate(model, prompts, params, **options)]


def error(found, expected):
    """The median of the tokens' errors: near ties send a few of them to other experts, whatever is rounded."""
    return (found.float() - expected.float()).norm(dim=-1).median()


@pytest.mark.parametrize("name", CASES)
def test_over_a_cache_it_is_what_it_is_without(name):
    """Absorbed queries over latents, and expanded keys and values of all heads."""
    model = hasten.load(make_reference(name), dtype="float32")
    for tokens in LONG:
        expected = our_logits(model, tokens)
        for parts in ([len(tokens)], [1] * len(tokens), [17, 1, 1, len(tokens) - 19]):
            assert (cached_logits(model, tokens, parts) - expected).abs().max() <= TOLERANCE


@pytest.mark.parametrize("kept", ["int8", "int4", "int8-plain", "int4-plain"])
def test_latents_are_kept_in_fewer_bits(kept):
    model = hasten.load(make_reference("glm4_moe_lite"), dtype="float32")
    model = decided(model)
    expected, found = (cached_logits(model, LONG[0], [30] + [1] * 40, own) for own in ("auto", kept))
    error = (found - expected).norm() / expected.norm()
    assert 0 < error < (0.05 if "int8" in kept else 0.6)
    config, bits = model.config, ROW_FORMATS[kept]
    whole = KVCache.bytes_per_block(config, block_size=4, dtype=torch.float32, row_format=bits)
    assert whole == 4 * 4 * bits.bytes(40, torch.float32)


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


def test_sequences_that_find_no_room_begin_again():
    model = hasten.load(make_reference("deepseek_v3"), dtype="float32")
    prompts = [LONG[0][:20], LONG[1][:20], LONG[0][5:25]]
    expected = greedy(model, prompts, 24)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    blocks = 24 * KVCache.bytes_per_block(model.config, block_size=4, dtype=torch.float32)
    llm = hasten.LLM(model, max_sequences=3, block_size=4, cache_bytes=blocks)
    assert [answer.tokens for answer in llm.generate(prompts, params)] == expected
    assert llm.engine.stats().preemptions > 0
    llm.close()


def test_a_cache_keeps_a_latent_and_one_key_for_all_heads():
    model = hasten.load(make_reference("deepseek_v3"))
    config = model.config
    assert (config.latent.kept, config.kv_heads, config.head_dim) == (40, 1, 40)
    assert KVCache.bytes_per_block(config, block_size=4, dtype=torch.float32) == 4 * 4 * 40 * 4
    assert kv_bytes_per_token(config, 4) == 4 * 40 * 4  # layers, numbers, bytes
    cache = KVCache(config, blocks=3, block_size=4, dtype=torch.float32, device="cpu")
    assert all(k is v for k, v in zip(cache.k, cache.v, strict=True))
    assert cache.bytes == 13 * 4 * 40 * 4  # slots, with that of the padding
    use = InferenceUse(length=9, step=8, weights=0, row_bytes=4 * 40, block_size=4)
    assert memory_of(config, use).parts["cache"] == 12 * kv_bytes_per_token(config, 4)


def test_blocks_are_copied_moved_and_kept():
    model = hasten.load(make_reference("deepseek_v2-lite"), dtype="float32")
    like = {"dtype": torch.float32, "device": "cpu"}
    cache = KVCache(model.config, blocks=4, block_size=8, **like)
    step = cache.step([Rows([0, 1], 0, 13)])
    with torch.no_grad():
        model(torch.tensor([LONG[0][:13]]), step.positions, step)
        cache.copy([(0, 2)])
        cache.write_blocks([3], cache.read_blocks([1]))
        cache.grow(9)
        again = [cache.step([Rows(table, 13, 1)]) for table in ([0, 1], [2, 3])]
        one, other = (model(torch.tensor([[7]]), step.positions, step) for step in again)
    assert torch.equal(one, other)
    assert cache.block_bytes == KVCache.bytes_per_block(model.config, block_size=8, dtype=torch.float32)


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
    unrouted = {name for name, _ in model.named_parameters() if ".experts." in name or name.endswith("choice_bias")}
    assert {name for name, _ in model.named_parameters()} - set(found) <= {"head.weight"} | unrouted
    model.zero_grad()  # the weights are the reference's own
    logits = reference(tokens).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-5, atol=0)
    expected.backward()
    theirs, latent = dict(reference.named_parameters()), model.config.latent
    pairs = {"kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "output": "o_proj"}
    pairs |= {"q": "q_proj"} if latent.query_rank is None else {"q_down": "q_a_proj", "q_up": "q_b_proj"}
    for ours, place in pairs.items():
        wanted = theirs[f"model.layers.2.self_attn.{place}.weight"].grad
        assert (found[f"blocks.2.attention.{ours}.weight"] - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_packed_documents_do_not_see_each_other():
    model = hasten.load(make_reference("deepseek_v3"), dtype="float32")
    tokens, documents = torch.tensor([LONG[0][:30]]), torch.tensor([[0] * 12 + [1] * 18])
    positions = torch.cat([torch.arange(12), torch.arange(18)])[None]
    with torch.no_grad():
        found = model(tokens, positions, TrainingContext([None] * 4, documents))[0]
    alone = torch.cat([our_logits(model, LONG[0][:12]), our_logits(model, LONG[0][12:30])])
    assert (found - alone).abs().max() <= TOLERANCE


@pytest.mark.parametrize("scheme", [hasten.Int8(lm_head="none"), hasten.Int4(group_size=32, lm_head="none")], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2-lite", "youtu"])
@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")
def test_a_quantized_model_computes_with_the_numbers_that_it_holds(name, scheme, tmp_path):
    model = hasten.quantize(decided(hasten.load(make_reference(name))), scheme)
    assert not any(layer.endswith("kv_up") for layer in model.quantization)
    found, tokens = our_logits(model, PROMPTS[0]), greedy(model, SOME, 8)
    hasten.save(model, tmp_path / "plain", dequantize=True)
    plain = our_logits(hasten.load(tmp_path / "plain", dtype="float32"), PROMPTS[0])
    assert error(found, plain) <= (1e-3 if isinstance(scheme, hasten.Int8) else 0.2) * plain.norm(dim=-1).median()
    hasten.save(model, tmp_path / "quantized")
    again = hasten.load(tmp_path / "quantized", dtype="float32")
    assert torch.equal(our_logits(again, PROMPTS[0]), found)
    assert greedy(again, SOME, 8) == tokens


@pytest.mark.parametrize("name", ["deepseek_v3", "youtu"])
def test_a_product_of_each_head_that_is_stored_quantized_is_unpacked(name, tmp_path):
    """Without a warning: that is how it is always multiplied, and how `plan` counts it."""
    hasten.save(hasten.quantize(decided(hasten.load(make_reference(name))), hasten.Int8(lm_head="none")), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(4):
        place = f"model.layers.{layer}.self_attn.kv_b_proj.weight"
        scale = tensors[place].abs().amax(1, keepdim=True) / 127
        tensors |= {place: (tensors[place] / scale).round().to(torch.int8), f"{place}_scale": scale}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    ignored = [one for one in values["quantization_config"]["ignore"] if "kv_b_proj" not in one]
    values["quantization_config"]["ignore"] = ignored
    (tmp_path / "config.json").write_text(json.dumps(values))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = hasten.load(tmp_path, dtype="float32")
    weight = model.blocks[0].attention.kv_up.weight
    place = "model.layers.0.self_attn.kv_b_proj.weight"
    torch.testing.assert_close(weight, tensors[place] * tensors[f"{place}_scale"])
    assert "blocks.0.attention.kv_up" not in model.quantization
    assert "blocks.0.attention.kv_down" in model.quantization


@pytest.mark.parametrize("name", CASES)
def test_calibration_gives_each_block_what_it_has_in_the_model(name):
    model = hasten.load(make_reference(name))
    tokens = torch.randint(3, 100, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        walk = CalibrationWalk(model, tokens)
        for index, block in enumerate(model.blocks):
            walk.advance(index, block)
        expected = model.states(tokens, torch.arange(20).expand(3, -1), TrainingContext([None] * 4))
    torch.testing.assert_close(walk.states, expected, rtol=1e-4, atol=1e-4)
    hasten.quantize(model, hasten.Int8(), method=hasten.GPTQ(), calibration=tokens)
    assert set(model.quantization) == set(layers_to_quantize(hasten.load(make_reference(name)))) - {"embedding"}
    assert greedy(model, SOME, 4)


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2-lite"])
def test_adapters_beside_all_its_products(name):
    """In training through the expanded form, over a cache through the absorbed one; each row takes its own."""
    model = hasten.load(make_reference(name), dtype="float32")
    made = [new_adapter(model.config, rank=3, alpha=5, targets=["all-linear"]) for _ in range(2)]
    assert any(layer.endswith("kv_up") for layer in made[0])
    for adapter in made:
        for own in adapter.values():
            torch.nn.init.normal_(own.b.data, std=0.3)
    plain = our_logits(model, LONG[0])
    choice = attach(model, made)
    for number in (0, 1, -1):
        choice.every = number
        expected = our_logits(model, LONG[0])
        assert (cached_logits(model, LONG[0], [30] + [1] * 40) - expected).abs().max() <= TOLERANCE
        assert torch.equal(expected, plain) == (number < 0)
    cache = KVCache(model.config, blocks=8, block_size=16, dtype=torch.float32, device="cpu")
    step = cache.step([Rows([0, 1], 0, 20), Rows([2, 3], 0, 20), Rows([4, 5], 0, 20)])
    choice.choose([1] * 20 + [-1] * 20 + [0] * 20, torch.device("cpu"))
    with torch.no_grad():
        found = model(torch.tensor([LONG[0][:20] * 3]), step.positions, step)[0].split(20)
    choice.rows = None
    for number, own in zip((1, -1, 0), found, strict=True):
        choice.every = number
        assert (own - our_logits(model, LONG[0][:20])).abs().max() <= TOLERANCE


@needs_native
@pytest.mark.parametrize("targets", [["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"], ["kv_b_proj"]])
def test_adapters_of_a_model_that_generates(targets, tmp_path):
    """Within the native blocks, or by readable ones where an adapter changes the product of each head."""
    exact = decided(hasten.load(make_reference("deepseek_v3"), dtype="float32"))
    adapter = new_adapter(exact.config, rank=3, alpha=5, targets=targets)
    for own in adapter.values():
        torch.nn.init.normal_(own.b.data, std=0.1)
    save_adapter(tmp_path / "a", adapter, exact.config)
    model, plain = (decided(hasten.load(make_reference("deepseek_v3"), dtype="bfloat16")) for _ in range(2))
    choice = load_adapters(model, [tmp_path / "a"])
    assert (model.stack is not None) == (targets != ["kv_b_proj"])
    attach(exact, [adapter])
    attach(plain, [adapter])
    choice.every = 0
    expected, parts = our_logits(exact, LONG[0]), [30] + [1] * 40
    found = cached_logits(model, LONG[0], parts)
    assert error(found, expected) <= 2 * error(our_logits(plain, LONG[0]), expected)
    choice.every = -1
    assert error(cached_logits(model, LONG[0], parts), expected) > 4 * error(found, expected)


@needs_native
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-plain"])
@pytest.mark.parametrize("kept", ["auto", "int8", "int4"])
def test_the_native_kernel_errs_no_more_than_twice_as_much_as_pytorch(name, kept):
    exact = hasten.load(make_reference(name), dtype="float32")
    model = hasten.load(make_reference(name), dtype="bfloat16")
    parts = [30] + [1] * 40
    expected = cached_logits(decided(exact), LONG[0], parts)
    found = cached_logits(decided(model), LONG[0], parts, kept).float()
    with hasten.kernels(model, attention="reference"):
        plain = our_logits(model, LONG[0]).float()
    assert KVCache(model.config, blocks=1, dtype=torch.bfloat16, device="cpu").kernel.name == "native"
    if kept == "auto":
        assert error(found, expected) <= 2 * error(plain, expected)
    else:
        reference = cached_logits(exact, LONG[0], parts, kept)
        assert error(found, expected) <= 2 * (error(reference, expected) + error(plain, expected))


@needs_native
@pytest.mark.parametrize("name", CASES)
def test_its_blocks_are_one_native_call(name):
    """Of prompts, their pieces and decodes, over every kind of cache and without one; and back."""
    expected = our_logits(decided(hasten.load(make_reference(name), dtype="float32")), LONG[0])
    model = decided(hasten.load(make_reference(name), dtype="bfloat16"))
    plain = our_logits(model, LONG[0])
    limit = 2 * error(plain, expected)
    fuse(model)
    assert {row.kernel for row in explain(model) if row.operator in ("block", "attention")} == {"fused"}
    assert error(our_logits(model, LONG[0]), expected) <= limit
    for kept, more in (("auto", 1), ("int8", 2), ("int4-plain", 30)):
        assert error(cached_logits(model, LONG[0], [30, 17] + [1] * 23, kept), expected) <= more * limit
    one, other = (cached_logits(model, LONG[0], parts) for parts in ([70], [30, 17] + [1] * 23))
    assert torch.equal(one, other), "the same bits, however a text is cut"
    hasten.unfuse(model)
    again = decided(hasten.load(make_reference(name), dtype="bfloat16"))
    pairs = zip(model.named_parameters(), again.named_parameters(), strict=True)
    assert all(one == other and torch.equal(own, held) for (one, own), (other, held) in pairs)


def test_explain_says_what_runs():
    model = hasten.load(make_reference("glm4_moe_lite"), dtype="bfloat16")
    found = {row.operator: row for row in explain(model) if row.layer == 0}
    assert {"attention", "attention over a cache", "paged attention"} <= set(found)
    for name in ("reference", "chunked"):
        with hasten.kernels(model, attention=name):
            forced = {row.operator: row for row in explain(model) if row.layer == 0}
            assert forced["attention over a cache"].kernel == forced["attention"].kernel == name
    again = {row.operator: row for row in explain(model) if row.layer == 0}
    assert again["attention over a cache"] == found["attention over a cache"]


def test_a_forced_linear_kernel_reaches_its_products_too():
    model = hasten.load(make_reference("youtu"), dtype="bfloat16")
    expected = cached_logits(model, PROMPTS[0], [10, 1, 1, 1, 1]).float()
    with hasten.kernels(model, linear="reference"):
        found = cached_logits(model, PROMPTS[0], [10, 1, 1, 1, 1]).float()
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_what_does_not_run_is_refused_by_name():
    config = read_config(values_of("deepseek_v3"))
    with pytest.raises(ConfigError, match=r"--tensor-parallel is 2; a deepseek_v3 has latent attention"):
        shares(config, 2)
    assert len(shares(config, 1)) == 1
    assert unknown_parts(config) == "no latent attention"  # on a GPU
    pattern = {"hasten": {"attention_pattern": pattern_values(parse_pattern("local:radius=1"))}}
    with pytest.raises(CheckpointError, match="latent attention has no sparse pattern"):
        read_config(values_of("deepseek_v3") | pattern)
    with pytest.raises(CheckpointError, match="norm_topk_prob must be False or absent"):
        read_config(values_of("deepseek_v2") | {"norm_topk_prob": True})
    with pytest.raises(CheckpointError, match="mlp_layer_types must be a list of 4"):
        read_config(values_of("glm4_moe_lite") | {"mlp_layer_types": ["dense"]})


def test_layers_that_predict_further_tokens_are_left_in_the_file(tmp_path):
    reference = make_reference("deepseek_v3")
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = hasten.load(tmp_path, dtype="float32")
    error = our_logits(model, PROMPTS[0]) - our_logits(hasten.load(reference), PROMPTS[0])
    assert error.abs().max() <= TOLERANCE


def test_kimi_k2_is_a_deepseek_v3():
    values = values_of("deepseek_v3")
    assert read_config(values | {"model_type": "kimi_k2"}) == read_config(values)


# Published sizes, and what their papers and model cards say of them.
V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "vocab_size": 129_280,
    "max_position_embeddings": 163_840,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V2_LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10_944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 102_400,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
}


@pytest.mark.parametrize(
    ("values", "billions", "active", "per_token"), [(V3, 671, 37, 70_272), (V2_LITE, 15.7, 2.4, 31_104)]
)
def test_published_models_are_counted_as_their_authors_do(values, billions, active, per_token):
    """671 billion weights, 37 for each token; 15.7 and 2.4. Of a token 576 numbers in each layer, two bytes each."""
    config = read_config(values)
    count = parameters(config)
    assert count.total == pytest.approx(billions * 1e9, rel=0.01)
    assert count.active == pytest.approx(active * 1e9, rel=0.06)
    assert kv_bytes_per_token(config, 2) == per_token
    rows = InferenceUse(length=1024, step=1024, weights=0, row_bytes=2 * 576)
    assert memory_of(config, rows).parts["cache"] == 1024 * per_token
    # Beside the weights, of each key seen: queries and keys of 192 numbers, values of 128, in each head.
    layers = len(config.layers)
    beside = forward_flops_per_token(config, 1000) - 2 * count.active
    assert beside == pytest.approx(layers * config.heads * 2 * (192 + 128) * 500.5, rel=1e-6)


def test_the_scale_of_the_scores_has_yarns_factor_twice():
    factor = 0.1 * torch.tensor(40.0).log().item() + 1
    assert read_config(V3).layers[0].scale == pytest.approx(192**-0.5 * factor**2)
    assert replace(read_config(V3).ropes[0]).attention_factor == 1.0
