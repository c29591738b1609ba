"""Compiles the C++ that lies beside the operators into one shared library an instruction set, once a machine.

A library's name holds a hash of everything it depends on (sources, flags, torch's ABI version, the compiler), so a
changed source can never run a stale binary. It is built in a folder of its own under a lock and renamed into place:
two processes starting at once build once, and a killed build leaves nothing that could be loaded.
"""

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from hasten.errors import ResourceError
from hasten.machine import Compiler, cache_folder, find_compiler, instruction_sets

SOURCES = Path(__file__).parent
STABLE_ABI = "0x020b000000000000"  # torch 2.11, the oldest we serve: one binary then serves every later torch
KEPT_BUILDS = 8  # of one instruction set; more than one, because checkouts and environments share the cache
COMPILE_SECONDS = 600

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
    """A set of vector instructions: its name, what the processor must have, and the compiler's flags for it.

    probe: an instruction of it that older assemblers do not know. instead: the same for processors that know the
    instructions in another encoding only.
    """

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]
    probe: str = ""
    instead: "InstructionSet | None" = None

    def here(self) -> "InstructionSet":
        """In the encoding that this processor has."""
        return self.instead if self.instead is not None and self.missing() and not self.instead.missing() else self

    def missing(self) -> list[str]:
        """What this processor lacks."""
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
        InstructionSet("avx512_vnni", VNNI_NEEDS, VNNI, "vdpbf16ps %zmm2, %zmm1, %zmm0"),
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
        InstructionSet("portable", frozenset(), ()),
    )
}


def namespace(isa: str) -> str:
    """The torch operator namespace of one instruction set's library, so that several can be loaded at once."""
    return f"hasten_{isa}"


def build(isa: str, *, sources: Path = SOURCES, folder: Path | None = None) -> Path:
    """Return the shared library of all *.cpp below `sources`, compiling it if `folder` (the cache) has no such one.

    Without a compiler, a library of the same sources that another compiler made is taken. Raises ResourceError when
    there is none, or when compiling fails (the whole output is then in a log file that the message names).
    """
    folder = folder or cache_folder("kernels")
    flags, stem = _flags_and_stem(isa, sources)
    compiler = find_compiler()
    if compiler is None:
        if ready := max(folder.glob(f"{stem}-*.so"), key=_modified, default=None):
            return _used(ready)
        raise ResourceError(
            "there is no C++ compiler (looked for $CXX, g++, clang++, c++); install one, "
            "for example with `apt install g++`"
        )
    if compiler.kind == "g++":
        flags = (*flags, *GNU_FLAGS)
    target = folder / f"{stem}-{_hash(str(compiler), *flags, SHORT_PATHS, *_rpath())}.so"
    if target.exists():
        return _used(target)
    with _locked(folder):
        if not target.exists():  # else another process made it while we waited
            _remove_leftovers(folder)
            _compile(compiler, flags, sources=sources, target=target, log=folder / f"failed-{isa}.log")
            _prune(folder, isa, keep=target)
    return target


def is_built(isa: str, *, sources: Path = SOURCES, folder: Path | None = None) -> bool:
    """Whether the cache has a library of these sources, whatever compiler made it."""
    _, stem = _flags_and_stem(isa, sources)
    return any((folder or cache_folder("kernels")).glob(f"{stem}-*.so"))


def _flags_and_stem(isa: str, sources: Path) -> tuple[tuple[str, ...], str]:
    """The flags of any compiler, and the beginning of the names of what any compiler makes of the sources with them."""
    flags = (*COMMON_FLAGS, *INSTRUCTION_SETS[isa].here().flags, f"-DHASTEN_LIBRARY={namespace(isa)}", _threads_flag())
    return flags, f"{namespace(isa)}-{_hash(*_contents(sources), *flags, sys.platform)}"


def _contents(sources: Path) -> list[str]:
    files = sorted(path for path in sources.rglob("*") if path.suffix in (".cpp", ".h"))
    return [part for path in files for part in (path.relative_to(sources).as_posix(), path.read_text())]


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")  # does not import it
    assert found is not None, "torch is a dependency"
    assert found.origin is not None
    return Path(found.origin).parent


def _threads_flag() -> str:
    """Whether torch's threads are OpenMP's, which can wait for each other (parallel.h)."""
    config = _torch_folder() / "include" / "ATen" / "Config.h"
    openmp = config.is_file() and "AT_PARALLEL_OPENMP 1" in config.read_text()
    return f"-DHASTEN_OPENMP={int(openmp)}"


def _rpath() -> tuple[str, ...]:
    """At run time torch's libraries are in the process already and are found by their names; macOS looks by path."""
    return (f"-Wl,-rpath,{_torch_folder() / 'lib'}",) if sys.platform == "darwin" else ()


def _compile(compiler: Compiler, flags: Sequence[str], *, sources: Path, target: Path, log: Path) -> None:
    """Compile each source (two at a time) and link them, in a new folder beside the target; then rename."""
    from rich.console import Console

    include = _torch_folder() / "include"
    header = include / "torch" / "csrc" / "stable" / "library.h"
    if not header.is_file():
        raise ResourceError(f"{header} is missing; install torch from its wheel, which brings its C++ headers")
    console = Console(stderr=True)
    message = f"compiling kernels ({target.name.split('-')[0]}) with {compiler}: once, some seconds"
    if not console.is_terminal:
        console.print(message, highlight=False, soft_wrap=True)
    place = Path(tempfile.mkdtemp(prefix="building-", dir=target.parent))
    try:
        with console.status(message), ThreadPoolExecutor(max_workers=2) as pool:
            commands, objects = [], []
            short = [SHORT_PATHS.format(folder=folder) for folder in (sources, include)]
            compile_one = [compiler.command, *flags, *short, f"-I{include}", "-c"]
            for source in sorted(sources.rglob("*.cpp")):
                objects.append(str(place / "-".join(source.relative_to(sources).with_suffix(".o").parts)))
                commands.append([*compile_one, str(source), "-o", objects[-1]])
            list(pool.map(lambda command: _call(command, log), commands))
            made = place / "library.so"
            libraries = (f"-L{_torch_folder() / 'lib'}", *_rpath(), "-ltorch_cpu", "-ltorch")
            _call([compiler.command, "-shared", *objects, "-o", str(made), *libraries], log)
        os.replace(made, target)
        log.unlink(missing_ok=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _call(command: list[str], log: Path) -> None:
    try:
        # English messages, so that the first error can be found in them.
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_SECONDS, env={**os.environ, "LC_ALL": "C"}
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ResourceError(f"the compiler {command[0]} did not run: {error}") from error
    if answer.returncode:
        log.write_text(f"{' '.join(command)}\n{answer.stdout}{answer.stderr}")
        lines = [line.strip() for line in (answer.stdout + answer.stderr).splitlines() if line.strip()]
        first = next((line for line in lines if re.search(r"\berror:", line)), lines[0] if lines else "no message")
        raise ResourceError(f"{command[0]} failed: {first}; its whole output is in {log}")


class _locked:
    """The cache's lock; says so when another process holds it, because its build takes some seconds."""

    def __init__(self, folder: Path) -> None:
        self.lock = FileLock(folder / ".lock")

    def __enter__(self) -> None:
        try:
            self.lock.acquire(timeout=0.5)
        except Timeout:
            print("waiting for another process that compiles the kernels", file=sys.stderr)
            self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def _remove_leftovers(folder: Path) -> None:
    """Whoever holds the lock is the only one building: what killed builds left can go."""
    for place in folder.glob("building-*"):
        shutil.rmtree(place, ignore_errors=True)


def _prune(folder: Path, isa: str, *, keep: Path) -> None:
    builds = sorted(folder.glob(f"{namespace(isa)}-*.so"), key=_modified, reverse=True)
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
