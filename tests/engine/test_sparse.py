"""Generation by a model with a sparse pattern: what whole-sequence scoring sees, over a cache that stays small."""

import random
from dataclasses import replace

import pytest
import torch

import hasten
from drafting import proposing
from hasten.engine.admission import room
from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.for_texts import engine_for
from hasten.engine.generate import Generation
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import SamplingParams
from hasten.errors import CheckpointError, HastenWarning
from hasten.evaluation.perplexity import perplexity
from hasten.model.context import training_context
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.ops.native import library
from hasten.quantization import Int8, quantize
from serving_cases import make_engine, request, run
from serving_cases import tokens_of as answer_of

native = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
LENGTH = 150
VALUES = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 256,
}
PATTERNS = [
    "bigbird:block=16,random-blocks=2",
    "bigbird:block=16,per-head=true",
    "fixed:block=16,local-blocks=3,global-patterns=2",
    "strided:block=16,stride=3",
    "local:block=16,radius=1",
    "sliding-window:block=16,window=2",
    "atrous:block=1,stride=3",
]


def model_of(pattern, **changes):
    values = VALUES | {"hasten": {"attention_pattern": pattern_values(parse_pattern(pattern))}}
    model = initialize(read_config(values | changes), seed=1).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q.weight", "k.weight")):
                weight *= 12  # so that it matters what is seen
    return model


def windowed():
    return initialize(read_config(VALUES | {"model_type": "mistral", "sliding_window": 32}), seed=1).eval()


def tokens_of(rows=1, length=LENGTH):
    return torch.randint(60, (rows, length), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def whole(model, tokens):
    positions = torch.arange(tokens.shape[1])[None]
    return model(tokens, positions, training_context(model, tokens.shape[1]))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_prompts_pieces_and_steps_give_the_logits_of_the_whole_text(pattern):
    model = model_of(pattern)
    tokens = tokens_of()
    wanted = whole(model, tokens)[0]
    model.bind(attention="reference")
    torch.testing.assert_close(whole(model, tokens)[0], wanted, rtol=1e-4, atol=1e-5)
    model.bind()
    row = tokens[0].tolist()
    decoder = GivenTexts(model, batch=1, capacity=LENGTH)
    found = [decoder.prefill([row[:70]])]  # past what a bounded cache holds
    found.append(decoder.prefill([row[70:117]]))  # several tokens over a cache
    found += [decoder.decode(torch.tensor([token])) for token in row[117:]]
    places = [69, 116, *range(117, LENGTH)]
    torch.testing.assert_close(torch.cat(found), wanted[places], rtol=1e-4, atol=1e-5)
    dense = initialize(replace(model.config, attention_pattern=None), seed=1).eval()
    dense.load_state_dict(model.state_dict())
    assert (whole(dense, tokens)[0] - wanted).abs().max() > 1e-3, "the pattern hides something"


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_engine_serves_every_pattern(pattern):
    """Beside others, in pieces, and again after it was put aside, everybody gets the text of the model alone."""
    model = model_of(pattern)
    params = SamplingParams(temperature=0, max_new_tokens=30, ignore_eos=True)
    prompts = [tokens_of(1, length)[0].tolist() for length in (5, 70, 33)]
    engine = make_engine(model, blocks=34, token_budget=24)
    found = run(engine, [request(str(n), prompt, params=params) for n, prompt in enumerate(prompts)])
    for n, prompt in enumerate(prompts):
        assert answer_of(found[str(n)]) == hasten.generate(model, prompt, params)[0].tokens
    assert engine.stats().preemptions > 0 or model.config.reach is not None


@pytest.mark.parametrize("pattern", ["local:block=16,radius=1", "bigbird:block=16"])
def test_rows_of_different_lengths_stay_apart(pattern):
    model = model_of(pattern)
    rows = [tokens_of(1, n)[0].tolist() for n in (100, 31)]
    decoder = GivenTexts(model, batch=2, capacity=LENGTH)
    found = decoder.prefill(rows)
    steps = [decoder.decode(torch.tensor([5, 6]), active=[True, number < 2]) for number in range(20)]
    for row, own in enumerate(rows):
        torch.testing.assert_close(found[row], whole(model, torch.tensor([own]))[0, -1], rtol=1e-4, atol=1e-5)
        grown = torch.tensor([own + [5 + row] * (20 if row == 0 else 2)])
        last = steps[-1 if row == 0 else 1][row]
        torch.testing.assert_close(last, whole(model, grown)[0, -1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", ["local:block=16,radius=1", "bigbird:block=16"])
def test_small_rows_are_read_however_a_prompt_comes(pattern):
    model, [row] = model_of(pattern), tokens_of().tolist()
    found = {}
    for name, size in (("auto", LENGTH), ("int4", LENGTH), ("int4", 15)):
        decoder = GivenTexts(model, batch=1, capacity=LENGTH, kv_cache_dtype=name)
        for start in range(0, LENGTH, size):
            found[name, size] = decoder.prefill([row[start : start + size]])
    torch.testing.assert_close(found["int4", 15], found["int4", LENGTH], rtol=1e-3, atol=1e-4)
    assert (found["int4", 15] - found["auto", LENGTH]).abs().max() > 1e-3


@pytest.mark.parametrize("pattern", ["local:block=16,radius=1", "bigbird:block=16"])
def test_drafts_change_no_text(pattern):
    model, [prompt] = model_of(pattern), tokens_of(length=40).tolist()
    settings = {"max_new_tokens": 40, "temperature": 0.9, "seed": 5, "ignore_eos": True}
    plain = hasten.generate(model, [prompt], **settings)[0].tokens
    wrong = random.Random(0)

    def propose(text):
        known = plain[text.step :][: wrong.randint(0, 6)]
        return [(token + 1) % 60 if wrong.random() < 0.3 else token for token in known]

    speculator = proposing(propose)
    run = Generation(model, [prompt], speculator=speculator, **settings)
    assert [token for step in run for output in step for token in output.tokens] == plain
    assert 0 < speculator.stats.accepted_tokens < speculator.stats.draft_tokens


def test_a_local_pattern_bounds_the_cache():
    local = model_of("local:block=16,radius=1")
    dense = initialize(replace(local.config, attention_pattern=None), seed=1).eval()
    held = [engine_for(model, [100_000]).cache_bytes for model in (local, dense)]
    assert held[0] < held[1] / 20, "what a query sees, and a step of 4,096 tokens"
    assert engine_for(local, [60]).runner.side_by_side, "a query sees 32 keys"


def test_the_pattern_travels_with_the_folder(tmp_path):
    model = model_of("bigbird:block=16,random-blocks=2")
    with pytest.warns(HastenWarning, match="transformers does not know it"):
        hasten.save(model, tmp_path)
    again = hasten.load(tmp_path, dtype="stored")
    assert again.config.attention_pattern == model.config.attention_pattern
    tokens = tokens_of()
    torch.testing.assert_close(whole(again, tokens), whole(model, tokens))
    loss = torch.nn.functional.cross_entropy(whole(model, tokens[:, :-1])[0], tokens[0, 1:])
    assert perplexity(again, [tokens[0].tolist()]).perplexity == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.filterwarnings("ignore:.*transformers")
def test_a_quantized_folder_keeps_it(tmp_path):
    model = model_of("local:block=16,radius=1").to(torch.bfloat16)
    quantize(model, Int8())
    hasten.save(model, tmp_path)
    again = hasten.load(tmp_path, dtype="stored")
    assert again.config.attention_pattern == model.config.attention_pattern
    assert again.quantization is not None


def dense_of(model):
    dense = initialize(replace(model.config, attention_pattern=None), seed=1).eval()
    dense.load_state_dict(model.state_dict())
    return dense


def test_transformers_reads_the_folder_and_attends_to_everything(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = model_of("local:block=16,radius=1")
    with pytest.warns(HastenWarning):
        hasten.save(model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tokens = tokens_of()
    with torch.inference_mode():
        logits = theirs(tokens).logits
    torch.testing.assert_close(logits[:, :32], whole(model, tokens)[:, :32], rtol=1e-3, atol=1e-4)  # all is near there
    torch.testing.assert_close(logits, whole(dense_of(model), tokens), rtol=1e-3, atol=1e-4)


@native
@pytest.mark.parametrize("pattern", PATTERNS)
@torch.inference_mode()
def test_a_fused_model_sees_what_the_pattern_shows_over_every_cache(pattern):
    model, tokens = model_of(pattern), tokens_of()
    wanted, row = whole(model, tokens)[0], tokens[0].tolist()
    plain = whole(model.to(torch.bfloat16), tokens)[0] - wanted
    hasten.fuse(model)
    found = whole(model, tokens)[0]
    assert (found - wanted).square().mean() <= 4 * plain.square().mean()
    decoder = GivenTexts(model, batch=1, capacity=LENGTH)
    steps = [decoder.prefill([row[:70]]), decoder.prefill([row[70:117]])]
    steps += [decoder.decode(torch.tensor([token])) for token in row[117:]]
    assert torch.equal(torch.cat(steps), found[[69, 116, *range(117, LENGTH)]]), "the same bits, however it comes"
    cache = KVCache(model.config, blocks=LENGTH, block_size=4, dtype=torch.bfloat16, device="cpu")
    table = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(0)).tolist()
    for start, end in ((0, 70), (70, 117), (117, 118), (118, 119)):
        step = cache.step([Rows(table, start, end - start)])
        assert torch.equal(model(tokens[:, start:end], step.positions, step)[0, -1], found[end - 1])
    scored = [perplexity(model, [row], kv_cache_dtype=name).perplexity for name in ("auto", "int8")]
    assert scored[1] == pytest.approx(scored[0], rel=0.1)


@native
@pytest.mark.parametrize("pattern", ["bigbird:block=16", "local:block=16,radius=1"])
@torch.inference_mode()
def test_a_wrapped_block_beside_fused_ones_sees_the_same(pattern):
    model, tokens = hasten.fuse(model_of(pattern).to(torch.bfloat16)), tokens_of()
    wanted = whole(model, tokens)[0, -2:]
    model.blocks[1] = torch.nn.Sequential(model.blocks[1])
    model.blocks[1].forward = model.blocks[1][0].forward
    decoder = GivenTexts(model, batch=1, capacity=LENGTH)
    found = [decoder.prefill([tokens[0, :-1].tolist()]), decoder.decode(tokens[0, -1:])]
    assert torch.equal(torch.cat(found), wanted)


@pytest.mark.parametrize("model", [lambda: model_of("local:block=16"), windowed], ids=["local", "windows"])
def test_where_every_layer_looks_back_only_so_far_a_server_keeps_no_more(model):
    model = model()
    if library() is not None:
        hasten.fuse(model.to(torch.bfloat16))
    prompts = [row.tolist() for row in tokens_of(3)]
    params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    wanted = [hasten.generate(model, [prompt], **params)[0].tokens for prompt in prompts]
    size = -(-(32 + 16) // 4) + 1  # blocks of 4 that a sequence keeps at once: what it sees, and a step of 16 tokens
    engine = make_engine(model, blocks=3 * size, prefix_cache=False)
    assert "one of 256" in room(model, engine.settings, blocks=3 * size, max_length=256)
    found = run(engine, [request(str(n), prompt, **params) for n, prompt in enumerate(prompts)])
    assert [answer_of(found[str(n)]) for n in range(3)] == wanted
    assert engine.stats().preemptions == 0


def test_a_cache_of_windows_says_what_the_whole_text_does():
    model, tokens = windowed(), tokens_of()
    wanted, row = whole(model, tokens)[0], tokens[0].tolist()
    decoder = GivenTexts(model, batch=1, capacity=LENGTH)
    steps = [decoder.prefill([row[:70]]), decoder.prefill([row[70:117]])]
    steps += [decoder.decode(torch.tensor([token])) for token in row[117:]]
    places = [69, 116, *range(117, LENGTH)]
    torch.testing.assert_close(torch.cat(steps), wanted[places], rtol=1e-4, atol=1e-5)
    if library() is not None:
        hasten.fuse(model.to(torch.bfloat16))
        decoder = GivenTexts(model, batch=1, capacity=LENGTH)
        assert torch.equal(decoder.prefill([row]), whole(model, tokens)[:, -1])


@pytest.mark.parametrize("pattern", ["bigbird:block=16,random-blocks=2,per-head=true", "atrous:block=1,stride=3"])
@torch.inference_mode()
def test_a_paged_cache_shows_every_sequence_what_the_whole_text_sees(pattern):
    model, (one, two) = model_of(pattern), tokens_of(2).tolist()
    cache = KVCache(model.config, blocks=20, dtype=torch.float32, device="cpu")
    assert cache.kernel.name == "gathered"
    tables, wanted = (range(10, 20), range(10)), [whole(model, torch.tensor([row]))[0] for row in (one, two)]
    ends = [(0, 0)]
    for end in ((70, 30), (117, 31), (118, 32), (119, 33)):  # chunks of prompts, a chunk beside a decode, decodes
        places = list(zip(tables, ends[-1], end, strict=True))
        step = cache.step([Rows(table, begin, stop - begin) for table, begin, stop in places])
        tokens = [row[begin:stop] for row, (_, begin, stop) in zip((one, two), places, strict=True)]
        flat, last = [token for own in tokens for token in own], step.metadata.query_start_loc[1:] - 1
        found = model(torch.tensor([flat]), step.positions, step)[0, last]
        for row, stop in enumerate(end):
            torch.testing.assert_close(found[row], wanted[row][stop - 1], rtol=1e-4, atol=1e-5)
        ends.append(end)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "must be an object"),
        ({"name": "bigbrid"}, "known: causal"),
        ({"name": "local", "block": 7}, "multiples of 64"),
    ],
)
def test_a_folder_with_another_pattern_is_refused(given, said):
    with pytest.raises(CheckpointError, match=said):
        read_config(VALUES | {"hasten": {"attention_pattern": given}})
