"""`--tensor-parallel`: run a command in several processes that share one model; only the first one prints."""

import os
import signal
import sys
import warnings
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from typing import Any

from hasten.cli.options import DeviceOptions, RankOptions
from hasten.cli.planned import by_plan
from hasten.distributed import launched
from hasten.errors import ConfigError, HastenWarning
from hasten.machine.processor import available_cores


def run(command: Any, arguments: list[str]) -> None:
    """Run a parsed command in the number of processes that it asks for. arguments: those it was parsed from.

    The processes are started here, by torchrun's agent, or this is one of those that torchrun has started.
    """
    alone = not launched()
    if alone and hasattr(command, "check_inputs"):
        command.check_inputs()  # before anything is measured or started
    planned = isinstance(command, DeviceOptions) and command.devices == "auto"
    degree = command.tensor_parallel if isinstance(command, RankOptions) else None
    if degree is None and not alone and os.environ["WORLD_SIZE"] != "1":
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes, but this command is single-process; run it "
            "without torchrun"
        )
    if degree is not None and degree < 1:
        raise ConfigError(f"--tensor-parallel is {degree}; it must be at least 1")
    if getattr(command, "pin", False) and (planned or (degree is not None and (degree > 1 or not alone))):
        raise ConfigError(
            f"--pin is for one process; leave it out, or {'--devices auto' if planned else '--tensor-parallel'}"
        )
    if isinstance(command, DeviceOptions) and (planned or alone):
        command, arguments = by_plan(command, arguments)
        degree = command.tensor_parallel
    if degree is None or (alone and (degree == 1 or getattr(command, "starts_ranks", False))):
        command.run()
    elif alone:
        _start_ranks(command, arguments, degree)
    else:
        _run_as_rank(command, degree)


def _start_ranks(command: Any, arguments: list[str], degree: int) -> None:
    """Start the ranks after checking what would fail in each of them."""
    from hasten.checkpoints.load import open_checkpoint, shares_of
    from hasten.cli.room import require_room
    from hasten.distributed.launch import start
    from hasten.machine import resolve_device

    source = open_checkpoint(command.model)
    shares_of(source, degree)  # raises if the model cannot be split that way
    require_room(command, source, str(resolve_device(command.device)), ranks=degree)
    cores = available_cores().physical
    if command.device in ("auto", "cpu") and degree > cores:
        text = f"{degree} ranks on {cores} cores: ranks will wait for each other's cores"
        warnings.warn(text, HastenWarning, stacklevel=1)
    start(arguments, processes=degree, resumes=False)


def _run_as_rank(command: Any, degree: int) -> None:
    """Run the command as one of several ranks; only the first one prints and is stopped by signals."""
    from hasten.distributed.launch import joined
    from hasten.distributed.tensor_parallel import tensor_parallel

    size = os.environ["WORLD_SIZE"]
    if str(degree) not in ("1", size):
        raise ConfigError(f"--tensor-parallel is {degree}, and torchrun has started {size} processes; leave it out")
    with joined() as ranks:
        if hasattr(command, "check_inputs"):
            command.check_inputs()
        if "-" in getattr(command, "prompt", ()):  # read by the first rank, sent to the others
            sys.stdin = StringIO(ranks.texts(sys.stdin.read() if ranks.first else "")[0])
        with tensor_parallel(ranks), ExitStack() as quiet:
            if not ranks.first:
                for stop in (signal.SIGINT, signal.SIGTERM):  # the end of the first rank ends all
                    signal.signal(stop, signal.SIG_IGN)
                command = replace(command, json=None) if hasattr(command, "json") else command
                nowhere = quiet.enter_context(open(os.devnull, "w"))
                quiet.enter_context(redirect_stdout(nowhere))
                quiet.enter_context(redirect_stderr(nowhere))
            command.run()
