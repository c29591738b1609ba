"""Compiles the C++ beside the operators into two shared libraries for each instruction set, once on each machine.

One is for inference, the other for training only, so that neither waits for the other. A library's
name holds a hash of everything it depends on (sources, flags, torch's ABI version, the compiler), so a changed source
can never run a stale binary. It is built in a folder of its own under a lock and renamed into place: two processes
starting at once build once, and a killed build leaves nothing that could be loaded.

A wheel brings the libraries of all instruction sets along (prebuild.py). One of them is taken if it was made from the
same sources with the same flags; then no compiler is asked.
"""

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hasten.errors import ResourceError
from hasten.machine import Compiler, cache_folder, cache_places, find_compiler, instruction_sets
from hasten.machine.files import locked
from hasten.ops.compile import compile_library

SOURCES = Path(__file__).parent
PREBUILT = "prebuilt"  # the folder, below the sources, of libraries that a wheel brings along
STABLE_ABI = "0x020b000000000000"  # torch 2.11, the oldest we serve: one binary then serves every later torch
# They call nothing of the others.
TRAINING_SOURCES = ("activation/activation.cpp", "attention/train.cpp")
# Compiled as one source: torch's headers take longer than any of them. Those with large inner loops stay by themselves.
TOGETHER = (
    *("block/plan.cpp", "collective/collective.cpp", "draw/draw.cpp"),
    *("linear/blocks.cpp", "linear/linear.cpp", "linear/unpacked.cpp", "rounding/rounding.cpp"),
    *("states/convolution.cpp", "states/mixer.cpp", "states/step.cpp"),
)
KEPT_BUILDS = 8  # of one library; more than one, because checkouts and environments share the cache

ABI_FLAG = f"-DTORCH_TARGET_VERSION={STABLE_ABI}"
COMMON_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-w", ABI_FLAG)
# g++ takes F32 as a vector argument without AVX-512 as an ABI change and says so once a function.
# Sums stay in the order that is written: turned into trees, they need more registers than there are.
GNU_FLAGS = ("-fno-gnu-unique", "-Wno-psabi", "-fno-tree-reassoc")
SHORT_PATHS = "-ffile-prefix-map={folder}/="  # messages name "linear/gemm.h", whatever checkout it was compiled in
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX2_NEEDS = frozenset({"avx2", "fma", "f16c"})
AVX512 = (
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c", "-mprfchw"),
    "-mprefer-vector-width=512",
)
VNNI = (*AVX512, "-mavx512vnni", "-mavx512bf16")
VNNI_NEEDS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16", "fma"})


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """A set of vector instructions: its name, required processor features, and compiler flags.

    probe: an instruction of it that older assemblers do not know. instead: the same for processors that know the
    instructions in another encoding only. architecture: as platform.machine() names it; "" for any.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    probe: str = ""
    instead: "InstructionSet | None" = None
    architecture: str = "x86_64"

    def here(self) -> "InstructionSet":
        """In the encoding that this processor has."""
        return self.instead if self.instead is not None and self.missing() and not self.instead.missing() else self

    def missing(self) -> list[str]:
        """Required features that this processor lacks."""
        return sorted(self.needs - frozenset(instruction_sets()))


# The fastest first. Portable has no flags at all, so that every compiler on every processor takes it.
INSTRUCTION_SETS: dict[str, InstructionSet] = {
    one.name: one
    for one in (
        InstructionSet(
            "amx",
            VNNI_NEEDS | {"amx_tile", "amx_bf16", "amx_int8"},
            (*VNNI, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            "tdpbf16ps %tmm2, %tmm1, %tmm0",
        ),
        InstructionSet(
            "avx512_vnni",
            VNNI_NEEDS,
            VNNI,
            "vdpbf16ps %zmm2, %zmm1, %zmm0",
            # Cascade Lake, Ice Lake: without products of bfloat16.
            instead=InstructionSet(
                "avx512_vnni",
                VNNI_NEEDS - {"avx512_bf16"},
                (*AVX512, "-mavx512vnni"),
                "vpdpbusd %zmm2, %zmm1, %zmm0",
            ),
        ),
        InstructionSet("avx512", frozenset({"avx512f", "avx512bw", "avx512vl", "fma"}), AVX512),
        InstructionSet(
            "avx_vnni",
            AVX2_NEEDS | {"avx_vnni"},
            (*AVX2, "-mavxvnni"),
            "{vex} vpdpbusd %ymm2, %ymm1, %ymm0",
            # Zen 4 and Ice Lake: never the fastest there, but a place to test it.
            instead=InstructionSet(
                "avx_vnni",
                AVX2_NEEDS | {"avx512f", "avx512vl", "avx512_vnni"},
                (*AVX2, "-mavx512vl", "-mavx512vnni", "-DHASTEN_256"),
            ),
        ),
        InstructionSet("avx2", AVX2_NEEDS, AVX2),
        # ARM: Neoverse N2, V1 and later, Apple's from M2 on; then Neoverse N1 and all others with dot products.
        InstructionSet(
            "neon_i8mm",
            frozenset({"asimddp", "i8mm", "bf16"}),
            ("-march=armv8.2-a+dotprod+i8mm+bf16",),
            "bfmmla v0.4s, v1.8h, v2.8h",
            architecture="aarch64",
        ),
        InstructionSet(
            "neon_dot",
            frozenset({"asimddp"}),
            ("-march=armv8.2-a+dotprod",),
            "sdot v0.4s, v1.16b, v2.16b",
            architecture="aarch64",
        ),
        InstructionSet("portable", frozenset(), (), architecture=""),
    )
}


Part = Literal["inference", "training"]


def namespace(isa: str) -> str:
    """The torch operator namespace of one instruction set's libraries, so that several sets can be loaded at once."""
    return f"hasten_{isa}"


def build(isa: str, part: Part = "inference", *, sources: Path = SOURCES, folder: Path | None = None) -> Path:
    """Return the shared library of a part of the *.cpp below `sources`, compiling it if `folder` (the cache) has none.

    Without a compiler, a library of the same sources that another compiler made is taken. Raises ResourceError when
    there is none, or when compiling fails (the whole output is then in a log file that the message names).
    """
    if ready := prebuilt(isa, part, sources=sources):
        return ready
    places, kind = _places(folder), INSTRUCTION_SETS[isa].here()
    stem = stem_of(kind, part, sources)
    compiler = find_compiler()
    if compiler is None:
        if ready := max((path for place in places for path in place.glob(f"{stem}-*.so")), key=_modified, default=None):
            return _used(ready)
        raise ResourceError("there is no C++ compiler ($CXX, g++, clang++, c++); install one: `apt install g++`")
    name = f"{stem}-{_hash(str(compiler), *flags_of(kind, compiler), SHORT_PATHS, *_rpath())}.so"
    if there := next((place / name for place in places if (place / name).exists()), None):
        return _used(there)
    folder = folder or cache_folder("kernels")
    target = folder / name
    with locked(folder / ".lock", waiting="waiting for another process that compiles the kernels"):
        if not target.exists():  # else another process made it while we waited
            for leftover in folder.glob("building-*"):  # whoever holds the lock is the only one building
                shutil.rmtree(leftover, ignore_errors=True)
            compile_part(compiler, kind, part, sources=sources, target=target, log=_log(folder, isa))
            _prune(folder, _library_name(isa, part), keep=target)
    return target


def prebuilt(isa: str, part: Part = "inference", *, sources: Path = SOURCES) -> Path | None:
    """The library that came with the wheel, or None if there is none of these sources, flags and kind of threads."""
    path = prebuilt_folder(sources) / f"{stem_of(INSTRUCTION_SETS[isa].here(), part, sources)}.so"
    return path if path.is_file() else None


def prebuilt_folder(sources: Path = SOURCES) -> Path:
    """Where libraries of this machine's architecture lie that came with the sources."""
    return sources / PREBUILT / platform.machine()


def is_built(isa: str, part: Part = "inference", *, sources: Path = SOURCES, folder: Path | None = None) -> bool:
    """Whether there is a library of these sources, prebuilt or in the cache, whatever compiler made it."""
    if prebuilt(isa, part, sources=sources):
        return True
    stem = stem_of(INSTRUCTION_SETS[isa].here(), part, sources)
    return any(path for place in _places(folder) for path in place.glob(f"{stem}-*.so"))


def can_build(isa: str) -> bool:
    """Whether `build` is likely to work, found in milliseconds; False if it failed the last time."""
    takes = _compiler_takes(isa, *(os.environ.get(name) for name in ("CXX", "PATH")))
    return takes and _header().is_file() and not any(_log(place, isa).exists() for place in _places(None))


@functools.cache  # each layer asks, and the answer calls the compiler
def _compiler_takes(isa: str, *_where_compilers_are: str | None) -> bool:
    compiler, kind = find_compiler(), INSTRUCTION_SETS[isa].here()
    return compiler is not None and compiler.takes(kind.flags, kind.probe)


def _places(folder: Path | None) -> tuple[Path, ...]:
    """Folders that are searched for libraries: `folder`, or the cache's."""
    return cache_places("kernels") if folder is None else (folder,)


def _log(folder: Path, isa: str) -> Path:
    return folder / f"failed-{isa}.log"


def _header() -> Path:
    return _torch_folder() / "include" / "torch" / "csrc" / "stable" / "library.h"


def _library_name(isa: str, part: Part) -> str:
    return namespace(isa) if part == "inference" else f"{namespace(isa)}_{part}"


def flags_of(kind: InstructionSet, compiler: Compiler | None = None) -> tuple[str, ...]:
    """The flags for an instruction set: those that any compiler gets, and those of `compiler`."""
    own = GNU_FLAGS if compiler is not None and compiler.kind == "g++" else ()
    return (*COMMON_FLAGS, *kind.flags, f"-DHASTEN_LIBRARY={namespace(kind.name)}", _threads_flag(), *own)


def stem_of(kind: InstructionSet, part: Part, sources: Path = SOURCES) -> str:
    """The beginning of the names of what any compiler makes of the sources for an instruction set."""
    contents = _own_contents(part) if sources == SOURCES else _contents(part, sources)
    return f"{_library_name(kind.name, part)}-{_hash(contents, *flags_of(kind), sys.platform)}"


@functools.cache
def _own_contents(part: Part) -> str:
    """Hash our own sources, once in a process: every bound layer asks, and a loaded library does not change either."""
    return _contents(part, SOURCES)


def _contents(part: Part, sources: Path) -> str:
    """A hash of the files."""
    return _hash(*(text for name in _files(part, sources) for text in (name, (sources / name).read_text())))


def _files(part: Part, sources: Path) -> list[str]:
    """The part's sources and all headers, by their paths below `sources`."""
    names = sorted(path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.suffix in (".cpp", ".h"))
    return [name for name in names if name.endswith(".h") or (name in TRAINING_SOURCES) == (part == "training")]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@functools.cache
def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")  # does not import it
    assert found is not None, "torch is a dependency"
    assert found.origin is not None
    return Path(found.origin).parent


@functools.cache
def _threads_flag() -> str:
    """Whether torch's threads are OpenMP's, which can wait for each other (parallel.h)."""
    config = _torch_folder() / "include" / "ATen" / "Config.h"
    openmp = config.is_file() and "AT_PARALLEL_OPENMP 1" in config.read_text()
    return f"-DHASTEN_OPENMP={int(openmp)}"


def _rpath() -> tuple[str, ...]:
    """Linker flags for torch's libraries. They are loaded already and found by name; macOS needs the path."""
    return (f"-Wl,-rpath,{_torch_folder() / 'lib'}",) if sys.platform == "darwin" else ()


def compile_part(
    compiler: Compiler,
    kind: InstructionSet,
    part: Part,
    *,
    sources: Path,
    target: Path,
    log: Path,
    link: Sequence[str] = (),
) -> None:
    """Compile a part of the sources and link it with `link`, in a new folder beside `target`; then rename."""
    include = _torch_folder() / "include"
    if not _header().is_file():
        raise ResourceError(f"{_header()} is missing; install torch from its wheel, which brings its C++ headers")
    short = [SHORT_PATHS.format(folder=folder) for folder in (sources, include)]
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent, ignore_cleanup_errors=True) as place:
        made = compile_library(
            [compiler.command, *flags_of(kind, compiler), *short, f"-I{include}"],
            [f"-L{_torch_folder() / 'lib'}", *_rpath(), "-ltorch_cpu", "-ltorch", *link],
            sources=sources,
            names=[name for name in _files(part, sources) if name.endswith(".cpp")],
            together=TOGETHER,
            place=Path(place),
            log=log,
            title=f"kernels ({target.name.split('-')[0]}) with {compiler}",
        )
        os.replace(made, target)
    log.unlink(missing_ok=True)


def _prune(folder: Path, library_name: str, *, keep: Path) -> None:
    builds = sorted(folder.glob(f"{library_name}-*.so"), key=_modified, reverse=True)
    for old in [path for path in builds if path != keep][KEPT_BUILDS - 1 :]:
        old.unlink(missing_ok=True)  # a process that has it loaded keeps it


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # pruned by another process
        return 0.0


def _used(path: Path) -> Path:
    """Mark a build as used now, so that pruning takes the others first."""
    with contextlib.suppress(OSError):  # a cache that somebody else owns
        os.utime(path)
    return path
