"""With ZeRO no rank has the whole model: each makes or reads its own rows, with the numbers of one process."""

import json
import textwrap
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import hasten
import ranks
from hasten.checkpoints.load import open_checkpoint
from hasten.checkpoints.one_by_one import unfilled_model
from hasten.errors import CheckpointError, ConfigError
from hasten.model.families import read_config
from hasten.model.initialize import draw_weights, initialize, unfilled
from hasten.model.transformer import Transformer
from hasten.ops.linear import PackedLinear
from hasten.training.rank_checks import check_shares
from hasten.training.recipe import Parallel
from references import values_of
from tiny_model import tiny_llama

LLAMA = {
    "model_type": "llama",
    "hidden_size": 40,
    "intermediate_size": 51,  # rows that two ranks cannot share evenly
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 301,
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "n_positions": 16}

# Makes each model of argv[1] on these ranks; the first writes the whole tensors that they hold together.
START = textwrap.dedent("""
    import json, sys
    import torch
    from safetensors.torch import save_file
    from hasten.checkpoints.load import open_checkpoint
    from hasten.distributed.launch import joined
    from hasten.model.families import read_config
    from hasten.training import build
    from hasten.training.recipe import Parallel, Recipe, Techniques
    with joined() as ranks:
        for case in json.loads(sys.argv[1]):
            policy = {"policy": case["policy"], "offload": case["offload"]}
            recipe = Recipe(
                name="start",
                techniques=Techniques(precision="bfloat16", compile=False, pad_vocabulary_to=64),
                parallel=Parallel(zero=case["zero"], **policy),
            )
            source = open_checkpoint(case["folder"]) if case["folder"] else None
            config = source.config if source else read_config(case["config"])
            model, weights = build.model_and_weights(
                source, build.training_config(recipe, config), recipe, device=torch.device("cpu")
            )
            assert all(one.is_meta for one in model.parameters())
            step = build.training_step(model, recipe, ranks=ranks, weights=weights)
            parameters = step.where.parameters
            for name, whole in parameters.items():
                assert len(whole.to_local()) <= -(-whole.shape[0] // ranks.size), name
            found = {name: one.full_tensor().detach().clone() for name, one in parameters.items()}
            if ranks.first:
                save_file(found, case["out"])
""")

# The same with packed weights that LoRA leaves frozen.
PACKED = textwrap.dedent("""
    import json, sys
    import torch
    from safetensors.torch import save_file
    from hasten.checkpoints.load import open_checkpoint
    from hasten.distributed.launch import joined
    from hasten.training import build
    from hasten.training.recipe import Lora, Parallel, Recipe, Techniques
    with joined() as ranks:
        for folder, out in json.loads(sys.argv[1]):
            recipe = Recipe(
                name="start",
                lora=Lora(rank=4, targets=("q_proj", "down_proj")),
                techniques=Techniques(precision="float32", compile=False),
                parallel=Parallel(zero=3),
            )
            source = open_checkpoint(folder)
            model, weights = build.model_and_weights(
                source, source.config, recipe, device=torch.device("cpu"), ranks=ranks
            )
            packed = {name for name, one in model.named_parameters() if one.is_meta}
            step = build.training_step(model, recipe, ranks=ranks, weights=weights)
            found = {}
            for name, whole in step.where.module.named_parameters():
                if (name := name.replace(".base", "")) in packed:
                    assert len(whole.to_local()) <= -(-whole.shape[0] // ranks.size), name
                    found[name] = whole.full_tensor().detach().clone()
            assert found.keys() == packed
            if ranks.first:
                save_file(found, out)
""")


@pytest.mark.parametrize("values", [LLAMA, LLAMA | {"tie_word_embeddings": True}, GPT2], ids=["llama", "tied", "gpt2"])
def test_weights_drawn_one_at_a_time_are_those_of_a_whole_model(values):
    config = read_config(values).padded_to(64)
    whole = initialize(config, seed=3)
    with unfilled():
        model = Transformer(config)
    drawn = {}
    draw_weights(model, lambda name, tensor: drawn.setdefault(name, tensor), seed=3)
    assert all(one.is_meta for one in model.parameters())
    for name, tensor in drawn.items():
        assert torch.equal(whole.get_parameter(name), tensor), name
    assert {whole.get_parameter(name) for name in drawn} == set(whole.parameters())


def test_ranks_hold_the_rows_of_one_process(tmp_path):
    hasten.save(tiny_llama(tie_word_embeddings=True), tmp_path / "model")
    cases = [
        {"zero": 1, "config": LLAMA},
        {"zero": 3, "config": LLAMA | {"tie_word_embeddings": True}},
        {"zero": 2, "config": GPT2, "offload": "optimizer"},
        {"zero": 3, "config": LLAMA, "offload": "all"},
        {"zero": 3, "config": LLAMA, "policy": "float32-masters"},
        {"zero": 3, "folder": str(tmp_path / "model")},
    ]
    usual = {"policy": "float32-weights", "offload": "none", "folder": None, "config": None}
    cases = [usual | case | {"out": str(tmp_path / f"{n}.safetensors")} for n, case in enumerate(cases)]
    for status, _, errors in ranks.run(START, json.dumps(cases)):
        assert status == 0, errors
    for case in cases:
        if case["folder"]:
            whole = hasten.load(case["folder"], dtype="float32")
        else:
            whole = initialize(read_config(case["config"]).padded_to(64), seed=0)
        found = load_file(case["out"])
        assert found.keys() == dict(whole.named_parameters()).keys()
        for name, tensor in found.items():
            expected = whole.get_parameter(name)
            expected = expected.bfloat16() if case["policy"] == "float32-masters" else expected
            assert torch.equal(tensor[: len(expected)], expected), (case, name)
            assert not tensor[len(expected) :].any(), "rows that pad the vocabulary"


def test_ranks_divide_packed_weights_as_they_are_read(tmp_path):
    cases = []
    for number, scheme in enumerate((hasten.Int8(), hasten.Int4(group_size=32))):
        model = tiny_llama(tie_word_embeddings=number == 0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "hasten reads this quantized model; transformers does not")
            hasten.save(hasten.quantize(model, scheme), folder := tmp_path / str(number))
        cases.append((str(folder), f"{folder}.safetensors"))
    for status, _, errors in ranks.run(PACKED, json.dumps(cases)):
        assert status == 0, errors
    for folder, out in cases:
        whole, found = hasten.load(folder, dtype="float32").state_dict(), load_file(out)
        assert len(found) > 20
        assert [name for name, tensor in found.items() if not torch.equal(tensor, whole[name])] == []


def test_a_packed_weight_that_is_divided_keeps_its_kernel():
    """FSDP2 may keep its shards on another device than the one where they are gathered and multiplied."""
    layer = PackedLinear.from_linear(torch.nn.Linear(64, 64), kernel="reference")
    layer.hold_as_parameters()
    assert layer.to(torch.float32).kernel == "reference"
    assert isinstance(layer.data, torch.nn.Parameter)


def test_a_head_that_is_not_the_embedding_after_all_is_read_for_itself(tmp_path):
    hasten.save(tiny_llama(), tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    config = replace(checkpoint.config, tie_embeddings=True)
    for changed in (True, False):
        tensors = load_file(tmp_path / "model.safetensors")
        if not changed:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
            save_file(tensors, tmp_path / "model.safetensors")
        model, read = unfilled_model(replace(open_checkpoint(tmp_path), config=config))
        found = {}
        read(found.setdefault)
        assert (model.head.weight is not model.embedding.weight) == changed
        assert ("head.weight" in found) == changed


def test_a_bias_that_chooses_experts_is_not_sharded_beside_16_bit_weights():
    config = read_config(values_of("dots1"))
    check_shares(config, Parallel(zero=2))
    with pytest.raises(ConfigError, match=r"set parallel.policy float32-weights"):
        check_shares(config, Parallel(zero=2, policy="float32-masters"))


def test_rows_with_nan_are_found_by_the_rank_that_keeps_them(tmp_path):
    hasten.save(tiny_llama(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][100, 3] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    _, read = unfilled_model(open_checkpoint(tmp_path))
    read(lambda name, tensor: tensor[:64])
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight holds 1 values that are NaN"):
        read(lambda name, tensor: tensor[64:])
