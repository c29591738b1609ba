"""What is done to a command line before it is parsed: options given more than once, and MODEL anywhere."""

from dataclasses import dataclass, field

import pytest

from hasten.cli.bench import LADDERS
from hasten.cli.main import main
from hasten.cli.parsing import merge_repeated, parse, with_model_option


@dataclass
class Part:
    targets: tuple[str, ...] = ()


@dataclass
class Options:
    adapter: tuple[str, ...] = ()
    port: int = 0
    fuse: bool = True
    lora: Part = field(default_factory=Part)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("M --adapter a=1 --adapter b=2", "M --adapter a=1 b=2"),
        ("--adapter a=1 b=2 --port 1 --adapter c=3", "--adapter a=1 b=2 c=3 --port 1"),
        ("--adapter=a=1 --adapter b=2", "--adapter a=1 b=2"),
        ("--lora.targets q --lora.rank 4 --lora.targets v", "--lora.targets q v --lora.rank 4"),
        ("--port 1 --port 2", "--port 1 --port 2"),
        ("--adapter a --no-fuse M", "--adapter a --no-fuse M"),
        ("--adapter=-x --adapter y", "--adapter=-x --adapter y"),
    ],
)
def test_values_of_an_option_stand_together(given, expected):
    assert merge_repeated(given.split(), Options) == expected.split()


def test_two_adapters_are_both_served(monkeypatch):
    told = []
    monkeypatch.setattr("hasten.cli.serve.Serve.check_inputs", lambda self: None)
    monkeypatch.setattr("hasten.cli.serve.Serve.run", lambda self: told.append(self.adapters()))
    main(["serve", "M", "--adapter", "law=F1", "--adapter", "code=F2"])
    assert [sorted(found) for found in told] == [["code", "law"]]


@pytest.mark.parametrize("ladder", ["generate", "serve"])
@pytest.mark.parametrize(
    "given",
    [
        "M",
        "M --json -",
        "--json - M",
        "--json=- M --device cpu",
        "--device cpu --json - M",
        "--model M --json -",
        "--seed 3 M",
    ],
)
def test_the_model_of_a_ladder_may_be_anywhere(ladder, given):
    arguments = with_model_option(given.split(), LADDERS[ladder])
    assert parse(LADDERS[ladder], arguments, prog="bench").model == "M"


def test_a_list_with_commas_ends_before_the_model():
    arguments = with_model_option(
        ["--batches", "1,8", "--rungs", "bf16,int8", "M", "--time-budget", "10"], LADDERS["generate"]
    )
    ladder = parse(LADDERS["generate"], arguments, prog="bench")
    assert (ladder.model, ladder.batches, ladder.rungs, ladder.time_budget) == ("M", (1, 8), ("bf16", "int8"), 10)


def test_values_apart_are_all_the_options():
    words = ["--batches", "1", "8", "--time-budget", "10"]
    assert with_model_option(words, LADDERS["generate"]) == words
