"""Change the code in one place at a time, and see whether a test fails: mutation testing, on a sample of the changes.

    python benchmarks/mutants.py --output benchmarks/results/mutants.json         # all of TESTS
    python benchmarks/mutants.py --modules ops/picker.py --sample 0               # one of them, every change
    python benchmarks/mutants.py --again --output benchmarks/results/mutants.json # only what no test noticed before

A change that no test notices is a survivor: write a test that fails, remove code that has no effect, or write into the
report, as its "why", what makes both versions the same. Later runs keep what is written there.

The changes are cosmic-ray's (the extra `mutants`), used as a library: its own runner starts Python for each change,
and importing torch takes longer than most tests. mutated.py makes them in forks.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version

from mutated import KILLED, ROOT, SOURCE, SURVIVED, TIMED_OUT, UNSEEN, Mutant, mutants_of, outcomes_of

from hasten.errors import ConfigError
from hasten.measure.script import Report, Script, Table, columns, main

# Modules of src/hasten -> the files of tests/ that are about them and run within their process.
TESTS: dict[str, str] = {
    "checks.py": "test_checks.py training/test_recipe.py ops/test_pattern_text.py",
    "engine/block_table.py": "engine/test_cache.py engine/test_paged.py engine/test_blocks.py",
    "engine/blocks.py": "engine/test_blocks.py",
    "engine/sampler.py": "engine/test_sampling.py engine/test_accept_distribution.py",
    "engine/sampling.py": "engine/test_sampling.py",
    "engine/scheduler.py": "engine/test_scheduler.py",
    "engine/state_slots.py": "engine/test_snapshots.py engine/test_states.py",
    "engine/stopping.py": "engine/test_stopping.py",
    "machine/pages.py": "machine/test_pages.py",
    "ops/attention/checks.py": "ops/test_attention_checks.py",
    "ops/attention/inputs.py": "ops/test_attention_inputs.py ops/test_attention.py ops/test_train_attention.py",
    "ops/attention/pattern_layout.py": "ops/test_patterns.py ops/test_pattern_text.py",
    "ops/attention/patterns.py": "ops/test_patterns.py ops/test_pattern_text.py",
    "ops/attention/regroup.py": "ops/test_regroup.py",
    "ops/attention/sdpa_rules.py": "ops/test_sdpa_rules.py ops/test_flash_triton.py ops/test_attention_checks.py",
    "ops/attention/spec.py": "ops/test_sdpa_rules.py ops/test_flash_triton.py ops/test_attention_checks.py",
    "ops/delta/rule.py": "ops/test_delta.py",
    "ops/draw/operator.py": "ops/test_draw.py ops/test_noise.py engine/test_sampling.py",
    "ops/linear/operator.py": "ops/test_linear.py ops/test_measured_picks.py ops/test_linear_layers.py",
    "ops/linear/weights.py": "ops/test_weight_formats.py ops/test_linear_formats.py ops/test_linear_refused.py",
    "ops/loss/chunked.py": "ops/test_loss.py",
    "ops/picker.py": "ops/test_picker.py",
    "quantization/gptq.py": "quantization/test_gptq.py quantization/test_calibrated.py",
    "quantization/qat.py": "quantization/test_qat.py",
    "quantization/rounding.py": "quantization/test_rounding.py quantization/test_native_rounding.py",
    "quantization/schemes.py": "quantization/test_formats_by_layer.py quantization/test_quantize.py",
    "training/lamb.py": "training/test_optimizers.py",
    "training/muon.py": "training/test_optimizers.py",
    "training/onebit.py": "distributed/test_onebit.py training/test_optimizers.py",
    "training/optimizers.py": "training/test_optimizers.py",
    "training/schedules.py": "training/test_schedules.py",
}


@dataclass(frozen=True, kw_only=True)
class Mutants(Script):
    """Mutation testing of a sample."""

    result = "mutants"
    of_this_machine = ("modules", "sample", "again")  # each row says how many were tried
    modules: tuple[str, ...] = tuple(TESTS)
    """Files of src/hasten."""
    sample: int = 40
    """Changes of each module; 0: all."""
    again: bool = False
    """Try only those that survived, according to the report in `output`."""

    def measure(self) -> Report:
        os.chdir(ROOT)
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(ROOT / "runs" / "mutants-bytecode")
        import pytest  # noqa: F401  all forks have them
        import torch  # noqa: F401

        before = self.before()
        rows: dict[str, Report] = {row["module"]: row for row in before.get("rows", ())}
        found: Report = {"tool": f"cosmic-ray {version('cosmic-ray')}"}
        for name in self.modules:
            if name not in TESTS:
                raise ConfigError(f"there are no tests listed for {name}; known: {', '.join(TESTS)}")
            earlier = rows.get(name, {})
            if self.again and not earlier.get("survivors"):
                continue
            rows[name] = row = self.again_of(name, earlier) if self.again else self.row_of(name, earlier)
            print(name, {key: value for key, value in row.items() if not isinstance(value, list)}, flush=True)
            found["rows"] = [rows[one] for one in TESTS if one in rows]
            self.write(found)
        return found

    def row_of(self, name: str, earlier: Report) -> Report:
        """Try a sample of a module's changes."""
        begun, source = time.monotonic(), (SOURCE / name).read_text()
        mutants = mutants_of(source)
        # By a hash of each: a change elsewhere in the file does not choose others.
        tried = sorted(mutants, key=lambda one: hashlib.sha256(one.key.encode()).digest())[: self.sample or None]
        outcomes = outcomes_of(SOURCE / name, source, tried, TESTS[name].split())
        count = Counter(outcomes.values())
        row: Report = {"module": name, "tests": TESTS[name].split(), "mutants": len(mutants), "tried": len(tried)}
        row |= {KILLED: count[KILLED], TIMED_OUT: count[TIMED_OUT], SURVIVED: count[SURVIVED] + count[UNSEEN]}
        row |= {UNSEEN: count[UNSEEN], "killed_since": 0, "removed_since": 0, "commit": commit()}
        return row | {"survivors": survivors_of(source, tried, outcomes, earlier)} | seconds_since(begun)

    def again_of(self, name: str, earlier: Report) -> Report:
        """Try a module's survivors once more: killed by tests, or their code removed, since."""
        source = (SOURCE / name).read_text()
        keys = {one["key"] for one in earlier["survivors"]}
        left = [mutant for mutant in mutants_of(source) if mutant.key in keys]
        outcomes = outcomes_of(SOURCE / name, source, left, TESTS[name].split())
        row = earlier | {"tests": TESTS[name].split()}
        row |= {"survivors": survivors_of(source, left, outcomes, earlier)}
        row["removed_since"] += len(keys) - len(left)
        row["killed_since"] += len(left) - len(row["survivors"])
        return row

    def show(self, report: Report) -> None:
        """Print the survivors that nobody has explained."""
        for row in report["rows"]:
            for one in row["survivors"]:
                if "why" not in one:
                    seen = "" if one["seen"] else "  (no test comes here)"
                    print(f"{row['module']}:{one['line']}: {one['operator']}{seen}")
                    print(f"    - {one['before']}\n    + {one['after']}")


def survivors_of(source: str, tried: list[Mutant], outcomes: dict[str, str], earlier: Report) -> list[Report]:
    """The changes that no test noticed, in the order of their lines. seen: some test passes through the statement."""
    whys = {one["key"]: one["why"] for one in earlier.get("survivors", ()) if "why" in one}
    found = []
    for mutant in sorted(tried, key=lambda one: one.line):
        if (outcome := outcomes[mutant.key]) not in (SURVIVED, UNSEEN):
            continue
        new = mutant.of(source).splitlines()
        after = new[mutant.line - 1].strip() if len(new) == len(source.splitlines()) else ""
        shown = {"line": mutant.line, "operator": mutant.operator, "before": mutant.before, "after": after}
        shown |= {"key": mutant.key, "seen": outcome == SURVIVED}
        found.append(shown | ({"why": whys[mutant.key]} if mutant.key in whys else {}))
    return found


def seconds_since(begun: float) -> Report:
    """How long a row took."""
    return {"seconds": round(time.monotonic() - begun)}


def commit() -> str:
    """The commit whose code is changed."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


def summary(report: Report) -> str:
    """A row for each module, and their sum."""
    counted = ("mutants", "tried", KILLED, TIMED_OUT, SURVIVED, UNSEEN, "killed_since", "removed_since")
    rows = [row | {"left": len(row["survivors"])} for row in report["rows"]]
    total: Report = {name: sum(row[name] for row in rows) for name in (*counted, "left")}
    cells = {
        "module": lambda row: f"`{row['module']}`" if row["module"] else "**all**",
        "changes": "{mutants}",
        "tried": "{tried}",
        "noticed": f"{{{KILLED}}}",
        "timed out": f"{{{TIMED_OUT}}}",
        "survived": f"{{{SURVIVED}}}",
        "of them in code that no listed test runs": f"{{{UNSEEN}}}",
        "noticed since": "{killed_since}",
        "line changed since": "{removed_since}",
        "left": "{left}",
    }
    return columns([*rows, {"module": ""} | total], cells)


def survivors(report: Report) -> str:
    """Each change that is not noticed, and why that is right."""
    rows = [one | {"module": row["module"]} for row in report["rows"] for one in row["survivors"]]

    def code(row: Report) -> str:
        before, after = (row[name].replace("|", "\\|") for name in ("before", "after"))
        return f"`{before}` → `{after}`" if after else f"`{before}`, {row['operator']}"

    cells = {"where": "{module}:{line}", "change": code, "why no test need notice": lambda row: row.get("why", "")}
    return columns(rows, cells, left=3)


TABLES: dict[str, Table] = {"mutants": summary, "mutants survivors": survivors}


if __name__ == "__main__":
    main({"mutants": Mutants}, TABLES)
