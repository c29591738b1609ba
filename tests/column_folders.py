"""GPTQ and AWQ folders of random integers, written loop by loop as the published definitions say."""

import json

import torch
from safetensors.torch import load_file, save_file


def word_of(values, bits):
    """One int32 of unsigned values, the first one lowest."""
    word = sum(int(value) << (bits * i) for i, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def packed_down(values, bits):
    """(K, N) -> (K · bits / 32, N): AutoGPTQ's qweight. Of 3 bits, 32 values stand in three words."""
    k, n = values.shape
    if bits == 3:
        rows = []
        for start in range(0, k, 32):
            whole = [sum(int(values[start + i, j]) << (3 * i) for i in range(32)) for j in range(n)]
            rows += [[(one >> (32 * part)) & 0xFFFFFFFF for one in whole] for part in range(3)]
        return torch.tensor([[w - (1 << 32) if w >= 1 << 31 else w for w in row] for row in rows], dtype=torch.int32)
    each = 32 // bits
    return torch.tensor(
        [[word_of(values[i : i + each, j], bits) for j in range(n)] for i in range(0, k, each)], dtype=torch.int32
    )


def packed_across(values, bits, order=None):
    """(R, N) -> (R, N · bits / 32): qzeros, and AWQ's qweight with its order."""
    if order is None:
        return packed_down(values.t(), bits).t().contiguous()
    rows = [[word_of([row[i + o] for o in order], bits) for i in range(0, values.shape[1], 8)] for row in values]
    return torch.tensor(rows, dtype=torch.int32)


def write(folder, out, method, *, bits=4, group=32, symmetric=False, version="gptq", act_order=False):
    """A checkpoint, and the weights that it stands for by their published names."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": method,
        "bits": bits,
        "group_size": group,
        **({"sym": symmetric, "desc_act": act_order, "checkpoint_format": version} if method == "gptq" else {}),
        **({"zero_point": True, "version": "gemm"} if method == "awq" else {}),
    }
    (out / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    tensors, weights = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "_proj." not in name or not name.endswith(".weight"):
            tensors[name] = tensor
            continue
        prefix, (n, k) = name.removesuffix("weight"), tensor.shape
        size = k if group == -1 else group
        groups = -(-k // size)
        values = torch.randint(0, 1 << bits, (k, n), generator=generator)
        zeros = torch.randint(1, 1 << bits, (groups, n), generator=generator)
        if symmetric:
            zeros.fill_(1 << (bits - 1))
        scales = (torch.rand(groups, n, generator=generator) * 0.02 + 0.001).half()
        index = torch.arange(k) // size
        if act_order:
            index = index[torch.randperm(k, generator=generator)]
        weights[name] = (scales.float()[index] * (values - zeros[index])).t().contiguous()
        if method == "awq":
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            own = {"qweight": packed_across(values, 4, order), "qzeros": packed_across(zeros, 4, order)}
        else:
            stored = (zeros - int(version == "gptq")) % (1 << bits)
            own = {"qweight": packed_down(values, bits), "qzeros": packed_across(stored, bits), "g_idx": index.int()}
        tensors |= {prefix + leaf: tensor for leaf, tensor in (own | {"scales": scales}).items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out, weights
