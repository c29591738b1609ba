"""hasten.kernels forces and restores; explain gives a reason for everything."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from threading import Barrier

import pytest
import torch

import hasten
from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.binding import explain, kernels
from hasten.model.context import TrainingContext
from hasten.ops.attention import KERNELS
from hasten.ops.native import library
from references import make_reference

DEFAULT = "sdpa" if library() is None else "native"


def bound(model):
    if not model.bound:
        model.bind()
    return [block.attention.kernels.tokens.name for block in model.blocks]


def logits(model):
    tokens = torch.tensor([[1, 5, 9, 2]])
    with torch.no_grad():
        return model(tokens, torch.arange(4)[None], TrainingContext([None] * len(model.config.layers)))


def test_within_the_block_the_named_kernel_runs_and_then_the_old_one():
    model = hasten.load(make_reference("llama"))
    assert set(bound(model)) == {DEFAULT}
    before = logits(model)
    with hasten.kernels(model, attention="reference") as same:
        assert same is model
        assert set(bound(model)) == {"reference"}
        torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    assert set(bound(model)) == {DEFAULT}
    assert torch.equal(logits(model), before)


def test_the_old_kernels_come_back_after_an_exception():
    model = hasten.load(make_reference("llama"))
    with pytest.raises(KeyError), kernels(model, attention="reference"):
        raise KeyError
    assert set(bound(model)) == {DEFAULT}


def test_blocks_can_be_nested_and_empty():
    model = hasten.load(make_reference("llama"))
    with kernels(model, attention="reference"):
        with kernels(model, attention="sdpa"):
            assert set(bound(model)) == {"sdpa"}
        with kernels(model):
            assert set(bound(model)) == {"reference"}
        assert set(bound(model)) == {"reference"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"attention": "warp"}, ["attention kernel 'warp'", "known: triton, native"]),
        ({"linear": "int4"}, ["linear kernel 'int4'", "known: native"]),
        ({"linear": "reference"}, ["'reference'", "these are float32"]),
        ({"linear": "native", "block": "fused"}, ["leaves no place for linear='native'"]),
        ({"attention": "reference", "block": "fused"}, ["leaves no place for attention='reference'"]),
        ({"rope": "fast"}, ["no operator 'rope'", "known: block, attention, linear"]),
        ({"attention": "sdpa"}, ["layer 0", "'sdpa'", "soft-capping"]),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(names, words):
    model = hasten.load(make_reference("gemma2"))
    with pytest.raises(ConfigError) as caught, kernels(model, **names):
        pytest.fail("the block ran")
    for word in words:
        assert word in str(caught.value)
    assert set(bound(model)) == {"reference"}


def test_explain_says_what_runs_and_why_the_others_do_not():
    model = hasten.load(make_reference("gemma2"))
    found = [asdict(binding) for binding in explain(model)]
    assert [row["layer"] for row in found if row["operator"] == "attention"] == [0, 1, 2, 3]
    row = next(row for row in found if row["operator"] == "attention")
    assert row["kernel"] == "reference"
    reasons = {other["kernel"]: other["reason"] for other in row["others"]}
    assert reasons["fused"] == "it belongs to the fused steps, which this model does not run"
    assert reasons["triton"] == "it takes bfloat16 and float16, not float32"
    assert reasons["sdpa"] == "PyTorch's SDPA has no soft-capping of scores"
    assert set(reasons) == {"fused", *(kernel.name for kernel in KERNELS)} - {"reference"}
    blocks = [row for row in found if row["operator"] == "block"]
    assert {row["kernel"] for row in blocks} == {"readable"}
    assert "float16; the model is float32" in blocks[0]["others"][0]["reason"]
    linear = [row for row in found if row["operator"].startswith("linear")]
    assert linear[-1]["layer"] == -1  # the head
    assert all(other["reason"] for row in found for other in row["others"])
    assert json.loads(json.dumps(found)) == found


def attention_row(model):
    return next(row for row in explain(model) if row.operator == "attention")


def test_explain_sees_a_forced_kernel():
    model = hasten.load(make_reference("llama"))
    with kernels(model, attention="reference"):
        row = attention_row(model)
        assert row.kernel == "reference"
        assert row.others[-1].reason == "reference was asked for by name"
    row = attention_row(model)
    assert (row.kernel, row.others[-1].kernel, row.others[-1].reason) == (
        DEFAULT,
        "reference",
        f"{DEFAULT} comes first",
    )


def test_every_form_of_a_call_runs_the_kernel_that_is_explained(monkeypatch):
    model = hasten.load(make_reference("llama"), dtype="float32")
    explained = {row.operator: row.kernel for row in explain(model) if row.layer == 0}
    assert explained["attention over a cache"] == explained["attention over a cache, one query"] == "sdpa"
    assert "attention with dropout" not in explained  # this model has none
    ran = []
    for attention in [module for module in model.modules() if isinstance(module, Attention)]:
        spies = {}
        for form in ("tokens", "dropout", "masked", "decode"):
            kernel = getattr(attention.kernels, form)

            def spy(*call, form=form, kernel=kernel):
                ran.append((form, kernel.name))
                return kernel.run(*call)

            spies[form] = replace(kernel, run=spy)
        attention.kernels = replace(attention.kernels, **spies)
    hasten.generate(model, [[1, 5, 9, 2]], hasten.SamplingParams(max_new_tokens=3, temperature=0, ignore_eos=True))
    assert {name for form, name in ran if form == "tokens"} == {explained["attention"]}
    assert {name for form, name in ran if form == "decode"} == {"sdpa"}
    assert {form for form, _ in ran} == {"tokens", "decode"}


@pytest.mark.skipif(library() is None, reason="there are no native kernels here")
def test_a_kernel_by_name_runs_every_form_that_it_serves():
    model = hasten.load(make_reference("llama"))
    with kernels(model, attention="native"):
        found = {row.operator: row for row in explain(model) if row.layer == 0}
        assert found["attention"].kernel == "native"
        assert found["attention over a cache"].kernel == "sdpa"
        reasons = {other.kernel: other.reason for other in found["attention over a cache"].others}
        assert reasons["native"] == "it takes no explicit mask"
    with pytest.raises(ConfigError, match="it is for block masks"), kernels(model, attention="native-sparse"):
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_paged_cache_is_the_one_that_is_explained(dtype):
    from hasten.engine.cache import KVCache

    model = hasten.load(make_reference("llama"), dtype=dtype)
    cache = KVCache(model.config, blocks=2, block_size=16, dtype=model.compute_dtype, device="cpu")
    rows = [row for row in explain(model) if row.operator == "paged attention"]
    assert [row.kernel for row in rows] == [cache.kernel.name] * len(model.blocks)
    assert all(other.reason for row in rows for other in row.others)


@pytest.mark.parametrize("name", ["flash", "math", "chunked", "sdpa", "reference"])
def test_every_kernel_that_is_forced_gives_a_model_the_same_logits_and_gradients(name):
    model = hasten.load(make_reference("qwen3"))
    wanted = logits(model)
    tokens = torch.tensor([[1, 5, 9, 2, 7, 3]])
    context = TrainingContext([None] * len(model.config.layers), torch.tensor([[0, 0, 0, 1, 1, 1]]))  # two documents

    def gradient():
        loss = model(tokens, torch.arange(6)[None], context, targets=tokens)
        return torch.autograd.grad(loss, model.embedding.weight)[0]

    expected = gradient()
    with kernels(model, attention=name):
        assert set(bound(model)) == {name}
        torch.testing.assert_close(logits(model), wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "call",
    [
        hasten.fuse,
        hasten.unfuse,
        hasten.explain,
        lambda model: hasten.quantize(model, hasten.Int8()),
        lambda model: kernels(model, linear="reference").__enter__(),
    ],
)
@pytest.mark.parametrize(("thing", "found"), [("tied", "found 'tied'"), (torch.nn.Linear(2, 2), "found Linear")])
def test_what_is_no_model_is_said_to_be_none(call, thing, found):
    with pytest.raises(ConfigError, match=r"takes a model, as hasten.load\(...\) returns one; " + found):
        call(thing)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="then it runs on a CPU")
def test_the_reason_against_a_gpu_kernel_is_the_device_first():
    model = hasten.load(make_reference("llama"), dtype="bfloat16")
    for quantized in (False, True):
        if quantized:
            hasten.quantize(model, hasten.Int4(group_size=32))
        with pytest.raises(ConfigError, match="it needs a CUDA GPU; the layer is on cpu"):
            kernels(model, linear="triton").__enter__()


def test_threads_that_use_a_new_model_at_once_all_find_its_kernels():
    folder_model = make_reference("llama")
    alone = hasten.generate(hasten.load(folder_model, dtype="float32"), [[5, 6, 7]], temperature=0, max_new_tokens=4)
    for _ in range(5):
        model = hasten.load(folder_model, dtype="float32")
        model.auto_fuse = False
        together = Barrier(3)

        def answer(model=model, together=together):
            together.wait()
            return hasten.generate(model, [[5, 6, 7]], temperature=0, max_new_tokens=4)

        with ThreadPoolExecutor(3) as threads:
            answers = [thread.result() for thread in [threads.submit(answer) for _ in range(3)]]
        assert answers == [alone] * 3
