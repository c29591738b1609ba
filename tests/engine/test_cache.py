"""Small caches (int8, int4, rotated or not): what they change, that nothing goes past them, and who refuses what."""

import pytest
import torch

import hasten
from hasten.cli.main import main
from hasten.engine.block_table import Rows
from hasten.engine.cache import ROW_FORMATS, KVCache, row_format
from hasten.engine.given_texts import GivenTexts
from hasten.engine.params import KVCacheDtype, SamplingParams
from hasten.errors import ConfigError
from hasten.evaluation.divergence import divergence
from hasten.ops.native import library
from references import make_reference, tiny_llama

SMALL = [name for name in ROW_FORMATS if name != "auto"]
TOKENS = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(0)).tolist()
native = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
TINY = tiny_llama()


def token_by_token(model, tokens, name, batch=1):
    """Logits after each token (T, V), the first given as a prompt."""
    decoder = GivenTexts(model, batch=batch, capacity=len(tokens), kv_cache_dtype=name)
    found = [decoder.prefill([tokens[:1]] * batch)]
    found += [decoder.decode(torch.tensor([token] * batch)) for token in tokens[1:]]
    return torch.stack(found)[:, 0]


def last(model, tokens, name, pieces=1):
    decoder, size = GivenTexts(model, batch=1, capacity=len(tokens), kv_cache_dtype=name), len(tokens) // pieces
    for start in range(0, len(tokens), size):
        logits = decoder.prefill([tokens[start : start + size]])
    return logits[0]


def paged(model, tokens, name):
    """The same over blocks in another order (T, V)."""
    make = {"blocks": len(tokens), "block_size": 4, "dtype": model.dtype, "device": "cpu"}
    context = KVCache(model.config, **make, row_format=row_format(name)).step(
        [Rows(range(len(tokens) - 1, -1, -1), 0, len(tokens))]
    )
    with torch.inference_mode():
        return model(torch.tensor([tokens]), context.positions, context)[0]


@native
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("family", ["gpt2", "llama-mqa", "gemma2"])
def test_a_fused_model_says_the_same_bits_over_static_and_paged_caches(family, name):
    model = hasten.fuse(hasten.load(make_reference(family)).eval().to(torch.bfloat16))
    blocks = paged(model, TOKENS, name)
    assert torch.equal(token_by_token(model, TOKENS, name), blocks)
    assert torch.equal(last(model, TOKENS, name, pieces=4), blocks[-1])
    assert not torch.equal(last(model, TOKENS, "auto"), blocks[-1])


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_readable_layers_read_what_the_cache_keeps_however_a_prompt_comes(family, name):
    model = hasten.load(make_reference(family), dtype="float32").eval()
    found: dict[str, list[float]] = {"pieces": [], "paged": [], "token by token": []}
    for seed in (0, 2, 4):
        tokens = torch.randint(3, 100, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        one, exact = last(model, tokens, name), last(model, tokens, "auto")
        error = (one - exact).abs().max()
        assert 1e-5 < error < 0.3 * one.abs().max()
        others = (
            last(model, tokens, name, pieces=4),
            paged(model, tokens, name)[-1],
            token_by_token(model, tokens, name, batch=2)[-1],
        )
        for ways, other in zip(found.values(), others, strict=True):
            ways.append(float((other - one).abs().max()))
            assert ways[-1] < error
    # PyTorch sums a product of few rows otherwise, and a number at the border of two integers is then rounded to the
    # other one: seen once in one of three texts.
    assert all(sorted(ways)[1] < 1e-4 for ways in found.values()), found


def test_sizes_and_growing():
    config = TINY.config  # heads of 16
    make = {"batch": 2, "capacity": 12, "dtype": torch.bfloat16, "device": "cpu"}
    rows = 2 * len(config.layers) * config.kv_heads * (2 * 64 + 1)  # in multiples of what a step reads
    for name, each in (("auto", 32), ("int8", 20), ("int4", 18)):
        assert KVCache.of_texts(config, **make, row_format=row_format(name)).bytes == rows * each
    cache = KVCache(config, blocks=2, block_size=4, dtype=torch.float32, device="cpu", row_format=row_format("int4"))
    found = []
    for start in (0, 8):
        step = cache.step([Rows([1, 0, 3, 2], start, 8)])
        with torch.inference_mode():
            found.append(TINY(torch.tensor([TOKENS[start : start + 8]]), step.positions, step)[0, -1])
        cache.grow(4)
    assert cache.blocks == 4
    torch.testing.assert_close(found[1], last(TINY, TOKENS[:16], "int4", pieces=2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=native)])
def test_perplexity_is_that_of_decoding_through_the_cache(fused):
    model = tiny_llama()
    if fused:
        hasten.fuse(model.bfloat16())
    found = {name: hasten.perplexity(model, [TOKENS], kv_cache_dtype=name).perplexity for name in ROW_FORMATS}
    assert len(set(found.values())) == len(found)
    logits = token_by_token(model, TOKENS, "int4")[:-1]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(TOKENS[1:]))
    assert found["int4"] == pytest.approx(float(loss.exp()), rel=1e-5)
    both = divergence(model, model, [TOKENS], kv_cache_dtype="int4")
    assert (both.perplexity, both.against_perplexity) == pytest.approx((found["int4"], found["auto"]), rel=1e-5)
    assert 0 < both.kl_mean < 0.1


def test_the_python_interface_and_unknown_names():
    assert set(ROW_FORMATS) == set(KVCacheDtype.__args__)
    greedy = SamplingParams(temperature=0, max_new_tokens=4)
    for name in SMALL:
        [answer] = hasten.generate(TINY, "def add", greedy, kv_cache_dtype=name)
        assert "".join(hasten.stream(TINY, "def add", greedy, kv_cache_dtype=name)) == answer.text
    for call in (
        lambda: hasten.generate(TINY, "x", greedy, kv_cache_dtype="fp8"),
        lambda: hasten.perplexity(TINY, [TOKENS], kv_cache_dtype="fp8"),
        lambda: hasten.EngineSettings(kv_cache_dtype="fp8"),
    ):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype .*must be one of '?auto'?, .*"):
            call()


def test_the_command_line(tiny_folder, tmp_path, capfd):
    text = tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n" * 4)
    prompt = ["--prompt", "def add", "--max-new-tokens", "4", "--temperature", "0"]
    main(["generate", str(tiny_folder), *prompt, "--kv-cache-dtype", "int4"])
    found = {}
    for name in ("auto", "int4", "int4-plain"):
        capfd.readouterr()
        main(["eval", str(tiny_folder), "--text", str(text), "--kv-cache-dtype", name, "--json", "-"])
        found[name] = capfd.readouterr().out
    assert len({line.split('"seconds"')[0] for line in found.values()}) == 3
    for command in (["generate", str(tiny_folder), *prompt], ["serve", str(tiny_folder)]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--kv-cache-dtype", "q4_0"])
        said = capfd.readouterr().err
        assert ended.value.code == 2
        assert "q4_0" in said
        assert "int4-plain" in said
        assert "Traceback" not in said
