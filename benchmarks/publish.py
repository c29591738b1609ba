"""Makes what this project publishes: runs `hasten bench …` and leaves JSON and PNG in benchmarks/results/.

    python benchmarks/publish.py                     # everything, about half an hour on two cores
    python benchmarks/publish.py train-gpt2-124m     # only the steps named
    python benchmarks/publish.py --list
    python benchmarks/publish.py --suffix amx generate-llama-1.1b     # another machine's results beside them

`benchmarks/tables.py` then puts them into the pages. Only through the command line, so that whoever runs the same
command measures the same thing.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
# name of the files -> arguments of `hasten bench`
STEPS = {
    "generate-llama-120m": "generate --shape llama-120m --dtype bfloat16 --prompt-tokens 512 --new-tokens 64",
    "generate-llama-1.1b": "generate --shape llama-1.1b --dtype bfloat16 --prompt-tokens 512 --new-tokens 64",
    "batches-llama-1.1b": "generate --shape llama-1.1b --dtype bfloat16 --prompt-tokens 512 --new-tokens 64 "
    "--rungs native-bf16,native-int8,native-int4 --batches 1,8 --contexts 16,2048",
    "compiled-llama-1.1b": "generate --shape llama-1.1b --dtype bfloat16 --prompt-tokens 512 --new-tokens 64 "
    "--rungs static-cache-compiled,static-cache-compiled-int8,static-cache-compiled-int4",
    "train-gpt2-124m": "train --shape gpt2-124m --batch-size 2 --sequence-length 256 --steps 2",
    "heads-llama-120m": "heads --shape llama-120m --dtype bfloat16 --prompt-tokens 2048 --new-tokens 64",
}


def publish(name: str, suffix: str = "") -> int:
    """Run one step; its exit status."""
    hasten = shutil.which("hasten", path=Path(sys.executable).parent) or "hasten"
    arguments = ["bench", *STEPS[name].split()]
    print(f"hasten {' '.join(arguments)}", file=sys.stderr, flush=True)
    start = time.monotonic()
    RESULTS.mkdir(exist_ok=True)
    place = RESULTS / (f"{name}-{suffix}" if suffix else name)
    files = ["--json", f"{place}.json", "--picture", f"{place}.png"]
    status = subprocess.run([hasten, *arguments, *files], check=False).returncode
    print(f"{name}: {time.monotonic() - start:.0f} s, exit status {status}\n", file=sys.stderr, flush=True)
    return status


def main() -> None:
    """Run the steps named on the command line, or all."""
    parser = argparse.ArgumentParser(description="Run the published benchmarks.")
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"one of {', '.join(STEPS)}; all by default")
    parser.add_argument("--suffix", default="", help="after the names of the files: another machine's results")
    parser.add_argument("--list", action="store_true", help="show the steps with their commands and end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{name}: hasten bench {arguments}" for name, arguments in STEPS.items()))
        return
    unknown = [name for name in given.steps if name not in STEPS]
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}; known: {', '.join(STEPS)}")
    failed = [name for name in given.steps or STEPS if publish(name, given.suffix)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
