"""`hasten demo` with a model of a few thousand parameters: what it leaves, and what a second run does."""

import json
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from hasten.cli import demo, demo_published
from hasten.cli.demo import Demo
from hasten.errors import ConfigError, ResourceError
from hasten.training import recipes, setup
from hasten.training.journal import read
from hasten.training.recipe import Data, Recipe, Run, Schedule, Shape, Techniques
from hasten.training.recipes import Size
from own_cache import make_cache


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run(again="fresh")` runs a tiny demo in runs/demo and gives that folder."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("abc.py", "bisect.py", "copy.py", "heapq.py", "queue.py"):
        (corpus / name).write_text((library / name).read_text(encoding="utf-8")[:4000], encoding="utf-8")
    tiny = Recipe(
        name="demo",
        model=Shape(layers=1, hidden_size=32, heads=2, feed_forward=64, max_positions=256),
        data=Data(source=str(corpus), vocab_size=300, context=32, batch_size=2, validation_fraction=0.3),
        schedule=Schedule(kind="wsd", warmup_steps=8),
        techniques=Techniques(precision="float32", compile=False, keep_memory=False),
        run=Run(steps=10, minutes=1, validate_every=5, validation_batches=2, device="cpu"),
    )
    monkeypatch.setitem(recipes.RECIPES, "demo", tiny)
    size = Size(model=tiny.model, learning_rate=tiny.optimizer.learning_rate, tokens=1)
    monkeypatch.setattr(recipes, "DEMO_SIZES", (size,))
    monkeypatch.setattr("hasten.data.bigram.bigram_loss", lambda *arguments, **options: 99.0)  # ten steps beat that
    monkeypatch.setattr(setup, "matrix_rate", lambda dtype, **options: 1e11)
    monkeypatch.setenv("HASTEN_CACHE", make_cache(tmp_path / "cache"))

    def start(**options):
        Demo(
            **(
                {"minutes": 1.0, "folder": tmp_path / "runs", "threads": 1, "ladder": False, "published": False}
                | options
            )
        ).run()
        return tmp_path / "runs/demo"

    return start


def test_it_leaves_what_it_says_and_a_second_run_keeps_a_finished_one(run, capsys):
    folder = run()
    told = capsys.readouterr().out
    for name in ("model", "train.jsonl", "loss.png", "evaluation.json"):
        assert (folder / name).exists()
        assert name in told
    assert "ladder.json" not in told
    assert demo.PROMPT in told
    assert "bits per byte" in told
    assert "a bigram model of the same text has 99.000" in told
    lines = read(folder / "train.jsonl")
    assert len(lines) == 10
    run()
    assert read(folder / "train.jsonl") == lines  # not trained again: the seconds are those of the first run

    with pytest.raises(ConfigError, match=r"run\.minutes: 1.0 -> 2.0.*hasten demo --again fresh"):
        run(minutes=2.0)
    run(minutes=2.0, again="fresh")
    fresh = read(folder / "train.jsonl")
    assert len(fresh) == 10
    assert fresh != lines


def test_noise_is_called_noise_and_not_shown(run, monkeypatch, capsys):
    monkeypatch.setattr("hasten.data.bigram.bigram_loss", lambda *arguments, **options: 4.0)
    run()
    told = capsys.readouterr().out
    assert "learned nothing usable" in told
    assert "10 steps were too few" in told
    assert demo.PROMPT not in told


def test_what_counts_as_noise():
    assert demo.noise(4.5, 4.6, 4096, steps=2000) is None
    assert "of a bigram model or worse" in demo.noise(4.7, 4.6, 4096, steps=900)
    assert "guessing among 4,096 tokens (8.32)" in demo.noise(8.31, 4.6, 4096, steps=3)


def test_a_slow_machine_trains_a_smaller_model_says_so_and_goes_on_with_it(run, monkeypatch, capsys):
    large = recipes.DEMO_SIZES[0]
    small = replace(large, model=replace(large.model, hidden_size=16))
    monkeypatch.setattr(recipes, "DEMO_SIZES", (replace(large, tokens=10**9), replace(small, tokens=1)))
    folder = run()
    assert "planned was a model of 0.0 M parameters" in capsys.readouterr().out
    assert json.loads((folder / "recipe.json").read_text())["model"]["hidden_size"] == 16
    monkeypatch.setattr("hasten.training.fitting.fit", lambda *arguments: pytest.fail("measured a second time"))
    run()


def test_stopped_it_goes_on_from_there(run, monkeypatch, capsys):
    import os
    import signal

    from hasten.training.step import TrainStep

    original, calls = TrainStep.run, []

    def stop_in_the_third(self, *arguments, **options):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments, **options)

    monkeypatch.setattr(TrainStep, "run", stop_in_the_third)
    monkeypatch.setattr("hasten.training.fitting.fit", lambda recipe, sizes: (recipe, None))  # it takes steps too
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 130
    assert "continues from there" in capsys.readouterr().err
    run()
    assert len(calls) == 3 + 10 - 2  # the third was stopped before it did anything


def test_the_ladder_is_measured_on_the_trained_model_when_asked(run, monkeypatch):
    measured = []
    monkeypatch.setattr(
        demo, "_measure", lambda folder, run, text, budget, *, threads: measured.append((folder, run, threads))
    )
    folder = run(ladder=True)
    assert measured == [(folder / "model", folder, 1)]


def test_the_ladder_scores_what_training_has_not_seen(run, monkeypatch):
    scored = []

    def ladder(self):
        scored.append(Path(self.text).read_text())
        return {"rows": []}

    monkeypatch.setattr("hasten.bench.generate.GenerateLadder.run", ladder)
    monkeypatch.setattr("hasten.measure.draw.draw_ladder", lambda *arguments, **options: None)
    monkeypatch.setattr("hasten.measure.table.print_ladder", lambda report: None)
    monkeypatch.setattr(demo, "LADDER_TEXT_BYTES", 3000)
    folder = run(ladder=True)
    assert (folder / "ladder.json").exists()
    (text,) = scored
    assert 0 < len(text.encode()) <= 3000
    files = [path.read_text(encoding="utf-8") for path in (folder.parents[1] / "corpus").iterdir()]
    assert any(text[:200] in file for file in files)


def test_it_begins_with_a_published_model_and_measures_what_fits(run, monkeypatch, tiny_folder, capsys):
    measured = []
    monkeypatch.setattr(demo, "find", lambda: tiny_folder)
    monkeypatch.setattr(demo, "answer", lambda path, budget, *, threads: measured.append(path))
    monkeypatch.setattr("hasten.bench.generate.GenerateLadder.run", lambda self: measured.append(self.rungs) or {})
    monkeypatch.setattr("hasten.measure.draw.draw_ladder", lambda *arguments, **options: None)
    monkeypatch.setattr("hasten.measure.table.print_ladder", lambda report: None)
    monkeypatch.setattr(demo, "_measure_training", lambda *arguments, **options: measured.append("training"))
    folder = run(published=True, ladder=True, budget=2.0)  # 60 s train, 25 are left for rungs
    said = capsys.readouterr().out
    assert measured == [tiny_folder, ("native-bf16",), "training"]
    assert "skipped: static-cache, about 20 s here" in said
    assert said.index("ask a published model") < said.index("train a small model")
    assert (folder / "published" / "ladder.json").exists()
    assert "published/" in said
    assert "hasten chat smollm2-135m" in said


def test_without_a_published_model_it_says_why_and_goes_on(run, monkeypatch, capsys):
    def fail(function, name):
        raise ResourceError("no index")

    monkeypatch.setattr(demo_published, "hub_answers", lambda hub_id: False)
    monkeypatch.setattr(demo_published, "fetch", fail)
    monkeypatch.setattr("hasten.machine.caches.find_cached", lambda *place: None)
    monkeypatch.setattr(demo, "_measure", lambda *arguments, **options: print("the trained model's ladder"))
    assert (run(published=True, ladder=True) / "model").exists()
    said = capsys.readouterr().out
    assert "skipped: no index" in said
    assert "the trained model's ladder" in said


def test_rungs_that_fit():
    known, fitting = demo_published.RUNG_SECONDS, demo_published.fitting
    assert fitting(known, 1000, 1.0) == (list(known), {})
    rungs, skipped = fitting(known, 60, 2.0)
    assert rungs == ["native-bf16", "native-int8"]
    assert skipped["gptq-int4-g32"] == 2 * known["gptq-int4-g32"]
    assert fitting(known, -5, 1.0)[0] == []


def test_the_trained_models_ladder_keeps_to_the_budget_too(run, monkeypatch, capsys):
    monkeypatch.setattr("hasten.bench.generate.GenerateLadder.run", lambda self: pytest.fail("no time is left"))
    folder = run(ladder=True, budget=1.0, spent=59.0)
    assert "skipped: native-bf16, about 8 s here, would break the budget" in capsys.readouterr().out
    assert not (folder / "ladder.json").exists()


def test_a_slow_hub_and_a_slow_index_cost_a_bounded_time(monkeypatch, tmp_path):
    import time

    monkeypatch.setattr(demo_published, "HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.model_info", lambda *given, **more: time.sleep(30))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    slow = "import time\ndef get(name):\n    time.sleep(30)\ndef broken(name):\n    raise OSError(f'no {name}')\n"
    (tmp_path / "slow_download.py").write_text(slow + "def there(name):\n    return f'/models/{name}'\n")
    begun = time.monotonic()
    assert not demo_published.hub_answers("owner/name")
    assert demo_published.fetch("slow_download:there", "x") == Path("/models/x")
    with pytest.raises(ResourceError, match=r"^no x$"):
        demo_published.fetch("slow_download:broken", "x")
    monkeypatch.setattr(demo_published, "DOWNLOAD_SECONDS", 0.2)
    with pytest.raises(ResourceError, match=r"x was not there within 0 s; hasten chat x downloads it"):
        demo_published.fetch("slow_download:get", "x")
    assert time.monotonic() - begun < 25
