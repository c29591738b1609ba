"""How far a model is from another one: against plain formulas, and through the command."""

import json
import math

import pytest
import torch

import hasten
from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.evaluation.divergence import divergence
from hasten.model.context import training_context
from references import make_reference, tiny_llama

DOCUMENTS = [[3 + (7 * i + j * j) % 90 for j in range(40 + i)] for i in range(5)]


def logits(model, ids):
    tokens = torch.tensor([ids])
    with torch.no_grad():
        return model(tokens, torch.arange(len(ids))[None], training_context(model, len(ids)))[0].double()


def test_the_figures_are_those_of_the_formulas():
    against = hasten.load(make_reference("llama"), dtype="float32")
    model = hasten.quantize(hasten.load(make_reference("llama"), dtype="float32"), hasten.Int8())
    found = divergence(model, against, DOCUMENTS)
    kl, same, nats, against_nats = [], [], [], []
    for ids in DOCUMENTS:
        q, p = (logits(one, ids)[:-1].log_softmax(-1) for one in (model, against))
        kl.append((p.exp() * (p - q)).sum(-1))
        same.append(q.argmax(-1) == p.argmax(-1))
        places = torch.arange(len(ids) - 1), torch.tensor(ids[1:])
        nats.append(-q[places])
        against_nats.append(-p[places])
    kl = torch.cat(kl)
    assert found.tokens == len(kl)
    assert found.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.kl_99 == pytest.approx(float(kl.sort().values[math.ceil(0.99 * len(kl)) - 1]), rel=1e-3)
    assert found.top1 == pytest.approx(float(torch.cat(same).double().mean()), abs=0.01)
    assert found.perplexity == pytest.approx(math.exp(torch.cat(nats).mean()), rel=1e-4)
    assert found.against_perplexity == pytest.approx(math.exp(torch.cat(against_nats).mean()), rel=1e-5)
    assert found.kl_mean > 0


def test_a_model_is_not_far_from_itself():
    model = hasten.load(make_reference("gemma2"), dtype="float32")
    found = divergence(model, hasten.load(make_reference("gemma2"), dtype="float32"), DOCUMENTS)
    assert (found.kl_mean, found.kl_99, found.top1) == (0, 0, 1)
    assert found.perplexity == found.against_perplexity


def test_models_that_read_other_tokens_cannot_be_compared(tiny):
    with pytest.raises(ConfigError, match="cannot be compared token by token"):
        divergence(tiny, hasten.load(make_reference("llama"), dtype="float32"), [[3, 4, 5]])


def test_the_command(tiny_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("def one(two):\n    return two + three\n" * 8)
    main(["eval", str(tiny_folder), "--quantize", "int4", "--against", str(tiny_folder), "--text", str(text)])
    out = capsys.readouterr().out
    assert "KL divergence mean" in out
    assert "same most likely token" in out
    main(["eval", str(tiny_folder), "--against", str(tiny_folder), "--text", str(text), "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    assert found["kl_mean"] == 0
    assert found["top1"] == 1
    with pytest.raises(SystemExit):
        main(["eval", str(tiny_folder), "--against", str(tmp_path / "no"), "--text", str(text)])
    assert str(tmp_path / "no") in capsys.readouterr().err


def test_fused_models_are_compared_by_their_own_kernels():
    from hasten.model.fused import refusal

    model = tiny_llama().to(torch.bfloat16)
    if refusal(model) is not None:
        pytest.skip("the native kernels cannot be built here")
    documents = ["def one(two): return two" * 5]
    found = divergence(hasten.fuse(tiny_llama().to(torch.bfloat16)), model, documents)
    assert 0 < found.kl_mean < 1e-3
