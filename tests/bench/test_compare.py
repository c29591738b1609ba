"""benchmarks/compare.py and what its peers' scripts share, with a program that stands in for a peer."""

import importlib.util
import json
import os
import struct
import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

PEERS = (("theirs", 100.0), ("broken", 1.0))
STAND_IN = """
import json, sys, time
if "broken" in sys.argv[1]:
    raise SystemExit(f"cannot read {sys.argv[1]}/config.json")
print("noise")
settings = {"arguments": sys.argv[2:], "system_info": "SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | AVX512_VNNI = 1"}
print(json.dumps({"versions": {"x": "1"}, "settings": settings}), flush=True)
for turn, _ in enumerate(sys.stdin):
    if "weary" in sys.argv[1] and turn == 1:
        raise SystemExit("out of memory")
    if "slow" in sys.argv[1]:
        time.sleep(60)
    print(json.dumps({"prefill": 100.0, "decode": SPEED + turn}), flush=True)
"""


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """compare.py and the modules beside the peers' scripts, which are no package."""
    monkeypatch.syspath_prepend(BENCHMARKS / "peers")
    found = {}
    for name, path in (("compare", BENCHMARKS), ("protocol", BENCHMARKS / "peers"), ("weights", BENCHMARKS / "peers")):
        spec = importlib.util.spec_from_file_location(name, path / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, found[name])
        spec.loader.exec_module(found[name])
    return found


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def test_bytes_that_are_read_of_a_gguf_file(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    strings = struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    entries = [text("tokens") + strings, text("flag") + struct.pack("<I?", 7, True)]
    entries.append(text("general.alignment") + struct.pack("<II", 4, 64))
    tensors = {"output.weight": (128, 300), "token_embd.weight": (0, 100), "blk.0.attn_q.weight": (448, 128)}
    infos = [text(name) + struct.pack("<IQQIQ", 2, 8, 4, 8, at) for name, (at, _) in tensors.items()]
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(entries)) + b"".join((*entries, *infos))
    file = tmp_path / "model.gguf"
    file.write_bytes(header + bytes(-len(header) % 64 + 448 + 128))
    assert scripts["weights"].gguf(file) == {
        "token_embd.weight": 128,
        "output.weight": 320,
        "blk.0.attn_q.weight": 128,
    }
    assert scripts["weights"].bytes_read(file) == 448, "of the embedding one row is read"
    header = header.replace(text("output.weight"), text("blk.0.attn_output.weight"))
    file.write_bytes(header + bytes(-len(header) % 64 + 448 + 128))
    assert scripts["weights"].bytes_read(file) == 128 + 320 + 128, "the embedding is the head"


def test_bytes_that_are_read_of_folders(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    untied, tied, export = (tmp_path / name for name in ("untied", "tied", "export"))
    for folder in (untied, tied, export):
        folder.mkdir()
    tensors = {"model.embed_tokens.weight": torch.zeros(50, 4), "model.layers.0.q.weight": torch.zeros(4, 4)}
    save_file(tensors, tied / "model.safetensors")
    save_file(tensors, untied / "model-1.safetensors", metadata={"format": "pt"})
    save_file({"lm_head.weight": torch.zeros(50, 4).bfloat16()}, untied / "model-2.safetensors")
    assert scripts["weights"].bytes_read(untied) == 4 * 4 * 4 + 50 * 4 * 2
    assert scripts["weights"].bytes_read(tied) == 4 * 4 * 4 + 50 * 4 * 4, "the head reads the embedding"
    layers = [("self.model.embed_tokens.weight", "Const", 900), ("self.lm_head.weight", "Const", 400)]
    layers += [("self.q.weight/scale", "Const", 20), ("x", "MatMul", 7)]
    xml = "".join(f'<layer name="{name}" type="{kind}"><data size="{size}"/></layer>' for name, kind, size in layers)
    (export / "openvino_model.xml").write_text(f"<net><layers>{xml}</layers></net>")
    assert scripts["weights"].bytes_read(export) == 420


def test_the_protocol_counts_what_it_asks_for(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    protocol = scripts["protocol"]
    clock = [0.0]
    monkeypatch.setattr(protocol.time, "perf_counter", lambda: clock[0])

    fed: list[int] = []

    def feed(ids: list[int]) -> None:
        fed.append(len(ids))
        clock[0] += 0.5 * len(ids) if len(ids) == 1 else 0.01 * len(ids)

    resets: list[int] = []
    turn = protocol.steps(protocol.LONG, lambda: resets.append(1), feed, vocabulary=50)
    assert tuple(map(round, turn())) == (100, 2)
    assert len(resets) == 2, "before the prefill and the decode"
    assert fed == [512, 8, *[1] * 64]
    fed.clear()
    protocol.steps(protocol.SHORT, lambda: None, feed, vocabulary=50)()
    assert fed == [128, 8, *[1] * 24]

    def generate(ids: list[int], answer: int) -> None:
        clock[0] += 0.01 * len(ids) + 0.5 * (answer - 1)

    turn = protocol.answers(protocol.LONG, generate, vocabulary=50)
    assert tuple(map(round, turn())) == (100, 2)
    monkeypatch.setattr(protocol.sys, "stdin", ["\n", "\n"])
    taken: list[int] = []

    def counted() -> tuple[float, float]:
        taken.append(1)
        return len(taken), 7.0

    protocol.take_turns(counted, packages=["torch"], precision="bf16")
    what, *turns = map(json.loads, capsys.readouterr().out.splitlines())
    assert what == {"versions": {"torch": torch.__version__}, "settings": {"precision": "bf16"}}
    assert turns == [{"prefill": 2, "decode": 7.0}, {"prefill": 3, "decode": 7.0}], "the first is not counted"


@pytest.fixture
def models(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of model folders, each of 4,004 bytes to read for a token, and a memory that reads 1 MB/s."""
    monkeypatch.setattr(scripts["compare"], "read_bandwidth", lambda: 1e6)
    for name in ("ours", "theirs", "broken", "weary", "slow"):
        (tmp_path / name).mkdir()
        tensors = {"q.weight": torch.zeros(1000), "lm_head.weight": torch.zeros(1)}
        save_file(tensors, tmp_path / name / "model.safetensors")
    return tmp_path


def stand_in(compare: ModuleType, name: str, speed: float, *, model: Path, ours: str = "bf16") -> Any:
    script = STAND_IN.replace("SPEED", str(speed))
    return compare.Program(name=name, ours=ours, model=model, command=(sys.executable, "-c", script))


def test_pairs_are_measured_in_turn_and_reported(scripts: dict[str, ModuleType], models: Path) -> None:
    compare = scripts["compare"]
    ours = stand_in(compare, "hasten", 200.0, model=models / "ours")
    pairs = [(stand_in(compare, "peer", speed, model=models / name), ours) for name, speed in PEERS]
    report = compare.compared(pairs, compare.LONG, rounds=1, threads=2, timeout=60, output=None)
    good, bad = report["pairs"]
    assert (good["peer"], good["model"], good["hasten"]) == ("peer", "theirs", "bf16")
    assert good["versions"] == {"peer": {"x": "1"}, "hasten": {"x": "1"}}
    assert good["build"] == ["AVX2", "AVX512_VNNI"], "what its library says of itself"
    assert [one["peer"]["decode"] for one in good["rounds"]] == [100.0, 101.0, 102.0], "three turns of one process"
    assert good["ratio"] == {"decode": 201 / 101, "prefill": 1.0}
    assert good["median"]["peer"]["share_of_bandwidth"] == pytest.approx(101 * 4004 / 1e6)
    assert bad["rounds"][0]["peer"] == {"error": "exit status 1: cannot read config.json"}
    assert "median" not in bad
    assert str(models) not in json.dumps(report)
    shown = compare.table(report)
    assert "| peer | AVX2 AVX512_VNNI | theirs | 101.0, bf16 201.0 | 1.99× | 40%, 80% | 100, 100 | 1.00× |" in shown
    assert "| peer |  | broken | failed: exit status 1" in shown


def test_a_short_comparison_from_end_to_end(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], models: Path
) -> None:
    """Progress at every pair and turn, the protocol given to all programs, two of ours in one format, the switch."""
    compare = scripts["compare"]
    for name in compare.AVX2_SWITCH:
        monkeypatch.setenv(name, "none" if name == "HASTEN_ISA" else "AVX2")
    own = {name: stand_in(compare, "hasten", 200.0, model=models / "ours", ours=name) for name in ("int4", "int4-g32")}
    pairs = [(stand_in(compare, "ik_llama.cpp", 100.0, model=models / "theirs", ours=name), own[name]) for name in own]
    monkeypatch.setattr(compare.Compare, "pairs", lambda self: pairs)
    chosen = compare.Compare(short=True, rounds=2, output=models / "report.json")
    chosen.show(chosen.run())
    report = json.loads((models / "report.json").read_text())
    assert report["protocol"] == {"prefill": 128, "decode": 24, "before": 8, "turns": 3}
    assert report["what"].startswith("prefill of 128 random tokens; decode of 24 after 8;")
    assert report["what"].endswith("take 3 turns each, stopped between them; medians of 2 rounds")
    assert [row["hasten"] for row in report["pairs"]] == ["int4", "int4-g32"]
    for row in report["pairs"]:
        for settings in row["settings"].values():
            assert settings["arguments"] == ["--threads", "2", "--format", "int4", "--short"]
    assert (report["hasten"]["isa"], report["hasten"]["avx2_switch"]) == ("none", False), "one variable is not avx2"
    assert set(report["hasten"]["environment"]) == set(compare.AVX2_SWITCH)
    out, err = capsys.readouterr()
    assert out.strip() == compare.table(report)
    assert "hasten: none; prefill of 128" in out
    lines = err.splitlines()
    assert len(lines) == 2 * 2 * (1 + 3 * 2), "rounds, pairs: before them, and after each turn of both sides"
    assert lines[0].endswith(" round 1 of 2, pair 1 of 2: ik_llama.cpp, theirs")
    assert lines[1] == "    peer: decode 100.0 tokens/s (40% of 0.0 GB/s), prefill 100"
    assert lines[2].startswith("    hasten: decode 200.0 tokens/s")


def test_a_program_that_ends_or_takes_too_long(scripts: dict[str, ModuleType], models: Path) -> None:
    """Its turns from then on say why; those before count, and nothing of it is left running."""
    compare = scripts["compare"]
    weary, slow = (stand_in(compare, "peer", 100.0, model=models / name) for name in ("weary", "slow"))
    with closing(compare.Living(weary, threads=2, timeout=60)) as living:
        assert os.WIFSTOPPED(os.waitpid(living.worker.process.pid, os.WUNTRACED)[1]), "stopped between turns"
        assert [living.turn().get("decode"), living.turn(), living.turn()] == [
            100.0,
            *[{"error": "exit status 1: out of memory"}] * 2,
        ]
    with closing(compare.Living(slow, threads=2, timeout=2)) as living:
        assert living.turn() == {"error": "exit status -9: it said nothing"}
    with closing(compare.Living(slow, threads=2, timeout=60)) as living:
        living.worker.process.kill()
        assert living.turn() == {"error": "exit status -9: it said nothing"}, "it ended while it was stopped"
    with closing(compare.Living(slow, threads=2, timeout=60)) as living:
        own = living.worker.process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(own, 0)


def test_the_avx2_switch_is_recorded(scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    compare = scripts["compare"]
    monkeypatch.setattr(compare, "choose_isa", lambda: "avx2")  # whatever this processor has
    for name in compare.AVX2_SWITCH:
        monkeypatch.setenv(name, "AVX2")
    assert compare.switches()["avx2_switch"]
    report = {"pairs": [], "what": "work", "hasten": compare.switches()}
    assert compare.table(report).endswith("hasten: avx2, under the AVX2 switch; work.")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")
    assert not compare.switches()["avx2_switch"]
    assert len(compare.switches()["environment"]) == 3


def test_reports_of_before_can_be_shown(scripts: dict[str, ModuleType]) -> None:
    shown = scripts["compare"].table(json.loads((BENCHMARKS / "results" / "compare.json").read_text()))
    assert "| llama.cpp |  | " in shown


def test_what_is_given_is_checked(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    compare = scripts["compare"].Compare
    for options, message in (
        ({"vllm": (sys.executable, f"bf16={tmp_path}")}, "--hasten bf16=FOLDER is missing"),
        ({"hasten": (f"bf16={tmp_path}",)}, "no peer is given"),
        ({"llama_cpp": (sys.executable, "file.gguf")}, "llama.cpp: a model is given as FORMAT=PATH"),
        ({"vllm": (f"bf16={tmp_path}",)}, "vLLM: the Python of its environment comes first"),
        ({"ik_llama_cpp": (sys.executable, "bf16=no.gguf")}, "ik_llama.cpp: a model is given as FORMAT=PATH"),
        ({"hasten": (f"int4={tmp_path}",) * 2}, "two have one name"),
    ):
        with pytest.raises(SystemExit, match=message):
            compare(**options).pairs()
    given = compare(hasten=(f"int4={tmp_path}",), openvino=(sys.executable, f"int4={tmp_path}", f"int4={tmp_path}"))
    assert [(peer.command[0], ours.name) for peer, ours in given.pairs()] == [(sys.executable, "hasten")] * 2
    both = compare(
        hasten=(f"int4-g32={tmp_path}", f"int4-g128={tmp_path}"),
        ik_llama_cpp=(sys.executable, f"int4-g128={tmp_path}", f"int4-g32={tmp_path}"),
    )
    found = both.pairs()
    assert [(peer.name, ours.ours, ours.format) for peer, ours in found] == [
        ("ik_llama.cpp", "int4-g128", "int4"),
        ("ik_llama.cpp", "int4-g32", "int4"),
    ]
    assert found[0][0].command[1].endswith("run_ik_llama_cpp.py")
