import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import tyro

from hasten.cli.doctor import Doctor, examine
from hasten.cli.main import main
from hasten.errors import ResourceError
from hasten.machine import cache_folder, describe
from hasten.machine.checkup import check_machine, check_rates
from hasten.machine.describe import Machine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def machine() -> Machine:
    return describe()


def test_the_module_loads_without_torch() -> None:
    code = "import sys, hasten.cli.doctor; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_quick_json_is_all_there_is_on_standard_output(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (cache_folder("tokens") / "shard").write_bytes(b"x" * 100)
    tyro.cli(Doctor, args=["--quick", "--json", "-"]).run()
    output = capsys.readouterr().out
    found = json.loads(output)
    assert found["schema"] == 1
    assert found["limits"] == {}
    assert found["caches"] == {"native": 0, "tokens": 100}
    names = [finding["name"] for finding in found["findings"]]
    assert names[:2] == ["torch", "C++ compiler"]
    assert {"instruction sets", "GPU", "cores", "memory", "cache folder"} <= set(names)
    assert all(finding["fix"] for finding in found["findings"] if finding["status"] == "missing")
    assert str(tmp_path) not in output


def test_people_see_findings_and_measurements(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rate(dtype: str, **_: object) -> float:
        if dtype == "int8":
            raise ResourceError("not here")
        return {"float32": 2e11, "bfloat16": 9e11, "float16": 1e10}[dtype]

    monkeypatch.setattr("hasten.machine.measure.matrix_rate", rate)
    monkeypatch.setattr("hasten.machine.measure.read_bandwidth", lambda **_: 5e10)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Doctor(json=str(tmp_path / "doctor.json")).run()
    text = capsys.readouterr().out
    for wanted in ("torch", "50.0 GB/s", "900.0 GFLOP/s", "not with this torch", "caches in"):
        assert wanted in text
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert found["limits"]["cpu"]["rates"] == {"float32": 2e11, "bfloat16": 9e11, "float16": 1e10}
    notes = [finding["name"] for finding in found["findings"]]
    assert "float16 products" in notes
    assert "int8 products" in notes
    assert "bfloat16 products" not in notes


def test_what_is_missing_is_named_with_its_remedy(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi" if name == "nvidia-smi" else None)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": "/nowhere"})
    poor = replace(
        machine,
        compiler=None,
        cuda=None,
        gpus=(),
        instruction_sets=("avx2", "fma"),
        versions={"torch": "2.9.1+cpu"},
        memory_available_bytes=1 << 30,
    )
    found = {finding.name: finding for finding in check_machine(poor)}
    for name, status, fix in [
        ("torch", "missing", "pip install -U torch"),
        ("C++ compiler", "missing", "apt install g++"),
        ("Python headers", "missing", "-dev"),
        ("GPU", "missing", "CUDA torch"),
        ("instruction sets", "note", "virtual machine"),
        ("memory", "note", "4 GiB"),
    ]:
        assert found[name].status == status, name
        assert fix in found[name].fix, name
    assert "not avx512f, avx512_vnni, avx512_bf16" in found["instruction sets"].found
    compiler = {finding.name: finding for finding in check_machine(poor, prebuilt=True)}["C++ compiler"]
    assert (compiler.status, compiler.found) == ("note", "none: no torch.compile on the CPU")


@pytest.mark.parametrize("prebuilt", [True, False])
def test_where_the_kernels_come_from_is_said(prebuilt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_ISA", "portable")
    monkeypatch.setattr("hasten.ops.build.prebuilt", lambda isa: prebuilt)
    found = {finding["name"]: finding for finding in examine(quick=True)["findings"]}["native kernels"]
    origin = "prebuilt" if prebuilt else "compiled on first use"
    assert (found["status"], found["found"]) == ("ok", f"for portable, {origin}")


def test_a_cache_in_the_way_is_a_finding_not_a_crash(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path / "file"))
    found = {finding.name: finding for finding in check_machine(machine)}["cache folder"]
    assert found.status == "note"
    assert "HASTEN_CACHE" in found.fix


def test_without_torch_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ResourceError, match=r"torch cannot be imported.*pip install torch"):
        examine(quick=True)


def test_dtypes_as_fast_as_float32_need_no_word() -> None:
    assert check_rates({"float32": 1.0, "bfloat16": 2.0, "float16": 1.0, "int8": 4.0}) == []


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (MemoryError(), 2),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore"), 2),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 2),
        (RuntimeError("something else"), None),
    ],
)
def test_memory_that_ran_out_is_one_line(raised, status, monkeypatch, capsys):
    monkeypatch.setattr(Doctor, "run", Mock(side_effect=raised))
    if status is None:
        with pytest.raises(RuntimeError, match="something else"):
            main(["doctor"])
        return
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == status
    err = capsys.readouterr().err
    assert err.startswith("error: memory ran out (")
    assert err.count("\n") == 1
