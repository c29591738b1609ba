"""Load torch's shared libraries while a command is parsed."""

import ctypes
import importlib.util
import os
import sys
import threading
from pathlib import Path


def preload_torch() -> None:
    """Start loading libtorch in a thread, so that `import torch` finds it loaded.

    Only on Linux and for torch's CPU build: a GPU build loads its libraries in an order of its own.

    Part of `import torch` (0.16 of 1.3 s) is the dynamic linker at work. Python waits for it when it imports an
    extension module, but not when a foreign function calls `dlopen`, so options are parsed meanwhile.
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    found = importlib.util.find_spec("torch")  # does not import it
    origin = None if found is None else found.origin
    folder = Path(origin or "").parent / "lib"
    library = folder / "libtorch_cpu.so"
    if not library.is_file() or any((folder / f"libtorch_{kind}.so").exists() for kind in ("cuda", "hip", "xpu")):
        return
    dlopen = ctypes.CDLL(None).dlopen
    dlopen.argtypes, dlopen.restype = [ctypes.c_char_p, ctypes.c_int], ctypes.c_void_p
    # If it fails, `import torch` does too, and says why. Not a daemon: the process must not end inside the linker.
    threading.Thread(target=dlopen, args=(os.fsencode(library), os.RTLD_LAZY), name="hasten-preload").start()
