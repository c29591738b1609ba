"""Name the committed figures whose code has changed since they were measured.

    python benchmarks/fresh.py                   # list them; renew.py --outdated measures them again
    python benchmarks/fresh.py --check           # exit status 1 if there are any
    python benchmarks/fresh.py --hold NAME WHY   # this result's figures hold for the code of today: say why

A result was measured with the code of the commit that last changed its file, or with the code of the working tree if
the file is not committed. Comments, docstrings and layout are no change. Reasons are kept in
benchmarks/results/held/NAME.txt with the digest that they are about.
"""

import argparse
import ast
import hashlib
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
HELD = RESULTS / "held"
DECODING = ("ops/linear", "ops/attention", "ops/block", "ops/delta", "engine")
TRAINING = ("training", "ops/attention", "ops/activation")
# Names of results -> folders of src/hasten that they measure; the first that fits counts.
CODE: dict[str, tuple[str, ...]] = {
    "*attention*": ("ops/attention",),
    "paged-decode": ("ops/attention",),
    "sparse-*": ("ops/attention",),
    "cache-formats": ("ops/attention",),
    "linear*": ("ops/linear",),
    "*format*": ("ops/linear",),
    "rows*": ("ops/linear",),
    "quantize-*": ("quantization", "ops/rounding", "ops/linear"),
    "serve-*": ("server", *DECODING),
    "compare-serving": ("server", *DECODING),
    "vllm-client": ("server", *DECODING),
    "replica-*": ("replicas", "server"),
    "sharing*": ("engine",),
    "train-*": TRAINING,
    "article-*": TRAINING,
    "race-*": TRAINING,
    "largest-batch-*": TRAINING,
    "layer-dropping*": TRAINING,
    "lora": ("training", "ops/linear"),
    "qat*": ("training", "quantization"),
    "zero-*": ("distributed", "training"),
    "scaling": ("distributed", "training"),
    "slow-link*": ("distributed", "training"),
    "onebit-steps": ("distributed", "training"),
    "plan*": ("planning",),
    "profile-*": ("profiling",),
    "mutants": (),  # of the commit that it names
    "*": DECODING,
}


def folders(name: str) -> tuple[str, ...]:
    """The folders of src/hasten that a result measures."""
    return next(code for pattern, code in CODE.items() if fnmatch(name, pattern))


def git(*arguments: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def meaning(name: str, text: str) -> str:
    """The code of a file without comments, docstrings and layout."""
    if not name.endswith(".py"):
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL).split())
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            body[0] = ast.Pass()
    return ast.dump(tree)


@cache
def digest(folder: str, commit: str | None) -> str:
    """A digest of the code of a folder, in a commit or (None) in the working tree."""
    place = f"src/hasten/{folder}"
    names = git("ls-files", place) if commit is None else git("ls-tree", "-r", "--name-only", commit, place)
    found = hashlib.sha256()
    for name in sorted(names.split()):
        if name.endswith((".py", ".cpp", ".h")):
            text = git("show", f"{commit}:{name}") if commit else (ROOT / name).read_text()
            found.update(f"{name}\0{meaning(name, text)}\0".encode())
    return found.hexdigest()[:16]


def today(name: str) -> str:
    """A digest of all code that a result measures, as it is in the working tree."""
    return " ".join(digest(folder, None) for folder in folders(name))


def outdated() -> Iterator[tuple[str, str, list[str]]]:
    """Each result whose code has changed, the day of its figures, and the folders that changed."""
    status = git("status", "--porcelain", "-uall", "--", str(RESULTS))
    new = {line.rpartition("/")[2] for line in status.splitlines()}
    for path in sorted(RESULTS.glob("*.json")):
        if path.name in new:  # just measured
            continue
        commit, _, day = git("log", "-1", "--format=%H %cs", "--", str(path)).strip().partition(" ")
        changed = [folder for folder in folders(path.stem) if digest(folder, commit) != digest(folder, None)]
        reason = HELD / f"{path.stem}.txt"
        held = reason.exists() and reason.read_text().splitlines()[0] == today(path.stem)
        if changed and not held:
            yield path.stem, day, changed


def main() -> None:
    """Print what is outdated, with --check as an error, or keep a reason why it is not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hold", nargs=2, metavar=("NAME", "WHY"), help="keep a result's figures, with a reason")
    parser.add_argument("--check", action="store_true", help="exit status 1 if any is outdated")
    given = parser.parse_args()
    if given.hold is not None:
        name, why = given.hold
        if not (RESULTS / f"{name}.json").exists():
            raise SystemExit(f"there is no benchmarks/results/{name}.json")
        HELD.mkdir(exist_ok=True)
        (HELD / f"{name}.txt").write_text(f"{today(name)}\n{why}\n")
        return
    found = sorted(outdated(), key=lambda one: one[1])
    for name, day, changed in found:
        print(f"{day}  {name}: changed since: {', '.join(changed)}")
    if found and given.check:
        raise SystemExit(
            f"{len(found)} results are older than their code: python benchmarks/renew.py --outdated measures again "
            "what can be, --hold NAME WHY keeps the others"
        )


if __name__ == "__main__":
    main()
