"""Two ranks with a share each compute what one process computes, whatever the model and however it is stored."""

import copy
import json
import warnings

import pytest
import torch

import column_folders
import hasten
import ranks
from hasten.errors import ConfigError
from hasten.model.families import read_config
from hasten.model.initialize import initialize
from hasten.model.shares import shares, whole_groups
from hasten.model.wide import narrow
from hasten.ops.linear.weights import INT8, Q4_K, int4_format
from hasten.ops.native import library
from hasten.quantization import Int4, Int8, quantize
from tiny_model import tiny_llama

PROMPTS = [[3, 7, 1, 9, 4], [60, 99, 2, 5, 5, 8, 13, 1, 1, 40, 7]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
GEMMA = {
    "model_type": "gemma2",
    "sliding_window": 6,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
}
MOE = {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
SHARED = {
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "first_k_dense_replace": 1,
}
GATED = {
    "model_type": "qwen2_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 96,
}
COHERE = {"model_type": "cohere2", "sliding_window": 6}
SINKS = {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
SINKS |= {"swiglu_limit": 0.7, "attention_bias": True}
EXAONE = {"model_type": "exaone4", "sliding_window": 6}
GRANITE = {"model_type": "granite", "attention_multiplier": 0.3, "residual_multiplier": 0.4, "logits_scaling": 2.0}
BIASES = {"attention_bias": True, "mlp_bias": True}
OLMO = {"model_type": "olmo2"}
STATES = {"num_hidden_layers": 4, "head_dim": 32, "rms_norm_eps": 1e-2, "linear_num_key_heads": 4}
STATES |= {"linear_num_value_heads": 16, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
DELTA = STATES | {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2}
DELTA |= {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 40}
GEMMA4 = {"model_type": "gemma4_text", "head_dim": 16, "global_head_dim": 32, "sliding_window": 6}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "attention_k_eq_v": False}
# Values of global layers that are their keys, of fewer heads; then shared keys and per-layer embeddings; then experts.
FEW_KEYS = GEMMA4 | {"num_hidden_layers": 7, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
LENT_KEYS = GEMMA4 | {"num_hidden_layers": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
LENT_KEYS |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 310}
BESIDE = FEW_KEYS | {"num_hidden_layers": 6, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
BESIDE |= {"moe_intermediate_size": 48}
LONG = [PROMPTS[0], PROMPTS[1] * 8]  # of several blocks
PATTERN = {"name": "bigbird", "block": 16, "window": 1, "random_blocks": 1, "per_head": True}
UNEVEN = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 111,
    "vocab_size": 301,
}
# name -> (changes of the tiny Llama, scheme of its weights, dtype)
CASES = {
    "grouped": ({}, None, "float32"),
    "one-kv-head": ({"num_key_value_heads": 1, **BIASES}, None, "float32"),
    "uneven": (UNEVEN, None, "float32"),
    "gemma": (GEMMA, None, "float32"),
    "experts": (MOE, None, "float32"),
    "stacked": (GRANITE | MOE | {"model_type": "granitemoe"}, None, "float32"),
    "shared": (SHARED, None, "float32"),
    "sinks": (SINKS, None, "float32"),
    "sinks-fused": (SINKS, None, "bfloat16"),
    "sparse": ({"hasten": {"attention_pattern": PATTERN}}, None, "float32"),
    "sparse-fused": ({"hasten": {"attention_pattern": PATTERN}}, None, "bfloat16"),
    "act-order": ({}, "desc_act", "float32"),
    "side-by-side": (COHERE, None, "float32"),
    "norm-of-all-heads": (OLMO, None, "float32"),
    "norm-of-one-key": (OLMO | {"num_key_value_heads": 1}, None, "float32"),
    "states": (DELTA, None, "float32"),
    "states-fused": (STATES | {"model_type": "qwen3_5_text"}, None, "bfloat16"),
    "states-experts-fused": (DELTA, None, "bfloat16"),
    "states-one-key": (STATES | {"model_type": "qwen3_5_text", "linear_num_key_heads": 1}, None, "float32"),
    "few-keys": (FEW_KEYS, None, "float32"),
    "lent-keys": (LENT_KEYS, None, "float32"),
    "experts-beside": (BESIDE, None, "float32"),
    "few-keys-fused": (FEW_KEYS, None, "bfloat16"),
    "lent-keys-fused": (LENT_KEYS, None, "bfloat16"),
    "experts-beside-fused": (BESIDE, None, "bfloat16"),
    "int8": ({}, Int8(activations="int8"), "bfloat16"),
    "int4": ({"intermediate_size": 160}, Int4(group_size=32), "bfloat16"),
    "int4-experts": (MOE, Int4(group_size=32), "bfloat16"),
    "int4-shared": (GATED, Int4(group_size=32), "bfloat16"),
    "bfloat16": (BIASES, None, "bfloat16"),
    "norms-after": (EXAONE, None, "bfloat16"),
    "scaled": (GRANITE, None, "bfloat16"),
}

SERVED = ["grouped", "int4", "states", "states-fused", "lent-keys"]

# Writes, for each case, what one rank has: tokens, logits of the first step, and how much of each weight it holds.
WORKER = """
import json, sys
import torch
import hasten
from hasten.distributed.launch import joined
from hasten.distributed.tensor_parallel import tensor_parallel
from hasten.engine.cache import KVCache
from hasten.engine.following import follow
from hasten.engine.settings import EngineSettings
from hasten.model.fused import fuse_where_it_fits
from hasten.checkpoints.load import load
torch.set_num_threads(1)
folder, cases, settings, served = sys.argv[1], *map(json.loads, sys.argv[2:])
found = {}
with joined() as ranks, tensor_parallel(ranks) as group, torch.inference_mode():
    for name, prompts in cases.items():
        model = load(f"{folder}/{name}", dtype="stored", group=group)
        said = {"held": sum(one.nbytes for one in model.state_dict().values())}
        for form in ["readable"] + ["fused"] * (model.dtype == torch.bfloat16):
            if form == "fused":
                fuse_where_it_fits(model)
            ids = torch.tensor([prompts[1]])
            positions = torch.arange(ids.shape[1])[None]
            size = {"batch": 1, "capacity": ids.shape[1]}
            cache = KVCache.of_texts(model.config, **size, dtype=model.compute_dtype, device=model.device)
            logits = model(ids, positions, cache.step_of_texts(positions, fresh=True))
            block = type(model.blocks[0]).__name__  # what generates is fused where it can be
            tokens = [one.tokens for one in hasten.generate(model, prompts, **settings)]
            again = [one.tokens for one in hasten.generate(model, prompts, **settings)]
            drawn = hasten.generate(model, prompts, temperature=1.0, seed=5, max_new_tokens=8, ignore_eos=True)
            said[form] = {"tokens": tokens, "again": again, "drawn": [one.tokens for one in drawn],
                          "logits": logits[0].tolist(), "block": block}
        if name in served:
            if ranks.first:
                llm = hasten.LLM(model, block_size=4)
                answers = llm.generate(prompts * 3, hasten.SamplingParams(**settings))
                said["served"] = [answer.tokens for answer in answers]
                llm.close()
            else:
                follow(model, EngineSettings(block_size=4))
        found[name] = said
    with open(f"{folder}/rank-{ranks.rank}.json", "w") as file:
        json.dump(found, file)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The models of all cases, and what a process alone makes of each."""
    root, alone = tmp_path_factory.mktemp("shared"), {}
    for name, (changes, scheme, dtype) in CASES.items():
        model = make(changes, decided=4 if dtype == "float32" else 8).to(getattr(torch, dtype))
        if scheme == "desc_act":
            hasten.save(model, root / f"{name}-plain")
            column_folders.write(root / f"{name}-plain", root / name, "gptq", act_order=True)
            alone[name] = hasten.load(root / name, dtype="stored")
            continue
        if scheme is not None:
            quantize(model, scheme)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "hasten runs")  # an attention pattern that transformers does not know
            hasten.save(model, root / name)
        alone[name] = hasten.load(root / name, dtype="stored")
    return root, alone


def make(changes, *, decided=4):
    """The tiny Llama with these changes; biases are random too. decided: factor of what its routers say."""
    plain = tiny_llama()
    model = initialize(read_config(dict(plain.config.source) | {"head_dim": None} | changes), seed=3)
    generator = torch.Generator().manual_seed(0)
    for name, one in model.named_parameters():
        if name.endswith(("bias", "sinks", "q_norm.weight", "k_norm.weight")):
            torch.nn.init.normal_(one, std=0.3, generator=generator)
        if name.endswith("router.weight"):  # decisions that are no near ties: else any rounding takes another expert
            one.data *= decided
    return model.eval()


def prompts_of(name):
    return LONG if name.startswith("sparse") else PROMPTS


def states_of(model):
    """Logits (T, V) of the second prompt, and greedy tokens of both."""
    prompts = PROMPTS if model.config.attention_pattern is None else LONG
    from hasten.engine.cache import KVCache

    ids = torch.tensor([prompts[1]])
    like = {"dtype": model.compute_dtype, "device": model.device}
    cache = KVCache.of_texts(model.config, batch=1, capacity=ids.shape[1], **like)
    positions = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        logits = model(ids, positions, cache.step_of_texts(positions, fresh=True))[0]
    return logits, [one.tokens for one in hasten.generate(model, prompts, **GREEDY)]


@pytest.fixture(scope="module")
def said(folders):
    """What each rank says of each case."""
    root, _ = folders
    cases = {name: prompts_of(name) for name in CASES}
    arguments = (root, json.dumps(cases), json.dumps(GREEDY), json.dumps(SERVED))
    found = ranks.run(WORKER, *arguments, ranks=2)
    assert [status for status, _, _ in found] == [0, 0], found
    return [json.loads((root / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", [name for name, (_, _, dtype) in CASES.items() if dtype == "float32"])
def test_greedy_text_in_float32_is_that_of_one_process(folders, said, name):
    logits, tokens = states_of(folders[1][name])
    for rank in said:
        assert rank[name]["readable"]["tokens"] == tokens
        torch.testing.assert_close(torch.tensor(rank[name]["readable"]["logits"]), logits, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name, (_, _, dtype) in CASES.items() if dtype != "float32"])
def test_fast_formats_err_as_little_as_one_process(folders, said, name):
    """Against the same numbers in float32: at most twice what one process errs."""
    alone = folders[1][name]
    exact, own = reference(alone), copy.deepcopy(alone)
    if CASES[name][1] is None:  # where it is emulated, readable layers would compute in float32, and err by nothing
        own.bind()
        narrow(own)
    ours, _ = states_of(own)
    allowed = 2 * (ours - exact).norm()
    for rank in said:
        for form in ("readable", "fused"):
            if library() is not None:
                assert rank[name][form]["block"] == {"readable": "Block", "fused": "FusedBlock"}[form]
            assert (torch.tensor(rank[name][form]["logits"]) - exact).norm() <= allowed, form


def reference(model):
    """The model's logits with float32 products of the numbers that it holds."""
    from hasten.ops.linear import PackedLinear

    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, PackedLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = module.dequantize()
            if module.bias is not None:
                linear.bias.data = module.bias.float()
            plain.set_submodule(name, linear)
    plain.quantization = None
    plain = plain.float()
    plain.bind()
    return states_of(plain)[0]


@pytest.mark.parametrize("name", CASES)
def test_every_rank_and_every_run_gives_the_same_bits(said, name):
    first, second = (rank[name] for rank in said)
    for form in first.keys() & {"readable", "fused"}:
        assert first[form] == second[form]
        assert first[form]["tokens"] == first[form]["again"]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_its_share(folders, said, name):
    model = folders[1][name]
    whole = sum(one.nbytes for one in model.state_dict().values())
    assert max(rank[name]["held"] for rank in said) < 0.85 * whole


FORMS = {"int4": "fused", "states-fused": "fused"}


@pytest.mark.parametrize(("name", "form"), [(name, FORMS.get(name, "readable")) for name in SERVED])
def test_the_first_rank_serves_and_the_others_follow(said, name, form):
    assert said[0][name]["served"] == said[0][name][form]["tokens"] * 3


def test_shares_are_whole_heads_and_groups():
    config = read_config(dict(tiny_llama().config.source) | SHAPE_OF_A_BILLION)
    assert whole_groups([INT8]) == 8
    assert whole_groups([int4_format(128), int4_format(32)]) == 128
    assert whole_groups([Q4_K]) == 256
    for size in range(1, 33):
        own = shares(config, size, output=128, down=128) if size <= 16 else shares(config, size)
        for parts in ([share.inner for share in own], [share.words for share in own]):
            assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
            assert min(map(len, parts)) > 0
        assert sum(len(share.inner) for share in own) == 5632
        assert [head for share in own for head in share.heads] == list(range(32))
        for share in own:  # the query heads are those of the rank's key heads, equally many of each
            ratio = len(share.heads) // len(share.kv_heads)
            assert ratio * len(share.kv_heads) == len(share.heads)
            seen = [share.kv_heads[i // ratio] for i in range(len(share.heads))]
            assert seen == [head // 8 for head in share.heads]
            assert size > 16 or share.heads.start * 64 % 128 == share.inner.start % 128 == 0


SHAPE_OF_A_BILLION = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4,
    "vocab_size": 32_000,
}  # fmt: skip


def test_eight_ranks_share_44_groups():
    config = read_config(dict(tiny_llama().config.source) | SHAPE_OF_A_BILLION)
    assert [len(share.inner) // 128 for share in shares(config, 8, output=128, down=128)] == [5, 6, 5, 6, 5, 6, 5, 6]


@pytest.mark.parametrize(("size", "group", "most"), [(33, 1, 32), (17, 128, 16), (0, 1, 32)])
def test_more_ranks_than_there_are_parts_are_refused_with_what_would_do(size, group, most):
    config = read_config(dict(tiny_llama().config.source) | SHAPE_OF_A_BILLION)
    with pytest.raises(ConfigError, match=f"--tensor-parallel is {size}.* at most {most}$"):
        shares(config, size, output=group, down=group)


@pytest.mark.parametrize(
    ("family", "kind", "name"),
    [
        ("lfm2", "conv", "short convolution"),
        ("granitemoehybrid", "mamba", "Mamba-2"),
        ("nemotron_h", "linear_attention", "Mamba-2"),
    ],
)
def test_states_of_other_kinds_are_not_divided(family, kind, name):
    kinds = {"model_type": family, "num_hidden_layers": 2, "layer_types": [kind, "full_attention"]}
    config = read_config(dict(tiny_llama().config.source) | kinds | {"mamba_n_heads": 8, "num_local_experts": 0})
    with pytest.raises(ConfigError, match=f"--tensor-parallel does not divide {name}, which this model has"):
        shares(config, 2)
    assert len(shares(config, 1)) == 1  # what a plan of one process asks


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_heads_of_states_are_divided_with_the_keys_that_they_use(size):
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 32, "num_attention_heads": 8}
    values = dict(tiny_llama().config.source) | {"head_dim": 8} | STATES | {"model_type": "qwen3_5_text"} | sizes
    config, covered = read_config(values), []
    for share in shares(config, size):
        own = share.config().mixer
        assert own.value_heads % own.key_heads == 0
        seen = [share.key_heads[i // (own.value_heads // own.key_heads)] for i in range(own.value_heads)]
        assert seen == [head // 16 for head in share.value_heads]
        covered += share.value_heads
    assert covered == list(range(32))


@pytest.mark.parametrize(("heads", "able"), [((12, 4, 3), [1, 12]), ((8, 4, 1), [1, 2, 4, 8])])
def test_layers_that_would_be_divided_differently_are_refused_with_the_sizes_that_do(heads, able):
    names = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
    config = read_config(dict(tiny_llama().config.source) | FEW_KEYS | dict(zip(names, heads, strict=True)))
    advice = f"take {', '.join(map(str, able[:-1]))} or {able[-1]}$"
    for size in range(1, heads[0] + 2):
        if size in able:
            assert len(shares(config, size)) == size
            continue
        reason = "gemma4_text have different numbers" if size <= heads[0] else "can be shared by 1"
        with pytest.raises(ConfigError, match=rf"--tensor-parallel is {size}; .*{reason}.*: {advice}"):
            shares(config, size)
