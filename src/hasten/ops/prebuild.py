"""Compiles the native libraries of all instruction sets for a wheel: `python -m hasten.ops.prebuild`.

They run wherever torch's own wheels for Linux run: with glibc 2.28 and the libstdc++ of g++ 8 (manylinux_2_28, PEP
600). `oldest_glibc.h` has what they would need of newer systems, and a library that still needs one is refused here.
Torch's stable ABI lets one library serve every torch from 2.11 on; no library uses Python.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

from hasten.errors import ConfigError, HastenError, ResourceError
from hasten.machine import find_compiler
from hasten.ops.build import INSTRUCTION_SETS, SOURCES, InstructionSet, Part, compile_part, prebuilt_folder, stem_of
from hasten.ops.compile import call

OLDEST_GLIBC = SOURCES / "oldest_glibc.h"
# The newest versions of symbols that manylinux_2_28 allows, as auditwheel lists them.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}


def prebuild(names: Sequence[str] = (), *, sources: Path = SOURCES) -> list[Path]:
    """Compile what is missing of a wheel's libraries, for `names` or all instruction sets; remove the outdated ones.

    Returns their paths. Raises ConfigError for an unknown name; ResourceError without g++, when compiling fails and
    for a library that needs a newer system.
    """
    compiler = find_compiler()
    if compiler is None or compiler.kind != "g++" or not sys.platform.startswith("linux"):
        raise ResourceError(f"a wheel's libraries are compiled with g++ on Linux, found {compiler}; `apt install g++`")
    folder = prebuilt_folder(sources)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = _libraries(folder, names, sources)
    for outdated in set(folder.iterdir()) - set(_libraries(folder, (), sources)):
        shutil.rmtree(outdated) if outdated.is_dir() else outdated.unlink()
    missing = {target: what for target, what in wanted.items() if not target.exists()}
    if missing:
        log, older = folder / "failed.log", folder / "oldest_glibc.o"
        source = ("-std=c++20", "-O2", "-fPIC", "-x", "c++", "-c", str(OLDEST_GLIBC))
        call([compiler.command, *source, "-o", str(older)], log)
        for target, (kind, part) in missing.items():
            made = target.with_suffix(".unchecked")
            compile_part(compiler, kind, part, sources=sources, target=made, log=log, link=(str(older), "-s"))
            if newer := newer_symbols(made):
                raise ResourceError(f"{made.name} needs a newer system than manylinux_2_28: {', '.join(newer)}")
            made.rename(target)
        older.unlink()
    return sorted(wanted)


def _libraries(folder: Path, names: Sequence[str], sources: Path) -> dict[Path, tuple[InstructionSet, Part]]:
    """What is compiled into each of the libraries for `names`."""
    return {
        folder / f"{stem_of(kind, part, sources)}.so": (kind, part)
        for kind in encodings(names)
        for part in get_args(Part)
    }


def encodings(names: Sequence[str] = ()) -> Iterator[InstructionSet]:
    """This architecture's instruction sets, those of `names` if there are any, each in all its encodings."""
    if unknown := set(names) - set(INSTRUCTION_SETS):
        raise ConfigError(
            f"unknown instruction sets: {', '.join(sorted(unknown))}; known: {', '.join(INSTRUCTION_SETS)}"
        )
    for name, kind in INSTRUCTION_SETS.items():
        if (not names or name in names) and kind.architecture in ("", platform.machine()):
            yield from (one for one in (kind, kind.instead) if one is not None)


def newer_symbols(library: Path) -> list[str]:
    """What a library needs of newer versions of the system's libraries than NEWEST, as "log (GLIBC_2.29)"."""
    command = ["objdump", "-p", "-T", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    references = listed.partition("Version References:")[2].partition("DYNAMIC SYMBOL TABLE:")[0]
    versions = set(re.findall(r"\b(?:GLIBC|GLIBCXX|CXXABI|GCC)_\S+", references))
    found = []
    for version in sorted(versions):
        library_name, _, numbers = version.partition("_")
        digits = numbers.split(".")
        if not all(digit.isdecimal() for digit in digits) or tuple(map(int, digits)) > NEWEST[library_name]:
            symbols = re.findall(rf"\(?{re.escape(version)}\)?\s+(\S+)$", listed, re.MULTILINE)
            found.append(f"{', '.join(symbols)} ({version})")
    return found


def main() -> None:
    """Compile into the package's own folder, and print how much there is."""
    parser = argparse.ArgumentParser(description="Compile the native libraries that a wheel holds.")
    parser.add_argument("isa", nargs="*", help="the instruction sets (default: all)")
    try:
        made = prebuild(parser.parse_args().isa)
    except HastenError as error:
        sys.exit(f"hasten: {error}")
    print(f"{len(made)} libraries, {sum(path.stat().st_size for path in made) / 1e6:.1f} MB, in {prebuilt_folder()}")


if __name__ == "__main__":
    main()
