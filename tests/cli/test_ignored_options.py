"""No option is ignored: every one has an effect in its combination, or is an error that says why and what to do."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from hasten.bench.choices import choose_plan
from hasten.bench.plan import PlanOptions, make_plan
from hasten.cli.main import main
from hasten.cli.plan import PlanCommand
from hasten.data.readers import TEXT_SUFFIXES
from hasten.data.sources import PYTHON_FOLDERS
from hasten.effects import Option, Unless, given_options, ignored, options_of
from hasten.errors import HastenError
from hasten.training.conditions import KIND
from hasten.training.recipe import TEXT_FILES, TEXT_SOURCES, Recipe

# Values of the fields that conditions look at: one that is set, and one that no condition wants.
SET = {
    "init": "MODEL",
    "data.tokenizer": "FOLDER",
    "data.validation_fraction": 0.1,
    "lora.rank": 4,
    "qat.bits": 4,
    "qat.start_bits": 8,
    "diloco.sync_every": 5,
    "parallel.zero": 3,
    "techniques.layer_drop": 0.5,
    "schedule.warmup_steps": 10,
    "techniques.whole_model": True,
    "techniques.compile": True,
}
OTHER = {
    "model.family": "gpt2",
    "data.tokenizer_kind": "character",
    "data.form": "text",
    "optimizer.kind": "adamw",
    "schedule.kind": "constant",
    KIND: "neither",
}
UNSET = {
    "schedule.warmup_steps": 0,
    "data.validation_fraction": 0.0,
    "parallel.zero": 0,
    "techniques.whole_model": False,
}
UNSET["techniques.compile"] = False
SOURCE = {"text": "stdlib", "records": "chat.jsonl"}
# Those that always do something. A new field belongs here, or says in its annotation what it depends on.
ALWAYS = """
name init teacher dropout model.attention_pattern data.source data.tokenizer data.validation_fraction data.limit_bytes
data.context data.fit_context data.batch_size data.accumulation data.separate_documents data.workers optimizer.kind
optimizer.learning_rate optimizer.beta1 optimizer.beta2 optimizer.epsilon optimizer.weight_decay optimizer.groups
optimizer.clip schedule.kind schedule.warmup_steps techniques.precision techniques.attention techniques.loss
techniques.layer_drop techniques.checkpointing techniques.compile techniques.fp8 techniques.fused_optimizer lora.rank
qat.bits parallel.zero parallel.offload parallel.policy diloco.sync_every run.steps run.epochs run.minutes run.folder
run.export_dtype run.checkpoint_every run.background_checkpoints run.device run.threads run.seed run.fit run.tensorboard
"""
RECIPE = options_of(Recipe)
CONDITIONAL = [(path, number) for path, one in RECIPE.items() for number in range(len(one.conditions))]


def having(settings: Any, place: tuple[str, ...], value: Any) -> Any:
    """The settings with another value at a place."""
    name, *inner = place
    return replace(settings, **{name: having(getattr(settings, name), tuple(inner), value) if inner else value})


def value_at(settings: Any, place: tuple[str, ...]) -> Any:
    for name in place:
        settings = getattr(settings, name)
    return settings


def recipe_where(option: Option, broken: int | None) -> tuple[Recipe, dict[str, Any]]:
    """A recipe, and facts, in which all of an option's conditions are met, but for the one that is to be broken."""
    recipe, facts = Recipe(name="made"), {KIND: "cpu"}
    wanted: dict[str, Any] = {}
    for number, condition in enumerate(option.conditions):
        path, values = condition.path, condition.values
        wants_set = isinstance(condition, Unless) == (number == broken)
        if values:
            value = values[0] if wants_set else OTHER.get(path, SET.get(path))
        else:
            value = SET[path] if wants_set else UNSET.get(path)
        if path not in wanted or number == broken:
            wanted[path] = value
    for path, value in wanted.items():
        if path == KIND:
            facts[KIND] = value
        elif path == "data.form":
            recipe = having(recipe, ("data", "source"), SOURCE[value])
        else:
            recipe = having(recipe, RECIPE[path].place, value)
    return recipe, {name: lambda value=value: value for name, value in facts.items()}


def test_every_option_of_a_recipe_has_an_effect_always_or_says_when():
    assert {path for path, one in RECIPE.items() if not one.conditions} == set(ALWAYS.split())
    assert set(TEXT_SOURCES) == PYTHON_FOLDERS.keys()
    assert TEXT_FILES == TEXT_SUFFIXES


@pytest.mark.parametrize(("path", "number"), CONDITIONAL)
def test_an_option_without_effect_says_what_stands_in_the_way(path, number):
    option = RECIPE[path]
    recipe, facts = recipe_where(option, None)
    assert list(ignored(recipe, [path], facts=facts)) == []
    recipe, facts = recipe_where(option, number)
    (said,) = ignored(recipe, [path], facts=facts)
    assert said.startswith(f"{path} has no effect with")
    assert option.conditions[number].path in said
    assert f"leave {path} out" in said or "leave one of them out" in said


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
        ("train demo --device cpu --techniques.no-capture", "--techniques.no-capture has no effect with a device of"),
        ("train demo --data.text-field body", "--data.text-field has no effect with data.form text"),
        ("train demo --print-config --resume must", "--resume has no effect with --print-config"),
        ("profile train demo --optimizer.momentum 0.9", "with --optimizer.kind adamw, only with muon"),
        ("plan tiny --use generate --parallel.zero 3", "with --use generate, only with train, finetune or lora"),
        ("plan tiny --use generate --lora.rank 8", "with --use generate, only with lora"),
        ("plan tiny --use generate --optimizer.kind lamb", "with --use generate, only with train, finetune or lora"),
        ("plan tiny --use train --optimizer.clip 2", "--optimizer.clip has no effect in a plan; leave it out"),
        ("plan tiny --price 2", "--price has no effect without --goal"),
    ],
)
def test_the_command_refuses_it_before_any_work(capsys, line, said):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_what_a_recipe_carries_along_is_no_error_and_what_is_set_to_its_own_default_is(capsys):
    main(["train", "demo", "--schedule.kind", "cosine", "--print-config"])  # demo's decay_fraction stays behind
    assert json.loads(capsys.readouterr().out)["schedule"]["kind"] == "cosine"
    with pytest.raises(SystemExit):
        main(["train", "demo", "--schedule.kind", "cosine", "--schedule.decay-fraction", "0.4", "--print-config"])


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
    "least_bits": 4,
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
                assert path in known or path in (KIND, "data.form"), (kind, option)
