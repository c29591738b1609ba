"""Libraries that come with a wheel: found without a compiler, never stale, and for systems as old as torch's."""

import ctypes
import platform
import sys

import pytest

from hasten.errors import ConfigError, ResourceError
from hasten.machine import find_compiler
from hasten.ops import prebuild as prebuilding
from hasten.ops.build import PREBUILT, SOURCES, build, is_built, prebuilt
from hasten.ops.native import choose_isa
from hasten.ops.prebuild import encodings, newer_symbols, prebuild

pytestmark = pytest.mark.skipif(
    getattr(find_compiler(), "kind", None) != "g++" or not sys.platform.startswith("linux"),
    reason="wheels are built with g++ on Linux",
)

# What brought newer symbols into the kernels: shared pointers, messages, vectors and logarithms.
NEEDS_MUCH = """
#include <cmath>
#include <memory>
#include <sstream>
#include <vector>
extern "C" __attribute__((visibility("default"))) int one(int count, double x) {
  std::ostringstream text;
  std::vector<long> many(count);
  auto shared = std::make_shared<std::vector<long>>(many);
  auto again = shared;
  text << again->size() << std::log(x);
  std::stringstream more;
  more << std::move(text).str();
  return int(std::string(more.str()).size());
}
"""


@pytest.fixture
def sources(tmp_path):
    (tmp_path / "src" / "one").mkdir(parents=True)
    (tmp_path / "src" / "one" / "native.cpp").write_text(NEEDS_MUCH)
    return tmp_path / "src"


def test_a_prebuilt_library_is_taken_without_a_compiler_until_the_sources_change(sources, tmp_path, monkeypatch):
    made = prebuild(["portable"], sources=sources)
    assert len(made) == 2  # inference and training
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    place = {"sources": sources, "folder": tmp_path}
    assert build("portable", **place) == prebuilt("portable", sources=sources)
    assert build("portable", **place) in made
    assert is_built("portable", "training", **place)
    assert ctypes.CDLL(str(build("portable", **place))).one(3, ctypes.c_double(1.0)) == 2
    (sources / "one" / "native.cpp").write_text(NEEDS_MUCH + "// changed\n")
    assert prebuilt("portable", sources=sources) is None
    with pytest.raises(ResourceError, match=r"no C\+\+ compiler"):
        build("portable", **place)


def test_what_is_there_is_not_compiled_again_and_what_is_outdated_goes(sources):
    before = {path: path.stat().st_mtime_ns for path in prebuild(["portable"], sources=sources)}
    assert {path: path.stat().st_mtime_ns for path in prebuild(["portable"], sources=sources)} == before
    (sources / "one" / "native.cpp").write_text(NEEDS_MUCH + "// changed\n")
    after = prebuild(["portable"], sources=sources)
    assert len(set(before) & set(after)) == 1  # training has no source here, so nothing of it changed
    assert sorted((sources / PREBUILT / platform.machine()).iterdir()) == after


def test_no_symbol_is_newer_than_the_wheel_promises(sources, monkeypatch):
    for library in prebuild(["portable"], sources=sources):
        assert newer_symbols(library) == []
    monkeypatch.setitem(prebuilding.NEWEST, "GLIBC", (2, 1))
    (sources / "one" / "native.cpp").write_text(NEEDS_MUCH + "// changed\n")
    with pytest.raises(ResourceError, match=r"needs a newer system than manylinux_2_28: .*log.* \(GLIBC_2"):
        prebuild(["portable"], sources=sources)


def test_no_symbol_of_this_checkouts_own_prebuilt_kernels_is_newer():
    there = sorted((SOURCES / PREBUILT / platform.machine()).glob("*.so"))
    if not there:
        pytest.skip("no prebuilt libraries here: make wheel")
    assert {path.name: newer_symbols(path) for path in there} == {path.name: [] for path in there}


def test_a_wheel_has_every_instruction_set_of_its_architecture_in_every_encoding(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [kind.name for kind in encodings()] == [
        *("amx", "avx512_vnni", "avx512_vnni", "avx512", "avx_vnni", "avx_vnni", "avx2", "portable")
    ]
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert [kind.name for kind in encodings()] == ["neon_i8mm", "neon_dot", "portable"]
    with pytest.raises(ConfigError, match=r"unknown instruction sets: sse9; known: .*avx2"):
        list(encodings(["sse9"]))


def test_the_fastest_prebuilt_set_is_chosen_and_no_compiler_is_started(monkeypatch, tmp_path):
    monkeypatch.delenv("HASTEN_ISA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "asked again"))
    monkeypatch.setattr("hasten.ops.native.prebuilt", lambda isa: isa == "portable")
    monkeypatch.setattr("hasten.ops.native.find_compiler", lambda: pytest.fail("a compiler was looked for"))
    assert choose_isa() == "portable"
