"""The ladder of training on a tiny shape: its rungs, what each switches on, and what they say."""

from dataclasses import replace
from pathlib import Path

import pytest

from hasten.bench import train_rungs
from hasten.bench.train import TrainLadder, TrainRung
from hasten.bench.train_rungs import Rungs, cumulative, possible
from hasten.errors import ConfigError
from hasten.training.recipe import Techniques

TINY = TrainLadder(
    shape="tiny", batch_size=2, sequence_length=16, steps=1, rounds=2, warmup=0, threads=1, limit_seconds=0.05
)


def techniques(name: str, rungs: Rungs) -> Techniques:
    return cumulative(rungs)[name][0]


def switched_on(name: str, rungs: Rungs) -> tuple[str, ...]:
    return cumulative(rungs)[name][1]


@pytest.mark.slow(minutes=1)
def test_training_ladder() -> None:
    report = replace(TINY, rungs=("explicit-float32", "padded-vocabulary")).run()
    first, last = report["rows"]
    assert [first["name"], last["name"]] == ["explicit-float32", "padded-vocabulary"]
    for row in (first, last):
        wanted = {"tokens_per_second", "mfu", "milliseconds_per_batch", "peak_memory_bytes", "speedup"}
        assert wanted <= set(row), row.get("error")
        assert row["tokens_per_second"] > 0
    assert (first["matrix_dtype"], last["matrix_dtype"]) == ("float32", report["settings"]["precision"]["dtype"])
    assert (first["vocabulary_rows"], last["vocabulary_rows"]) == (250, 256)
    assert first["flops_per_token"] == last["flops_per_token"]
    assert first["first_loss"] > first["last_loss"], "the one batch is learned"
    for moment in ("first_loss", "last_loss"):
        assert first[moment] == pytest.approx(last[moment], rel=2e-3)
    assert first["techniques"] == ["float32, eager, explicit attention"]
    narrow = ["bf16 autocast"] * (report["settings"]["precision"]["dtype"] == "bfloat16")
    assert last["techniques"] == ["flash attention", "torch.compile per block", *narrow, "padded vocabulary"]


@pytest.mark.slow
def test_two_processes_learn_the_batch_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(train_rungs.RUNGS, "compile", ("not compiled, which takes its time", {}))
    ladder = replace(TINY, processes=2, rungs=("one-process", "ddp", "zero-3"))
    rows = ladder.run()["rows"]
    assert [row["name"] for row in rows] == list(ladder.rungs)
    one, *shared = rows
    for row in shared:
        assert "error" not in row, row["error"]
        assert row["sent_bytes"] > 0
        for moment in ("first_loss", "last_loss"):
            assert row[moment] == pytest.approx(one[moment], rel=2e-3)
    assert "sent_bytes" not in one
    with pytest.raises(ConfigError, match="which 2 processes cannot share evenly"):
        replace(ladder, batch_size=3).run()


def test_training_rungs_differ_in_what_they_say() -> None:
    def rung(name: str) -> TrainRung:
        recipe, config = TrainLadder(shape="tiny", sequence_length=8).recipe_and_config(1)
        own = replace(recipe, techniques=techniques(name, CPU))
        return TrainRung(recipe=own, config=config, steps=1, device="cpu")

    names = {"explicit-float32": "reference", "math": "math", "memory-efficient": "chunked", "flash": "flash"}
    made = {name: rung(name) for name in names}
    for name, kernel in names.items():
        assert made[name].step.model.blocks[0].attention.kernels.tokens.name == kernel
    losses = [one.measure()["loss"] for one in made.values()]
    assert losses == pytest.approx([losses[0]] * 4, abs=1e-5)


CPU, CUDA = (possible(device, vocab_size=None, wanted=("bf16",)) for device in ("cpu", "cuda"))


def test_rungs_that_change_nothing_are_on_no_list() -> None:
    padded = possible("cpu", vocab_size=128)
    assert techniques("keep-memory", padded).pad_vocabulary_to == 1
    assert "padded vocabulary" not in switched_on("keep-memory", padded)
    assert "padded vocabulary" in switched_on("keep-memory", possible("cpu", vocab_size=65))
    assert not techniques("layer-drop", CUDA).keep_memory
    assert not any("freed memory" in word or "native" in word for word in switched_on("layer-drop", CUDA))


def test_a_model_of_characters_has_as_many_tokens_as_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recipe, config = TrainLadder(recipe="shakespeare-char").recipe_and_config(None)
    assert recipe.data.vocab_size == config.vocab_size == 65
    Path("shakespeare.txt").write_text("abc" * 50)
    recipe, config = TrainLadder(recipe="shakespeare-char").recipe_and_config(None)
    assert config.vocab_size == 3 + 2  # and the end of a text, and unknown characters
    small = replace(
        recipe, techniques=techniques("explicit-float32", CPU), data=replace(recipe.data, batch_size=1, context=8)
    )
    rung = TrainRung(recipe=small, config=config, steps=1, device="cpu")
    assert rung.describe()["vocabulary_rows"] == 5


def test_techniques_of_a_rung_are_those_below_it_but_what_they_replace() -> None:
    assert switched_on("explicit-float32", CPU) == ("float32, eager, explicit attention",)
    assert switched_on("bf16", CPU) == ("flash attention", "torch.compile per block", "bf16 autocast")
    native = switched_on("native-kernels", CPU)
    assert native[-1] == "native attention and activations, joined projections"
    assert "flash attention" not in native
    assert switched_on("checkpoint-full", CPU) == (*native, "full checkpointing")
    assert switched_on("layer-drop", CPU) == (*native, "layer dropping, θ = 0.5")
    assert "checkpoint-offload" in CUDA
    assert "checkpoint-offload" not in CPU
    names = list(CUDA)
    assert names.index("flash") == names.index("bf16") + 1
    assert "flash attention" in switched_on("fused-optimizer-and-loss", CUDA)
    assert techniques("flash", CUDA).precision == "bfloat16"
    assert techniques("checkpoint-full", CUDA).attention == "flash-triton"
    assert techniques("native-kernels", CPU).attention is None
    last = techniques("layer-drop", CPU)
    assert (last.checkpointing, last.layer_drop, last.loss) == ("none", 0.5, None)


def test_emulated_bfloat16_is_measured_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hasten.machine.precision._flags", lambda: ("avx2",))
    here = possible("cpu", vocab_size=None)
    assert "bf16" not in here
    assert techniques("native-kernels", here).precision == "float32"
    assert "bf16" in possible("cuda", vocab_size=None)
    assert techniques("native-kernels", possible("cpu", vocab_size=None, wanted=("bf16",))).precision == "bfloat16"


def test_layer_dropping_runs_some_blocks_only() -> None:
    recipe, config = TrainLadder(shape="tiny", sequence_length=8).recipe_and_config(1)
    own = replace(recipe, techniques=replace(techniques("layer-drop", CPU), compile=False, keep_memory=False))
    rung = TrainRung(recipe=own, config=config, steps=1, device="cpu")
    assert rung.block_scales is not None
    drawn = [rung.block_scales(step)[0] for step in range(40)]
    assert all(block_scales[0] == 1 for block_scales in drawn)
    assert {block_scales[1] for block_scales in drawn} == {0.0, 1 / 0.75}
    rung.measure()
