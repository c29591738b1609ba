"""Generation and serving on a GPU: in float32 the tokens of a CPU, whatever the steps, the cache and the drafts are."""

import copy

import pytest
import torch

import hasten
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import SamplingParams
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from references import make_reference, tiny_llama
from triton_cases import needs_gpu

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, needs_gpu]
FAMILIES = ("gpt2", "llama-mqa", "mistral", "qwen3", "gemma2", "gemma3_text", "mixtral", "phi3")
PROMPTS = [[7, 3, 90, 41, 12, 55, 8, 8, 23, 60, 71, 5, 33], [18, 99, 3], [64, 29, 77, 50, 51, 64, 29, 77] * 5]
FLOAT = {"activations": "float"}  # as the Triton products have them
SCHEMES = [None, hasten.Int8(**FLOAT), hasten.Int4(group_size=32, **FLOAT), hasten.Int4(group_size=64, **FLOAT)]
PATTERNS = ["bigbird:block=16,random-blocks=2", "sliding-window:block=16,window=2", "atrous:block=1,stride=3"]


def there(model):
    """A copy of the model on the GPU."""
    moved = copy.deepcopy(model).to(DEVICE)
    moved.bind()
    return moved.eval()


def greedy(decoder, steps=8):
    """Logits (steps + 1, B, V) after the prompts and after each most likely token."""
    found = [decoder.prefill(PROMPTS).clone()]
    for _ in range(steps):
        found.append(decoder.decode(found[-1].argmax(-1)).clone())
    return torch.stack(found).cpu()


def answers(model, params, **options):
    llm = hasten.LLM(model, **options)
    return [answer.tokens for answer in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("family", FAMILIES)
def test_families_compute_what_a_cpu_computes(family):
    model = hasten.load(make_reference(family), dtype="float32").eval()
    expected = greedy(GivenTexts(model, batch=3, capacity=128))
    moved = there(model)
    for decoder in (
        GivenTexts(moved, batch=3, capacity=128),
        GivenTexts(moved, batch=3, capacity=128, compiled=True),
        GivenTexts(moved, batch=3, capacity=128),
    ):
        torch.testing.assert_close(greedy(decoder), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("draft", ["none", "suffix", "self:1-layers"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_answers_with_the_tokens_of_a_cpu(draft, temperature):
    model = tiny_llama()
    params = SamplingParams(max_new_tokens=24, temperature=temperature, top_p=0.95, seed=3, ignore_eos=True)
    expected = answers(model, params)
    moved = there(model)
    assert answers(moved, params, draft=draft) == expected
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert hasten.generate(moved, prompt, params, draft=draft)[0].tokens == tokens


def test_small_blocks_small_steps_and_a_full_cache_change_nothing():
    model = tiny_llama()
    params = SamplingParams(max_new_tokens=24, temperature=0, ignore_eos=True)
    expected = answers(model, params)
    assert answers(there(model), params, max_sequences=3, token_budget=8, cache_bytes=40_000) == expected


@pytest.mark.parametrize("cache", ["int8", "int4"])
def test_rounded_caches(cache):
    model = tiny_llama()
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    assert answers(there(model), params, kv_cache_dtype=cache) == answers(model, params, kv_cache_dtype=cache)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_sparse_patterns(pattern):
    model = tiny_llama(hasten={"attention_pattern": pattern_values(parse_pattern(pattern))})
    expected = greedy(GivenTexts(model, batch=3, capacity=128))
    torch.testing.assert_close(greedy(GivenTexts(there(model), batch=3, capacity=128)), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bfloat16_and_quantized_weights_keep_the_perplexity(scheme):
    model = tiny_llama(hidden_size=256, num_attention_heads=4, head_dim=64, intermediate_size=512)
    text = ["def add(a, b):\n    return a + b\n\nfor name in names:\n    print(name)\n" * 3]
    exact = copy.deepcopy(model)
    if scheme is not None:
        hasten.quantize(exact, scheme)
    moved = copy.deepcopy(model).to(DEVICE, torch.bfloat16)
    moved.bind()
    if scheme is not None:
        hasten.quantize(moved, scheme)
    found = hasten.perplexity(moved, text).perplexity
    assert found == pytest.approx(hasten.perplexity(exact, text).perplexity, rel=0.03)
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    assert [len(tokens) for tokens in answers(moved, params)] == [12] * len(PROMPTS)


def test_a_folder_is_loaded_onto_it(tiny_folder, tiny):
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    moved = hasten.load(tiny_folder, device=DEVICE, dtype="stored")
    assert moved.device.type == DEVICE
    assert answers(moved, params) == answers(tiny, params)
    chosen = hasten.load(tiny_folder, device=DEVICE)  # in the dtype to generate in
    assert chosen.dtype == torch.bfloat16
    assert [len(tokens) for tokens in answers(chosen, params)] == [12] * len(PROMPTS)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_another_gpu_than_the_current_one(tiny_folder):
    """Steps are captured there, and tokens are read when they are there."""
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)
    first, second = (hasten.load(tiny_folder, device=f"cuda:{i}") for i in (0, 1))
    assert answers(second, params) == answers(first, params)
