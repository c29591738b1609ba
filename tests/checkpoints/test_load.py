"""hasten.load: shards, ties, layouts, old files, dtypes, mapping, hub ids."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

import hasten
from checkpoint_folders import tensors, write_folder
from hasten.errors import CheckpointError, ConfigError, HastenWarning, ResourceError
from hasten.model.context import TrainingContext
from references import make_reference

TOKENS = torch.tensor([[3, 7, 1, 9, 4, 4, 10, 2]])


def logits(model, tokens=TOKENS):
    context = TrainingContext([layer.window for layer in model.config.layers])
    with torch.no_grad():
        return model(tokens, torch.arange(tokens.shape[1])[None], context)[0]


def reference_logits(folder, tokens=TOKENS, **options):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        return model(tokens).logits[0]


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a folder's single file."""
    path = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path, metadata={"format": "pt"})


def rewrite_config(folder: Path, change) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_give_the_same_model(tmp_path, shards):
    one, many = write_folder(tmp_path / "one"), write_folder(tmp_path / "many", shards=shards)
    assert torch.equal(logits(hasten.load(one, dtype="stored")), logits(hasten.load(many, dtype="stored")))
    assert (logits(hasten.load(many, dtype="stored")) - reference_logits(many)).abs().max() < 1e-5


def test_the_single_file_is_read_where_a_stale_index_lies_beside_it(tmp_path):
    folder = write_folder(tmp_path, shards=2)
    doubled = {name: tensor * 2 for name, tensor in tensors().items()}
    save_file(doubled, folder / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(hasten.load(folder, dtype="stored").embedding.weight, doubled["model.embed_tokens.weight"])
    assert (logits(hasten.load(folder, dtype="stored")) - reference_logits(folder)).abs().max() < 1e-4


@pytest.mark.parametrize("present", ["both equal", "no head", "no embedding"])
def test_tied_embeddings(tmp_path, present):
    weights = tensors()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    if present != "both equal":
        del weights["lm_head.weight" if present == "no head" else "model.embed_tokens.weight"]
    model = hasten.load(write_folder(tmp_path, config={"tie_word_embeddings": True}, weights=weights), dtype="stored")
    assert model.head.weight is model.embedding.weight
    assert len(list(model.parameters())) == len(tensors()) - 1
    whole = weights | dict.fromkeys(
        ["lm_head.weight", "model.embed_tokens.weight"], tensors()["model.embed_tokens.weight"]
    )
    if present == "no embedding":
        whole |= dict.fromkeys(["lm_head.weight", "model.embed_tokens.weight"], weights["lm_head.weight"])
    whole["lm_head.weight"] = whole["lm_head.weight"].clone()
    expected = reference_logits(write_folder(tmp_path / "whole", weights=whole))  # the same, said twice
    assert (logits(model) - expected).abs().max() < 1e-5


def test_a_head_that_differs_stays_apart_whatever_the_config_says(tmp_path):
    folder = write_folder(tmp_path, config={"tie_word_embeddings": True})
    model = hasten.load(folder, dtype="stored")
    assert model.head.weight is not model.embedding.weight
    assert torch.equal(model.head.weight, tensors()["lm_head.weight"])
    assert (logits(model) - reference_logits(folder)).abs().max() < 1e-5


def test_an_untied_model_needs_its_head(tmp_path):
    weights = tensors()
    del weights["lm_head.weight"]
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        hasten.load(write_folder(tmp_path, weights=weights), dtype="stored")


def test_what_safetensors_own_save_model_writes_for_a_tied_model(tmp_path):
    reference = make_reference("qwen3")
    reference.save_pretrained(tmp_path)
    save_model(reference, str(tmp_path / "model.safetensors"))  # keeps lm_head.weight and drops the embedding
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = reference(TOKENS).logits[0]
    assert (logits(hasten.load(tmp_path, dtype="stored")) - expected).abs().max() < 1e-4


def bare_gpt2(folder: Path) -> torch.Tensor:
    """The layout of the hub's gpt2: no prefix, the causal mask among the weights. Returns the right logits."""
    reference = make_reference("gpt2")
    reference.save_pretrained(folder)
    with torch.no_grad():
        expected = reference(TOKENS).logits[0]

    def change(found):
        out = {name.removeprefix("transformer."): tensor for name, tensor in found.items() if name != "lm_head.weight"}
        for i in range(3):
            out[f"h.{i}.attn.bias"] = torch.ones(128, 128).tril().bool().view(1, 1, 128, 128)
            out[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e9)
        return out

    rewrite(folder, change)
    return expected


def test_the_hubs_gpt2_layout_loads_without_a_warning(tmp_path):
    expected = bare_gpt2(tmp_path)
    assert (logits(hasten.load(tmp_path, dtype="stored")) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama-mqa", "qwen3", "gpt_bigcode"])
def test_the_bare_model_saved_by_transformers_loads(name, tmp_path):
    reference = make_reference(name)  # all tied: the head is the embedding
    reference.base_model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(TOKENS).logits[0]
    assert (logits(hasten.load(tmp_path, dtype="stored")) - expected).abs().max() < 1e-4
    assert (logits(hasten.load(reference.base_model)) - expected).abs().max() < 1e-4


def test_rotary_buffers_of_old_llamas_are_left_alone(tmp_path):
    weights = tensors() | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(2) for i in range(2)}
    hasten.load(write_folder(tmp_path, weights=weights), dtype="stored")


def test_unused_tensors_warn_once(tmp_path):
    weights = tensors() | {"model.layers.0.self_attn.q_proj.bias": torch.ones(8), "vision.weight": torch.ones(3)}
    with pytest.warns(HastenWarning, match="2 tensors .* stay unread") as caught:
        hasten.load(write_folder(tmp_path, weights=weights), dtype="stored")
    assert len(caught) == 1


def test_numbers_that_no_model_changes_are_checked(tmp_path):
    reference = make_reference("apertus")
    with torch.no_grad():
        reference.model.layers[1].mlp.act_fn.beta.fill_(0.4)
    reference.save_pretrained(tmp_path)
    for source in (tmp_path, reference):
        with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.act_fn.beta is 0\.4.*; hasten computes.* 0\.5"):
            hasten.load(source)


# -- configs of transformers 4 ----------------------------------------------------------------------------------------


def old_style(values: dict, changes: dict) -> dict:
    """As transformers 4 wrote it: rope fields at the top level, torch_dtype, no layer_types."""
    kept = {k: v for k, v in values.items() if k not in ("rope_parameters", "layer_types", "dtype")}
    return kept | {"torch_dtype": "float32", "transformers_version": "4.44.0"} | changes


LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3] * 2, "long_factor": [2.0, 3.0, 4.0, 5.0] * 2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("llama", {"rope_theta": 500.0, "rope_scaling": None}),
        ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 32}}),
        ("llama", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}),
        ("qwen2", {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 4.0}}),
        ("mistral", {"rope_theta": 1e6, "sliding_window": 5}),
        ("gemma3_text", {"rope_theta": 1e6, "rope_local_base_freq": 77.0, "rope_scaling": None}),
        ("gemma3_text", {"rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
        ("phi3", {"rope_theta": 1e4, "rope_scaling": LONG, "original_max_position_embeddings": 64}),
        ("phi3", {"rope_theta": 1e4, "rope_scaling": LONG, "original_max_position_embeddings": 6}),
    ],
)
def test_an_old_config_gives_what_transformers_gives(case, changes, tmp_path):
    make_reference(case).save_pretrained(tmp_path)
    rewrite_config(tmp_path, lambda values: old_style(values, changes))
    expected = reference_logits(tmp_path)
    found = logits(hasten.load(tmp_path, dtype="stored"))
    assert expected.std() > 0.2
    assert (found - expected).abs().max() < 1e-4


# -- dtype, device, mapping -------------------------------------------------------------------------------------------


def test_dtype_of_the_file_or_the_one_asked_for(tmp_path):
    folder = write_folder(tmp_path, weights=tensors(dtype=torch.bfloat16))
    assert {p.dtype for p in hasten.load(folder, dtype="stored").parameters()} == {torch.bfloat16}
    for name in ("float32", "bfloat16", "float16"):
        model = hasten.load(folder, dtype=name)
        assert {p.dtype for p in model.parameters()} == {getattr(torch, name)}
        assert model.ropes[0].frequencies.dtype == torch.float32
        assert logits(model).dtype == torch.float32
    assert hasten.load(folder, dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ConfigError, match="int8"):
        hasten.load(folder, dtype="int8")


def test_a_file_of_mixed_dtypes_loads_in_the_one_most_bytes_are_in(tmp_path):
    weights = tensors(dtype=torch.bfloat16)
    weights |= {name: tensor.float() for name, tensor in weights.items() if tensor.dim() == 1}
    folder = write_folder(tmp_path, weights=weights)
    assert {p.dtype for p in hasten.load(folder, dtype="stored").parameters()} == {torch.bfloat16}
    expected = reference_logits(folder)
    assert (logits(hasten.load(folder, dtype="float32")) - expected).abs().max() < 1e-5


def test_devices(tmp_path):
    folder = write_folder(tmp_path)
    assert hasten.load(folder, device="cpu", dtype="stored").device.type == "cpu"
    with pytest.raises(ConfigError, match="tpu"):
        hasten.load(folder, device="tpu", dtype="stored")
    if not torch.cuda.is_available():
        with pytest.raises(ResourceError, match="cuda"):
            hasten.load(folder, device="cuda", dtype="stored")


def test_weights_are_mapped_and_training_leaves_the_file_alone(tmp_path):
    folder = write_folder(tmp_path)
    path = folder / "model.safetensors"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    model = hasten.load(folder, dtype="stored")
    # All tensors of a file stand in one mapping: neighbours in the file are neighbours in memory.
    places = sorted((p.data_ptr(), p.nbytes) for p in model.parameters())
    assert places[-1][0] + places[-1][1] - places[0][0] == sum(size for _, size in places)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    context = TrainingContext([None] * 2)
    before_step = model.embedding.weight.detach().clone()
    model(TOKENS, torch.arange(8)[None], context, targets=TOKENS.roll(-1)).backward()
    optimizer.step()
    assert not torch.equal(model.embedding.weight, before_step)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert torch.equal(hasten.load(folder, dtype="stored").embedding.weight, before_step)


def test_gpt2s_transposed_weights_are_mapped_too(tmp_path):
    make_reference("gpt2").save_pretrained(tmp_path)
    model = hasten.load(tmp_path, dtype="stored")
    assert not model.blocks[0].mlp.up.weight.is_contiguous()
    size = (tmp_path / "model.safetensors").stat().st_size
    places = [p.data_ptr() for p in model.parameters()]
    assert max(places) - min(places) < size


# -- a folder without a tokenizer, and other small things -------------------------------------------------------------


def test_a_folder_without_a_tokenizer_loads_and_generates_from_ids(tmp_path):
    model = hasten.load(write_folder(tmp_path), dtype="stored")
    assert model.tokenizer is None
    assert model.generation == {}
    answer = hasten.generate(
        model, [[1, 2, 3]], hasten.SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    )
    assert len(answer[0].tokens) == 4


def test_generation_config_travels_with_the_model(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    assert hasten.load(folder, dtype="stored").generation == {"temperature": 0.5}
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        hasten.load(folder, dtype="stored")


def test_what_is_no_model_at_all():
    with pytest.raises(ConfigError, match="Linear"):
        hasten.load(torch.nn.Linear(2, 2))
