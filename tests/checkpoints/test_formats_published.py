"""Quantized folders as others publish them are read with the same numbers."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

import hasten
from hasten.checkpoints.formats.packing import unpack_columns
from hasten.ops.linear import PackedLinear
from hasten.quantization import Int8, quantize
from quantized_folders import Q, change_config, change_tensors, exact, logits, theirs, weights_of
from references import make_reference

pytest.importorskip("compressed_tensors")
transformers.logging.set_verbosity_error()


def publish(folder, *, bits, strategy, symmetric, packed, dtype, embedding=False):
    """A folder as llm-compressor writes it, by the package's own compressors; returns what these make of it again."""
    from compressed_tensors.compressors import NaiveQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    model = hasten.load(make_reference("phi3"), dtype=dtype)
    hasten.save(model, folder)
    size = 32 if strategy == "group" else None
    args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=size, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = PackedQuantizationCompressor if packed else NaiveQuantizationCompressor
    expected = {}

    def compress(tensors):
        generator = torch.Generator().manual_seed(0)
        for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
            if not embedding and "embed" in name:
                continue
            weight = tensors.pop(name)
            groups = weight.unflatten(1, (-1, size or weight.shape[1]))  # (N, G, group)
            scale = groups.abs().amax(-1) / 2 ** (bits - 1)
            zeros = torch.randint(-(2 ** (bits - 2)), 2 ** (bits - 2), scale.shape, generator=generator)
            state = {"weight": weight, "weight_scale": scale}
            if not symmetric:
                state["weight_zero_point"] = zeros.to(torch.int8)
            state = compressor.compress(state, scheme)
            expected[name] = compressor.decompress(state, scheme)["weight"]
            tensors.update({name.removesuffix("weight") + key: value for key, value in state.items()})

    change_tensors(folder, compress)
    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json")}
    form = "pack-quantized" if packed else "int-quantized"
    quantization = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    change_config(folder, lambda v: v.update(quantization_config=quantization | {"quantization_status": "compressed"}))
    return expected


def weights(model, expected):
    """Pairs of our weight, exact in the dtype of the scales, and theirs."""
    attention, mlp = model.blocks[1].attention, model.blocks[1].mlp
    for name, parts in (
        ("model.layers.1.self_attn.qkv_proj.weight", (attention.q, attention.k, attention.v)),
        ("model.layers.1.mlp.down_proj.weight", (mlp.down,)),
        ("lm_head.weight", (model.head,)),
    ):
        dtype = expected[name].dtype
        ours = [part.dequantize(dtype) if isinstance(part, PackedLinear) else part.weight for part in parts]
        yield torch.cat(ours), expected[name]


def test_as_llm_compressor_publishes_w4a16(int4_folder):
    before = logits(hasten.load(int4_folder, dtype="stored"))

    def publish(values):
        del values["hasten"]
        group = values["quantization_config"]["config_groups"]["group_0"]
        del group["format"]
        group["weights"] |= {"actorder": "weight", "block_structure": None, "observer": "mse", "observer_kwargs": {}}
        values["quantization_config"] |= {"sparsity_config": {}, "transform_config": {}, "version": "0.12.2"}

    change_config(int4_folder, publish)
    model = hasten.load(int4_folder, dtype="stored")
    assert model.quantization["blocks.0.attention.q"].activations == "float"
    assert (logits(model) - before).std() < 0.1 * before.std()


def test_int4_with_one_scale_a_row_and_wide_groups(int4_folder):
    def one_scale(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name][:, :1].contiguous()

    change_tensors(int4_folder, one_scale)
    change_config(int4_folder, lambda v: weights_of(v).update(strategy="channel", group_size=None))
    weight = hasten.load(int4_folder, dtype="stored").blocks[0].attention.q.to_weight()
    stored = load_file(int4_folder / "model.safetensors")
    values = unpack_columns(stored[f"{Q}.weight_packed"], 64).float() - 8
    assert torch.equal(weight.dequantize(), values * stored[f"{Q}.weight_scale"].float())
    change_config(int4_folder, lambda v: weights_of(v).update(strategy="group", group_size=256))
    assert torch.equal(hasten.load(int4_folder, dtype="stored").blocks[0].attention.q.dequantize(), weight.dequantize())


def test_int8_packed_as_w8a16_is_published(tmp_path):
    model = quantize(hasten.load(make_reference("llama")), Int8(activations="float", lm_head="none"))
    hasten.save(model, tmp_path)

    def narrow(tensors):
        packed = [name for name in tensors if name.endswith("weight_packed")]
        assert packed
        for name in packed:
            scale = name.replace("_packed", "_scale")
            tensors[scale] = tensors[scale].bfloat16()

    change_tensors(tmp_path, narrow)
    change_config(tmp_path, lambda v: v["quantization_config"]["config_groups"]["group_0"].pop("format"))
    again = hasten.load(tmp_path, dtype="stored").blocks[1].mlp.down.to_weight()
    ours = model.blocks[1].mlp.down.to_weight()
    assert torch.equal(again.values, ours.values)
    assert torch.equal(again.scales, ours.scales.bfloat16().float())


@pytest.mark.filterwarnings("ignore:hasten reads this quantized model")  # of groups that do not divide the features
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "strategy", "packed"),
    [(4, "group", True), (4, "channel", True), (8, "group", True), (8, "channel", True), (8, "group", False)],
)
def test_weights_are_those_of_the_package(bits, strategy, packed, symmetric, dtype, tmp_path):
    expected = publish(tmp_path, bits=bits, strategy=strategy, symmetric=symmetric, packed=packed, dtype=dtype)
    model = hasten.load(tmp_path, dtype="stored")
    assert all(torch.equal(ours, theirs) for ours, theirs in weights(model, expected))
    assert isinstance(model.head, PackedLinear)
    assert (model.head.format.bits, model.head.format.symmetric) == (bits, symmetric)
    hasten.save(model, tmp_path / "again")
    again = hasten.load(tmp_path / "again", dtype="stored")
    assert torch.equal(again.head.dequantize(), model.head.dequantize())


def test_transformers_and_we_agree_on_int8_by_group(tmp_path):
    publish(tmp_path, bits=8, strategy="group", symmetric=True, packed=True, dtype="float32")
    model = hasten.load(tmp_path, dtype="stored")
    hasten.save(model, tmp_path / "again")
    assert (logits(exact(model)) - theirs(tmp_path)).abs().max() < 1e-4
    assert (
        logits(exact(hasten.load(tmp_path / "again", dtype="stored"))) - theirs(tmp_path / "again")
    ).abs().max() < 1e-4


def test_a_quantized_embedding_is_read_as_it_is(tmp_path):
    expected = publish(
        tmp_path, bits=4, strategy="group", symmetric=True, packed=True, dtype="bfloat16", embedding=True
    )
    model = hasten.load(tmp_path, dtype="stored")
    ids = torch.arange(101)
    # Rows come in the dtype that this processor computes in: float32, not yet rounded, where it lacks bfloat16.
    assert torch.equal(model.embedding(ids).bfloat16(), expected["model.embed_tokens.weight"])
    assert isinstance(model.head, PackedLinear)


def test_tensors_of_no_module_are_no_module(int4_folder):
    before = logits(hasten.load(int4_folder, dtype="stored"))
    change_tensors(int4_folder, lambda t: t.update({leaf: t[f"{Q}.{leaf}"].clone() for leaf in ("weight_packed",)}))
    assert torch.equal(logits(hasten.load(int4_folder, dtype="stored")), before)
