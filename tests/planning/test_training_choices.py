"""Ways to train a model on several devices: each fits and works, the fastest is first, what is needless is left out."""

import json
from dataclasses import replace

import pytest

from hasten.bench import plan as plans
from hasten.bench.plan import PlanOptions, make_plan
from hasten.bench.training_choices import SAME, choose_training
from hasten.cli.main import main
from hasten.errors import ConfigError, ResourceError
from hasten.machine.limits import Limits
from hasten.training.recipe import Parallel, Recipe, Techniques, flat

FLOAT32 = Techniques(compile=False, precision="float32")
H100S = PlanOptions(use="train", device="h100", gpus=8, goal="throughput")


def asked(way):
    """The options of a way as {option: value}."""
    words = way.options.replace("-", "_").replace("__", "--").split()
    return dict(zip((word.removeprefix("--") for word in words[::2]), words[1::2], strict=True))


def test_the_fastest_way_is_first_and_every_way_fits():
    found = choose_training("llama-7b", H100S)
    assert all(way.fits and way.devices == 8 for way in found.rows)
    seconds = [way.step_seconds for way in found.rows]
    assert seconds[0] <= SAME * min(seconds)
    assert found.thought_of > 100
    known = flat(Recipe(name="any")).keys() | {"processes"}
    assert all(asked(way).keys() <= known for way in found.rows)
    for one in found.rows:
        for other in found.rows:
            more = set(one.changes) < set(other.changes)
            assert not (more and SAME * other.step_seconds >= one.step_seconds), "what asks for more gives more"


def test_a_way_is_the_plan_of_what_it_asks_for():
    way = choose_training("llama-7b", H100S).best
    found = asked(way)
    parallel = replace(H100S.parallel, zero=int(found["parallel.zero"]), policy="float32-masters")
    assert found["parallel.policy"] == "float32_masters"
    plan = make_plan("llama-7b", PlanOptions(use="train", device="h100", ranks=8, parallel=parallel))
    assert plan.memory.peak == way.plan.memory.peak
    assert plan.tokens_per_second == way.plan.tokens_per_second


def test_the_least_device_seconds_and_what_was_asked_for():
    cost = choose_training("gpt2-124m", replace(H100S, goal="cost"))
    assert cost.best.devices == 1, "nothing is sent"
    assert cost.best.device_seconds <= SAME * min(way.device_seconds for way in cost.rows)
    kept = replace(H100S, parallel=replace(H100S.parallel, zero=3), memory=40.0)
    found = choose_training("llama-7b", kept)
    assert {way.use.zero for way in found.rows} == {3}
    assert all(way.plan.memory.peak <= 40e9 for way in found.rows)
    assert all("--parallel.zero 3" in way.kept for way in found.rows)
    masters = choose_training("llama-7b", replace(H100S, parallel=Parallel(zero=3, policy="float32-masters")))
    assert {asked(way)["techniques.precision"] for way in masters.rows} == {"bfloat16"}, "which masters need"
    split = choose_training("llama-7b", replace(H100S, parallel=replace(H100S.parallel, zero=3, tensor=2)))
    assert {(way.use.tensor, way.devices, asked(way)["parallel.tensor"]) for way in split.rows} == {(2, 8, "2")}
    assert {int(asked(way)["data.batch_size"]) * int(asked(way)["data.accumulation"]) for way in split.rows} == {32}


def test_recomputing_is_never_predicted_to_be_faster_nor_more_for_the_host_with_split_blocks():
    options = PlanOptions(use="train", device="h100", ranks=4, parallel=Parallel(zero=3, offload="optimizer"))
    hosts = [
        make_plan("llama-7b", replace(options, parallel=replace(options.parallel, tensor=tensor))).phases[0].host
        for tensor in (1, 2, 4)
    ]
    assert hosts == pytest.approx([hosts[0]] * 3)
    for length in (8, 1024):  # where memory decides, and where products do
        plain, again = (
            make_plan("gpt2-124m", replace(H100S, goal=None, gpus=None, length=length, techniques=one))
            for one in (Techniques(compile=False), Techniques(compile=False, checkpointing="full"))
        )
        assert plain.phases[0].seconds(plain.device) <= again.phases[0].seconds(again.device)


@pytest.mark.parametrize(
    ("use", "without", "having"),
    [("train", {}, {"offload": "optimizer"}), ("lora", {"zero": 2}, {"zero": 3})],
)
def test_the_host_and_what_frozen_weights_send_take_time(use, without, having):
    options = PlanOptions(use=use, device="h100", ranks=4)
    plans = [
        make_plan("llama-1.1b", replace(options, parallel=replace(options.parallel, **changes)))
        for changes in (without, having)
    ]
    plain, more = (plan.phases[0].seconds(plan.device) for plan in plans)
    assert more > 1.05 * plain
    assert plans[1].memory.peak < plans[0].memory.peak


def test_the_command_shows_ways_and_names_one_where_a_plan_does_not_fit(capsys, tmp_path):
    main(["plan", "gpt2-124m", "--use", "train", "--device", "h100", "--memory", "6"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the fastest way that does is --data.accumulation 2 --data.batch-size 4 --data.context 1024" in said
    main(
        [
            "plan",
            "llama-7b",
            "--use",
            "lora",
            "--device",
            "h100",
            "--gpus",
            "2",
            "--goal",
            "cost",
            "--parallel.zero",
            "3",
        ]
    )
    assert "--lora.rank 16" in " ".join(capsys.readouterr().out.split())
    main(["plan", "llama-7b", "--use", "finetune", "--device", "h100", "--gpus", "8", "--goal", "throughput"])
    said = capsys.readouterr().out
    assert "training llama-7b on NVIDIA H100 SXM, 79.6 GB free, for throughput" in said
    assert "--processes 8 --parallel.zero 1 --parallel.policy float32-masters" in said
    file = str(tmp_path / "ways.json")
    main(["plan", "llama-7b", "--use", "train", "--device", "h100", "--gpus", "8", "--goal", "cost", "--json", file])
    ways = json.loads((tmp_path / "ways.json").read_text())["ways"]
    assert all(way["fits"] and way["peak_bytes"] <= way["free_bytes"] for way in ways)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"goal": "latency"}, "--goal throughput or cost"),
        ({"token_ms": 10.0}, "without --token-ms"),
        ({"ranks": 2}, "with --goal give --gpus"),
        ({"memory": -1.0}, r"--memory is -1\.0"),
        ({"gpus": 3, "parallel": Parallel(zero=3, tensor=2)}, r"--gpus\) is 3, which .* \(2\) does not divide"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, error):
    with pytest.raises(ConfigError, match=error):
        choose_training("gpt2-124m", replace(H100S, **changes))


def test_on_one_socket_the_plan_is_one_process_unless_ranks_are_asked_for(monkeypatch):
    monkeypatch.setattr(plans, "product_limits", lambda *given, **options: Limits(2e10, {"float32": 2e11}))
    monkeypatch.setattr(plans, "available_memory", lambda kind: 16 * 10**9)
    here = PlanOptions(use="train", device="cpu", gpus=2, goal="throughput", techniques=FLOAT32)
    found = choose_training("gpt2-124m", here)
    assert {way.devices for way in found.rows} == {1}
    assert "on one socket several ranks never beat one process" in found.note
    assert found.to_json()["note"] == found.note
    split = choose_training("gpt2-124m", replace(here, parallel=Parallel(zero=3)))
    assert {way.devices for way in split.rows} == {2}
    assert split.best.plan.free < found.best.plan.free / 2, "each has half of the memory"
    assert split.best.device_seconds > found.best.device_seconds


@pytest.mark.slow
def test_where_nothing_fits_the_smallest_is_named():
    with pytest.raises(ResourceError, match=r"the smallest \(.*--techniques.checkpointing full.*--use lora"):
        choose_training("llama-70b", replace(H100S, device="rtx4090", gpus=2))
    with pytest.raises(ResourceError) as error:
        choose_training("llama-70b", replace(H100S, use="lora", device="rtx4090", gpus=2))
    assert "--use lora" not in str(error.value)


# About Qwen3-30B-A3B, of 8 layers.
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}


@pytest.mark.slow
def test_ways_divide_experts_where_a_model_has_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    found = choose_training(str(tmp_path), H100S)
    divided = [way for way in found.rows if asked(way).get("parallel.experts") == "8"]
    assert divided
    assert {way.use.experts for way in found.rows} <= {1, 8}
    way = divided[0]
    policy = "float32-masters" if way.use.masters else "float32-weights"
    parallel = Parallel(zero=way.use.zero, policy=policy, experts=8)
    options = replace(H100S, goal=None, gpus=None, ranks=8, parallel=parallel, batch_size=way.use.batch_size)
    techniques = replace(H100S.techniques, precision="bfloat16", checkpointing=way.use.recompute)
    options = replace(options, accumulation=way.use.accumulation, techniques=techniques)
    assert make_plan(str(tmp_path), options).memory.peak == way.plan.memory.peak
    asked_for = choose_training(str(tmp_path), replace(H100S, parallel=Parallel(experts=4)))
    assert {way.use.experts for way in asked_for.rows} == {4}
    assert all("--parallel.experts 4" in way.kept for way in asked_for.rows)


def test_devices_that_experts_cannot_be_divided_among_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(EXPERTS))
    with pytest.raises(ConfigError, match=r"is 8, which parallel.experts \(3\) does not divide"):
        choose_training(str(tmp_path), replace(H100S, parallel=Parallel(experts=3)))
    with pytest.raises(ConfigError, match=r"parallel.experts is 8, and the model has no experts; leave it at 1"):
        choose_training("llama-7b", replace(H100S, parallel=Parallel(experts=8)))
