"""The tables of docs/lora.md."""

from renderers import Report, markdown

LORA_WAYS = {"full": "all weights, float32"}
LORA_WAYS |= {name: f"adapter, base in {name}" for name in ("float32", "bfloat16", "int8", "int4")}
LORA_WAYS["int4 merged"] = "the same, merged into int4"


def lora(report: Report) -> str:
    """`lora.py`: what is kept of the gain of full finetuning, seed by seed."""
    rows = report["quality"]
    found = {(row["way"], row["seed"]): row for row in rows}
    start = {row["seed"]: row["before"] for row in rows if row["way"] == "full"}
    gains = {key: start[key[1]] - row["after"] for key, row in found.items()}
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        kept = " ".join(f"{gains[way, row['seed']] / gains['full', row['seed']]:.1%}" for row in own)
        losses = [" ".join(f"{row[key]:.3f}" for row in own) for key in ("before", "after")]
        gain = " ".join(f"{gains[way, row['seed']]:.3f}" for row in own)
        lines.append([LORA_WAYS[way], f"{own[0]['trained']:,}", *losses, gain, kept])
    return markdown(["", "trained", "loss before", "after", "gain", "of full finetuning's"], lines)


def lora_cost(report: Report) -> str:
    """`lora.py`: memory and speed."""
    full = report["cost"][0]
    rows = []
    for one in report["cost"]:
        counted = one["counted_bytes"]
        held = [f"{counted[name] / 1e6:.1f} MB" for name in ("weights", "gradients", "optimizer")]
        speed = f"{one['tokens_per_second'] / full['tokens_per_second']:.2f}×"
        rows.append([LORA_WAYS[one["way"]], *held, f"{one['peak_bytes'] / 1e6:.0f} MB", speed])
    return markdown(["", "weights", "gradients", "AdamW", "peak of the process", "tokens/s"], rows)
