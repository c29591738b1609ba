"""For every family: our logits and greedy tokens are those of transformers, from disk, from memory, and exported."""

import pytest
import torch

import hasten
from hasten.engine.cache import KVCache
from hasten.model.context import TrainingContext
from parity import PROMPTS, TOLERANCE, assert_exported, assert_same, our_greedy, reference_greedy, reference_logits
from references import make_reference

transformers = pytest.importorskip("transformers")


def our_cached_logits(model, tokens, prefill):
    """The same logits, the first `prefill` tokens at once and the rest one by one through the static cache."""
    cache = KVCache.of_texts(model.config, batch=1, capacity=64, dtype=model.dtype, device="cpu")
    out = []
    with torch.no_grad():
        positions = torch.arange(prefill)[None]
        out.append(model(torch.tensor([tokens[:prefill]]), positions, cache.step_of_texts(positions, fresh=True))[0])
        for place in range(prefill, len(tokens)):
            positions = torch.tensor([[place]])
            out.append(model(torch.tensor([[tokens[place]]]), positions, cache.step_of_texts(positions))[0])
    return torch.cat(out)


def test_folder_gives_the_same_logits_and_tokens(case, tmp_path):
    reference = make_reference(case)
    reference.save_pretrained(tmp_path)
    model = hasten.load(tmp_path, dtype="float32")
    assert_same(model, reference)
    # Sequences past longrope's original context are rescaled as a whole, so there only prefill can be compared.
    if case != "phi3-longrope":
        for tokens in PROMPTS:
            expected = reference_logits(reference, tokens)
            assert (our_cached_logits(model, tokens, 2) - expected).abs().max() <= TOLERANCE
    for tokens in PROMPTS:
        assert our_greedy(model, tokens, 32) == reference_greedy(reference, tokens, 32)


def test_model_in_memory_is_taken_over_without_a_copy(case):
    reference = make_reference(case)
    model = hasten.load(reference)
    assert_same(model, reference)
    storages = {t.untyped_storage().data_ptr() for t in reference.state_dict().values()}
    copied = [n for n, p in model.named_parameters() if p.untyped_storage().data_ptr() not in storages]
    if case == "gpt_bigcode-mha":  # its q, k, v alternate head by head: no view can separate them
        copied = [n for n in copied if ".attention." not in n]
    if case == "qwen3_next":  # as do those of its layers with Gated DeltaNet
        copied = [n for n in copied if ".mixer." not in n]
    if case.startswith("gpt_oss"):  # gate and up alternate row by row, transposed: such a view is slow to multiply with
        copied = [n for n in copied if not (".experts." in n and n.split(".")[-2] in ("gate", "up"))]
    assert not copied


def test_export_loads_in_transformers_and_here(case, tmp_path):
    reference = make_reference(case)
    hasten.save(hasten.load(reference), tmp_path)
    again, model = assert_exported(tmp_path, reference)
    for tokens in PROMPTS:
        assert our_greedy(model, tokens, 8) == reference_greedy(again, tokens, 8)  # longer ones: the folder, above


@pytest.mark.parametrize("name", ["granite", "cohere2", "gemma2"])
def test_the_loss_is_that_of_the_logits(name):
    reference = make_reference(name)
    model, tokens = hasten.load(reference), torch.tensor([PROMPTS[0]])
    context = TrainingContext([layer.window for layer in model.config.layers])
    loss = model(tokens, torch.arange(tokens.shape[1])[None], context, targets=tokens)
    expected = torch.nn.functional.cross_entropy(reference_logits(reference, PROMPTS[0]), tokens[0], reduction="sum")
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=0)
