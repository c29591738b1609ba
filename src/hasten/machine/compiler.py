"""The C++ compiler that native kernels and torch.compile would use."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: the command to call (with a path), the kind ("g++", "clang++") and its version."""

    command: str
    kind: str
    version: str

    def __str__(self) -> str:
        return f"{self.kind} {self.version}"

    def takes(self, flags: Sequence[str], instruction: str = "") -> bool:
        """Whether the compiler supports all of these flags, and its assembler the instruction.

        True if that cannot be found out; the build then reports the error.
        """
        command = [self.command, *flags, "-x", "c++", "-c", "-", "-o", os.devnull]
        source = f'void f() {{ asm("{instruction}"); }}'
        try:
            return not subprocess.run(command, input=source, text=True, capture_output=True, timeout=20).returncode
        except (OSError, subprocess.SubprocessError):
            return True


def find_compiler() -> Compiler | None:
    """The first of $CXX, g++, clang++, c++ that runs and reports its version, or None."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        command = shutil.which(name) if name else None
        if command is None:
            continue
        try:
            answer = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=20, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        first = answer.stdout.splitlines()[0] if answer.stdout else ""
        versions = re.findall(r"\d+\.\d+(?:\.\d+)?", re.sub(r"\([^)]*\)", "", first))
        if versions:
            kind = "clang++" if "clang" in answer.stdout.lower() else "g++"
            return Compiler(command=command, kind=kind, version=versions[-1])
    return None
