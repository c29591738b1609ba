"""Quantized folders that are odd are refused in words."""

import pytest
import torch

from quantized_folders import Q, change_config, change_tensors, refused, weights_of

TENSORS = {
    "no scale": (lambda t: t.pop(f"{Q}.weight_scale"), f"{Q}.weight_packed", "lacks"),
    "no shape": (lambda t: t.pop(f"{Q}.weight_shape"), f"{Q}.weight_packed", "weight_shape"),
    "no weight": (lambda t: t.pop(f"{Q}.weight_packed"), f"{Q}.weight_scale", "is there without"),
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
    "columns of no group": (lambda t: t.update({f"{Q}.weight_g_idx": torch.full((64,), 5)}), "g_idx", "names groups"),
    "columns of others": (lambda t: t.update({f"{Q}.weight_g_idx": torch.zeros(63).int()}), "g_idx", "[63]"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(case, int4_folder):
    change, *words = TENSORS[case]
    change_tensors(int4_folder, change)
    refused(int4_folder, "model.safetensors", *words)


CONFIGS = {
    "no word of it": (lambda v: v.pop("quantization_config"), "weight_packed is quantized", "no quantization_config"),
    "5 bits": (lambda v: weights_of(v).update(num_bits=5), "weights.num_bits", "5"),
    "group of 7": (lambda v: weights_of(v).update(group_size=7), "groups of 7"),
    "group of -7": (lambda v: weights_of(v).update(group_size=-7), "weights.group_size", "-7"),
    "group of 64": (lambda v: weights_of(v).update(group_size=64), "groups of 64"),
    "group of text": (lambda v: weights_of(v).update(group_size="32"), "weights.group_size"),
    "floats": (lambda v: weights_of(v).update(type="float"), "format must be 'float-quantized'"),
    "blocks": (lambda v: weights_of(v).update(strategy="block"), "weights.strategy", "block"),
    "int8 by group of none": (lambda v: weights_of(v).update(num_bits=8, group_size=0), "weights.group_size"),
    "fp8": (
        lambda v: v["quantization_config"].update(format="float-quantized"),
        "format",
        "reads weights of 2, 3, 4 and 8 bits",
    ),
    "column order": (lambda v: weights_of(v).update(actorder="rows"), "weights.actorder", "rows"),
    "order of columns missing": (lambda v: weights_of(v).update(actorder="group"), "lacks", "weight_g_idx"),
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
    "gptq": (lambda v: v["quantization_config"].update(quant_method="gptq"), "bits (gptq) must be"),
    "awq": (lambda v: v["quantization_config"].update(quant_method="awq"), "bits (awq) must be"),
    "fp8 of others": (lambda v: v["quantization_config"].update(quant_method="fbgemm_fp8"), "fbgemm_fp8"),
    "no method": (lambda v: v["quantization_config"].pop("quant_method"), "None"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_that_ask_for_something_else_are_refused(case, int4_folder):
    change, *words = CONFIGS[case]
    change_config(int4_folder, change)
    in_weights = case in ("group of 64", "group of 7", "no word of it", "order of columns missing")
    refused(int4_folder, "model.safetensors" if in_weights else "config.json", *words)
