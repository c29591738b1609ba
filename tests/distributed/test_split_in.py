"""Models of transformers that are none of our families, split over two ranks by the roles of their modules."""

import json
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import ranks
from hasten.distributed.ranks import Ranks
from hasten.distributed.split_in import split_in
from hasten.errors import ConfigError

WORKER = """
import json, torch
import transformers
from hasten.distributed.launch import joined
from hasten.distributed.split_in import split_in
torch.set_num_threads(1)
COMMON = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99, max_position_embeddings=64)
WIDE = COMMON | dict(intermediate_size=150)
CASES = {
    "OPT": dict(COMMON, ffn_dim=150, word_embed_proj_dim=64),
    "Bloom": dict(hidden_size=64, n_layer=2, n_head=4, vocab_size=99),
    "Falcon": dict(COMMON, new_decoder_architecture=True, num_kv_heads=2),
    "Olmo2": dict(WIDE, num_key_value_heads=2),
    "GPTNeoX": WIDE,
    "StableLm": dict(WIDE, num_key_value_heads=2),
    "Falcon, one key head": dict(COMMON, multi_query=True, new_decoder_architecture=False),
}
def model_of(name):
    kind = name.partition(",")[0]
    torch.manual_seed(0)
    tied = kind in ("OPT", "Bloom", "Falcon")
    config = getattr(transformers, kind + "Config")(**CASES[name], tie_word_embeddings=tied)
    model = getattr(transformers, kind + "ForCausalLM")(config).eval()
    for parameter in model.parameters():  # biases are zeros and norms ones in new models
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else torch.nn.init.normal_(parameter, 0.5, 0.5)
    return model
class Between(torch.nn.Module):  # of whose linear layers the second does not take what the first puts out, unchanged
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 12), torch.nn.Linear(12, 8)
    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))
class Softmax(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layers = torch.nn.Embedding(99, 8), torch.nn.ModuleList([Between(), Between()])
    def forward(self, tokens, use_cache=None):
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return x
with joined() as ranks, torch.no_grad():
    softmax = Softmax()
    print(json.dumps(split_in(softmax, ranks).whole))
    found, tokens = {}, torch.randint(3, 99, (2, 12), generator=torch.Generator().manual_seed(1))
    for name in CASES:
        model = model_of(name)
        model.config.pad_token_id = model.config.eos_token_id = None
        whole = model(tokens).logits
        told = model.generate(tokens[:, :5], max_new_tokens=6, do_sample=False)
        reference = model_of(name).double()(tokens).logits
        before = sum(one.numel() for one in model.parameters())
        report = split_in(model, ranks)
        local = [one.to_local() if hasattr(one, "to_local") else one for one in model.parameters()]
        split = model(tokens).logits
        found[name] = {
            "split": report.split,
            "why": report.whole,
            "held": sum(one.numel() for one in local) / before,
            "error": (split - reference).abs().max().item(),
            "of whole": (whole - reference).abs().max().item(),
            "scale": reference.abs().max().item(),
            "same": torch.equal(model.generate(tokens[:, :5], max_new_tokens=6, do_sample=False), told),
        }
    print(json.dumps(found))
"""

# name -> modules of a block that are split, and those that stay whole
EXPECTED = {
    "OPT": ({"self_attn", "OPTDecoderLayer"}, {"lm_head"}),
    "Bloom": ({"mlp"}, {"self_attention", "lm_head"}),  # its biases are made for all heads, outside of the block
    "Falcon": ({"self_attention", "mlp"}, {"lm_head"}),
    "Olmo2": ({"mlp", "lm_head"}, {"self_attn"}),  # a norm over all heads together
    "GPTNeoX": ({"attention", "mlp"}, set()),
    "StableLm": ({"self_attn", "mlp", "lm_head"}, set()),
    "Falcon, one key head": ({"mlp"}, {"self_attention", "lm_head"}),
}


@pytest.fixture(scope="module")
def found():
    told = ranks.run(WORKER, ranks=2)
    assert [status for status, _, _ in told] == [0, 0], told
    first, second = (json.loads(said.splitlines()[-1]) for _, said, _ in told)
    for name, case in first.items():
        assert case | {"held": 0} == second[name] | {"held": 0}, "the same logits, to the bit"
        assert case["held"] + second[name]["held"] >= 1
    return first | {"Softmax": json.loads(told[0][1].splitlines()[0])}


def test_a_block_that_is_another_one_when_it_is_split_stays_whole(found):
    ((where, why),) = found["Softmax"].items()
    assert where == "Between"
    assert why.startswith("split its output is another one")


@pytest.mark.parametrize("name", EXPECTED)
def test_a_split_model_has_the_whole_ones_logits(found, name):
    case = found[name]
    rounding = torch.finfo(torch.float32).eps * case["scale"]
    assert case["error"] <= 2 * case["of whole"] + 16 * rounding
    assert case["same"], "greedy text, through the cache"


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_split_is_reported_and_held_in_shares(found, name):
    case, (split, whole) = found[name], EXPECTED[name]
    assert split <= set(case["split"])
    assert set(case["why"]) == whole
    assert all(case["why"].values())
    assert case["held"] < 0.9


def test_the_script_of_the_page(tmp_path):
    import transformers

    from tiny_model import tiny_llama

    tokenizer = tiny_llama().tokenizer
    config = transformers.OPTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=300, ffn_dim=128, word_embed_proj_dim=64,
        max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    page = (Path(__file__).parents[2] / "docs" / "parallel-inference.md").read_text()
    block = page.split("    # torchrun --nproc-per-node 2 split.py FOLDER\n")[1].split("\n\nOnly from Python")[0]
    (status, said, errors), (other, silent, _) = ranks.run(textwrap.dedent(block), tmp_path, ranks=2)
    assert (status, other) == (0, 0), errors
    assert "SplitReport(split=['OPTDecoderLayer', 'self_attn']" in said
    assert "Once upon a time" in said
    assert not silent


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ConfigError, match="Linear has no list of blocks"):
        split_in(nn.Linear(3, 3), Ranks())
