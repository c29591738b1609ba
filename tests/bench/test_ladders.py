"""The ladders themselves, on a tiny shape; each rung is a process that imports torch, so they are run once each."""

import json
from pathlib import Path
from typing import Any

import pytest

from hasten.bench.generate import COMPILED_QUANTIZED, NATIVE, OF_CHECKPOINT, RUNGS, GenerateLadder
from hasten.bench.generate_rung import GenerateRung
from hasten.bench.heads import HeadsLadder, grouped
from hasten.bench.models import BenchmarkModel
from hasten.bench.train import TrainLadder
from hasten.cli.bench import LADDERS
from hasten.cli.main import main
from hasten.errors import ConfigError, HastenError, ResourceError
from hasten.machine import emulated
from hasten.measure.ladder import Ladder
from hasten.measure.process import Rung
from hasten.planning.cost import forward_flops_per_token, kv_bytes_per_token, parameters
from hasten.planning.shapes import SHAPES, shape_config

QUICK = ["--limit-seconds", "0.02"]  # no test looks at the figures of the machine


def test_published_shapes_have_their_published_size() -> None:
    counts = {name: parameters(shape_config(name)).total / 1e6 for name in SHAPES}
    wanted = {"gpt2-124m": 124.4, "qwen3-0.6b": 596.0, "llama-7b": 6738.4, "llama-70b": 68976.6, "llama-1.1b": 1100.0}
    wanted["qwen3.5-0.8b"] = 752.4
    for name, millions in wanted.items():
        assert counts[name] == pytest.approx(millions, rel=1e-3), name
    assert counts["llama-120m"] == pytest.approx(125, rel=0.05)


@pytest.mark.slow(minutes=2)
def test_generation_ladder_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "ladder.png"
    options = ["--prompt-tokens", "24", "--new-tokens", "4", "--rounds", "1", "--threads", "1", "--dtype", "bfloat16"]
    options += QUICK
    rungs = [name for name in RUNGS if name not in {*COMPILED_QUANTIZED, *OF_CHECKPOINT}]
    main(["bench", "generate", "--shape", "tiny", *options, "--json", "-", "--picture", str(picture)])
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert (report["schema"], report["kind"], report["settings"]["weights"]) == (1, "generate", "random")
    assert "random weights" in err
    assert picture.read_bytes()[:4] == b"\x89PNG"
    rows = {row["name"]: row for row in report["rows"]}
    assert list(rows) == rungs, "what a CPU's ladder has by default"
    for row in rows.values():
        assert "error" not in row, row
        assert {"techniques", "bandwidth_gb_s", "mbu", "peak_memory_bytes", "speedup", "setup_seconds"} <= set(row)
        assert row["decode_tokens_per_second"] > 0
        assert row["prefill_tokens_per_second"] > 0
        assert row["time_to_first_token_seconds"] > 0
    names = ("no-cache", "static-cache", "static-cache-compiled")
    assert len({rows[name]["bytes_per_token"] for name in names}) == 1, "the same useful bytes on every bf16 rung"
    sizes = [rows[name]["bytes_per_token"] for name in NATIVE]
    assert sizes == sorted(sizes, reverse=True), "fewer bits are fewer bytes"
    # 2 layers x k and v x 2 heads x 16 elements x 2 bytes, and 28 places of them with one to spare for padding
    dtype, size = ("float32", 512) if emulated("bfloat16") else ("bfloat16", 256)
    assert rows["static-cache"]["cache_bytes_per_token"] == size
    assert rows["static-cache"]["cache_bytes"] == 65 * size  # 28 tokens in steps of 64, and one row aside
    assert rows["static-cache"]["matrix_dtype"] == rows["static-cache"]["precision"]["dtype"] == dtype
    assert (rows["no-cache"]["decoded_tokens"], rows["static-cache"]["decoded_tokens"]) == (2, 4)
    compiled = rows["static-cache-compiled"]
    assert compiled["compile_seconds"] > compiled["warm_compile_seconds"] > compiled["time_to_first_token_seconds"]
    assert [name for name in rows if "warm_compile_seconds" in rows[name]] == ["static-cache-compiled"]
    assert rows["native-int4"]["matrix_dtype"] == "int8"
    assert set(report["limits"]["matrix_rates"]) == {dtype, "int8"}
    assert rows["native-int8"]["prefill_mfu"] > 0


@pytest.mark.slow
def test_a_rung_in_two_ranks(tiny_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt-tokens", "9", "--new-tokens", "4", "--rounds", "1", "--warmup", "0", "--threads", "2", *QUICK]
    options += ["--rungs", "static-cache", "--tensor-parallel", "2", "--dtype", "float32", "--json", "-"]
    main(["bench", "generate", "--model", str(tiny_folder), *options])
    one, two = json.loads(capfd.readouterr().out)["rows"]
    assert (one["name"], two["name"]) == ("static-cache", "static-cache-tp2")
    assert "error" not in two, two
    assert two["techniques"][-1] == "tensor parallelism of 2"
    assert two["bytes_per_token"] == one["bytes_per_token"], "of the whole model"
    assert two["cache_bytes"] == one["cache_bytes"] / 2, "of a rank"
    assert two["decode_tokens_per_second"] > 0


def test_ladders_under_torchrun(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr("hasten.cli.bench.run", made.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):  # the second has nothing to do
        monkeypatch.setenv("RANK", rank)
        main(["bench", "generate", "--model", str(tiny_folder)])
        main(["bench", "train", "--shape", "tiny"])
    assert [made[0].tensor_parallel, made[1].processes, len(made)] == [2, 2, 2]
    with pytest.raises(SystemExit):
        main(["bench", "attention"])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(SystemExit):
        main(["bench", "train", "--shape", "tiny"])


def make_rung(name: str, **changes: Any) -> GenerateRung:
    fixed = {"shape": "tiny", "dtype": "float32", "device": "cpu", "prompt_tokens": 9, "new_tokens": 4, "seed": 3}
    return GenerateRung(ladder=GenerateLadder(**fixed, **changes), mode=RUNGS[name])


@pytest.mark.parametrize("batch", [1, 3])
def test_every_rung_of_generation_gives_the_same_tokens(batch: int) -> None:
    found = {}
    for name in ("no-cache", "static-cache"):
        rung = make_rung(name, batches=(batch,))
        tokens = [rung.streams[""].first_tokens()]
        for _ in range(3):
            tokens.append(rung.streams[""].next_tokens(tokens[-1]))
        found[name] = tokens
        assert rung.measure()["decode_tokens_per_second"] > 0
    assert found["no-cache"] == found["static-cache"]
    assert [len(tokens) for tokens in found["no-cache"]] == [batch] * 4


def test_further_rows_of_a_rung() -> None:
    rung = make_rung("native-int8", batches=(1, 8), contexts=(30,))
    facts = rung.describe()
    own, many, longer = (each["bytes_per_token"] for each in (facts, facts["rows"]["x8"], facts["rows"]["c30"]))
    token = kv_bytes_per_token(shape_config("tiny"), 2)
    cache = 11 * token  # 9 + 4 / 2 tokens on average, in bfloat16
    assert many - cache == pytest.approx((own - cache) / 8), "weights are read once for all, every cache by itself"
    assert longer - own == pytest.approx((30 - 9) * token)
    once = forward_flops_per_token(rung.config, 9, scored=1)
    assert facts["prefill_flops_per_token"] == once, "the head is computed for a prompt's last token"
    found = rung.measure()
    assert found["x8|decode_tokens_per_second"] == pytest.approx(8 * found["x8|decode_tokens_per_second_per_sequence"])
    assert {name for name in found if "|" not in name} == {
        "prefill_tokens_per_second",
        "time_to_first_token_seconds",
        "decode_tokens_per_second",
        "predicted_tokens_per_second",
    }
    assert "x8|prefill_tokens_per_second" not in found, "its prompts are taken in once"
    stream = rung.streams["x8"]
    assert stream.texts is not None
    assert stream.texts.lengths == [13] * 8
    rung.measure()
    assert stream.texts.lengths == [13] * 8, "every round starts after the prompts"


@pytest.mark.slow
def test_batches_and_contexts_from_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--prompt-tokens", "12", "--new-tokens", "4", "--rounds", "2", "--threads", "1", *QUICK, "--json", "-"]
    wanted = ["--rungs", "no-cache,native-int4", "--batches", "1,8", "--contexts", "16,200"]
    main(["bench", "generate", "--shape", "tiny", *options, *wanted])
    out, err = capfd.readouterr()
    report = json.loads(out)
    assert (report["settings"]["batches"], report["settings"]["contexts"]) == ([1, 8], [16, 200])
    rows = {row["name"]: row for row in report["rows"]}
    endings = ["", "-x8", "-c16", "-c200"]
    assert list(rows) == ["no-cache", *(f"native-int4{ending}" for ending in endings)], "without a cache one row"
    own, many, short, long = (rows[f"native-int4{ending}"] for ending in endings)
    assert [(row["batch"], row["prompt_tokens"]) for row in (own, many, short, long)] == [
        (1, 12),
        (8, 12),
        (1, 16),
        (1, 200),
    ]
    for row, base in ((many, own), (short, short), (long, short)):
        assert row["ratio_to"] == base["name"]
        speeds = [
            found["decode_tokens_per_second"] / other["decode_tokens_per_second"]
            for found, other in zip(row["rounds"], base["rounds"], strict=True)
        ]
        assert row["ratio"] == pytest.approx(sum(speeds) / 2)
        assert "speedup" not in row
        assert row["mbu"] > 0
    assert own["speedup"] > 0
    assert "× c16" in err


def test_a_first_batch_other_than_one_is_in_the_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rungs: list[Rung] = []
    monkeypatch.setattr(Ladder, "measure", lambda ladder, made, **_: rungs.extend(made) or {})
    GenerateLadder(shape="tiny", prompt_tokens=12, batches=(4,), rungs=("no-cache", "static-cache-compiled")).run()
    assert [(rung.name, rung.twice) for rung in rungs] == [("no-cache-x4", False), ("static-cache-compiled-x4", True)]
    assert rungs[1].arguments["ladder"].batches == (4,)


def test_auto_of_the_generation_ladder_is_bfloat16_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict] = []
    monkeypatch.setattr(Ladder, "measure", lambda ladder, made, **rest: found.append(rest | {"made": made}) or {})
    for flags, dtype in ((("avx2",), "float32"), (("avx512_bf16",), "bfloat16")):
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
        monkeypatch.setattr("hasten.machine.precision._flags", lambda flags=flags: flags)
        GenerateLadder(shape="tiny", rungs=("static-cache",), prompt_tokens=8, new_tokens=2).run()
        assert found[-1]["settings"]["dtype"] == found[-1]["made"][0].arguments["ladder"].dtype == "bfloat16"
        assert found[-1]["dtypes"] == (dtype,)


def test_heads_change_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    rungs: list[Rung] = []
    monkeypatch.setattr(Ladder, "measure", lambda ladder, made, **_: rungs.extend(made) or {})
    HeadsLadder(shape="tiny", prompt_tokens=16, new_tokens=3, eager=True).run()
    assert [rung.name for rung in rungs] == ["heads-mha", "heads-gqa", "heads-mqa"]
    assert rungs[1].techniques == ("eager", "static cache", "grouped-query: 2 key/value heads")
    found = []
    for rung in rungs:
        made = GenerateRung(**rung.arguments)
        assert made.measure()["decode_tokens_per_second"] > 0
        found.append(made.describe())
    assert [facts["kv_heads"] for facts in found] == [4, 2, 1]
    unit = 64 * (4 if emulated("bfloat16") else 2)  # 2 layers, keys and values of 16: float32 where bf16 is emulated
    assert [facts["cache_bytes_per_token"] for facts in found] == [4 * unit, 2 * unit, unit]
    assert [grouped(12, 12), grouped(9, 9), grouped(32, 4)] == [3, 3, 4]
    with pytest.raises(ConfigError, match="cannot be grouped"):
        grouped(5, 5)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: BenchmarkModel(shape="llama-2b"), ConfigError, "no shape 'llama-2b'; known: tiny, llama-120m"),
        (lambda: BenchmarkModel(), ConfigError, "--shape NAME and --model"),
        (lambda: BenchmarkModel(model="x", kv_heads=1), ConfigError, "use --shape"),
        (lambda: GenerateLadder(shape="tiny", rungs=("fast",)).run(), ConfigError, "known: no-cache, static-cache"),
        (lambda: GenerateLadder(shape="tiny", dtype="int3").run(), ConfigError, "dtype 'int3' is not known"),
        (lambda: GenerateLadder(shape="tiny", prompt_tokens=600).run(), ConfigError, "512 positions"),
        (lambda: GenerateLadder(shape="tiny", new_tokens=0).run(), ConfigError, "--new-tokens is 0; .* at least 2"),
        (lambda: GenerateLadder(shape="tiny", contexts=(16, 600)).run(), ConfigError, "600 prompt .* 512 positions"),
        (lambda: GenerateLadder(shape="tiny", batches=(1, 1)).run(), ConfigError, "--batches takes different .* 1, 1"),
        (lambda: GenerateLadder(shape="tiny", batches=()).run(), ConfigError, "at least one"),
        (lambda: GenerateLadder(shape="tiny", contexts=(0,)).run(), ConfigError, "--contexts takes .* found 0"),
        (lambda: HeadsLadder(model="x").run(), ConfigError, "use --shape"),
        (
            lambda: GenerateLadder(shape="tiny", tensor_parallel=2).run(),
            ConfigError,
            "give --tensor-parallel with --model",
        ),
        (lambda: GenerateLadder(shape="tiny", tensor_parallel=0).run(), ConfigError, "--tensor-parallel is 0"),
        (lambda: TrainLadder(shape="tiny", recipe="demo").run(), ConfigError, "one of --shape NAME and --recipe"),
        (lambda: TrainLadder(recipe="finetune").run(), ConfigError, "known: demo"),
        (lambda: TrainLadder(shape="tiny", batch_size=0).run(), ConfigError, "--batch-size is 0"),
        (lambda: TrainLadder(shape="tiny", sequence_length=4096).run(), ConfigError, "512 positions"),
        (lambda: TrainLadder(shape="llama-120m", rungs=("padded-vocabulary",)).run(), ConfigError, "multiple of 64"),
        (
            lambda: TrainLadder(shape="tiny", rungs=("x",)).run(),
            ConfigError,
            "known: explicit-float32, math, memory-efficient",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(make: Any, kind: type[HastenError], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_a_model_that_does_not_fit_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("hasten.bench.models.available_memory", lambda device: 20 << 30)
    monkeypatch.setattr(Ladder, "measure", never)
    with pytest.raises(ResourceError, match=r"llama-70b .* needs about 1\d\d.\d GB on cpu \(138.0 GB weights"):
        GenerateLadder(shape="llama-70b", device="cpu").run()
    with pytest.raises(ResourceError, match=r"training llama-7b .* 21.5 GB are free"):
        TrainLadder(shape="llama-7b", device="cpu").run()


def test_without_a_compiler_the_compiled_rung_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    rungs: list[Rung] = []
    monkeypatch.setattr(Ladder, "measure", lambda ladder, made, **_: rungs.extend(made) or {})
    GenerateLadder(shape="tiny", prompt_tokens=8, new_tokens=2, device="cpu").run()
    GenerateRung(**rungs[1].arguments)
    with pytest.raises(ResourceError, match="needs a C\\+\\+ compiler on a CPU and none is here"):  # an error row
        GenerateRung(**rungs[2].arguments)


@pytest.mark.parametrize(
    ("name", "said", "unsaid"),
    [
        ("attention", ("NAME-time.png", "Decides the random inputs."), ("weights",)),
        ("race", ("the order of the data",), ("NAME-time.png",)),
        ("heads", ("--shape",), ("--model", "--text")),
        ("serve", ("In this process: limits of the engine.",), ("NAME-time.png",)),
    ],
)
def test_the_help_of_a_ladder_is_its_own(
    name: str,
    said: tuple[str, ...],
    unsaid: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main(["bench", name, "--help-all"])
    text = capsys.readouterr().out
    assert all(words in text for words in said)
    assert not any(words in text for words in unsaid)


def test_an_unknown_ladder_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "nothing"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "'nothing'; known: " in err
    assert all(name in err for name in LADDERS)
    main(["bench", "--help"])
    assert "static cache + torch.compile" in capsys.readouterr().out


@pytest.fixture(scope="module")
def quantized_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "q4"
    options = ["--scheme", "int4", "--group-size", "32", "--dtype", "bfloat16"]
    main(["quantize", str(tiny_folder), *options, "--output", str(folder)])
    return folder


@pytest.mark.slow
def test_a_quantized_checkpoint_is_measured_as_it_is(
    quantized_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n" * 5)
    options = ["--prompt-tokens", "12", "--new-tokens", "4", "--rounds", "1", "--threads", "1", *QUICK, "--json", "-"]
    main(["bench", "generate", "--model", str(quantized_folder), "--text", str(text), *options])
    rows = {row["name"]: row for row in json.loads(capfd.readouterr().out)["rows"]}
    assert list(rows) == ["static-cache", "native-int4"]
    for row in rows.values():
        assert "error" not in row, row
        assert row["perplexity"] > 1
    sizes = [row["bytes_per_token"] - row["context"] * row["cache_bytes_per_token"] for row in rows.values()]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1), "the same weights, but for the panels that fused layers share"


@pytest.mark.parametrize("name", ["native-int8", "native-bf16", "static-cache-compiled-int8"])
def test_rungs_that_a_quantized_checkpoint_cannot_become(quantized_folder: Path, name: str) -> None:
    ladder = GenerateLadder(model=str(quantized_folder), rungs=(name,))
    with pytest.raises(ConfigError, match=f"are int4 already, which cannot become the rung '{name}'"):
        ladder.run()
