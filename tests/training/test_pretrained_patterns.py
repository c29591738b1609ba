"""A sparse pattern given to a pretrained model: it applies, also beside windows and soft-caps, and is exported."""

from dataclasses import replace

import pytest
import torch

import hasten
from hasten.errors import ConfigError, HastenWarning
from hasten.model.context import training_context
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.ops.attention.inputs import visible
from hasten.ops.native import library
from hasten.training.patterns import give_pattern
from hasten.training.recipe import Lora, Shape
from hasten.training.session import train

PATTERNS = ["bigbird:block=16,random-blocks=1", "atrous:block=1,stride=2", "local:block=16,radius=1"]
LENGTH = 96
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 60,
    "max_position_embeddings": 256,
    "sliding_window": 40,
}
MODELS = {
    "windows": {"model_type": "mistral"},
    "windows and soft-caps": {"model_type": "gemma2", "attn_logit_softcapping": 20.0, "query_pre_attn_scalar": 16},
}


def model_of(kind, pattern=None):
    model = initialize(read_config(SIZES | MODELS[kind]), seed=3)
    give_pattern(model, Shape(attention_pattern=pattern))
    return model


def tokens_of(count=LENGTH):
    return torch.randint(60, (1, count), generator=torch.Generator().manual_seed(1))


def scores(model, tokens):
    positions = torch.arange(tokens.shape[1])[None]
    return model(tokens, positions, training_context(model, tokens.shape[1]))


def explicit(model, tokens):
    """The same with a mask of every pair of positions, made here: what the pattern shows and the window does."""
    from hasten.model.context import PlainLayer, TrainingContext
    from hasten.ops.attention.block_mask import BlockMask

    places, config = torch.arange(tokens.shape[1]), model.config
    context = TrainingContext([layer.window for layer in config.layers])
    layers = []
    for number, layer in enumerate(config.layers):
        mask = BlockMask.of(config.attention_pattern, len(places), heads=config.heads, layer=number)
        seen = mask.dense(len(places), len(places), torch.device("cpu")) & visible(places, places, layer.window)
        layers.append(PlainLayer(seen[None] if len(seen) == config.heads else seen))
    context.layers = layers
    return model(tokens, places[None], context)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.filterwarnings("ignore:.*cannot skip the blocks")
def test_a_layer_sees_what_its_pattern_and_its_window_show(kind, pattern):
    model, dense = model_of(kind, pattern), model_of(kind)
    tokens = tokens_of()
    found, wanted = scores(model, tokens), explicit(model, tokens)
    assert torch.allclose(found, wanted, atol=2e-5), (found - wanted).abs().max()
    assert (found - scores(dense, tokens)).abs().max() > 1e-3
    found.sum().backward()
    assert all(p.grad is not None for p in model.blocks.parameters())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.filterwarnings("ignore:.*cannot skip the blocks")
def test_generating_shows_the_same(kind, pattern):
    model = model_of(kind, pattern).eval()
    with torch.no_grad():
        given = tokens_of(60)[0].tolist()
        made = hasten.generate(model, [given], max_new_tokens=30, temperature=0, ignore_eos=True)[0].tokens
        text = torch.tensor([given + list(made)])
        wanted = scores(model, text)[0].argmax(-1)[59:-1].tolist()
        assert list(made) == wanted
        llm = hasten.LLM(model, max_length=128)
        try:
            params = hasten.SamplingParams(max_new_tokens=30, temperature=0, ignore_eos=True)
            assert list(llm.generate([given], params)[0].tokens) == wanted
        finally:
            llm.close()


@pytest.mark.filterwarnings("ignore:.*cannot skip the blocks")
def test_finetuning_applies_and_exports_it(recipe):
    first = train(recipe(name="dense", steps=1, context=64), progress=False)
    made = recipe(name="sparse", init=str(first.model_folder), steps=2, context=64)
    made = replace(made, model=Shape(attention_pattern="local:block=16,radius=0"))
    with pytest.warns(HastenWarning, match="transformers does not know it"):
        tuned = train(made, progress=False)
    assert hasten.load(first.model_folder).config.attention_pattern is None
    model = hasten.load(tuned.model_folder)
    assert model.config.reach == 16
    plain = train(recipe(name="plain", init=str(first.model_folder), steps=2, context=64), progress=False)
    assert plain.loss != tuned.loss


def test_what_cannot_be_says_why(recipe):
    made = recipe(init="MODEL")
    with pytest.raises(ConfigError, match=r"lora\.rank writes only an adapter; train all weights"):
        replace(made, model=Shape(attention_pattern="bigbird"), lora=Lora(rank=4)).check()
    with pytest.raises(ConfigError, match=r"model\.attention_pattern local:block=20: .*multiples of"):
        give_pattern(model_of("windows"), Shape(attention_pattern="local:block=20"))


@pytest.mark.skipif(library() is None, reason="needs the native kernels")
@pytest.mark.parametrize("kind", MODELS)
def test_the_fused_kernels_show_the_same(kind):
    def errors(pattern):
        model, tokens = model_of(kind, pattern).eval(), tokens_of()
        wanted = scores(model, tokens)
        plain = scores(model.to(torch.bfloat16), tokens).float()
        fused = scores(hasten.fuse(model), tokens).float()
        return (fused - wanted).abs().max(), (plain - wanted).abs().max()

    with torch.no_grad():
        fused, plain = errors("bigbird:block=16,random-blocks=1")
    assert fused <= 2 * plain
