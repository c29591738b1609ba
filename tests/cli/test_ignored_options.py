"""No option is ignored: every one has an effect in its combination, or is an error that says why and what to do."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.bench.choices import choose_plan
from hasten.bench.plan import PlanOptions, make_plan
from hasten.bench.serve_workload import plan as planned_requests
from hasten.cli.bench import LADDERS
from hasten.cli.bench_serve import ServeBenchmark
from hasten.cli.chat import ChatInTerminal
from hasten.cli.convert import Convert
from hasten.cli.demo import Demo
from hasten.cli.doctor import Doctor
from hasten.cli.eval import Eval
from hasten.cli.explain import ExplainModel
from hasten.cli.explain_attention import ExplainAttention
from hasten.cli.export import Export
from hasten.cli.generate import Generate
from hasten.cli.main import COMMANDS, main
from hasten.cli.merge import Merge
from hasten.cli.options import same_fields
from hasten.cli.plan import PlanCommand
from hasten.cli.profile import NOT_PROFILED, ProfileModel, ProfileTraining
from hasten.cli.quantize import Quantize
from hasten.cli.serve import Serve
from hasten.cli.train import Train
from hasten.data.readers import TEXT_SUFFIXES
from hasten.data.sources import PYTHON_FOLDERS
from hasten.effects import (
    KIND,
    Option,
    Reads,
    Unless,
    default_at,
    given_options,
    ignored,
    options_of,
    refuse_ignored,
    value_at,
)
from hasten.engine.settings import EngineSettings
from hasten.errors import ConfigError, HastenError
from hasten.quantization.schemes import Mixed
from hasten.training.recipe import TEXT_FILES, TEXT_SOURCES, Recipe

# Values of the fields that conditions look at: one that is set, and one that no condition wants.
SET = {
    "init": "MODEL",
    "data.tokenizer": "FOLDER",
    "data.validation_fraction": 0.1,
    "lora.rank": 4,
    "qat.bits": 4,
    "qat.start_bits": 8,
    "parallel.zero": 3,
    "techniques.layer_drop": 0.5,
    "schedule.warmup_steps": 10,
    "techniques.whole_model": True,
    "techniques.compile": True,
    "scheme": "int4",
    "bits": 6.0,
    "goal": "cost",
    "url": "http://127.0.0.1:1",
    "cache_gib": 1.0,
    "replicas": 1,
    "max_replicas": 2,
    "processes": 2,
    "shared_prefix_tokens": 8,
    "text": "stdlib",
    "tasks": ("arc_easy",),
    "prompt_ids": (1,),
}
OTHER = {
    "model.family": "gpt2",
    "data.tokenizer_kind": "character",
    "optimizer.kind": "adamw",
    "schedule.kind": "constant",
    KIND: "neither",
    "draft": "self:2-layers",
    "devices": "given",
    "method": "rtn",
    "scheme": "int4",
    "rates": (1.0,),
    "lengths": "sharegpt",
}
UNSET = {
    "schedule.warmup_steps": 0,
    "data.validation_fraction": 0.0,
    "parallel.zero": 0,
    "techniques.whole_model": False,
}
UNSET["techniques.compile"] = False
UNSET |= {"replicas": 0, "processes": 0, "shared_prefix_tokens": 0, "tasks": (), "prompt_ids": (), "text": None}
# Those that always do something. A new field belongs here, or says in its annotation what it depends on.
ALWAYS = """
name init teacher dropout model.attention_pattern data.source data.tokenizer data.validation_fraction data.limit_bytes
data.context data.fit_context data.batch_size data.accumulation data.separate_documents data.workers optimizer.kind
optimizer.learning_rate optimizer.beta1 optimizer.beta2 optimizer.epsilon optimizer.weight_decay optimizer.groups
optimizer.clip schedule.kind schedule.warmup_steps techniques.precision techniques.attention techniques.loss
techniques.layer_drop techniques.checkpointing techniques.compile techniques.fp8 techniques.fused_optimizer lora.rank
qat.bits parallel.zero parallel.experts parallel.offload parallel.policy run.steps run.epochs run.minutes run.folder
run.export_dtype run.checkpoint_every run.background_checkpoints run.device run.threads run.seed run.fit run.tensorboard
"""
# The same of the commands. Among them are what is refused by its own error where it cannot be (--tensor-parallel of a
# shape), seeds (what they ask for holds where nothing is drawn), and switches that turn off what is off (--no-fuse).
LOADS = "model dtype device threads pin quantize fuse verbose"
SAMPLES = """max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty
frequency_penalty logit_bias stop"""
LADDER = "json picture device threads seed rungs rounds warmup limit_seconds"
GENERATES = f"{LOADS} adapter seed ignore_eos kv_cache_dtype draft {SAMPLES}"
MODEL = {"model": "MODEL"}
FROM_TO = {**MODEL, "output": Path("OUTPUT")}
# A command: its class, what it must be given, whether sections have no prefixes, and the options that need nothing.
Command = tuple[type, dict[str, Any], bool, str]
EVERY: dict[str, Command] = {
    "demo": (Demo, {}, False, "minutes spent published again folder threads ladder"),
    "generate": (Generate, MODEL, False, f"{GENERATES} tensor_parallel json prompt prompt_ids compile"),
    "chat": (ChatInTerminal, MODEL, False, f"{GENERATES} tensor_parallel system template chat_template_kwargs"),
    "serve": (
        Serve,
        MODEL,
        False,
        f"""{LOADS} tensor_parallel devices draft max_sequences token_budget max_length block_size fit kv_cache_dtype
        capture no_prefix_cache queue_limit reader_limit cache_gib host port api_key served_model_name adapter
        chat_template chat_template_kwargs replicas adapter_folder allowed_origins page strict_fields
        strict_length stored_responses header_bytes bodies_bytes requests samples choices logprobs schema_bytes
        body_timeout write_timeout request_timeout grammar_timeout drain_timeout max_body_mib log""",
    ),
    "eval": (Eval, MODEL, False, f"{LOADS} adapter tensor_parallel json text context tasks seed"),
    "quantize": (
        Quantize,
        FROM_TO,
        False,
        "json model output scheme formats method overwrite format activations dtype device threads",
    ),
    "convert": (Convert, FROM_TO, False, "json model output format overwrite"),
    "merge": (Merge, {**FROM_TO, "adapter": Path("A")}, False, "json model adapter output dtype text overwrite"),
    "export": (Export, FROM_TO, False, "json model output dequantize"),
    "plan": (
        PlanCommand,
        MODEL,
        False,
        "goal use device batch_size length techniques.precision json memory model picture",
    ),
    "explain": (ExplainModel, MODEL, True, f"{LOADS} adapter json"),
    "explain attention": (
        ExplainAttention,
        {},
        True,
        "json shape kv_heads dtype window softcap sinks block_mask layer device kernel",
    ),
    "doctor": (Doctor, {}, False, "json quick"),
    "profile generate": (
        ProfileModel,
        MODEL,
        True,
        f"{LOADS} measured sort tensorboard output batch prompt_tokens",
    ),
    "bench generate": (
        LADDERS["generate"],
        {},
        True,
        f"{LADDER} shape model dtype prompt_tokens new_tokens batches contexts kv_cache_dtype text gptq draft "
        "tensor_parallel",
    ),
    "bench heads": (
        LADDERS["heads"],
        {},
        True,
        f"{LADDER} shape dtype prompt_tokens new_tokens batches contexts kv_cache_dtype eager",
    ),
    "bench train": (LADDERS["train"], {}, True, f"{LADDER} shape recipe sequence_length batch_size steps processes"),
    "bench race": (LADDERS["race"], {}, True, f"{LADDER} recipe source batch_size sequence_length seconds steps"),
    "bench batch": (
        LADDERS["batch"],
        {},
        True,
        "json picture device threads seed shape recipe sequence_length rungs memory most timeout",
    ),
    "bench attention": (
        LADDERS["attention"],
        {},
        True,
        "json picture device threads seed batch heads kv_heads head_dim dtype causal backward lengths kernels rounds "
        "point_seconds",
    ),
    "bench serve": (
        ServeBenchmark,
        {},
        True,
        """json picture model url requests concurrency lengths prompt_tokens output_tokens shared_prefix_tokens n
        temperature seed rates goodput_ttft_ms goodput_tpot_ms goodput_e2e_ms warmup""",
    ),
    "train": (
        Train,
        {"recipe": Recipe(name="made")},
        False,
        f"json print_config {ALWAYS}",
    ),
    "profile train": (
        ProfileTraining,
        {"recipe": Recipe(name="made")},
        False,
        f"measured sort tensorboard output processes {' '.join({*ALWAYS.split()} - {*NOT_PROFILED})}",
    ),
}
CONDITIONAL = [
    (name, path, number)
    for name, (kind, _, flat, _) in EVERY.items()
    for path, option in options_of(kind, flat=flat).items()
    for number in range(len(option.conditions))
    if name not in ("plan", "profile train")  # in which an option changes the plan, or is refused: below
]


def having(settings: Any, place: tuple[str, ...], value: Any) -> Any:
    """The settings with another value at a place."""
    name, *inner = place
    return replace(settings, **{name: having(getattr(settings, name), tuple(inner), value) if inner else value})


def settings_where(settings: Any, known: dict[str, Option], path: str, broken: int | None) -> tuple[Any, Any]:
    """Settings, and facts, in which all of an option's conditions are met, but for the one that is to be broken."""
    facts: dict[str, Any] = {KIND: "cpu"}
    wanted: dict[str, Any] = {}
    for number, condition in enumerate(known[path].conditions):
        if isinstance(condition, Reads):
            continue
        name, values = condition.path, getattr(condition, "values", ())
        wants_set = isinstance(condition, Unless) == (number == broken)
        if values:
            value = values[0] if wants_set else OTHER.get(name, SET.get(name))
        else:
            value = SET.get(name, True) if wants_set else UNSET.get(name, False if name not in SET else None)
        if name not in wanted or number == broken:
            wanted[name] = value
    for name, value in wanted.items():
        if name in known:
            settings = having(settings, known[name].place, value)
        else:
            facts[name] = value
    return settings, {name: lambda value=value: value for name, value in facts.items()}


def test_every_command_is_here():
    parsers = {"bench": set(LADDERS), "explain": {"attention", ""}, "profile": {"train", "generate"}}
    parsers["start"] = set()  # passes its options to serve
    named = {f"{name} {part}".strip() for name in COMMANDS for part in parsers.get(name, {""})}
    assert EVERY.keys() == named
    assert set(TEXT_SOURCES) == PYTHON_FOLDERS.keys()
    assert TEXT_FILES == TEXT_SUFFIXES


@pytest.mark.parametrize("command", EVERY)
def test_every_option_has_an_effect_always_or_says_when(command):
    kind, _, flat, always = EVERY[command]
    known = options_of(kind, flat=flat)
    assert {path for path, one in known.items() if not one.conditions} == set(always.split())
    assert kind.__dict__.get("EFFECTS", {}).keys() <= known.keys()


@pytest.mark.parametrize(("command", "path", "number"), CONDITIONAL)
def test_an_option_without_effect_says_what_stands_in_the_way(command, path, number):
    kind, needed, flat, _ = EVERY[command]
    known, base = options_of(kind, flat=flat), kind(**needed)
    condition = known[path].conditions[number]
    if not isinstance(condition, Reads):
        settings, facts = settings_where(base, known, path, None)
        reads = [one for one in known[path].conditions if isinstance(one, Reads)]
        assert len(list(ignored(settings, [path], facts=facts, flat=flat))) == len(reads)
    settings, facts = settings_where(base, known, path, number)
    (said,) = ignored(settings, [path], facts=facts, flat=flat)
    assert said.startswith(f"{path} has no effect ")
    assert (condition.by if isinstance(condition, Reads) else getattr(condition, "why", condition.path)) in said
    assert f"leave {path} out" in said or "leave one of them out" in said or isinstance(condition, Reads)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train finetune --init X --model.kv-heads 1", "--model.kv-heads has no effect with --init X"),
        ("train finetune --init X --model.layers 2", "--model.layers has no effect with --init X"),
        ("train demo --qat.group-size 64", "--qat.group-size has no effect without --qat.bits; set that too"),
        ("train demo --qat.bits 8 --qat.group-size 64", "--qat.group-size has no effect with --qat.bits 8"),
        ("train demo --qat.head int8", "--qat.head has no effect without --qat.bits"),
        ("train demo --optimizer.momentum 0.9", "with --optimizer.kind adamw, only with muon"),
        ("train gpt2-124m --schedule.decay-fraction 0.3", "with --schedule.kind cosine, only with wsd"),
        ("train demo --techniques.layer-drop-decay 5", "without --techniques.layer-drop"),
        (
            "train demo --device cpu --techniques.compile-whole",
            "--techniques.compile-whole has no effect with a device",
        ),
        ("train demo --data.text-field body", "with a source of plain text; give --data.source FILE.jsonl"),
        ("train demo --data.source notes.TXT --data.text-field body", "--data.text-field has no effect with a source"),
        ("train demo --print-config --resume must", "--resume has no effect with --print-config"),
        ("profile train demo --optimizer.momentum 0.9", "with --optimizer.kind adamw, only with muon"),
        ("plan tiny --use generate --parallel.zero 3", "with --use generate, only with train, finetune or lora"),
        ("plan tiny --use generate --lora.rank 8", "with --use generate, only with lora"),
        ("plan tiny --use generate --optimizer.kind lamb", "with --use generate, only with train, finetune or lora"),
        ("plan tiny --use train --optimizer.clip 2", "--optimizer.clip has no effect in a plan; leave it out"),
        ("plan tiny --price 2", "--price has no effect without --goal"),
        ("train demo --max-restarts 2", "--max-restarts has no effect with --processes 0"),
        ("train demo --techniques.no-compile --techniques.compile-whole --device cpu", "with a device of kind cpu"),
        ("profile train demo --steps 9", "--steps has no effect in a profile, which takes --measured steps"),
        ("profile generate M --no-such-option", "no-such-option"),
        ("generate M --prompt x --draft none --speculate 4", "--speculate has no effect with --draft none; change"),
        ("generate M --prompt x --compile --speculate 4", "--speculate has no effect with --compile and --draft auto"),
        ("generate M --prompt x --accept distribution", "--accept has no effect with --draft auto; change that"),
        *((f"generate M --prompt x --{name} 2", f"--{name}") for name in ("price", "goal", "token-ms", "devices")),
        ("chat M --draft none --speculate 2", "--speculate has no effect with --draft none"),
        ("eval M --text stdlib --no-overlap --stride 4", "--stride has no effect with --no-overlap; leave one of"),
        ("eval M --tasks x --no-overlap", "--no-overlap has no effect without --text"),
        ("serve M --device cpu --capture-sizes 2", "--capture-sizes has no effect with a device of kind cpu, only"),
        ("serve M --cache-gib 2 --cache-share 0.9", "--cache-share has no effect with --cache-gib 2.0"),
        (
            "serve M --no-prefix-cache --prefix-cache D",
            "--prefix-cache has no effect with --no-prefix-cache; leave one",
        ),
        ("serve M --prefix-cache-bytes 9", "--prefix-cache-bytes has no effect without --prefix-cache; set that too"),
        ("serve M --prefix-cache D --replicas 2", "--prefix-cache does not go with --replicas: its blocks"),
        ("serve M --replicas 2 --requests-each 4", "--requests-each has no effect without --max-replicas"),
        ("serve M --api-key k --allowed-host example.com", "--allowed-host has no effect with an API key, or on an"),
        ("export M out --gguf Q8_0", "--gguf has no effect in a folder; name an OUTPUT that ends in .gguf, or leave"),
        ("export M out.gguf --dtype float32", "--dtype has no effect in a GGUF file; say the type of its matrices by"),
        ("merge M A O --limit-bytes 9", "--limit-bytes has no effect without --text"),
        ("demo --no-ladder --budget 3", "--budget has no effect with --no-ladder; leave one of them out"),
        ("explain M --seed 3", "--seed"),
        ("explain attention --block-size 32", "--block-size has no effect without --block-mask"),
        ("explain attention --device cpu --capability 8.0", "--capability has no effect with a device of kind cpu"),
        ("bench generate --shape tiny --speculate 2", "--speculate has no effect without drafts; give --draft, or"),
        ("bench serve --url http://x --quantize int8", "--quantize has no effect with --url http://x; leave one of"),
        ("bench serve --shape tiny --burstiness 2", "--burstiness has no effect with --rates inf; change that"),
        ("bench serve --shape tiny --spread 2", "--spread has no effect with --lengths fixed"),
    ],
)
def test_the_command_refuses_it_before_any_work(capsys, line, said):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_a_recipe_carries_along_and_what_is_set_to_its_own_default_are_no_errors(capsys):
    main(["train", "demo", "--schedule.kind", "cosine", "--print-config"])  # demo's decay_fraction stays behind
    assert json.loads(capsys.readouterr().out)["schedule"]["kind"] == "cosine"
    main(["train", "demo", "--schedule.kind", "cosine", "--schedule.decay-fraction", "0.4", "--print-config"])
    assert json.loads(capsys.readouterr().out)["schedule"]["decay_fraction"] == 0.4
    with pytest.raises(SystemExit):
        main(["train", "demo", "--schedule.kind", "cosine", "--schedule.decay-fraction", "0.2", "--print-config"])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Generate, {"temperature": 0.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1}),  # a sweep over temperatures
        (ChatInTerminal, {"temperature": 0.0, "top_p": 0.9, "seed": 3}),
        (Generate, {"ignore_eos": True, "min_new_tokens": 9}),
        (Eval, {"text": "stdlib", "seed": 3}),
        (Serve, {"device": "cpu", "engine": EngineSettings(capture=False)}),
    ],
)
def test_an_option_that_asks_for_what_holds_anyway_is_no_error(kind, options):
    given = [name for name in options if name not in ("engine", "text", "device")] + ["capture"] * ("engine" in options)
    refuse_ignored(kind(**MODEL, **options), [f"--{name.replace('_', '-')}" for name in given])


@pytest.mark.parametrize("option", ["no-capture", "no-whole-model"])
def test_turning_off_what_a_cpu_has_not_is_no_error(capsys, option):
    """One script for both kinds of machine."""
    main(["train", "demo", "--device", "cpu", f"--techniques.{option}", "--print-config"])
    found = json.loads(capsys.readouterr().out)["techniques"]
    assert found[option.removeprefix("no-").replace("-", "_")] is False


def test_samples_are_for_every_rung_that_is_made_of_the_folder_by_gptq():
    ladder = LADDERS["generate"]
    for rung in ("gptq-int4-g32", "all-together"):
        refuse_ignored(ladder(model="MODEL", rungs=(rung,), gptq_samples=8), ["--rungs", rung, "--gptq-samples"])
    with pytest.raises(ConfigError, match="--gptq-samples has no effect without a folder to make"):
        refuse_ignored(ladder(model="MODEL", rungs=("native-int8",), gptq_samples=8), ["--gptq-samples"])


def test_options_are_found_as_they_are_written():
    line = "finetune --steps 3 --dtype=float32 --model.kv_heads 2 --techniques.no-compile --name no-fit"
    assert given_options(line.split(" "), Recipe) == {
        "run.steps": "--steps",
        "techniques.precision": "--dtype",
        "model.kv_heads": "--model.kv-heads",
        "techniques.compile": "--techniques.no-compile",
        "name": "--name",
    }


# Other values of the options of a plan, where doubling or negating the usual one will not do.
CHANGES = {
    "optimizer.kind": "muon",
    "optimizer.groups": ("x:rate=0.1",),
    "techniques.attention": "reference",
    "techniques.loss": "reference",
    "techniques.layer_drop": 0.5,
    "techniques.checkpointing": "full",
    "techniques.precision": "float32",
    "lora.targets": ("q_proj",),
    "lora.base": "float32",
    "parallel.zero": 3,
    "parallel.offload": "optimizer",
    "parallel.policy": "float32-masters",
    "weights": "int8",
    "kv_cache_dtype": "int8",
    "token_ms": 50.0,
    "tensor_parallel": 2,
    "gpus": 8,
    "batch_size": 3,
    "length": 512,
    "new_tokens": 64,
    "ranks": 2,
}
SETTLED = {"use", "device", "goal"}  # of which each combination below has its own
OPTIONS = [path for path in options_of(PlanOptions) if path not in SETTLED]
PLANS = [
    {"use": use, "device": device, **more}
    for use in ("train", "finetune", "lora", "generate", "serve")
    for device in ("h100", "epyc")
    for more in ({}, {"goal": "cost"} if use in ("generate", "serve") else {"ranks": 4})
]


def planned(options: PlanOptions) -> str:
    """Everything a plan says but what it was asked."""
    found = (make_plan if options.goal is None else choose_plan)("llama-120m", options).to_json()
    return json.dumps({name: value for name, value in found.items() if name != "settings"})


def changes(usual: PlanOptions) -> Iterator[tuple[str, PlanOptions]]:
    """The options, each with another value than usual."""
    known = options_of(PlanOptions)
    for path in OPTIONS:
        value = value_at(usual, known[path].place)
        other = CHANGES.get(path, not value if isinstance(value, bool) else 2 * (value or 1))
        yield path, having(usual, known[path].place, other)


@pytest.mark.parametrize("more", PLANS, ids=lambda more: "-".join(map(str, more.values())))
def test_an_option_of_a_plan_changes_it_or_is_refused(more):
    usual = PlanOptions(**more)
    was = planned(usual)
    for path, options in changes(usual):
        refused = list(ignored(options, [path], facts=options.facts()))
        with suppress(HastenError):  # another clear error
            assert (planned(options) == was) == bool(refused), path


def test_the_fields_of_a_plan_and_of_its_command_have_conditions_that_can_be_looked_up():
    for kind in (PlanOptions, PlanCommand, Recipe):
        known = options_of(kind)
        for option in known.values():
            for condition in option.conditions:
                path = getattr(condition, "path", KIND)
                assert path in known or path in (KIND, "data.has_fields") or hasattr(kind, path), (kind, option)


def quantizing(command: Quantize) -> Any:
    """What decides the numbers of a quantized folder."""
    text = (command.calibration, command.samples, command.length, command.calibration_seed)
    looks = (*text, command.spill, command.picture) if command.method == "gptq" else None
    scheme = same_fields(command, Mixed) if command.formats else command.scheme_of()
    return scheme, command.method_of(), looks


def asked_of_attention(command: ExplainAttention) -> Any:
    """The call; a capability is a CUDA device's."""
    request, _ = command.request()
    return replace(request, capability=request.capability if request.device.type == "cuda" else None)


def requests_of(command: ServeBenchmark) -> Any:
    """What is sent."""
    loads = [planned_requests(replace(command.workload, rate=rate), vocabulary=100) for rate in command.rates]
    return loads, command.workload.temperature, command.workload.n, command.workload.concurrency


# How the effect of some of a command's options is seen; the usual settings; other values where the first will not do.
SEEN: list[tuple[str, Callable[[Any], Any], list[dict[str, Any]], dict[str, Any]]] = [
    (
        "quantize",
        quantizing,
        [
            {**way, "method": method}
            for way in ({"scheme": "int8"}, {"scheme": "int4"}, {"formats": Path("TABLE")})
            for method in ("rtn", "gptq")
        ],
        {
            "group_size": 64,
            "symmetric": None,
            "lm_head": "none",
            "embedding": "int8",
            "search": "minmax",
            "calibration": "TEXT",
            "samples": 3,
            "length": 9,
            "calibration_seed": 4,
            "order": "columns",
            "damping": 0.5,
            "picture": Path("P"),
            "spill": True,
            "gptaq": True,
            "asymmetric": True,
        },
    ),
    (
        "explain attention",
        asked_of_attention,
        [
            {"layer": layer, "device": device, "block_mask": mask}
            for layer in (False, True)
            for device in ("cpu", "cuda")
            for mask in (False, True)
        ],
        {
            "keys": 2048,
            "kv_heads": 4,
            "window": 64,
            "softcap": 30.0,
            "sinks": True,
            "capability": "8.0",
            "dtype": "float32",
            "mask": True,
            "key_padding": True,
            "key_lengths": True,
            "bias": True,
            "learned_bias": True,
            "alibi": True,
            "documents": True,
            "dropout": True,
            "gradient": False,
            "causal": False,
            "block_size": 32,
        },
    ),
    (
        "bench serve",
        requests_of,
        [
            {
                "rates": rates,
                "workload": replace(ServeBenchmark().workload, lengths=lengths, shared_prefix_tokens=prefix),
            }
            for rates in ((math.inf,), (2.0,))
            for lengths in ("fixed", "sharegpt")
            for prefix in (0, 8)
        ],
        {
            "burstiness": 3.0,
            "spread": 0.2,
            "prefix_groups": 4,
            "requests": 9,
            "prompt_tokens": 99,
            "output_tokens": 33,
            "n": 2,
            "concurrency": 5,
            "temperature": 0.5,
        },
    ),
]
SEEN_CASES = [(*one[:2], usual, one[3]) for one in SEEN for usual in one[2]]


@pytest.mark.parametrize(("command", "look", "given", "changes"), SEEN_CASES)
def test_an_option_of_a_command_changes_what_it_does_or_is_refused(command, look, given, changes):
    kind, needed, flat, _ = EVERY[command]
    known, usual = options_of(kind, flat=flat), kind(**needed | given)
    was = look(usual)
    for path, value in changes.items():
        if value is None or value == value_at(usual, known[path].place):
            continue
        options = having(usual, known[path].place, value)
        refused = list(
            ignored(options, [path], facts=None if not hasattr(options, "facts") else options.facts(), flat=flat)
        )
        with suppress(HastenError):  # another clear error
            assert (look(options) == was) == bool(refused), path


def test_a_default_is_found_through_sections():
    assert default_at(Recipe, ("optimizer", "momentum")) == 0.95
    assert default_at(ServeBenchmark, ("workload", "spread")) == 0.8
