"""benchmarks/compare.py and what its peers' scripts share, with a program that stands in for a peer."""

import importlib.util
import json
import struct
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

STAND_IN = """
import json, sys
if "broken" in sys.argv[1]:
    raise SystemExit(f"cannot read {sys.argv[1]}/config.json")
print("noise")
print("RESULT " + json.dumps({"prefill": 100.0, "decode": SPEED, "versions": {"x": "1"}, "settings": {"a": sys.argv}}))
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

    def feed(ids: list[int]) -> None:
        clock[0] += 0.5 * len(ids) if len(ids) == 1 else 0.01 * len(ids)

    resets: list[int] = []
    found = protocol.measure_steps(lambda: resets.append(1), feed, vocabulary=50)
    assert (round(found["prefill"]), round(found["decode"])) == (100, 2)
    assert len(resets) == 8, "three times and a warm-up, prefill and decode"

    def generate(ids: list[int], answer: int) -> None:
        clock[0] += 0.01 * len(ids) + 0.5 * (answer - 1)

    found = protocol.measure_generate(generate, vocabulary=50)
    assert (round(found["prefill"]), round(found["decode"])) == (100, 2)
    protocol.answer(found, packages=["torch"], precision="bf16")
    line = capsys.readouterr().out
    assert line.startswith("RESULT ")
    assert json.loads(line.removeprefix("RESULT "))["versions"] == {"torch": torch.__version__}


def test_pairs_are_measured_in_turn_and_reported(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compare = scripts["compare"]
    monkeypatch.setattr("hasten.machine.read_bandwidth", lambda threads: 1e6)
    for name in ("ours", "theirs", "broken"):
        (tmp_path / name).mkdir()
        tensors = {"q.weight": torch.zeros(1000), "lm_head.weight": torch.zeros(1)}
        save_file(tensors, tmp_path / name / "model.safetensors")

    def program(name: str, speed: float, *, model: str) -> Any:
        script = STAND_IN.replace("SPEED", str(speed))
        return compare.Program(name=name, format="bf16", model=tmp_path / model, command=(sys.executable, "-c", script))

    ours = program("hasten", 200.0, model="ours")
    pairs = [(program("peer", 100.0, model="theirs"), ours), (program("peer", 1.0, model="broken"), ours)]
    rounds = [
        [{"peer": peer.run(threads=2, timeout=60), "hasten": own.run(threads=2, timeout=60)} for peer, own in pairs]
    ]
    report = compare.summarise(pairs, rounds, threads=2)
    good, bad = report["pairs"]
    assert (good["peer"], good["model"], good["hasten"], good["versions"]) == ("peer", "theirs", "bf16", {"x": "1"})
    assert good["ratio"] == {"decode": 2.0, "prefill": 1.0}
    assert good["median"]["peer"]["share_of_bandwidth"] == pytest.approx(100 * 4004 / 1e6)
    assert bad["rounds"][0]["peer"] == {"error": "exit status 1: cannot read config.json"}
    assert "median" not in bad
    assert str(tmp_path) not in json.dumps(report | {"pairs": [row | {"settings": 0} for row in report["pairs"]]})
    shown = compare.table(report)
    assert "| peer | theirs | 100.0, bf16 200.0 | 2.00× | 40%, 80% | 100, 100 | 1.00× |" in shown
    assert "failed: exit status 1" in shown


def test_what_is_given_is_checked(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    compare = scripts["compare"].Compare
    for options, message in (
        ({"vllm": ("python", f"bf16={tmp_path}")}, "--hasten bf16=FOLDER is missing"),
        ({"hasten": (f"bf16={tmp_path}",)}, "no peer is given"),
        ({"llama_cpp": ("python", "file.gguf")}, "llama.cpp: a model is given as FORMAT=PATH"),
    ):
        with pytest.raises(SystemExit, match=message):
            compare(**options).pairs()
    given = compare(hasten=(f"int4={tmp_path}",), openvino=("python", f"int4={tmp_path}", f"int4={tmp_path}"))
    assert [(peer.command[0], ours.name) for peer, ours in given.pairs()] == [("python", "hasten")] * 2
