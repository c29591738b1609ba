"""The `hasten` command: one file a command, imported only when that command runs."""

import atexit
import errno
import gc
import sys
import warnings
from contextlib import suppress
from importlib import import_module
from operator import attrgetter
from typing import Any

import hasten
from hasten.cli.preload import preload_torch
from hasten.errors import HastenError, HastenWarning
from hasten.machine.threads import wait_briefly

# What for -> command -> (module, class or function of arguments, what it does)
GROUPS = {
    "run a model": {
        "chat": ("hasten.cli.chat", "ChatInTerminal", "talk to a model in the terminal"),
        "generate": ("hasten.cli.generate", "Generate", "continue prompts"),
        "serve": ("hasten.cli.serve", "Serve", "serve a model over HTTP, as OpenAI's API does"),
        "start": (
            "hasten.cli.start",
            "start",
            "serve a model to a coding agent, and run the agent: codex, opencode, claude",
        ),
        "eval": ("hasten.cli.eval", "Eval", "perplexity and bits per byte of a text, or lm-eval's tasks"),
    },
    "make one": {
        "train": ("hasten.cli.train", "Train.main", "pretrain, or finetune with --init"),
        "quantize": ("hasten.cli.quantize", "Quantize", "write a model in 8, 4, 3 or 2 bits"),
        "merge": ("hasten.cli.merge", "Merge", "add a LoRA adapter to its model's weights"),
        "export": ("hasten.cli.export", "Export", "write a model as a Hugging Face folder or a GGUF file"),
        "convert": (
            "hasten.cli.convert",
            "Convert",
            "write a quantized model in another layout, its numbers as they are",
        ),
    },
    "measure and explain": {
        "demo": ("hasten.cli.demo", "Demo", "ask a published model, measure each technique, train a small model"),
        "bench": ("hasten.cli.bench", "bench", "measure every technique on this machine, as a table and a picture"),
        "plan": ("hasten.cli.plan", "PlanCommand", "bytes, FLOPs and time of a model, before anything is loaded"),
        "profile": ("hasten.cli.profile", "profile", "where time and memory of a step go, and what could be gained"),
        "explain": ("hasten.cli.explain", "explain", "which kernel runs where, and why not the others"),
        "doctor": ("hasten.cli.doctor", "Doctor", "what this machine offers and what is missing"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}

GENERATING = ("generate", "chat", "serve")  # a person waits for the first token
TRAINING = ("train", "demo")  # their threads meet at thousands of barriers a step
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # in the first line of what torch says


def overview() -> str:
    """The text of `hasten --help`."""
    head = f"hasten {hasten.__version__}: a PyTorch language model at the limit of the machine it runs on"
    usage = "usage: hasten COMMAND [options]      (hasten COMMAND --help for its options)"
    lines = [head, "", usage, "       hasten chat smollm2-135m       (a first try: downloads 93 MB)"]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {name:<10} {text}" for name, (_, _, text) in commands.items())]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run one command. Exit status: 0; 2 for a user's error, printed as one line; 130 for Ctrl-C."""
    given = sys.argv[1:] if arguments is None else arguments
    if not given or given[0] in ("-h", "--help", "help", "--version"):
        shown = f"hasten {hasten.__version__}" if given[:1] == ["--version"] else overview()
        with suppress(BrokenPipeError):  # the reader of our output is gone, as with `| head`
            print(shown, flush=True)
        return
    if given[0] not in COMMANDS:
        print(f"error: {given[0]!r} is not a command of hasten\n\n{overview()}", file=sys.stderr)
        raise SystemExit(2)
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    # Without this Python searches all of torch's objects for cycles at exit, several times: 0.4 s.
    atexit.register(gc.freeze)
    if given[0] in GENERATING and not {"-h", "--help", "--pin"} & set(given):  # OpenMP reads --pin when it is loaded
        preload_torch()
    if given[0] in TRAINING:
        wait_briefly()
    module, name, _ = COMMANDS[given[0]]
    try:
        command = attrgetter(name)(import_module(module))
        if not isinstance(command, type):  # a function that parses its own arguments
            command(given[1:])
        else:
            import tyro

            from hasten.cli.help import first_screen, for_parser, wants_help
            from hasten.cli.parsing import merge_repeated
            from hasten.effects import refuse_ignored

            if wants_help(given[1:]):
                print(first_screen(command, prog=f"hasten {given[0]}"))
                return
            given = [given[0], *for_parser(merge_repeated(given[1:], command))]
            parsed: Any = tyro.cli(command, args=given[1:], prog=f"hasten {given[0]}")
            refuse_ignored(parsed, given[1:])
            if getattr(parsed, "pin", False):  # before a command imports torch, which reads it
                from hasten.machine.threads import pin_threads

                pin_threads()
            from hasten.cli.ranks import run

            run(parsed, given)
        sys.stdout.flush()
    except HastenError as error:
        print(f"error: {as_option(str(error), given)}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        sys.stderr.close()
        raise SystemExit(0) from None
    except (MemoryError, RuntimeError) as error:
        text = str(error).split("\n")[0]
        if not isinstance(error, MemoryError) and not any(words in text for words in OUT_OF_MEMORY):
            raise
        print(f"error: memory ran out ({text or 'of this process'}); take a smaller batch or context", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("error: standard output cannot be written: no space is left there", file=sys.stderr)
        sys.stdout = None  # what is left in its buffer cannot be written either
        raise SystemExit(2) from None


def as_option(message: str, given: list[str]) -> str:
    """A message of the library about a field, with the option that set it: "keys is 0" becomes "--max-keys is 0"."""
    name, _, rest = message.partition(" ")
    options = {word.partition("=")[0].replace("_", "-") for word in given}
    wanted = name.replace("_", "-")
    return next((f"{option} {rest}" for option in (f"--{wanted}", f"--max-{wanted}") if option in options), message)


def _show_warning(message: Warning | str, category: type[Warning], *rest: object) -> None:
    """Print our own warnings as one line; those of libraries only with Python's -W."""
    if issubclass(category, HastenWarning) or sys.warnoptions:
        print(f"warning: {message}", file=sys.stderr)
