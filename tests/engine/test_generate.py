"""Generation: the cache, batches and streaming change nothing of what the plain model says."""

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hasten
from hasten.engine.generate import Generation, Timing
from hasten.errors import ConfigError
from hasten.model.context import TrainingContext
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from references import tiny_llama

GREEDY = hasten.SamplingParams(temperature=0, max_new_tokens=12, ignore_eos=True)
MODEL = tiny_llama()
IDS = st.lists(st.integers(0, 255), min_size=1, max_size=20)


def plain_greedy(model, prompt, count):
    """Recompute everything for each token, without a cache."""
    tokens = list(prompt)
    context = TrainingContext([layer.window for layer in model.config.layers])
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], context)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@settings(max_examples=15)
@given(st.lists(IDS, min_size=1, max_size=4))
def test_a_batch_gives_each_prompt_what_it_gets_alone_and_without_a_cache(prompts):
    together = hasten.generate(MODEL, prompts, GREEDY)
    for prompt, output in zip(prompts, together, strict=True):
        assert output.tokens == hasten.generate(MODEL, prompt, GREEDY)[0].tokens
        assert output.tokens == plain_greedy(MODEL, prompt, 12)
        assert output.prompt_tokens == len(prompt)
        assert output.finish_reason == "length"


def test_a_call_leaves_nothing_to_the_collector():
    """Whose next run would come at some token."""
    hasten.generate(MODEL, [1, 2, 3], GREEDY)
    gc.collect()
    gc.disable()
    earlier = {id(one) for one in gc.get_objects()}  # what other tests left, and this call may be the last to hold
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        hasten.generate(MODEL, [[1, 2, 3], [4]], GREEDY)
        gc.collect()
        left = [one for one in gc.garbage if id(one) not in earlier]
        assert [one for one in left if type(one).__module__.startswith("hasten")] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_windowed_and_soft_capped_layers_in_a_batch():
    values = {
        "model_type": "gemma2",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 64,
        "max_position_embeddings": 128,
        "sliding_window": 4,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "initializer_range": 0.2,
        "query_pre_attn_scalar": 16,
    }
    model = initialize(read_config(values), seed=1).eval()
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [10], [11, 12, 13]]
    for prompt, output in zip(prompts, hasten.generate(model, prompts, GREEDY), strict=True):
        assert output.tokens == plain_greedy(model, prompt, 12)


def test_stream_gives_the_text_of_generate():
    params = hasten.SamplingParams(temperature=1.0, seed=3, max_new_tokens=60, ignore_eos=True)
    pieces = list(hasten.stream(MODEL, "def add", params))
    output = hasten.generate(MODEL, "def add", params)[0]
    assert "".join(pieces) == output.text == MODEL.tokenizer.decode(output.tokens)
    assert len(pieces) > 5


def test_seeds_reproduce_alone_and_in_a_batch():
    prompts = ["for name", "def", "print(f"]
    params = [hasten.SamplingParams(seed=s, max_new_tokens=20, temperature=1.2, top_p=0.95) for s in (1, 2, 1)]
    together = hasten.generate(MODEL, prompts, params)
    for prompt, own, output in zip(prompts, params, together, strict=True):
        assert hasten.generate(MODEL, prompt, own)[0].tokens == output.tokens
    other = hasten.generate(MODEL, "def", seed=9, max_new_tokens=20, temperature=1.2)[0]
    assert other.tokens != together[1].tokens


def test_stop_strings_are_cut_and_end_the_output():
    free = hasten.generate(MODEL, "def", GREEDY)[0]
    stop = free.text[3:6]
    output = hasten.generate(MODEL, "def", GREEDY, stop=(stop,))[0]
    assert output.finish_reason == "stop"
    assert output.text == free.text[: free.text.index(stop)]
    assert len(output.tokens) <= len(free.tokens)


def test_end_of_text_ends_and_minimum_holds_it_off():
    free = hasten.generate(MODEL, "def", GREEDY)[0]
    end = free.tokens[2]
    first = free.tokens.index(end)
    output = hasten.generate(MODEL, "def", GREEDY, stop_token_ids=(end,))[0]
    assert output.tokens == free.tokens[: first + 1]
    assert output.finish_reason == "stop"
    held = hasten.generate(MODEL, "def", GREEDY, stop_token_ids=(end,), min_new_tokens=8)[0]
    assert len(held.tokens) >= 8
    assert end not in held.tokens[:8]


def test_rows_that_ended_do_not_disturb_the_others():
    prompts = ["def add", "for name in"]
    free = hasten.generate(MODEL, prompts, GREEDY)
    params = [hasten.SamplingParams(temperature=0, max_new_tokens=2, ignore_eos=True), GREEDY]
    short = hasten.generate(MODEL, prompts, params)
    assert short[0].tokens == free[0].tokens[:2]
    assert short[1].tokens == free[1].tokens


def test_output_is_bounded_by_the_positions_of_the_model():
    output = hasten.generate(MODEL, [5] * 505, temperature=0, max_new_tokens=100, ignore_eos=True)[0]
    assert len(output.tokens) == 7
    assert output.finish_reason == "length"
    with pytest.raises(ConfigError, match="512 positions"):
        hasten.generate(MODEL, [5] * 512, GREEDY)


def test_penalties_change_what_greedy_says():
    free = hasten.generate(MODEL, "def", GREEDY)[0].tokens
    once = hasten.generate(MODEL, "def", GREEDY, presence_penalty=2.0, frequency_penalty=2.0, repetition_penalty=5.0)
    assert len(set(once[0].tokens)) > len(set(free)) or once[0].tokens != free
    banned = hasten.generate(MODEL, "def", GREEDY, logit_bias={free[0]: -1e9})[0].tokens
    assert free[0] not in banned


def test_token_ids_work_without_a_tokenizer():
    model = tiny_llama()
    model.tokenizer = None
    output = hasten.generate(model, [1, 2, 3], GREEDY)[0]
    assert len(output.tokens) == 12
    assert output.text == ""
    with pytest.raises(ConfigError, match="no tokenizer"):
        hasten.generate(model, "text", GREEDY)
    with pytest.raises(ConfigError, match="stop strings"):
        hasten.generate(model, [1], GREEDY, stop=("x",))


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "no prompt"),
        ([[]], "empty"),
        ([[1], []], "empty"),
        ([999_999], "outside the vocabulary"),
        ([-1], "outside"),
    ],
)
def test_bad_prompts(prompts, message):
    model = tiny_llama()
    model.tokenizer = None
    with pytest.raises(ConfigError, match=message):
        hasten.generate(model, prompts, GREEDY)


def test_unknown_settings_and_wrong_counts_are_refused():
    with pytest.raises(ConfigError, match="unknown sampling setting"):
        hasten.generate(MODEL, "x", temprature=0)
    with pytest.raises(ConfigError, match="2 sampling parameters"):
        hasten.generate(MODEL, "x", [GREEDY, GREEDY])


def test_timing_counts_tokens():
    timing = Timing()
    run = Generation(MODEL, ["def add", "for"], GREEDY, timing=timing)
    assert sum(1 for _ in run) == 12
    assert timing.prefill_tokens == sum(len(p) for p in run.prompts)
    assert timing.decode_tokens == 2 * 11
    assert 0 < timing.first_token <= timing.prefill_seconds + 1


def test_padded_vocabulary_is_never_sampled():
    config = tiny_llama().config.padded_to(512)
    model = initialize(config, seed=0).eval()
    model.head.weight.data[config.vocab_size :] = 100.0  # would win every draw
    output = hasten.generate(model, [[1, 2, 3]] * 4, max_new_tokens=30, temperature=2.0, seed=0)
    assert all(token < config.vocab_size for o in output for token in o.tokens)


def test_rows_end_apart_at_the_edge_of_the_model():
    """A long prompt that ends early, beside a short one that goes on: each gets what it gets alone."""
    prompts = [[5] * 508, [1, 2, 3], list(range(40, 90))]
    params = [
        hasten.SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True, min_new_tokens=count)
        for count in (4, 30, 2)
    ]
    for prompt, own, output in zip(prompts, params, hasten.generate(MODEL, prompts, params), strict=True):
        assert output.tokens == hasten.generate(MODEL, prompt, own)[0].tokens
        assert len(output.tokens) == own.max_new_tokens


def test_rows_of_one_setting_are_bounded_each_by_its_own_room():
    outputs = hasten.generate(MODEL, [[7] * 500, [1, 2]], temperature=0, max_new_tokens=40, ignore_eos=True)
    assert [len(o.tokens) for o in outputs] == [12, 40]


@pytest.mark.parametrize(
    "prompts", [None, 5, [1.5, 2], [True, False], b"abc", [b"abc"], [[1, "x"]], {"a": 1}, ["x", None]]
)
def test_prompts_of_a_wrong_type_are_refused(prompts):
    with pytest.raises(ConfigError):
        hasten.generate(MODEL, prompts, GREEDY)


def test_tensors_and_arrays_are_prompts():
    expected = hasten.generate(MODEL, [3, 4, 5], GREEDY)[0].tokens
    for prompt in (torch.tensor([3, 4, 5]), torch.tensor([3, 4, 5]).numpy(), (3, 4, 5), torch.tensor([[3, 4, 5]])):
        assert hasten.generate(MODEL, prompt, GREEDY)[0].tokens == expected


def test_params_and_streams_of_a_wrong_kind_are_refused():
    for params in ({"temperature": 0}, "greedy", [{"temperature": 0}]):
        with pytest.raises(ConfigError, match="SamplingParams"):
            hasten.generate(MODEL, "x", params)
    with pytest.raises(ConfigError, match="one prompt"):
        list(hasten.stream(MODEL, ["a", "b"], GREEDY))
