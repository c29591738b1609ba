"""The rungs of a checkpoint: GPTQ's weights and 16-bit activations, and how well each rung still predicts a text."""

import json
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.bench.generate import GGUF_RUNG, GPTQ_RUNG, OF_CHECKPOINT, RUNGS, GenerateLadder
from hasten.bench.generate_rung import GenerateRung
from hasten.bench.models import BenchmarkModel
from hasten.checkpoints.gguf.write import write_gguf
from hasten.cli.main import main
from hasten.errors import ConfigError
from hasten.evaluation.divergence import divergence
from hasten.measure.ladder import Ladder
from instruction_sets import needs_native

TEXT = "def add(a, b):\n    return a + b\n" * 5
SHORT = ["--prompt-tokens", "12", "--new-tokens", "4", "--rounds", "1", "--warmup", "0", "--threads", "1"]
SHORT += ["--limit-seconds", "0.02"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration by a few tokens."""
    few = hasten.own_text
    monkeypatch.setattr("hasten.engine.own_text.own_text", lambda model, **_: few(model, samples=4, length=32))


@pytest.mark.slow
@needs_native
def test_gptq_and_weight_only_beside_bfloat16(
    tiny_folder: Path, tmp_path: Path, quick: None, capfd: pytest.CaptureFixture[str]
) -> None:
    text, folder, picture = tmp_path / "text.txt", tmp_path / "gptq", tmp_path / "ladder.png"
    text.write_text(TEXT)
    of_checkpoint = ("int8-weight-only", GPTQ_RUNG)
    drafted = ("speculation", "all-together")
    names = ("native-bf16", *of_checkpoint, *drafted)
    words = ["--text", str(text), "--gptq", str(folder), "--rungs", ",".join(names), "--picture", str(picture)]
    words += ["--draft", "auto", "--speculate", "3"]
    main(["bench", "generate", "--model", str(tiny_folder), *SHORT, *words, "--json", "-"])
    said = capfd.readouterr()
    report = json.loads(said.out)
    assert "KL from bf16" in said.err
    assert "gptq-int4-g32: quantized in" in said.err
    assert picture.stat().st_size > 5000
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == list(names)
    assert all("error" not in row for row in rows.values()), rows
    # The figures are those of the models, computed here.
    plain = hasten.fuse(hasten.load(tiny_folder, dtype="bfloat16"))
    rounded = hasten.quantize(hasten.load(tiny_folder, dtype="bfloat16"), hasten.Int8(activations="float"))
    gptq = hasten.load(folder, dtype="bfloat16")
    for name, model in zip(of_checkpoint, (rounded, gptq), strict=True):
        found = divergence(hasten.fuse(model), plain, [TEXT])
        assert rows[name]["kl_mean"] == found.kl_mean > 0
        assert rows[name]["perplexity"] == found.perplexity
    assert rows["native-bf16"]["kl_mean"] == 0
    assert rows[GPTQ_RUNG]["kl_mean"] > rows["int8-weight-only"]["kl_mean"]
    # Drafts change no text: they are as far from bfloat16 as the same weights without.
    assert (rows["speculation"]["kl_mean"], rows["all-together"]["kl_mean"]) == (0, rows[GPTQ_RUNG]["kl_mean"])
    assert report["settings"]["speculate"] == 3
    for name in drafted:
        row = rows[name]
        assert row["predicted_tokens_per_second"] > 0
        assert row["decoded_tokens"] == 4
        assert 1 <= row["tokens_per_pass"] <= 4
        assert row["bytes_per_token"] * row["tokens_per_pass"] == pytest.approx(bytes_per_pass(rows, name))
    # The folder is taken as it is the next time.
    before = (folder / "model.safetensors").stat().st_mtime_ns
    found = run_without_measuring(tiny_folder, gptq=str(folder))
    assert found["settings"]["gptq"] == {"found": True}
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def bytes_per_pass(rows: dict[str, Any], name: str) -> float:
    of: float = rows["native-bf16" if name == "speculation" else GPTQ_RUNG]["bytes_per_token"]
    return of


def run_without_measuring(model: Path, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ladder, "measure", lambda ladder, made, **more: found.update(more, made=made) or {})
        GenerateLadder(model=str(model), device="cpu", prompt_tokens=8, new_tokens=2, **options).run()
    return found


@needs_native
def test_a_gguf_file_has_all_rungs_from_its_dequantized_weights(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(hasten.load(tiny_folder, dtype="stored"), file, "Q8_0")
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ladder, "measure", lambda ladder, made, **more: found.update(more, made=made) or {})
        ladder = ["bench", "generate", str(file), "--prompt-tokens", "8", "--new-tokens", "4"]
        patch.setattr("hasten.bench.generate.GenerateLadder.show", lambda self, report: True)
        main([*ladder, "--rungs", "native-bf16,gguf-file,native-int8,speculation"])
        rungs = {rung.name: rung for rung in found["made"]}
    assert list(rungs) == ["native-bf16", GGUF_RUNG, "native-int8", "speculation"]
    assert found["settings"]["model"] == "tiny.gguf (dequantized), bfloat16, 8 prompt tokens"
    assert found["settings"]["draft"] == "suffix"
    assert rungs[GGUF_RUNG].arguments["source"].model == str(file)
    assert rungs["native-int8"].arguments["source"].model == rungs["speculation"].arguments["ladder"].model != str(file)
    with pytest.raises(ConfigError, match=r"gguf-file is measured of a GGUF file, and \S+ is none"):
        run_without_measuring(tiny_folder, rungs=(GGUF_RUNG,))
    # What a rung makes of the file, beside the dequantized weights.
    plain = GenerateLadder(model=str(file)).source.dequantized(tmp_path / "plain")
    kept = GenerateLadder(model=plain.model, device="cpu", dtype="bfloat16", prompt_tokens=8, new_tokens=4)
    rung = GenerateRung(ladder=kept, mode=RUNGS[GGUF_RUNG], source=BenchmarkModel(model=str(file)))
    assert 8.5 / 8 <= rung.weight_bytes < 1.5, "a byte for each weight and its scales; 2 if it had been dequantized"
    assert rung.measure()["decode_tokens_per_second"] > 0


def test_what_is_left_out_says_why(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = GenerateLadder(shape="tiny", device="cpu")
    assert not OF_CHECKPOINT & shape.modes().keys()
    assert "random weights predict no text" in shape.left_out()[GPTQ_RUNG]
    with pytest.raises(ConfigError, match="gptq-int4-g32 is left out: random weights predict no text"):
        GenerateLadder(shape="tiny", rungs=(GPTQ_RUNG,)).run()
    found = run_without_measuring(tiny_folder)
    assert "int8-weight-only" in [rung.name for rung in found["made"]]
    assert found["settings"]["left_out"] == {
        GPTQ_RUNG: "it takes minutes to make; it takes --gptq DIR, or --rungs",
        "speculation": "it takes --draft",
        "all-together": "it takes --draft and --gptq DIR",
    }
    with pytest.raises(ConfigError, match="speculation is left out: it takes --draft"):
        run_without_measuring(tiny_folder, rungs=("speculation",))
    with pytest.raises(ConfigError, match=r"all-together is left out: it takes .* another one than self:int4"):
        run_without_measuring(tiny_folder, rungs=("all-together",), draft="self:int4", text="stdlib", gptq="new")
    drafted = GenerateLadder(model=str(tiny_folder), draft="self:int4", text="stdlib", gptq="new")
    assert [name for name, mode in drafted.modes().items() if mode.drafted] == ["speculation"]
    with pytest.raises(ConfigError, match="--draft takes suffix"):
        run_without_measuring(tiny_folder, draft="suffix")
    assert run_without_measuring(tiny_folder, draft="none")["settings"] == found["settings"]
    monkeypatch.setattr("hasten.bench.generate.resolve_device", lambda name: __import__("torch").device("cuda", 0))
    on_gpu = GenerateLadder(model=str(tiny_folder), gptq="somewhere").modes()
    assert on_gpu[GPTQ_RUNG].compiled
    assert not on_gpu[GPTQ_RUNG].fused
    assert on_gpu[GPTQ_RUNG].techniques == ("static cache", "torch.compile", "int4 in groups of 32", "GPTQ")


def test_a_folder_of_something_else_is_not_measured_as_gptq(tiny_folder: Path, tmp_path: Path) -> None:
    coarse = tmp_path / "g64"
    hasten.save(
        hasten.quantize(hasten.load(tiny_folder, dtype="stored"), hasten.Int4(group_size=64, search="minmax")), coarse
    )
    with pytest.raises(ConfigError, match="holds no int4 weights in groups of 32"):
        run_without_measuring(tiny_folder, gptq=str(coarse))
    with pytest.raises(ConfigError, match="holds no int4 weights in groups of 32"):
        run_without_measuring(tiny_folder, gptq=str(tiny_folder))
    with pytest.raises(ConfigError, match="--gptq quantizes a checkpoint that is not quantized"):
        run_without_measuring(coarse, gptq=str(tmp_path / "new"))
    from tiny_model import tiny_llama

    other = tmp_path / "other"
    hasten.save(tiny_llama(num_hidden_layers=1), other)
    with pytest.raises(ConfigError, match=r"is of another model than \S*model: its layers differs"):
        run_without_measuring(tiny_folder, gptq=str(other))
