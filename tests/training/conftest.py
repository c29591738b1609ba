"""A tiny recipe on a few real files, fast enough to train for dozens of steps in a second."""

import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hasten.training import display
from hasten.training.recipe import Data, Optimizer, Recipe, Run, Schedule, Shape, Techniques
from own_cache import make_cache

DRAW = display.draw_losses
MODULES = ("abc.py", "bisect.py", "colorsys.py", "contextlib.py", "copy.py", "heapq.py", "queue.py", "textwrap.py")

TINY = Recipe(
    name="tiny",
    model=Shape(layers=2, hidden_size=32, heads=2, kv_heads=1, feed_forward=64),
    data=Data(vocab_size=300, context=32, batch_size=4, validation_fraction=0.3),
    optimizer=Optimizer(learning_rate=5e-3),
    schedule=Schedule(warmup_steps=8),
    techniques=Techniques(precision="float32", compile=False, keep_memory=False),
    run=Run(steps=20, validate_every=10, validation_batches=3, checkpoint_every=10, device="cpu", threads=1),
)


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A cache for token shards, never the user's."""
    return make_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def cache(cache_folder: str) -> Iterator[None]:
    """The cache of these tests; a worker's next ones, of another folder, have the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HASTEN_CACHE", cache_folder)
        yield


@pytest.fixture(autouse=True)
def known_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fixed rate to reckon MFU with: measuring the machine's takes longer than a tiny run."""
    from hasten.training import setup

    monkeypatch.setattr(setup, "matrix_rate", lambda dtype, **options: 1e11)


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Drawing the losses takes longer than a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(display, "draw_losses", lambda *given, **options: None)
        yield


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at one."""
    monkeypatch.setattr(display, "draw_losses", DRAW)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first kilobytes of a few modules of the standard library."""
    folder = tmp_path_factory.mktemp("corpus")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in MODULES:
        (folder / name).write_text((library / name).read_text(encoding="utf-8")[:6000], encoding="utf-8")
    return folder


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> Callable[..., Recipe]:
    """`recipe(steps=5, dropout=0.1)`: the tiny recipe with any of its fields changed, whatever section they are in."""
    return recipes_in(tmp_path, corpus)


@pytest.fixture(scope="module")
def recipe_of_module(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """The same for all tests of a module: they share the runs."""
    return recipes_in(tmp_path_factory.mktemp("module"), corpus)


def recipes_in(folder: Path, corpus: Path) -> Callable[..., Recipe]:
    """What makes recipes of runs in a folder."""

    def make(base: Recipe = TINY, **changes: Any) -> Recipe:
        made = replace(
            base, data=replace(base.data, source=str(corpus)), run=replace(base.run, folder=str(folder / "runs"))
        )
        for name, value in changes.items():
            sections = ("model", "data", "optimizer", "schedule", "techniques", "parallel", "run")
            owner = next((s for s in sections if hasattr(getattr(made, s), name)), None)
            if owner is None:
                made = replace(made, **{name: value})
            else:
                made = replace(made, **{owner: replace(getattr(made, owner), **{name: value})})
        return made

    return make
