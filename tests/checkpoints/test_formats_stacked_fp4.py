"""gpt-oss's own MXFP4 folders: the numbers that transformers makes of them, held in 4 bits, whole and in shares."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import hasten
from hasten.checkpoints.load import load, open_checkpoint
from hasten.errors import HastenWarning
from hasten.model.binding import explain
from hasten.model.fused import fuse
from hasten.ops.collective import RankGroup
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.weights import MXFP4
from hasten.ops.native import library
from hasten.planning.held import held_bytes
from parity import PROMPTS, assert_exported, assert_same, our_greedy, reference_greedy
from quantized_folders import (
    DAMAGE,
    FUZZ,
    as_written,
    change_config,
    change_tensors,
    exact,
    load_damaged,
    logits,
    refused,
)
from references import make_reference

mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
needs_native = pytest.mark.skipif(library() is None, reason="the native kernels cannot be built here (no C++ compiler)")
STACK = "model.layers.0.mlp.experts.gate_up_proj"
PLAIN = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


def write(out, dtype=torch.float32):
    """A folder with random blocks, and the transformers model of the numbers that transformers makes of them."""
    reference = make_reference("gpt_oss")
    reference.to(dtype).save_pretrained(out)
    tensors, generator = load_file(out / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, parameter in reference.named_parameters():
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        experts, k, n = parameter.shape
        blocks = torch.randint(0, 256, (experts, n, k // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(120, 125, (experts, n, k // 32), generator=generator, dtype=torch.uint8)
        parameter.data = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    change_config(out, lambda values: values.update(quantization_config=CONFIG))
    return out, reference.float()


CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": PLAIN}


@pytest.fixture
def written(tmp_path):
    return write(tmp_path / "folder")


def experts_of(model):
    return {name: one for name, one in model.named_modules() if ".experts." in name and isinstance(one, PackedLinear)}


def test_the_numbers_are_those_that_transformers_makes(written):
    folder, reference = written
    model = hasten.load(folder, dtype="float32")
    held = experts_of(model)
    assert len(held) == 4 * 6 * 3
    for name, layer in held.items():
        _, number, _, _, expert, leaf = name.split(".")
        stacks = reference.model.layers[int(number)].mlp.experts
        stack = stacks.down_proj if leaf == "down" else stacks.gate_up_proj
        part = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}[leaf]
        assert layer.format == MXFP4
        assert layer.bias is not None
        assert torch.equal(layer.dequantize(), stack[int(expert)][:, part].T)
    assert_same(exact(model), reference)
    for tokens in PROMPTS:
        assert our_greedy(model, tokens, 32) == reference_greedy(reference, tokens, 32)


@needs_native
def test_a_layer_takes_half_a_byte_a_number_and_a_byte_a_group(written):
    model = hasten.load(written[0], dtype="bfloat16")
    for layer in experts_of(model).values():
        held = sum(one.nbytes for name, one in layer.named_buffers() if name in ("data", "scales"))
        assert held == -(-layer.out_features // 64) * 64 * layer.in_features * 17 // 32
    assert "linear (fp4)" in {row.operator for row in explain(model)}


@needs_native
def test_fused_it_is_the_same_function(written):
    model = hasten.load(written[0], dtype="bfloat16")
    plain = logits(model)
    fused = logits(fuse(model))
    assert all(block.joins_experts for block in model.blocks)
    assert (fused - plain).abs().max() <= 0.1 * plain.abs().max()


def test_written_again_it_is_a_plain_folder(written, tmp_path):
    folder, reference = written
    model = hasten.load(folder, dtype="float32")
    with pytest.warns(HastenWarning, match="written as plain weights"):
        hasten.save(model, tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    assert_exported(tmp_path / "plain", reference)


@pytest.mark.parametrize("size", [2, 3])
def test_shares_together_are_the_whole(written, size):
    folder, _ = written
    whole = experts_of(load(folder, dtype="float32"))
    parts = [experts_of(load(folder, dtype="float32", group=RankGroup(rank, size))) for rank in range(size)]
    for name, layer in whole.items():
        along = 1 if name.endswith("down") else 0
        together = torch.cat([part[name].dequantize() for part in parts], dim=along)
        assert torch.equal(together, layer.dequantize())


def drop(tensors, name):
    del tensors[name]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: drop(t, f"{STACK}_scales"), [f"{STACK}_blocks", f"lacks {STACK}_scales (U8)"]),
        (lambda t: t.update({f"{STACK}_scales": t[f"{STACK}_scales"][:, :-1].clone()}), ["must be U8 [6, 192, 2]"]),
        (lambda t: t.update({f"{STACK}_scales": t[f"{STACK}_scales"].float()}), ["U8", "found F32"]),
        (lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"].int()}), ["(experts, rows, groups, 16)", "I32"]),
        (lambda t: t.update({f"{STACK}_blocks": t[f"{STACK}_blocks"].flatten(2)}), ["[6, 192, 32]"]),
        (lambda t: drop(t, f"{STACK}_blocks"), [STACK, "missing"]),
        (lambda t: drop(t, f"{STACK}_bias"), [f"{STACK}_bias", "missing"]),
    ],
)
def test_what_does_not_fit_is_refused(written, change, words):
    folder, _ = written
    change_tensors(folder, change)
    refused(folder, *words)


def test_another_number_of_experts_is_refused(written):
    folder, _ = written
    change_config(folder, lambda values: values.update(num_local_experts=5))
    refused(folder, "config.json asks for")
    change_config(folder, lambda values: values.update(num_local_experts=7))
    refused(folder, "config.json asks for")


FIELDS = ["quant_method", "modules_to_not_convert", "swiglu_limit", "head_dim"]
json_values = st.none() | st.booleans() | st.integers(-3, 300) | st.text(max_size=5) | st.lists(st.integers())


@settings(FUZZ)
@given(
    st.dictionaries(st.sampled_from(FIELDS), json_values),
    DAMAGE,
)
@pytest.mark.filterwarnings("ignore::hasten.errors.HastenWarning")
def test_damaged_folders_load_or_are_refused(tmp_path_factory, changes, damage):
    if not FOLDERS:
        FOLDERS.append(as_written(write(tmp_path_factory.mktemp("damaged") / "folder")[0]))

    def change(values):
        own = {name: value for name, value in changes.items() if name in ("quant_method", "modules_to_not_convert")}
        values["quantization_config"] = CONFIG | own
        values.update({name: value for name, value in changes.items() if name not in own})

    load_damaged(FOLDERS[0], change, damage)


FOLDERS = []


def test_the_bytes_that_it_will_take_are_counted(written):
    source = open_checkpoint(written[0])
    stacks = [one for name, one in source.stored.items() if name.endswith("_blocks")]
    plain = [one for name, one in source.stored.items() if not name.endswith(("_blocks", "_scales"))]
    numbers = sum(2 * one.bytes for one in stacks)
    assert held_bytes(source) == numbers * 17 // 32 + sum(one.bytes for one in plain)
