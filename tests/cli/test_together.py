"""An option of several values, given more than once."""

from dataclasses import dataclass, field

import pytest

from hasten.cli.main import main
from hasten.cli.parsing import together


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
    assert together(given.split(), Options) == expected.split()


def test_two_adapters_are_both_served(monkeypatch):
    told = []
    monkeypatch.setattr("hasten.cli.serve.Serve.check_inputs", lambda self: None)
    monkeypatch.setattr("hasten.cli.serve.Serve.run", lambda self: told.append(self.adapters()))
    main(["serve", "M", "--adapter", "law=F1", "--adapter", "code=F2"])
    assert [sorted(found) for found in told] == [["code", "law"]]
