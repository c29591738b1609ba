"""Layers that keep a state of each text: in batches, chunks, forks and after preemption as that of the text alone."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.engine.cache import KVCache
from hasten.engine.compiled import compile_blocks
from hasten.engine.engine import Engine
from hasten.engine.given_texts import GivenTexts
from hasten.engine.settings import EngineSettings
from hasten.engine.state_slots import StateSlots
from hasten.errors import ConfigError, ResourceError
from hasten.model.fused import fuse_where_it_fits, is_fused
from hasten.planning.memory import InferenceUse, cache_bytes
from instruction_sets import needs_native
from parity import PROMPTS, TOLERANCE, our_logits, reference_greedy
from references import decided, make_reference
from serving_cases import request, run, tokens_of

FUSED = ["qwen3_next", "qwen3_5_text", "qwen3_5_text-kinds", "qwen3_5_moe_text", "lfm2", "lfm2-biases", "lfm2_moe"]
FUSED += ["granitemoehybrid", "granitemoehybrid-dense"]
FAMILIES = [*FUSED, "nemotron_h", "nemotron_h-dense"]
LONG = [torch.randint(3, 100, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (150, 67, 40)]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    reference = make_reference(request.param)
    return reference, hasten.load(reference, dtype="float32")


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_5_text", "float32"),
        pytest.param(("qwen3_5_text", "bfloat16"), marks=needs_native),
        ("lfm2", "float32"),
        ("granitemoehybrid-dense", "float32"),
        ("nemotron_h-dense", "float32"),
    ],
    ids="-".join,
)
def model(request):
    """In bfloat16 it is fused."""
    family, dtype = request.param
    return fuse_where_it_fits(hasten.load(make_reference(family), dtype=dtype))


def greedy(model, prompt, count):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    return hasten.generate(model, [prompt], params)[0].tokens


def engine_of(model, *, blocks, sequences, **more):
    """An engine with exactly these blocks of 16 tokens, beside the states of its sequences."""
    size = KVCache.bytes_per_block(model.config, block_size=16, dtype=model.dtype)
    states = sequences * KVCache.bytes_per_sequence(model.config, model.dtype)
    assert blocks * size >= states, "else fewer sequences run"
    settings = EngineSettings(max_sequences=sequences, cache_bytes=blocks * size + states, prefix_cache=False, **more)
    return Engine(model, model.tokenizer, settings)


def test_served_together_each_text_is_that_of_transformers(pair):
    """In steps of 24 tokens, so that prompts are read in chunks beside the tokens of other texts."""
    reference, model = pair
    prompts = [*PROMPTS, *LONG]
    expected = [reference_greedy(reference, tokens, 24) for tokens in prompts]
    params = hasten.SamplingParams(temperature=0, max_new_tokens=24, min_new_tokens=24)
    llm = hasten.LLM(model, max_sequences=4, token_budget=24, block_size=4)
    assert [answer.tokens for answer in llm.generate(prompts, params)] == expected
    llm.engine.check()
    llm.close()
    assert [answer.tokens for answer in hasten.generate(model, prompts, params)] == expected


@needs_native
@pytest.mark.parametrize("family", FUSED)
def test_fused_each_text_is_that_of_the_text_alone(family):
    """In steps of 24 tokens, and from snapshots."""
    model = hasten.fuse(decided(hasten.load(make_reference(family), dtype="bfloat16")))
    prompts = [*PROMPTS, *LONG]
    expected = [greedy(model, prompt, 24) for prompt in prompts]
    assert is_fused(model)
    params = hasten.SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    llm = hasten.LLM(model, max_sequences=4, token_budget=24, block_size=4)
    for cached in (False, True):
        answers = llm.generate(prompts, params)
        assert [answer.tokens for answer in answers] == expected
        assert any(answer.cached_tokens for answer in answers) == cached
    llm.engine.check()
    llm.close()


def test_logits_of_a_cut_prompt_are_those_of_the_whole_one(pair):
    _, model = pair
    texts = GivenTexts(model, batch=2, capacity=200)
    for part in range(5):
        found = texts.prefill([prompt[len(prompt) * part // 5 : len(prompt) * (part + 1) // 5] for prompt in LONG[:2]])
    expected = our_logits(model, LONG[0])[-1]
    assert (found[0] - expected).abs().max() <= TOLERANCE
    token = int(expected.argmax())
    found = texts.decode(torch.tensor([token, 5]))
    assert (found[0] - our_logits(model, [*LONG[0], token])[-1]).abs().max() <= TOLERANCE
    assert (found[1] - our_logits(model, [*LONG[1], 5])[-1]).abs().max() <= TOLERANCE


def test_texts_that_rest_keep_their_states(model):
    texts = GivenTexts(model, batch=3, capacity=64)
    texts.prefill([[5, 6, 7], [8], [9, 10]])
    texts.decode(torch.tensor([11, 12, 13]), active=[True, False, True])
    found = texts.decode(torch.tensor([14, 15, 16]), active=[False, True, True])
    for row, text in ((1, [8, 15]), (2, [9, 10, 13, 16])):
        assert (found[row] - our_logits(model, text)[-1]).abs().max() <= TOLERANCE


def test_a_preempted_text_is_computed_again(model):
    engine = engine_of(model, blocks=20, sequences=3, token_budget=32)
    prompts = [LONG[0][:33], LONG[1][:34], LONG[2][:35]]
    found = run(engine, [request(str(i), prompt, max_new_tokens=85) for i, prompt in enumerate(prompts)])
    assert engine.stats().preemptions > 0
    for number, prompt in enumerate(prompts):
        assert tokens_of(found[str(number)]) == greedy(model, prompt, 85)


def test_samples_and_beams_go_on_from_copies(model):
    engine = engine_of(model, blocks=60, sequences=4)
    how = {"temperature": 1.0, "seed": 7, "max_new_tokens": 20}
    found = run(engine, [request("four", LONG[2], n=4, **how)])["four"]
    samples = [tokens_of(found, index) for index in range(4)]
    assert len({tuple(tokens) for tokens in samples}) == 4
    for index, tokens in enumerate(samples):
        alone = hasten.SamplingParams(temperature=1.0, seed=7 + index, max_new_tokens=20, ignore_eos=True)
        assert hasten.generate(model, [LONG[2]], alone)[0].tokens == tokens


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "lfm2", "granitemoehybrid", "nemotron_h"])
def test_beams_are_those_of_transformers(family):
    reference = make_reference(family)
    reference.generation_config.eos_token_id = None
    model = hasten.load(reference, dtype="float32")
    found = reference.generate(
        torch.tensor([PROMPTS[0]]),
        attention_mask=torch.ones(1, len(PROMPTS[0]), dtype=torch.int64),
        max_new_tokens=12,
        num_beams=4,
        num_return_sequences=4,
        do_sample=False,
        pad_token_id=0,
    )
    engine = engine_of(model, blocks=60, sequences=4)
    own = run(engine, [request("beams", PROMPTS[0], max_new_tokens=12, beam_width=4, n=4)])["beams"]
    assert [tokens_of(own, index) for index in range(4)] == found[:, len(PROMPTS[0]) :].tolist()


def test_a_text_that_takes_the_place_of_another_begins_with_no_state(model):
    engine = engine_of(model, blocks=20, sequences=1)
    for prompt in (LONG[1], [7], LONG[2], [7]):
        found = run(engine, [request("one", prompt, max_new_tokens=8)])["one"]
        assert tokens_of(found) == greedy(model, prompt, 8)
    assert engine.blocks.slots.begin() == 0


@given(st.lists(st.sampled_from(["take", "fork", "end"]), max_size=40), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_no_two_texts_have_one_place(actions, random):
    """Copies in the order they are given leave each text the contents it has: those of the text it was forked from."""
    slots, held, wanted, memory, most = StateSlots(), {}, {}, {}, 0
    for number, action in enumerate(actions):
        if action == "take" or not held:  # texts begin in a step, after the copies that were due before it
            for source, target in slots.copies():
                memory[target] = memory[source]
            held[number], wanted[number] = slots.begin(), number
            memory[held[number]] = number
        elif action == "fork":
            parent = random.choice(list(held))
            held[number], wanted[number] = slots.fork(held[parent]), wanted[parent]
        else:
            slots.end(held.pop(random.choice(list(held))))
        most = max(most, len(held))
        assert len(set(held.values())) == len(held)
        assert max(held.values(), default=0) < most
    for source, target in slots.copies():
        memory[target] = memory[source]
    assert {number: memory[slot] for number, slot in held.items()} == {number: wanted[number] for number in held}


def test_states_are_counted_where_memory_is_asked_for(model):
    config, sequences = model.config, 3
    cache = KVCache(config, blocks=5, block_size=16, sequences=sequences, dtype=torch.float32, device="cpu")
    each = KVCache.bytes_per_sequence(config, torch.float32)
    numbers = {"qwen3_5_text": 16 * 8 * 12 + 3 * (2 * 4 * 8 + 16 * 12), "lfm2": 2 * 64}
    numbers["granitemoehybrid"] = 8 * 12 * 16 + 2 * (128 + 2 * 12)
    numbers["nemotron_h"] = 8 * 12 * 16 + 2 * (128 + 2 * 2 * 12)
    assert each == 3 * 4 * numbers[config.family]
    blocks = 5 * KVCache.bytes_per_block(config, block_size=16, dtype=torch.float32)
    padding = 2 * config.kv_heads * config.head_dim * 4  # the last row
    assert cache.bytes == blocks + padding + sequences * each
    use = InferenceUse(length=80, step=80, weights=0, dtype="float32", row_bytes=4 * config.head_dim, block_size=16)
    assert cache_bytes(config, use) == blocks + each


def test_as_many_texts_run_as_have_room_for_their_states(caplog):
    model = hasten.load(make_reference("qwen3_5_text"), dtype="float32")
    each = KVCache.bytes_per_sequence(model.config, model.dtype)
    with caplog.at_level(logging.WARNING, logger="hasten.engine"):
        engine = Engine(model, model.tokenizer, EngineSettings(max_sequences=64, cache_bytes=20 * each))
    assert engine.settings.max_sequences == 5  # with a snapshot for each, in half of the memory
    assert engine.cache_bytes <= 20 * each + 4096
    assert "5 sequences run at the same time instead of 64" in caplog.text
    alone = Engine(model, model.tokenizer, EngineSettings(cache_bytes=20 * each, prefix_cache=False))
    assert alone.settings.max_sequences == 10
    found = run(engine, [request(str(i), prompt, max_new_tokens=6) for i, prompt in enumerate([*PROMPTS, [7]] * 3)])
    assert tokens_of(found["0"]) == tokens_of(found["3"]) == greedy(model, PROMPTS[0], 6)
    with pytest.raises(ResourceError, match="the states of one sequence take"):
        Engine(model, model.tokenizer, EngineSettings(cache_bytes=each))


def test_what_would_take_tokens_back_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match=f"the draft model is a {model.config.family}, whose layers keep states"):
        hasten.LLM(hasten.load(make_reference("llama"), dtype="float32"), draft=model)
    with pytest.raises(ConfigError, match=f"--prefix-cache DIR keeps blocks, .* layers of a {model.config.family}"):
        hasten.LLM(model, prefix_cache=str(tmp_path))
    with pytest.raises(ConfigError, match="are not compiled; leave --compile out"):
        compile_blocks(model)
    texts = GivenTexts(model, batch=1, capacity=32)
    texts.prefill([[5, 6, 7]])
    with pytest.raises(ConfigError, match="keeps states, from which no tokens can be taken back"):
        texts.truncate(2)
    texts.truncate(0)
    assert (texts.prefill([[9, 8]])[0] - our_logits(model, [9, 8])[-1]).abs().max() <= TOLERANCE


def test_drafts_are_left_out_where_nobody_asks_for_them(model):
    params = hasten.SamplingParams(temperature=0, max_new_tokens=8, ignore_eos=True)
    llm = hasten.LLM(model, draft="auto")
    assert llm.engine.speculator is None
    assert llm.generate([PROMPTS[0]], params)[0].tokens == greedy(model, PROMPTS[0], 8)
    llm.close()


def test_prompts_have_log_probabilities(model):
    llm = hasten.LLM(model, token_budget=16, max_sequences=2)
    (answer,) = llm.generate([LONG[2]], hasten.SamplingParams(temperature=0, max_new_tokens=1), prompt_logprobs=1)
    logprobs = our_logits(model, LONG[2]).log_softmax(-1)
    expected = [float(logprobs[place, token]) for place, token in enumerate(LONG[2][1:])]
    assert [one.logprob for one in answer.prompt_logprobs[1:]] == pytest.approx(expected, abs=1e-4)
    llm.close()
