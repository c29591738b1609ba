"""A wheel installed where there is no compiler: the kernels are there, and nothing is compiled."""

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import hasten
from hasten.machine import find_compiler
from hasten.ops.native import choose_isa
from tiny_model import tiny_llama

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow(minutes=2),
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        getattr(find_compiler(), "kind", None) != "g++" or not sys.platform.startswith("linux"),
        reason="wheels are built with g++ on Linux",
    ),
]

FIRST_TOKEN = """
import sys
import hasten
model = hasten.load(sys.argv[1])
piece = next(iter(hasten.stream(model, "def add", max_new_tokens=4, temperature=0, ignore_eos=True)))
print(piece)
from hasten.ops.native import library
print(library().path)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel with the libraries of one instruction set, which take the time of one first start."""
    pytest.importorskip("setuptools", minversion="77", reason="building a wheel needs setuptools")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(
        ROOT / "src" / "hasten", tree / "src" / "hasten", ignore=shutil.ignore_patterns("prebuilt", "__pycache__")
    )
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, "-m", "hasten.ops.prebuild", choose_isa()]
    subprocess.run(command, cwd=tree, env=environment, check=True, timeout=800, capture_output=True)
    for kind in ("sdist", "wheel"):
        command = [sys.executable, "-c", f"from setuptools import build_meta; build_meta.build_{kind}('dist')"]
        subprocess.run(command, cwd=tree, env=environment, check=True, timeout=100, capture_output=True)
    assert [path.suffix for path in sorted((tree / "dist").iterdir())] == [".whl", ".gz"]
    sdist = next((tree / "dist").glob("*.gz"))
    listed = subprocess.run(["tar", "-tf", str(sdist)], check=True, capture_output=True, text=True).stdout
    assert "gemm.cpp" in listed
    assert ".so" not in listed  # it compiles at first use
    return next((tree / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment with the wheel and our own packages, but neither our checkout nor a compiler; its interpreter."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, timeout=100, capture_output=True)
    packages = next((folder / "lib").glob("python*/site-packages"))
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


@pytest.fixture
def alone(tmp_path):
    """The variables of a user who has no compiler and has never used hasten."""
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin"), "HOME": str(tmp_path), "HASTEN_CACHE": str(tmp_path / "cache")}


def test_the_wheel_is_for_any_python_and_holds_the_libraries(wheel):
    assert wheel.name.endswith(f"-py3-none-manylinux_2_28_{platform.machine()}.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert sum(name.startswith(f"hasten/ops/prebuilt/{platform.machine()}/hasten_") for name in names) >= 2
    assert {f"hasten/server/page/{name}" for name in ("index.html", "app.js", "app.css")} <= set(names)
    assert not [name for name in names if ".data/" in name]  # as auditwheel wants it


def test_the_first_token_comes_without_a_compiler(environment, alone, tmp_path):
    hasten.save(tiny_llama(), tmp_path / "model")
    command = [str(environment), "-c", FIRST_TOKEN, str(tmp_path / "model")]
    answer = subprocess.run(command, env=alone, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    library = answer.stdout.splitlines()[-1]
    assert Path(library).parent.parent.name == "prebuilt"
    assert environment.parents[1] in Path(library).parents
    assert "compil" not in answer.stderr


def test_the_doctor_says_that_kernels_are_prebuilt(environment, alone, tmp_path):
    command = [str(environment), "-m", "hasten", "doctor", "--quick", "--json", "-"]
    answer = subprocess.run(command, env=alone, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    findings = {finding["name"]: finding for finding in json.loads(answer.stdout)["findings"]}
    assert findings["native kernels"] == {
        "name": "native kernels",
        "status": "ok",
        "found": f"for {choose_isa()}, prebuilt",
        "fix": "",
    }
    assert findings["C++ compiler"]["status"] == "note"
