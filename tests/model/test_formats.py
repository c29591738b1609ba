"""Quantized folders: read again bit for bit, read by transformers, refused where they are odd."""

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import hasten
from hasten.errors import CheckpointError, HastenWarning
from hasten.machine import PeakMemory
from hasten.model.context import TrainingContext
from hasten.model.formats.packing import pack_bytes, pack_columns, pack_rows, unpack_bytes, unpack_columns, unpack_rows
from hasten.model.formats.stream import write_file
from hasten.ops.linear import PackedLinear
from hasten.quantization import Int4, Int8, quantize
from references import make_reference

helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
transformers.logging.set_verbosity_error()

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2, 60, 99]])
DEQUANTIZE = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
FAMILIES = ["llama-biases", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_bigcode-mha"]


def logits(model):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(TOKENS, torch.arange(TOKENS.shape[1])[None], context)[0].double()


def theirs(folder, dtype=torch.float32, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval()
    with torch.no_grad():
        return model(TOKENS).logits[0].double()


def exact(model):
    """The same model with plain products in float32 of the weights that its integers stand for."""
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight = nn.Parameter(module.dequantize())
            if module.bias is not None:
                linear.bias = nn.Parameter(module.bias.float())
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, linear)
    model.quantization = None
    return model.float()


# -- packing ----------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 20), columns=st.integers(1, 70), seed=st.integers(0, 1000))
def test_packing_is_that_of_the_package(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    four = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, generator=generator)
    eight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    signed = four.to(torch.int8) - 8
    assert torch.equal(pack_columns(four), helpers.pack_to_int32(signed, 4))
    assert torch.equal(pack_rows(four), helpers.pack_to_int32(signed, 4, packed_dim=0))
    assert torch.equal(pack_bytes(eight), helpers.pack_to_int32(eight, 8))
    assert torch.equal(unpack_columns(pack_columns(four), columns), four)
    assert torch.equal(unpack_rows(pack_rows(four), rows), four)
    assert torch.equal(unpack_bytes(pack_bytes(eight), columns), eight)


def test_a_file_written_tensor_by_tensor_is_a_safetensors_file(tmp_path):
    tensors = {
        "b": torch.randn(3, 5).bfloat16(),
        "shape": torch.tensor([3, 5]),
        "empty": torch.zeros(0, 4),
        "i": torch.arange(-3, 4, dtype=torch.int8),
        "a": torch.randn(2, 2).t(),
    }
    specs = {name: tensor.to("meta") for name, tensor in tensors.items()}
    write_file(specs, tmp_path / "x.safetensors", tensors=reversed(tensors.items()))
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


# -- our own folders --------------------------------------------------------------------------------------------------

SCHEMES = [
    Int8(),
    Int8(activations="float", lm_head="none"),
    Int4(group_size=32, scale_dtype="bfloat16"),
    Int4(group_size=64, symmetric=False, lm_head="same", activations="float"),
]


@pytest.mark.filterwarnings("ignore::hasten.HastenWarning")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, "gpt2", "gpt_bigcode", "mixtral", "qwen3_moe"])
def test_file_to_memory_to_file_is_exact(name, scheme, tmp_path):
    model = quantize(hasten.load(make_reference(name)), scheme)
    hasten.save(model, tmp_path / "first")
    again = hasten.load(tmp_path / "first")
    assert again.quantization == model.quantization
    for layer in model.quantization:
        ours, read = model.get_submodule(layer).to_weight(), again.get_submodule(layer).to_weight()
        assert torch.equal(ours.values, read.values)
        assert torch.equal(ours.scales, read.scales)
        assert (ours.zeros is None and read.zeros is None) or torch.equal(ours.zeros, read.zeros)
    assert torch.equal(logits(again), logits(model))
    hasten.save(again, tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_shards_and_another_dtype(tmp_path):
    from hasten.model.export import export_model

    model = quantize(hasten.load(make_reference("phi3")), Int4(group_size=32))
    export_model(model, tmp_path, shard_bytes=20_000, dtype=torch.bfloat16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    again = hasten.load(tmp_path)
    assert again.dtype == torch.bfloat16
    assert torch.equal(again.blocks[2].attention.v.to_weight().values, model.blocks[2].attention.v.to_weight().values)


def test_a_model_is_no_longer_called_quantized_when_it_is_not(tmp_path):
    hasten.save(quantize(hasten.load(make_reference("llama")), Int8()), tmp_path / "int8")
    hasten.save(exact(hasten.load(tmp_path / "int8")), tmp_path / "plain")
    assert not {"quantization_config", "hasten"} & set(json.loads((tmp_path / "plain" / "config.json").read_text()))
    assert hasten.load(tmp_path / "plain").quantization is None


# -- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (Int8(activations="float"), {}),
        (Int8(lm_head="none"), DEQUANTIZE),
        (Int4(group_size=32), {}),
        (Int4(group_size=32, symmetric=False, lm_head="same"), DEQUANTIZE),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_the_same_numbers(name, scheme, options, tmp_path):
    if name.startswith("gpt_bigcode") and scheme == Int4(group_size=32):
        pytest.skip("transformers' GPT-BigCode wants a plain weight when it is made (docs/quantization.md)")
    model = quantize(hasten.load(make_reference(name)), scheme)
    hasten.save(model, tmp_path / "quantized")
    ours = logits(exact(hasten.load(tmp_path / "quantized")))
    # Dequantized on loading, their weights are rounded to the dtype of the scales, which is float16 here.
    tolerance = 5e-2 if scheme == Int4(group_size=32, symmetric=False, lm_head="same") else 1e-4
    if scheme == Int8(lm_head="none"):
        tolerance = None  # they round the activations too, and not bit for bit as we do
    found = theirs(tmp_path / "quantized", **options)
    if tolerance is None:
        assert (found - ours).std() < 0.1 * ours.std()
    else:
        assert (found - ours).abs().max() < tolerance


@pytest.mark.parametrize("scheme", [Int8(activations="float"), Int4(group_size=32, activations="float")], ids=str)
@pytest.mark.parametrize("name", ["llama-biases", "qwen3", "phi3"])
def test_in_bfloat16_our_error_is_at_most_twice_that_of_transformers(name, scheme, tmp_path):
    plain = hasten.load(make_reference(name), dtype="bfloat16")
    hasten.save(quantize(plain, scheme), tmp_path / "quantized")
    hasten.save(exact(hasten.load(tmp_path / "quantized")), tmp_path / "exact")
    expected = theirs(tmp_path / "exact", torch.float64)
    ours = (logits(hasten.load(tmp_path / "quantized")) - expected).square().mean().sqrt()
    reference = (theirs(tmp_path / "quantized", torch.bfloat16) - expected).square().mean().sqrt()
    assert ours <= 2 * reference


@pytest.mark.parametrize("scheme", [Int8(activations="float"), Int4(group_size=32)], ids=str)
def test_transformers_reads_experts(scheme, tmp_path):
    model = quantize(hasten.load(make_reference("mixtral")), scheme)
    hasten.save(model, tmp_path)
    ours = logits(exact(hasten.load(tmp_path)))
    assert (theirs(tmp_path) - ours).abs().max() < 5e-3  # experts are dequantized in the dtype of their scales


@pytest.mark.parametrize(
    ("name", "scheme", "word"),
    [
        ("gpt2", Int8(), "Conv1D"),
        ("qwen3_moe", Int4(group_size=32), "no multiple of the group size 32"),
        ("llama", Int4(group_size=32, symmetric=False), "quantized alike"),
        ("mixtral", Int4(group_size=32, symmetric=False, lm_head="same"), "zero points of experts"),
    ],
)
def test_what_transformers_will_not_read_is_said(name, scheme, word, tmp_path):
    model = quantize(hasten.load(make_reference(name)), scheme)
    with pytest.warns(HastenWarning, match=word):
        hasten.save(model, tmp_path)


# -- folders of others ------------------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def int4_folder(tmp_path):
    hasten.save(quantize(hasten.load(make_reference("llama")), Int4(group_size=32, lm_head="none")), tmp_path)
    return tmp_path


def change_config(folder, change):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def change_tensors(folder, change):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def weights_of(values):
    return values["quantization_config"]["config_groups"]["group_0"]["weights"]


def test_as_llm_compressor_publishes_w4a16(int4_folder):
    before = logits(hasten.load(int4_folder))

    def publish(values):
        del values["hasten"]
        group = values["quantization_config"]["config_groups"]["group_0"]
        del group["format"]
        group["weights"] |= {"actorder": "weight", "block_structure": None, "observer": "mse", "observer_kwargs": {}}
        values["quantization_config"] |= {"sparsity_config": {}, "transform_config": {}, "version": "0.12.2"}

    change_config(int4_folder, publish)
    model = hasten.load(int4_folder)
    assert model.quantization["blocks.0.attention.q"].activations == "float"
    assert (logits(model) - before).std() < 0.1 * before.std()


def test_int4_with_one_scale_a_row_and_wide_groups(int4_folder):
    def one_scale(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name][:, :1].contiguous()

    change_tensors(int4_folder, one_scale)
    change_config(int4_folder, lambda v: weights_of(v).update(strategy="channel", group_size=None))
    weight = hasten.load(int4_folder).blocks[0].attention.q.to_weight()
    stored = load_file(int4_folder / "model.safetensors")
    values = unpack_columns(stored[f"{Q}.weight_packed"], 64).float() - 8
    assert torch.equal(weight.dequantize(), values * stored[f"{Q}.weight_scale"].float())
    change_config(int4_folder, lambda v: weights_of(v).update(strategy="group", group_size=256))
    assert torch.equal(hasten.load(int4_folder).blocks[0].attention.q.dequantize(), weight.dequantize())


def test_int8_packed_as_w8a16_is_published(tmp_path):
    model = quantize(hasten.load(make_reference("llama")), Int8(activations="float", lm_head="none"))
    hasten.save(model, tmp_path)

    def pack(tensors):
        for name in [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]:
            values = tensors.pop(name)
            tensors[f"{name}_packed"], tensors[f"{name}_shape"] = pack_bytes(values), torch.tensor(values.shape)
            tensors[f"{name}_scale"] = tensors[f"{name}_scale"].bfloat16()

    change_tensors(tmp_path, pack)
    change_config(tmp_path, lambda v: v["quantization_config"].update(format="pack-quantized"))
    change_config(tmp_path, lambda v: v["quantization_config"]["config_groups"]["group_0"].pop("format"))
    again = hasten.load(tmp_path).blocks[1].mlp.down.to_weight()
    ours = model.blocks[1].mlp.down.to_weight()
    assert torch.equal(again.values, ours.values)
    assert torch.equal(again.scales, ours.scales.bfloat16().float())


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


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "strategy", "packed"),
    [(4, "group", True), (4, "channel", True), (8, "group", True), (8, "channel", True), (8, "group", False)],
)
def test_weights_are_those_of_the_package(bits, strategy, packed, symmetric, dtype, tmp_path, recwarn):
    expected = publish(tmp_path, bits=bits, strategy=strategy, symmetric=symmetric, packed=packed, dtype=dtype)
    model = hasten.load(tmp_path)
    assert all(torch.equal(ours, theirs) for ours, theirs in weights(model, expected))
    kernel = bits == 4 or (strategy == "channel" and symmetric)
    assert isinstance(model.head, PackedLinear) is kernel
    assert (model.quantization is not None) is kernel
    told = [str(w.message) for w in recwarn if issubclass(w.category, HastenWarning)]
    assert len(told) == (not kernel)
    if not kernel:
        assert "lm_head (8 bits, " in told[0]
        assert ("zero points" in told[0]) is not symmetric
        assert f"held as plain {dtype}" in told[0]


def test_transformers_and_we_agree_on_int8_by_group(tmp_path):
    publish(tmp_path, bits=8, strategy="group", symmetric=True, packed=True, dtype="float32")
    with pytest.warns(HastenWarning, match="8 bits, groups of 32, symmetric"):
        model = hasten.load(tmp_path)
    assert (logits(model) - theirs(tmp_path)).abs().max() < 1e-4
    quantize(model, Int8())  # what the warning advises
    assert model.quantization["head"].weight.bits == 8


def test_a_quantized_embedding_is_read_as_a_plain_one(tmp_path):
    expected = publish(
        tmp_path, bits=4, strategy="group", symmetric=True, packed=True, dtype="bfloat16", embedding=True
    )
    with pytest.warns(HastenWarning, match="embed_tokens"):
        model = hasten.load(tmp_path)
    assert torch.equal(model.embedding.weight, expected["model.embed_tokens.weight"])
    assert isinstance(model.head, PackedLinear)


def refused(folder, *words):
    with PeakMemory() as peak, pytest.raises(CheckpointError) as caught:
        hasten.load(folder)
    message = str(caught.value)
    assert peak.bytes < 50_000_000
    assert len(message) < 1000
    assert "\n" not in message
    assert all(word in message for word in words), message


TENSORS = {
    "no scale": (lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_packed", "lacks"),
    "no shape": (lambda t: t.pop(f"{Q}.weight_shape"), f"{Q}.weight_packed", "weight_shape"),
    "no weight": (lambda t: t.pop(f"{Q}.weight_packed"), f"{Q}.weight_scale", "stands without"),
    "float scale": (lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 2)}), f"{Q}.weight_scale", "F32"),
    "integer scale": (lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 2).int()}), f"{Q}.weight_scale", "I32"),
    "scale of other groups": (lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 3).half()}), "groups of 32"),
    "scale of other rows": (lambda t: t.update({f"{Q}.weight_scale": torch.ones(63, 2).half()}), "groups of 32"),
    "scale NaN": (lambda t: t[f"{Q}.weight_scale"].fill_(float("nan")), f"{Q}.weight_scale", "NaN"),
    "packed as int64": (
        lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"].long()}),
        f"{Q}.weight_packed",
        "I32",
    ),
    "packed too short": (
        lambda t: t.update({f"{Q}.weight_packed": t[f"{Q}.weight_packed"][:, :7].contiguous()}),
        f"{Q}.weight_packed",
        "64×64",
    ),
    "shape of others": (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 10**12])}), f"{10**12}"),
    "shape below zero": (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, -64])}), "-64"),
    "shape of three": (lambda t: t.update({f"{Q}.weight_shape": torch.tensor([64, 8, 8])}), f"{Q}.weight_shape"),
    "another model's": (
        lambda t: t.update(
            {
                f"{Q}.weight_packed": torch.zeros(32, 8).int(),
                f"{Q}.weight_scale": torch.ones(32, 2).half(),
                f"{Q}.weight_shape": torch.tensor([32, 64]),
            }
        ),
        f"{Q}.weight",
        "[64, 64]",
    ),
    "unexpected zeros": (
        lambda t: t.update({f"{Q}.weight_zero_point": torch.zeros(8, 2).int()}),
        f"{Q}.weight_scale",
        "with zero points",
    ),
    "reordered columns": (lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(64).int()}), "g_idx", "actorder"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(case, int4_folder):
    change, *words = TENSORS[case]
    change_tensors(int4_folder, change)
    refused(int4_folder, "model.safetensors", *words)


def test_tensors_of_no_module_are_no_module(int4_folder):
    before = logits(hasten.load(int4_folder))
    change_tensors(int4_folder, lambda t: t.update({leaf: t[f"{Q}.{leaf}"].clone() for leaf in ("weight_packed",)}))
    assert torch.equal(logits(hasten.load(int4_folder)), before)


CONFIGS = {
    "no word of it": (lambda v: v.pop("quantization_config"), "weight_packed is quantized", "no quantization_config"),
    "3 bits": (lambda v: weights_of(v).update(num_bits=3), "weights.num_bits", "3"),
    "group of 7": (lambda v: weights_of(v).update(group_size=7), "weights.group_size", "7"),
    "group of 64": (lambda v: weights_of(v).update(group_size=64), "groups of 64"),
    "group of text": (lambda v: weights_of(v).update(group_size="32"), "weights.group_size"),
    "floats": (lambda v: weights_of(v).update(type="float"), "weights.type", "float"),
    "blocks": (lambda v: weights_of(v).update(strategy="block"), "weights.strategy", "block"),
    "int8 by group of none": (lambda v: weights_of(v).update(num_bits=8, group_size=0), "weights.group_size"),
    "fp8": (lambda v: v["quantization_config"].update(format="float-quantized"), "format", "reads int4 and int8"),
    "column order": (lambda v: weights_of(v).update(actorder="group"), "weights.actorder", "group"),
    "dynamic": (lambda v: weights_of(v).update(dynamic=True), "weights.dynamic"),
    "static activations": (
        lambda v: v["quantization_config"]["config_groups"]["group_0"].update(
            input_activations={"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False}
        ),
        "input_activations",
    ),
    "outputs": (
        lambda v: v["quantization_config"]["config_groups"]["group_0"].update(output_activations={}),
        "output_activations",
    ),
    "a preset": (lambda v: v["quantization_config"].update(config_groups={"W4A16": ["Linear"]}), "W4A16"),
    "no groups": (lambda v: v["quantization_config"].update(config_groups={}), "config_groups"),
    "weights missing": (
        lambda v: v["quantization_config"]["config_groups"]["group_0"].pop("weights"),
        "group_0.weights",
    ),
    "format": (lambda v: v["quantization_config"].update(format="nvfp4-pack-quantized"), "format", "nvfp4"),
    "cache": (lambda v: v["quantization_config"].update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    "sparse": (lambda v: v["quantization_config"].update(sparsity_config={"format": "24"}), "sparsity_config"),
    "rotated": (lambda v: v["quantization_config"].update(transform_config={"x": 1}), "transform_config"),
    "no object": (lambda v: v.update(quantization_config=[1]), "quantization_config", "object"),
    "gptq": (lambda v: v["quantization_config"].update(quant_method="gptq"), "gptq", "compressed-tensors"),
    "awq": (lambda v: v["quantization_config"].update(quant_method="awq"), "awq"),
    "fp8 of others": (lambda v: v["quantization_config"].update(quant_method="fp8"), "fp8"),
    "no method": (lambda v: v["quantization_config"].pop("quant_method"), "None"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_ask_for_something_else_are_refused(case, int4_folder):
    change, *words = CONFIGS[case]
    change_config(int4_folder, change)
    in_weights = case in ("group of 64", "no word of it")
    refused(int4_folder, "model.safetensors" if in_weights else "config.json", *words)
