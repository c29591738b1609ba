"""How exact every attention kernel is, and which order of scaling PyTorch's backends have (docs/attention.md).

python benchmarks/attention_errors.py --output benchmarks/results/attention-errors.json
"""

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionErrors:
    """Measure, print as Markdown tables, and write."""

    device: str = "cpu"
    """cpu or cuda."""

    tokens: int = 512
    """T and S of the table of errors."""

    output: Path | None = None
    """Where to write the JSON."""

    def run(self) -> None:
        from attention_numerics import errors, overflow, scaling_orders

        from hasten.machine import describe
        from hasten.machine.files import write_json

        result = {
            "schema": 1,
            "machine": describe().to_json(),
            "settings": {"device": self.device, "tokens": self.tokens},
            "scaling": scaling_orders(self.device),
            "overflow": overflow(self.device),
            "errors": errors(self.device, tokens=self.tokens),
        }
        print("| backend | dtype | equals, bit for bit |\n|---|---|---|")
        for row in result["scaling"]:
            same = [form for form, count in row["equal"].items() if count == row["cases"]]
            print(f"| {row['kernel']} | {row['dtype']} | {', '.join(same) or 'neither'} |")
        print("\n| float16, products past 65,504 | error |\n|---|---|")
        for row in result["overflow"]:
            print(f"| {row['way']} | {'not finite' if row['error'] is None else format(row['error'], '.1e')} |")
        print("\n| kernel | dtype | forward | dq | dk | dv | largest ratio to plain |\n|---|---|---|---|---|---|---|")
        for row in result["errors"]:
            found = " | ".join(f"{row['errors'][part]:.1e}" for part in ("forward", "dq", "dk", "dv"))
            worst = f"{max(row['ratios'].values()):.2f}" if "ratios" in row else ""
            print(f"| {row['kernel']} | {row['dtype']} | {found} | {worst} |")
        if self.output:
            write_json(self.output, result)


if __name__ == "__main__":
    tyro.cli(AttentionErrors).run()
