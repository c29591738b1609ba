"""Building and loading the native library: once, whoever asks; and clearly said when it cannot be."""

import ctypes
import os
import pathlib
import platform
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch

from hasten.errors import ConfigError, ResourceError
from hasten.machine import cache_folder, find_compiler
from hasten.ops.build import INSTRUCTION_SETS, KEPT_BUILDS, SOURCES, build, can_build, is_built
from hasten.ops.native import available_isas, choose_isa, library, meta_kernels, obtainable
from instruction_sets import ISAS

BUILD = "import sys; from pathlib import Path; from hasten.ops.build import build; "
BUILD += "print(build('portable', sources=Path(sys.argv[1]), folder=Path(sys.argv[2])))"

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")


@pytest.fixture
def tree(tmp_path):
    """Sources of two files and a header, small enough to compile in a fraction of a second."""
    for name in ("one", "two"):
        (tmp_path / "src" / name).mkdir(parents=True)
        (tmp_path / "src" / name / "native.cpp").write_text(
            f'#include "../common.h"\nextern "C" __attribute__((visibility("default"))) int {name}() {{ return X; }}\n'
        )
    (tmp_path / "src" / "common.h").write_text("constexpr int X = 7;\n")
    (tmp_path / "cache").mkdir()
    return tmp_path


@pytest.fixture
def counted(tree, monkeypatch):
    """A compiler that writes down each call but `--version`; returns the log. SLOW=seconds makes it wait."""
    log, wrapper = tree / "calls.log", tree / "g++-counted"
    log.touch()
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo "$@" >> {log}; sleep ${{SLOW:-0}}; }}\n'
        f'exec {find_compiler().command} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def calls(log):
    return len(log.read_text().splitlines())


@needs_compiler
def test_compiles_each_source_and_links_then_never_again(tree, counted):
    made = build("portable", sources=tree / "src", folder=tree / "cache")
    loaded = ctypes.CDLL(str(made))
    assert (loaded.one(), loaded.two(), calls(counted)) == (7, 7, 3)
    assert build("portable", sources=tree / "src", folder=tree / "cache") == made
    assert calls(counted) == 3


@needs_compiler
def test_a_changed_header_or_another_instruction_set_is_another_build(tree):
    made = build("portable", sources=tree / "src", folder=tree / "cache")
    (tree / "src" / "common.h").write_text("constexpr int X = 8;\n")
    other = build("portable", sources=tree / "src", folder=tree / "cache")
    assert made != other
    assert ctypes.CDLL(str(other)).one() == 8
    assert build(available_isas()[0], sources=tree / "src", folder=tree / "cache").name.split("-")[0] != "portable"


@needs_compiler
def test_no_path_of_the_checkout_is_in_a_library(tree):
    (tree / "src" / "common.h").write_text("#define X 7\nstatic const char* volatile where = __FILE__;\n")
    (tree / "src" / "one" / "native.cpp").write_text(
        '#include "../common.h"\n'
        'extern "C" __attribute__((visibility("default"))) const char* one() { return where; }\n'
    )
    library = ctypes.CDLL(str(build("portable", sources=tree / "src", folder=tree / "cache")))
    library.one.restype = ctypes.c_char_p
    assert library.one() == b"one/../common.h"


@needs_compiler
def test_old_builds_are_pruned_and_the_used_ones_stay(tree):
    used = build("portable", sources=tree / "src", folder=tree / "cache")
    text = (tree / "src" / "common.h").read_text()
    for version in range(KEPT_BUILDS + 2):
        (tree / "src" / "common.h").write_text(f"{text}// {version}\n")
        newest = build("portable", sources=tree / "src", folder=tree / "cache")
        (tree / "src" / "common.h").write_text(text)
        assert build("portable", sources=tree / "src", folder=tree / "cache") == used
    kept = list((tree / "cache").glob("*.so"))
    assert len(kept) == KEPT_BUILDS
    assert {used, newest} <= set(kept)


@needs_compiler
def test_two_processes_at_once_build_once(tree, counted):
    command = [sys.executable, "-c", BUILD, str(tree / "src"), str(tree / "cache")]
    environment = {**os.environ, "SLOW": "0.7"}
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0], answers
    assert answers[0][0] == answers[1][0]
    assert calls(counted) == 3
    said = answers[0][1] + answers[1][1]
    assert said.count("compiling kernels") == 1
    assert "waiting for another process" in said


@needs_compiler
def test_a_killed_build_leaves_nothing_in_the_way(tree, counted):
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(tree / "src"), str(tree / "cache")],
        env={**os.environ, "SLOW": "1.5"},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while not calls(counted) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list((tree / "cache").glob("*.so"))
    assert list((tree / "cache").glob("building-*"))
    build("portable", sources=tree / "src", folder=tree / "cache")
    assert not list((tree / "cache").glob("building-*"))


@needs_compiler
def test_an_error_in_the_source_is_named_and_logged(tree):
    (tree / "src" / "two" / "native.cpp").write_text("int two() { return missing; }\n")
    with pytest.raises(ResourceError, match=r"error: .*missing.*failed-portable\.log"):
        build("portable", sources=tree / "src", folder=tree / "cache")
    assert "missing" in (tree / "cache" / "failed-portable.log").read_text()
    assert [path.name for path in (tree / "cache").iterdir() if path.name != ".lock"] == ["failed-portable.log"]


@needs_compiler
def test_without_a_compiler_an_earlier_build_of_the_same_sources_serves(tree, monkeypatch):
    made = build("portable", sources=tree / "src", folder=tree / "cache")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tree))
    assert build("portable", sources=tree / "src", folder=tree / "cache") == made
    (tree / "src" / "common.h").write_text("constexpr int X = 9;\n")
    with pytest.raises(ResourceError, match=r"no C\+\+ compiler .*install one"):
        build("portable", sources=tree / "src", folder=tree / "cache")


def test_a_broken_compiler_is_one_warning_and_no_library(tmp_path):
    broken = tmp_path / "g++-broken"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ 9.9.9" && exit 0\necho "fatal error: no" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    code = "from hasten.ops.native import library; print(library()); print(library())"
    environment = {**os.environ, "CXX": str(broken), "HASTEN_CACHE": str(tmp_path / "cache"), "HASTEN_ISA": "portable"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert answer.stdout == "None\nNone\n"
    assert answer.stderr.count("HastenWarning") == 1
    assert "fatal error: no" in answer.stderr


def test_a_missing_compiler_is_one_warning_for_both_parts(tmp_path):
    code = """
from hasten.ops.native import missing_library
print(missing_library("inference") is None)
print(missing_library("training") is None)
"""
    environment = {**os.environ, "PATH": str(tmp_path), "HASTEN_CACHE": str(tmp_path), "HASTEN_ISA": "portable"}
    environment.pop("CXX", None)
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert answer.stdout == "False\nFalse\n"
    assert answer.stderr.count("there is no C++ compiler") == 1


def test_instruction_sets_are_chosen_forced_and_refused(monkeypatch):
    monkeypatch.delenv("HASTEN_ISA", raising=False)
    assert choose_isa() == available_isas()[0]
    assert available_isas()[-1] == "portable"
    monkeypatch.setenv("HASTEN_ISA", "portable")
    assert choose_isa() == "portable"
    assert choose_isa("none") == "none"
    assert library("none") is None
    monkeypatch.setenv("HASTEN_ISA", "sse9")
    with pytest.raises(ConfigError, match=f"HASTEN_ISA is 'sse9'; known: {', '.join(INSTRUCTION_SETS)}, none"):
        library()
    monkeypatch.setattr("hasten.ops.build.instruction_sets", lambda: ("avx2", "fma", "f16c"))
    assert available_isas() == ("avx2", "portable")
    with pytest.raises(ConfigError, match=r"'avx512', but this processor has no avx512bw.*use avx2, portable"):
        choose_isa("avx512")
    everything = frozenset[str]().union(*(one.needs for one in INSTRUCTION_SETS.values()))
    monkeypatch.setattr("hasten.ops.build.instruction_sets", lambda: tuple(everything))
    monkeypatch.setattr("hasten.ops.native.amx_permitted", lambda: True)
    assert available_isas() == tuple(INSTRUCTION_SETS)
    monkeypatch.setattr("hasten.ops.native.amx_permitted", lambda: False)
    assert available_isas()[0] == "avx512_vnni"
    with pytest.raises(ConfigError, match=r"'amx', but the system does not let this process use AMX; use avx512_vnni"):
        choose_isa("amx")
    asked = []
    monkeypatch.setattr("hasten.ops.native.amx_permitted", lambda: asked.append(1))
    assert choose_isa("avx2") == "avx2"
    assert not asked  # nobody wanted it


@needs_compiler
def test_a_compiler_that_lacks_an_instruction_set_gets_the_next(tmp_path, monkeypatch):
    old = tmp_path / "g++-old"
    old.write_text(
        f"""#!/bin/sh
case "$*" in *-mamx*|*-mavx512bf16*) echo "unrecognized command-line option" >&2; exit 1;; esac
exec {find_compiler().command} "$@"
"""
    )
    old.chmod(0o755)
    monkeypatch.delenv("HASTEN_ISA", raising=False)
    monkeypatch.setenv("CXX", str(old))
    everything = frozenset[str]().union(*(one.needs for one in INSTRUCTION_SETS.values()))
    monkeypatch.setattr("hasten.ops.build.instruction_sets", lambda: tuple(everything))
    monkeypatch.setattr("hasten.ops.native.amx_permitted", lambda: True)
    assert choose_isa() == "avx512"
    assert choose_isa("amx") == "amx"  # who asks for it is told what the compiler said


def test_without_a_compiler_a_library_from_before_is_chosen(tmp_path, monkeypatch):
    monkeypatch.delenv("HASTEN_ISA", raising=False)
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_isa() == available_isas()[0]  # none is there: the message will name the fastest
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))  # asked anew
    monkeypatch.setattr("hasten.ops.native.is_built", lambda isa: isa == "portable")
    assert choose_isa() == "portable"


@needs_compiler
def test_a_built_library_is_known_whatever_compiler_made_it(tree):
    place = {"sources": tree / "src", "folder": tree / "cache"}
    assert not is_built("portable", **place)
    build("portable", **place)
    assert is_built("portable", **place)
    (tree / "src" / "common.h").write_text("constexpr int X = 9;\n")
    assert not is_built("portable", **place)


@needs_compiler
def test_a_kernel_is_chosen_without_compiling_it_unless_that_failed_before(tmp_path, monkeypatch):
    monkeypatch.setenv("HASTEN_CACHE", str(tmp_path))
    monkeypatch.setenv("HASTEN_ISA", "portable")
    asked = []
    monkeypatch.setattr("hasten.ops.native.library", lambda **which: asked.append(which))
    assert obtainable("training")
    assert not asked
    cache_folder("kernels").joinpath("failed-portable.log").touch()
    assert not obtainable("training")
    assert asked == [{"part": "training"}]
    monkeypatch.setenv("HASTEN_ISA", "none")
    assert not obtainable("training")
    assert len(asked) == 1


@needs_compiler
def test_a_library_in_a_read_only_cache_is_used(tree, monkeypatch):
    cache = tree / "cache"
    monkeypatch.setenv("HASTEN_CACHE", str(cache))
    made = build("portable", sources=tree / "src")
    access = os.access
    monkeypatch.setattr(
        "hasten.machine.caches.os.access",
        lambda path, mode: cache not in pathlib.Path(path).parents and access(path, mode),
    )
    with warnings.catch_warnings(action="error"):
        assert build("portable", sources=tree / "src") == made
        assert is_built("portable", sources=tree / "src")
        assert can_build("portable")


@needs_compiler
def test_inference_and_training_are_libraries_of_their_own(tree):
    (tree / "src" / "attention").mkdir()
    (tree / "src" / "attention" / "train.cpp").write_text(
        '#include "../common.h"\nextern "C" __attribute__((visibility("default"))) int train() { return X; }\n'
    )
    place = {"sources": tree / "src", "folder": tree / "cache"}
    assert not hasattr(ctypes.CDLL(str(build("portable", **place))), "train")
    assert not is_built("portable", "training", **place)
    training = ctypes.CDLL(str(build("portable", "training", **place)))
    assert training.train() == 7
    assert not hasattr(training, "one")


def test_portable_has_no_flags_of_one_processor():
    assert INSTRUCTION_SETS["portable"].flags == ()


@needs_compiler
def test_the_kernels_for_amx_compile_where_no_processor_runs_them(tmp_path):
    amx = INSTRUCTION_SETS["amx"]
    if platform.machine() != "x86_64" or not find_compiler().takes(amx.flags, amx.probe):
        pytest.skip("the compiler knows no AMX")
    for header in SOURCES.rglob("*.h"):
        copy = tmp_path / "src" / header.relative_to(SOURCES)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(header.read_text())
    (tmp_path / "src" / "linear" / "amx.cpp").write_text((SOURCES / "linear" / "amx.cpp").read_text())
    assert build("amx", sources=tmp_path / "src", folder=tmp_path / "cache").exists()


@needs_compiler
@pytest.mark.parametrize("isa", ISAS)
def test_every_operator_has_a_meta_kernel_and_every_meta_kernel_an_operator(isa):
    for part in ("inference", "training"):
        native = library(isa, part)
        assert library(isa, part) is native
    prefix = f"hasten_{isa}::"
    names = {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}
    assert "linear" in names
    assert names == set(meta_kernels())
