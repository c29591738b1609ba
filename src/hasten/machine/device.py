"""Converts user options (`--device`, `--dtype`, `--threads`, `--seed`) to torch's values and settings."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from hasten.errors import ConfigError, ResourceError
from hasten.machine.threads import Threads, thread_count

if TYPE_CHECKING:
    import torch

DTYPE_NAMES = ("float32", "bfloat16", "float16")


def resolve_device(name: str | torch.device = "auto") -> torch.device:
    """The torch device named "auto" (the first GPU, else the CPU), "cpu", "cuda" (GPU 0) or "cuda:<index>".

    Raises ConfigError for another name and ResourceError where the GPU asked for is not there.
    """
    import torch

    text = str(name)
    if text == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if text == "cpu":
        return torch.device("cpu")
    kind, _, index = text.partition(":")
    if kind != "cuda" or (text != "cuda" and not index.isdecimal()):
        raise ConfigError(f"device {text!r} is not known; use auto, cpu, cuda or cuda:<index>")
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            reason = f"torch {torch.__version__} here is a build without CUDA; install a CUDA build of torch"
        else:
            reason = f"torch {torch.__version__} finds no usable GPU; look at the driver (nvidia-smi)"
        raise ResourceError(f"device {text!r} was asked for, but {reason}, or use --device cpu")
    count = torch.cuda.device_count()
    number = int(index or 0)
    if number >= count:
        here = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ResourceError(f"device {text!r} was asked for, but there is only {here} on this machine")
    return torch.device("cuda", number)


def resolve_dtype(name: str | torch.dtype, *, auto: torch.dtype | None = None) -> torch.dtype:
    """The torch dtype named "float32", "bfloat16" or "float16"; a torch.dtype is taken as it is.

    "auto" gives `auto` (the caller's choice, for example the checkpoint's own dtype), float32 where that is None.
    Raises ConfigError for another name.
    """
    import torch

    if isinstance(name, torch.dtype):
        if not name.is_floating_point:
            raise ConfigError(f"dtype {name} cannot hold weights; use one of {', '.join(DTYPE_NAMES)}")
        return name
    if name == "auto":
        return torch.float32 if auto is None else auto
    if name not in DTYPE_NAMES:
        raise ConfigError(f"dtype {name!r} is not known; use one of auto, {', '.join(DTYPE_NAMES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def configure(*, threads: Threads | None = None, seed: int | None = None, processes: int = 1) -> None:
    """Set torch's thread count and the seeds of torch and `random` for this process.

    `threads` None or "auto" keeps torch's own count, cut to the physical cores of this process and to what the control
    group allows: more threads share a core's arithmetic or stall at every barrier. `processes` that do the same work
    beside each other share the cores. `seed=None` seeds nothing. Raises ConfigError for threads < 1 or a negative seed.
    """
    import torch

    from hasten.machine.processor import available_cores

    threads = thread_count(threads)
    most = max(64, 4 * available_cores().logical)
    if threads is not None and threads > most:
        raise ConfigError(f"threads is {threads}; more than {most} only wait for each other on this machine")
    if seed is not None and not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed is {seed}; it must be between 0 and 2^63 - 1")
    if threads is None:
        threads = min(torch.get_num_threads(), max(1, available_cores().physical // processes))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    if seed is not None:
        torch.manual_seed(seed)
        random.seed(seed)
