"""The planner: the survey's rules, what fits, the table of devices, the command; measured memory beside the planned."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hasten
from hasten.bench.plan import PlanOptions, inference_plan, make_plan, settle
from hasten.bench.predict import Generating, step_seconds
from hasten.bench.weight_bytes import weight_bytes
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.machine.limits import Limits
from hasten.model.families import read_config
from hasten.ops.attention.pattern_text import parse_pattern, pattern_values
from hasten.planning.cost import expert_weights, kv_bytes_per_token, parameters, training_flops_per_token
from hasten.planning.devices import DEVICES
from hasten.planning.largest import largest
from hasten.planning.memory import InferenceUse, TrainingUse, memory_of
from hasten.planning.plan import inference_phases, training_phase
from hasten.planning.shapes import SHAPES, shape_config
from hasten.planning.sharing import exchanged_bytes
from hasten.training.memory import training_use
from hasten.training.recipe import Lora, Optimizer, Parallel, Techniques
from tiny_model import tiny_llama

STATES = ("weights", "gradients", "masters", "optimizer")
ROOT = Path(__file__).parents[2]


def states(config, **use) -> float:
    parts = memory_of(config, TrainingUse(batch_size=1, length=16, **use)).parts
    return sum(parts[name] for name in STATES)


@pytest.mark.parametrize("shape", ["tiny", "llama-7b", "gpt2-124m"])
def test_the_surveys_rules_are_special_cases(shape):
    config = shape_config(shape)
    count = parameters(config).total
    assert weight_bytes(config, "auto") == 2 * count, "2n GB to serve in 16 bits"
    assert states(config, masters=True) == 16 * count, "2 + 2 + 12 bytes a weight"
    assert states(config) == 16 * count, "4 + 4 + 8 without masters"
    assert states(config, optimizer="lamb") == 16 * count
    assert 12 * count < states(config, optimizer="muon") < 16 * count
    assert states(config, adapter=1000, base=2 * count) == 2 * count + 16 * 1000


def test_a_tied_head_in_int8_is_counted_in_the_groups_it_is_quantized_to():
    model = tiny_llama(tie_word_embeddings=True, intermediate_size=64).bfloat16()  # every row has 64 features
    layers = hasten.Int8().layers(model)
    assert layers["head"].weight.group_size
    held, plain = 0.0, parameters(model.config).total
    for name, layer in layers.items():
        weight = model.get_submodule(name).weight
        held += layer.weight.bits_of(weight.shape[1]) * weight.numel() / 8
        plain -= weight.numel()
    assert weight_bytes(model.config, "int8") == int(held) + 2 * plain


def test_a_cache_is_counted_as_it_is_kept():
    config = shape_config("llama-70b")  # 80 layers, 8 heads of keys and values, 128 elements
    use = InferenceUse(batch_size=4, length=1001, step=512, weights=0, row_bytes=256)
    assert memory_of(config, use).parts["cache"] == 4 * 1001 * kv_bytes_per_token(config, 2)
    assert memory_of(config, replace(use, block_size=16)).parts["cache"] == 4 * 1008 * kv_bytes_per_token(config, 2)
    assert memory_of(config, replace(use, degree=8)).parts["cache"] == 4 * 1001 * kv_bytes_per_token(config, 2) / 8
    assert memory_of(config, replace(use, degree=16)).parts["cache"] == 4 * 1001 * kv_bytes_per_token(config, 2) / 8
    values = SHAPES["tiny"] | {"hasten": {"attention_pattern": pattern_values(parse_pattern("local:radius=1"))}}
    sparse = read_config(values)
    assert sparse.attention_pattern is not None
    bounded = [memory_of(sparse, replace(use, length=length)).parts["cache"] for length in (300, 400)]
    assert bounded[0] == bounded[1], "a local pattern bounds what is kept"


def test_integers_are_multiplied_at_the_rate_of_int8_where_it_is_known():
    config = shape_config("llama-70b")
    use = InferenceUse(batch_size=1, length=1001, step=1000, weights=1, row_bytes=256)
    plain, rounded = (inference_phases(config, replace(use, integers=own))[0] for own in (False, True))
    device = DEVICES["epyc"]
    faster = replace(device, limits=Limits(device.limits.bandwidth, dict(device.limits.rates) | {"int8": 1e15}))
    assert rounded.limits(device) == plain.limits(device) == plain.limits(faster)
    assert rounded.limits(faster)["products"] == rounded.flops / 1e15


@given(st.integers(0, 10_000), st.integers(1, 12_000))
def test_the_largest_that_fits_is_found_with_few_tries(limit, most):
    asked = []

    def fits(count):
        asked.append(count)
        return count <= limit

    assert largest(fits, most) == min(limit, most)
    assert len(asked) == len(set(asked)) <= 2 * max(most, 2).bit_length() + 1
    assert max(asked) <= most


def test_what_fits_is_the_edge():
    plan = make_plan("llama-7b", PlanOptions(use="lora", device="h100", length=2048))
    fits = replace(plan, use=replace(plan.use, batch_size=plan.largest_batch))
    assert 0 < plan.largest_batch < 1000
    assert (
        fits.memory.peak
        <= plan.free
        < replace(fits, use=replace(fits.use, batch_size=plan.largest_batch + 1)).memory.peak
    )
    full = make_plan("llama-7b", PlanOptions(use="train", device="h100"))
    assert full.largest_batch == 0, "16 bytes a weight are 108 GB"
    assert full.memory.peak > full.free


def test_what_is_recomputed_or_frozen_changes_flops():
    def flops(**options):
        return (
            make_plan("llama-120m", PlanOptions(use="train", device="h100") if not options else options["o"])
            .phases[0]
            .flops
        )

    base = PlanOptions(use="train", device="h100", batch_size=2, length=512)
    plain = flops(o=base)
    assert plain == pytest.approx(2 * 512 * training_flops_per_token(shape_config("llama-120m"), 512))
    assert plain < flops(o=replace(base, techniques=Techniques(checkpointing="full"))) < 4 / 3 * plain
    assert flops(o=replace(base, use="lora")) == pytest.approx(2 / 3 * plain)
    assert flops(o=replace(base, techniques=Techniques(layer_drop=0.5))) < plain


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_and_use_gives_a_plan(device):
    for use in ("train", "finetune", "lora", "generate", "serve"):
        found = make_plan("llama-1.1b", PlanOptions(use=use, device=device)).to_json()
        assert found["tokens_per_second"] > 0
        assert found["peak_bytes"] == sum(
            found["parts"][name]
            for name in max(found["moments"].values(), key=lambda names: sum(found["parts"][name] for name in names))
        )
        assert all(phase["seconds"] > phase["limit_seconds"] > 0 for phase in found["phases"])
        json.dumps(found)


def test_shares_take_less_and_are_told_what_they_send():
    options = PlanOptions(use="train", device="h100", batch_size=1)
    whole = make_plan("llama-7b", options)
    shared = make_plan("llama-7b", replace(options, ranks=8, parallel=Parallel(zero=3)))
    assert shared.memory.peak < whole.memory.peak / 2
    assert shared.phases[0].limits(shared.device)["link"] > 0 == whole.phases[0].limits(whole.device)["link"]
    groups = make_plan("llama-7b", replace(options, ranks=16, parallel=Parallel(zero=3, replicas=2)))
    assert groups.memory.peak == shared.memory.peak
    assert 1.9 < groups.tokens_per_second / shared.tokens_per_second < 2
    assert groups.phases[0].sent > shared.phases[0].sent, "and what each reduction sends between the groups"
    split = make_plan("llama-7b", replace(options, ranks=8, parallel=Parallel(zero=3, tensor=2)))
    kept = [sum(n for name, n in one.memory.parts.items() if name.startswith("activations")) for one in (split, shared)]
    assert kept[0] < 0.8 * kept[1], "of half a row; what products take in is of all"
    assert split.phases[0].flops == shared.phases[0].flops / 2
    quarter = make_plan("llama-7b", replace(options, ranks=4, parallel=Parallel(zero=3))).phases[0].sent
    # Of each row eight times a block, in float32 or bfloat16 by halves, and of embedding and head; half of it is sent.
    tokens = (4 * 32 * (4 + 2) + 4 * 4) * 1024 * 4096 / 2
    assert split.phases[0].sent == pytest.approx(quarter / 2 + tokens)
    muon = make_plan("llama-7b", replace(options, ranks=8, parallel=Parallel(zero=3), optimizer=Optimizer(kind="muon")))
    assert muon.phases[0].sent > shared.phases[0].sent, "its momentum is gathered"
    one, eight = (make_plan("llama-70b", PlanOptions(device="h100", tensor_parallel=n)) for n in (1, 8))
    assert one.memory.peak > one.free
    assert eight.memory.peak < eight.free
    assert one.phases[1].seconds(one.device) > 4 * eight.phases[1].seconds(eight.device)


def test_the_command_on_this_machine_and_a_config_alone(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    picture, file = tmp_path / "plan.png", tmp_path / "plan.json"
    main(["plan", str(tmp_path), "--use", "serve", "--length", "64", "--new-tokens", "16", "--json", str(file)])
    shown = capsys.readouterr().out
    assert "by measured blocks" in shown
    assert "longest context that fits" in shown
    assert json.loads(file.read_text())["device"]["measured"] is True
    main(["plan", "tiny", "--use", "train", "--device", "xeon", "--picture", str(picture), "--json", "-"])
    assert json.loads(capsys.readouterr().out)["phases"][0]["measured"] is None
    assert picture.read_bytes()[:4] == b"\x89PNG"


def test_of_a_hub_id_only_the_config_is_downloaded(tmp_path, monkeypatch, capsys):
    import huggingface_hub

    asked, plain = [], json.dumps(SHAPES["tiny"])

    def snapshot_download(name, *, allow_patterns, ignore_patterns):
        asked.append((name, allow_patterns))
        (tmp_path / "config.json").write_text(plain)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr("hasten.checkpoints.hub._hub_file", lambda name, tag, *, otherwise=None: otherwise)
    main(["plan", "owner/name", "--use", "train", "--device", "h100"])
    assert "owner/name" in capsys.readouterr().out
    assert asked == [("owner/name", ["config.json"])]
    plain = json.dumps(SHAPES["tiny"] | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}})
    with pytest.raises(SystemExit):
        main(["plan", "owner/name", "--use", "train", "--device", "h100"])
    assert "safetensors" in capsys.readouterr().err, "its formats stand in the headers of its weights"
    assert "*.safetensors" in asked[-1][1]


def test_steps_are_measured_by_blocks_of_each_kind():
    two_kinds = read_config(SHAPES["tiny"] | {"model_type": "gemma2", "sliding_window": 8, "head_dim": 16})
    assert len(set(two_kinds.layers)) == 2
    recipe = PlanOptions(use="train", length=16, batch_size=1).recipe()
    measured = step_seconds(two_kinds, replace(recipe, techniques=Techniques(precision="float32", layer_drop=0.5)))
    assert measured is not None
    assert 0 < measured < 5


def test_what_ranks_of_this_machine_share_is_planned_beside_measured_blocks():
    options = PlanOptions(use="train", length=64, ranks=2, parallel=Parallel(zero=1, tensor=2))
    phase = make_plan("tiny", options).phases[0]
    assert phase.measured is not None
    assert phase.sent > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"device": "b200"}, "device 'b200' is not known; use auto .* h100"),
        ({"length": 1 << 20}, "--length is 1048576; tiny takes from 2 to 512"),
        ({"length": 64, "new_tokens": 64, "device": "h100"}, "--new-tokens .64. must be below --length"),
        ({"tensor_parallel": 5, "device": "h100"}, "a model of 4 heads .* take at most 4"),
        ({"batch_size": 0}, "--batch-size is 0"),
        (
            {"device": "h100", "use": "train", "ranks": 8, "parallel": Parallel(zero=1, tensor=8)},
            "parallel.tensor is 8, which the model's 2 key/value heads",
        ),
        (
            {"device": "h100", "use": "train", "ranks": 3, "parallel": Parallel(zero=1, tensor=2)},
            r"--ranks .* is 3, .* \(2\) does not",
        ),
        ({"device": "h100", "use": "lora", "lora": Lora(rank=0)}, "lora.rank is 0"),
        ({"device": "h100", "techniques": Techniques(layer_drop=2.0)}, "techniques.layer_drop is 2.0"),
        ({"device": "h100", "techniques": Techniques(precision="float16"), "use": "train"}, None),
    ],
)
def test_bad_options(options, text):
    if text is None:
        assert make_plan("tiny", PlanOptions(**options)).tokens_per_second > 0
        return
    with pytest.raises(ConfigError, match=text):
        make_plan("tiny", PlanOptions(**options))


@pytest.mark.slow  # a process for each plan
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak is exact there")
def test_planned_memory_is_what_is_measured(tmp_path):
    """The cases of benchmarks/plan.py that take least, each in a process of its own."""
    file = tmp_path / "plan.json"
    cases = ["llama", "serve, batch 4"]
    command = [sys.executable, str(ROOT / "benchmarks" / "plan.py"), "--only", "memory", "--output", str(file)]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--cases", *cases], check=True, env=alone, capture_output=True)
    for name, found in json.loads(file.read_text())["cases"].items():
        ratio = found["memory"]["predicted_bytes"] / found["memory"]["measured_bytes"]
        assert 0.85 < ratio < 1.15, (name, found)


def test_all_that_was_measured_is_still_predicted():
    """Of every case of benchmarks/plan.py, whose measured peaks are committed: arithmetic only."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from plan import CASES, predicted_memory
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    measured = json.loads((ROOT / "benchmarks/results/plan.json").read_text())["cases"]
    assert {name for name, found in measured.items() if "memory" in found} == set(CASES)
    for name, case in CASES.items():
        ratio = predicted_memory(case)["predicted_bytes"] / measured[name]["memory"]["measured_bytes"]
        assert 0.85 < ratio < 1.15, (name, ratio)


def test_the_proposals_that_were_run_are_still_predicted():
    """Of every case of benchmarks/plan_training.py, each run by `hasten train` under a limit: arithmetic only."""
    report = json.loads((ROOT / "benchmarks/results/plan-training.json").read_text())
    config = read_config(report["config"])
    assert len(report["rows"]) >= 10
    for row in report["rows"]:
        ratio = memory_of(config, TrainingUse(**row["use"])).peak / row["measured_bytes"]
        assert 0.85 < ratio < 1.15, (row["case"], ratio)


def test_copies_of_weights_are_counted_where_they_are():
    """`offload optimizer`: 4 bytes a weight more on a CPU, whose memory is the host's, and 8 less on a GPU."""
    config, parallel = shape_config("gpt2-124m"), Parallel(zero=3, offload="optimizer")
    count, recipe = parameters(config).total, PlanOptions(use="train", parallel=parallel).recipe()
    plain = replace(recipe, parallel=Parallel(zero=3))

    def held(recipe, device):
        use = training_use(config, recipe, torch.device(device), ranks=Ranks(size=2))
        parts = memory_of(config, use).parts
        return sum(parts[name] for name in (*STATES, "gathered"))

    assert held(recipe, "cpu") - held(plain, "cpu") == pytest.approx(4 * count / 2, rel=1e-3)
    assert held(recipe, "cuda") - held(plain, "cuda") == pytest.approx(-8 * count / 2, rel=1e-3)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_a_plan_counts_a_gguf_file_as_it_is_held(tmp_path, kind):
    path = tmp_path / "model.gguf"
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}  # whose rows fill the kernels' tiles
    write_gguf(tiny_llama(**sizes), path, kind)
    model = hasten.load(path)
    held = sum(tensor.nbytes for tensor in {t.data_ptr(): t for t in model.state_dict().values()}.values())
    plan = make_plan(str(path), PlanOptions(device="epyc", length=64, new_tokens=8))
    assert plan.memory.parts["weights"] == pytest.approx(held, rel=0.03)


def test_a_file_of_several_formats_takes_as_long_as_its_bytes(monkeypatch):
    subject = settle("llama-120m", PlanOptions(device="epyc"))
    cost = Generating(prompt=1.0, steps={1: 1e-3})
    plain = inference_plan(subject, cost=cost)
    whole = weight_bytes(subject.config, "bfloat16")
    mixed = replace(
        subject, checkpoint=SimpleNamespace(held_bytes=lambda: int(1.5 * whole), weights=lambda: subject.own)
    )
    found = inference_plan(mixed, cost=cost)
    assert found.phases[1].measured == pytest.approx(1.5 * plain.phases[1].measured)
    assert found.phases[0].measured == plain.phases[0].measured


def test_a_plan_has_the_dtypes_of_the_path_that_generates(tmp_path, monkeypatch):
    """As on a processor that emulates bfloat16: the fused steps keep keys and values in it all the same."""
    hasten.save(tiny_llama().bfloat16(), tmp_path / "model")
    monkeypatch.setattr("hasten.bench.plan.training_precision", lambda kind: SimpleNamespace(dtype="float32"))
    limits = Limits(1e10, {"float32": 1e11, "bfloat16": 1e11})  # its bytes are asked for, not its seconds
    monkeypatch.setattr("hasten.bench.plan.product_limits", lambda *_, **__: limits)

    def parts(precision, *, fused=True):
        monkeypatch.setattr("hasten.model.inference.obtainable", lambda what: fused)
        techniques = Techniques(precision=precision, compile=False)
        options = PlanOptions(device="cpu", length=64, new_tokens=8, measure=False, techniques=techniques)
        return make_plan(str(tmp_path / "model"), options).memory.parts

    usual, readable, wide = parts("auto"), parts("auto", fused=False), parts("float32")
    assert readable["cache"] == wide["cache"] == 2 * usual["cache"]
    assert usual["weights"] == readable["weights"] == wide["weights"] // 2
    asked = hasten.load(tmp_path / "model", dtype="float32")
    assert wide["weights"] == sum(parameter.nbytes for parameter in asked.parameters())


@pytest.mark.parametrize("zero", [0, 3])
def test_experts_that_ranks_divide_are_counted_once_in_all(zero):
    """Each of 4 ranks has a quarter of the experts, with gradients and states, and of the rest what ZeRO leaves it."""
    values = SHAPES["tiny"] | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}
    config = read_config(values | {"moe_intermediate_size": 64, "head_dim": 32})
    use = TrainingUse(batch_size=1, length=16, dtype="float32", zero=zero, ranks=4)

    def held(experts):
        parts = memory_of(config, replace(use, experts=experts)).parts
        return sum(parts[name] for name in ("weights", "gradients", "optimizer"))

    apart, total = expert_weights(config), parameters(config).total
    assert 0.3 * total < apart < 0.95 * total
    rest = (total - apart) / (4 if zero else 1)
    for experts in (2, 4):
        assert held(experts) == pytest.approx(16 * (rest + apart / experts), rel=1e-6)
    gathered = [memory_of(config, replace(use, experts=experts)).parts["gathered"] for experts in (1, 4)]
    assert gathered[1] < gathered[0] if zero else gathered == [0, 0]
    phases = [training_phase(config, replace(use, experts=experts)) for experts in (1, 4)]
    tokens = exchanged_bytes(config, tokens=16, experts=4, itemsize=4)
    assert tokens == 16 * len(config.layers) * 4 * 2 * config.hidden_size * 4 * 3 / 4
    assert phases[1].sent > tokens
    assert phases[1].exchanges == phases[0].exchanges + 4 * len(config.layers)
    again = [training_phase(config, replace(use, experts=4, recompute=kind)).sent for kind in ("none", "full")]
    assert again[1] - again[0] == pytest.approx(tokens / 2)
