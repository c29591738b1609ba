"""What PyTorch's attention backends refuse, by rules that need no such device."""

import re

import pytest
import torch

from hasten.ops.attention import AttentionRequest, AttentionSpec, sdpa_rules

CPU = torch.device("cpu")
HOPPER = {"capability": (9, 0)}
LONG = {"queries": 512, "keys": 512}
LAYER = {"queries": None, "keys": None}


def request(*, spec=(), **changes):
    spec = AttentionSpec(**{"heads": 8, "kv_heads": 2, "head_dim": 64, "scale": 0.125} | dict(spec))
    known = {"device": torch.device("cuda"), "dtype": torch.bfloat16, "capability": (8, 0)}
    return AttentionRequest(spec=spec, **known | {"queries": 100, "keys": 100} | changes)


TAKEN = [
    ("flash", {}),
    ("flash", LAYER),
    ("flash", {"queries": 1}),
    ("flash", {"dtype": torch.float16, "dropout": True}),
    ("flash", {"spec": {"head_dim": 256}}),
    ("flash", {"spec": {"window": 100}}),
    ("flash", {"queries": 99, "spec": {"causal": False, "scale": -1.0}}),
    ("flash", {"device": CPU, "dtype": torch.float32, "mask": True, "alibi": True, "bias": True}),
    ("memory_efficient", {}),
    ("memory_efficient", {"spec": {"head_dim": 8}, "mask": True}),
    ("memory_efficient", {"spec": {"head_dim": 4}, "dtype": torch.float32, "alibi": True}),
    ("memory_efficient", {"dtype": torch.float16, "capability": (7, 5)}),
    ("cudnn", {}),
    ("cudnn", {"spec": {"head_dim": 128}, "mask": True, "bias": True}),
    ("cudnn", HOPPER | {"spec": {"head_dim": 256}}),
    ("cudnn", {"queries": 1, "keys": 2}),
    ("cudnn", {"queries": 2, "dropout": True}),
    ("cudnn", LAYER),
    ("one_by_one", {}),
    ("one_by_one", {"queries": 1}),
    ("one_by_one", {"queries": 99, "mask": True}),
    ("cudnn_opt_in", HOPPER | LONG),
    ("cudnn_opt_in", HOPPER | LONG | {"gradient": True}),
    ("flash_opt_in", {"device": CPU, "dtype": torch.float16}),
    ("flash_opt_in", {"dtype": torch.float16, "gradient": True}),
    ("flash_opt_in", {"device": CPU, "dtype": torch.float32, "gradient": True}),
    ("named_instead", LAYER),
    ("named_instead", {"queries": 99}),
]


@pytest.mark.parametrize(("rule", "changes"), TAKEN)
def test_what_is_taken(rule, changes):
    assert getattr(sdpa_rules, rule)(request(**changes)) is None


REFUSED = [
    ("flash", {"sinks": True}, "no attention sinks"),
    ("flash", {"device": CPU, "spec": {"softcap": 5.0}}, "no soft-capping"),
    ("flash", {"alibi": True}, "bfloat16 rounds ALiBi's distances"),
    ("flash", {"device": CPU, "dropout": True}, "on a CPU it has no dropout"),
    ("flash", {"device": CPU, "bias_gradient": True}, "on a CPU it gives a bias no gradient"),
    ("flash", {"device": torch.device("xpu")}, "a CUDA GPU or a CPU; the tensors are on xpu"),
    ("flash", {"dtype": torch.float32}, "bfloat16 and float16, not float32"),
    ("flash", {"spec": {"head_dim": 257}}, "head size is 257; it goes up to 256"),
    ("flash", {"capability": (7, 5)}, "it needs compute capability 8.0 or later, the device has 7.5"),
    ("flash", {"spec": {"window": 99}}, "found: window"),
    ("flash", {"spec": {"scale": 0.0}}, "found: scale of 0"),
    ("flash", {"key_lengths": True}, "found: key-padding lengths"),
    ("flash", {"queries": 99}, "with 99 queries and 100 keys .* and it takes no mask instead"),
    ("memory_efficient", {"device": CPU}, "no memory-efficient backend on a CPU"),
    ("memory_efficient", {"device": torch.device("xpu")}, "it needs a CUDA GPU; the tensors are on xpu"),
    ("memory_efficient", {"sinks": True}, "no attention sinks"),
    ("memory_efficient", {"dtype": torch.float64}, "not float64"),
    ("memory_efficient", {"capability": (7, 5)}, "bfloat16 needs compute capability 8.0"),
    ("memory_efficient", {"spec": {"head_dim": 12}}, "a multiple of 8 in bfloat16; it is 12"),
    ("memory_efficient", {"spec": {"head_dim": 6}, "dtype": torch.float32}, "a multiple of 4 in float32; it is 6"),
    ("cudnn", {"device": CPU}, "there is none on a CPU"),
    ("cudnn", {"device": torch.device("xpu")}, "it needs a CUDA GPU"),
    ("cudnn", {"dtype": torch.float32}, "not float32"),
    ("cudnn", {"capability": (7, 5)}, "compute capability 8.0"),
    ("cudnn", {"spec": {"head_dim": 136}}, "a multiple of 8 up to 128; it is 136"),
    ("cudnn", HOPPER | {"spec": {"head_dim": 100}}, "a multiple of 8 up to 256; it is 100"),
    ("cudnn", {"queries": 1, "keys": 1}, "a single key"),
    ("cudnn", {"queries": 0}, "a single key, nor none"),
    ("cudnn", {"queries": 1, "dropout": True}, "no dropout for a single query"),
    ("cudnn", {"bias": True, "bias_gradient": True}, "a bias no gradient"),
    ("one_by_one", LAYER, "a layer's calls differ"),
    ("one_by_one", {"queries": 99}, "needs a mask of queries x keys"),
    ("cudnn_opt_in", HOPPER | LAYER, "a layer's calls differ"),
    ("cudnn_opt_in", LONG, "measured on Hopper"),
    ("cudnn_opt_in", LONG | HOPPER | {"documents": True}, "found: packed documents"),
    ("cudnn_opt_in", HOPPER | {"queries": 511, "keys": 511}, "fewer than 512 queries"),
    ("cudnn_opt_in", LONG | HOPPER | {"gradient": False}, "74 ms of the host"),
    ("flash_opt_in", {"device": CPU, "dtype": torch.float16, "gradient": True}, "slow in float16"),
    ("flash_opt_in", LAYER, "a layer's calls differ"),
    ("named_instead", {}, "listed here by itself"),
]


@pytest.mark.parametrize(("rule", "changes", "words"), REFUSED)
def test_what_is_refused(rule, changes, words):
    reason = getattr(sdpa_rules, rule)(request(**changes))
    assert re.search(words, reason or "")


def test_an_older_cudnn_takes_heads_up_to_128(monkeypatch):
    wide = request(**HOPPER, spec={"head_dim": 256})
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_000)
    assert sdpa_rules.cudnn(wide) is None
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90_999)
    assert "up to 128" in sdpa_rules.cudnn(wide)


@pytest.mark.parametrize(("mode", "warn_only", "refused"), [(True, False, True), (True, True, False)])
def test_cudnn_gives_no_same_bits(mode, warn_only, refused):
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)
    try:
        found = sdpa_rules.cudnn(request())
    finally:
        torch.use_deterministic_algorithms(False)
    assert (found is not None) == refused
