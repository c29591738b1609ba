"""Checks of a GPU's fused block against the readable one, interpreted on a CPU and unchanged on a GPU."""

import torch

import hasten
from hasten.engine.block_table import Rows
from hasten.engine.cache import KVCache
from hasten.engine.given_texts import GivenTexts
from hasten.model.context import TrainingContext
from hasten.model.fused import fuse
from references import make_reference

FAMILIES = (
    "gpt2",
    "gpt_bigcode",
    "llama-biases",
    "llama-mqa",
    "mistral",
    "mistral-plain",
    "qwen2-window",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "gemma",
    "starcoder2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "dots1",
    "glm4_moe",
)
PROMPTS = [[7, 3, 90, 41, 12, 55, 8, 8, 23], [18, 99, 3]]


def fresh(family, *, device, dtype):
    """A model of a family on a device."""
    model = hasten.load(make_reference(family), dtype=dtype).to(device)
    model.bind()
    return model.eval()


@torch.no_grad()
def whole(model):
    """Logits of rows of tokens that nothing comes before."""
    tokens = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0)).to(model.device)
    context = TrainingContext([layer.window for layer in model.config.layers])
    return model(tokens, torch.arange(12, device=model.device).expand(2, -1), context).float()


def decoded(model, **options):
    """Logits after prompts, after pieces of text behind them, and after single tokens."""
    decoder = GivenTexts(model, batch=2, capacity=48, compiled=True, **options)
    found = [decoder.prefill(PROMPTS), decoder.prefill([[4], [5, 6, 7, 8]])]
    found += [decoder.decode(torch.tensor([i, i + 20], device=model.device)) for i in range(3)]
    return torch.stack(found).float().clone()


def paged_logits(model, prompts):
    """Logits after prompts that lie in blocks."""
    size, config = 4, model.config
    needed = [-(-len(prompt) // size) for prompt in prompts]
    cache = KVCache(config, blocks=sum(needed), block_size=size, dtype=model.compute_dtype, device=model.device)
    order = list(reversed(range(sum(needed))))
    rows = [Rows([order.pop() for _ in range(n)], 0, len(prompt)) for n, prompt in zip(needed, prompts, strict=True)]
    step = cache.step(rows)
    tokens = torch.tensor([[token for prompt in prompts for token in prompt]], device=model.device)
    with torch.no_grad():
        return model(tokens, step.positions, step, rows=step.metadata.query_start_loc[1:] - 1).float()


def errors(family, *, device):
    """Root mean squares (fused, readable) of what bfloat16 errs against float32, by what was computed."""
    exact = fresh(family, device="cpu", dtype="float32")
    model = fresh(family, device=device, dtype="bfloat16")
    expected = {"whole": whole(exact), "decoded": decoded(exact)}
    readable = {"whole": whole(model), "decoded": decoded(model)}
    fuse(model)
    found = {"whole": whole(model), "decoded": decoded(model)}

    def error(logits, name):
        return (logits[name].cpu() - expected[name]).square().mean().sqrt().item()

    return {name: (error(found, name), error(readable, name)) for name in expected}
