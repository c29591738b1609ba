"""One small function for each measurement whose table stands in a page: its JSON in, Markdown out.

`tables.py` calls them by the name of the JSON, and shows the ladders and comparisons itself.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import precision_bytes
import zero
from format_speeds import shown as shown_formats
from quantize_quality import shown

Report = dict[str, Any]


def markdown(head: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """A table whose first `left` columns are text and the others numbers."""
    align = "|---" * left + "|---:" * (len(head) - left) + "|"
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], align, *lines[1:]])


def committed(name: str) -> Report:
    """Another result, where a table needs two."""
    found: Report = json.loads((Path(__file__).parent / "results" / f"{name}.json").read_text())
    return found


def attention_growth(report: Report) -> str:
    """`hasten bench attention`: time and memory of each kernel at the two largest lengths."""
    points = {(one["kernel"], one["tokens"]): one for one in report["points"]}
    short, long = sorted(report["settings"]["lengths"])[-2:]

    def memory(kernel: str, tokens: int) -> str:
        found = points[kernel, tokens].get("forward_backward_peak_bytes")
        if found is None:
            return "does not fit"
        return f"{found / 2**30:.1f} GiB" if found >= 2**30 else f"{found / 2**20:.0f} MiB"

    flash = points["flash", short]["forward_backward_seconds"]
    rows = []
    for kernel in dict.fromkeys(kernel for kernel, _ in points):
        found = points[kernel, short]
        time = f"{found['forward_backward_seconds'] / flash:.2f}×"
        speed = f"{found['forward_backward_gflops']:.0f}"
        rows.append([f"`{kernel}`", time, speed, memory(kernel, short), memory(kernel, long)])
    head = ["kernel", "time, of `flash`", "GFLOP/s", f"memory at {short:,} tokens", f"memory at {long:,}"]
    return markdown(head, rows)


def attention_speed(report: Report) -> str:
    """`hasten bench attention --kernels native,flash`: GFLOP/s of both at each length."""
    points = {(one["kernel"], one["tokens"]): one for one in report["points"]}
    rows = []
    for tokens in report["settings"]["lengths"]:
        cells = [f"{tokens:,}"]
        for part in ("forward", "forward_backward"):
            ours, theirs = points["native", tokens], points["flash", tokens]
            seconds, speed = f"{part}_seconds", f"{part}_gflops"
            rounds = zip(ours["rounds"], theirs["rounds"], strict=True)  # a ratio is formed within a round
            ratio = median(other[seconds] / one[seconds] for one, other in rounds)
            cells += [f"{ours[speed]:.0f}", f"{theirs[speed]:.0f}", f"{ratio:.1f}×"]
        rows.append(cells)
    head = ["tokens", "forward: `native`", "`flash`", "ratio", "forward and backward: `native`", "`flash`", "ratio"]
    return markdown(head, rows)


def attention_errors(report: Report) -> str:
    """`attention_errors.py`: each kernel's error against float64, and its largest ratio to plain PyTorch's."""
    plain = {one["dtype"]: one["errors"] for one in report["errors"] if one["kernel"] == "plain"}
    parts = ["forward", "dq", "dk", "dv"]
    rows = []
    for one in report["errors"]:
        ratio = max(one["errors"][part] / plain[one["dtype"]][part] for part in parts)
        name, worst = ("plain PyTorch", "") if one["kernel"] == "plain" else (f"`{one['kernel']}`", f"{ratio:.2f}")
        rows.append([name, one["dtype"], *(f"{one['errors'][part]:.1e}" for part in parts), worst])
    return markdown(["kernel", "dtype", *parts, "largest ratio to plain"], rows, left=2)


def attention_scaling(report: Report) -> str:
    """`attention_errors.py`: which order of scaling each backend equals in every case, bit for bit."""
    ways = ["prescaled", "prescaled in float32", "post-scaled", "post-scaled in float32"]
    rows = [
        [f"`{one['kernel']}`", one["dtype"], *("equal" if one["equal"][way] == one["cases"] else "no" for way in ways)]
        for one in report["scaling"]
    ]
    return markdown(["backend", "dtype", *ways], rows, left=2 + len(ways))


def attention_overflow(report: Report) -> str:
    """`attention_errors.py`: float16 scores past 65,504."""
    rows = []
    for one in report["overflow"]:
        name = f"`{one['way']}`" if "scaled" not in one["way"] else f"{one['way']}, plain PyTorch"
        rows.append([name, f"{one['error']:.1e}" if one["finite"] else "not finite"])
    return markdown(["", "error"], rows)


def linear_products(report: Report) -> str:
    """`linear.py`: few rows as a share of the bandwidth, many as a share of PyTorch's rate."""
    found = {(one["format"], one["activations"], one["rows"]): one for one in report["rows"]}
    few, many = [1, 4, 8], [64, 512]
    body = []
    for name, activations in (("bfloat16", "float"), ("int8", "int8"), ("int4", "int8")):
        shares = [found[name, activations, rows]["bandwidth_fraction"] for rows in few]
        shares += [found[name, activations, rows]["matrix_rate_fraction"] for rows in many]
        body.append([name, *(f"{share:.0%}" for share in shares)])
    head = ["weights", *(f"{rows} row{'s' * (rows > 1)}: of the bandwidth" for rows in few)]
    return markdown([*head, *(f"{rows} rows: of the rate" for rows in many)], body)


def int4_products(report: Report) -> str:
    """`linear.py`: int4 with many rows beside the rate of PyTorch's int8 product."""
    head = ["rows", *(f"{one['rows']:,}" for one in report["int4"])]
    return markdown(head, [["of the int8 rate", *(f"{one['of_matrix_rate']:.0%}" for one in report["int4"])]])


def weight_formats(report: Report) -> str:
    """`weight_formats.py`: decoding by bytes, prompts by arithmetic, each beside bf16."""
    plain = next(one for one in report["rows"] if one["format"] == "bf16")["prefill_seconds"]
    rows = []
    for one in report["rows"]:
        share, speed = f"{one['bandwidth_share']:.0%}", f"{one['against_bf16']:.2f}×"
        name = f"{one['format']}, {one['activations']}"
        prompt = f"{plain / one['prefill_seconds']:.2f}×"
        rows.append([name, f"{one['bits_per_weight']:.2f}", share, speed, prompt])
    head = ["weights, activations", "bits a weight", "1 row: of the bandwidth", "1 row: beside bf16"]
    return markdown([*head, "512 rows: beside bf16"], rows)


def prefill_attention(report: Report) -> str:
    """`prefill_attention.py`."""
    rows = []
    for one in report["rows"]:
        heads = f"{one['heads']} of {one['head_dim']} values, {one['kv_heads']} key/value heads"
        speed = f"{one['flops_per_second'] / 1e9:,.0f}"
        rows.append([heads, f"{one['tokens']:,}", speed, f"{one['share']:.0%}", f"{one['flash_share']:.0%}"])
    head = ["query heads", "tokens", "GFLOP/s", "of the matrix rate", "PyTorch's flash, of the same rate"]
    return markdown(head, rows)


def demo_ladder(report: Report) -> str:
    """The ladder at the end of `hasten demo`: speed beside what it costs in perplexity."""
    rows = []
    for one in report["rows"]:
        speed = f"{one['decode_tokens_per_second']:,.0f}"
        rows.append([f"`{one['name']}`", speed, f"{one['speedup']:.1f}×", f"{one['perplexity']:.2f}"])
    return markdown(["rung", "decode tokens/s", "speed-up", "perplexity"], rows)


def quantize_perplexity(report: Report) -> str:
    """`quantize_perplexity.py`."""
    rows = []
    for one in report["rows"]:
        change = f"{one['change']:+.3%}" if one["change"] else ""
        rows.append([one["name"], f"{one['perplexity']:.3f}", change])
    return markdown(["weights, activations", "perplexity", "against bf16"], rows)


def real_precision(report: Report) -> str:
    """`real_precision.py`: each model as published, and off the grid of its file."""
    found = {(one["model"], one["off_grid"], one["name"]): one for one in report["rows"]}
    models = dict.fromkeys(one["model"] for one in report["rows"])
    rows = []
    for name in dict.fromkeys(one["name"] for one in report["rows"]):
        row = [name]
        for model in models:
            plain, other = (found.get((model, off_grid, name)) for off_grid in (False, True))
            either = plain or other
            row += [f"{either['bits']:.2f}" if either else "", f"{plain['kl']:.4f}" if plain else ""]
            row.append(f"{plain['perplexity_change']:+.1%}" if plain else "")
            row.append(f"{other['kl']:.4f}" if other else "")
        rows.append(row)
    head = [f"{model}: {title}" for model in models for title in ("bits", "KL", "perplexity", "KL off the grid")]
    return markdown(["weights", *head], rows)


def quantize_quality(report: Report) -> str:
    """`quantize_quality.py`: how far each is from the model, and what rounding to nearest of the same format is."""
    nearest = {
        one["name"].removesuffix(" rtn"): one["kl_mean"] for one in report["rows"] if one["name"].endswith(" rtn")
    }
    rows = []
    for one in sorted(shown(report["rows"]), key=lambda one: (-one["bits_per_weight"], one["kl_mean"])):
        scheme, _, method = one["name"].rpartition(" ")
        share = f"{one['kl_mean'] / nearest[scheme]:.2f}" if scheme in nearest and method != "rtn" else ""
        change = f"{one['perplexity'] / one['against_perplexity'] - 1:+.3%}"
        size = [f"{one['bits_per_weight']:.2f}", f"{one['bytes'] / 1e6:.1f}" if "bytes" in one else ""]
        rows.append([one["name"], *size, f"{one['kl_mean']:.5f}", share, f"{one['top1']:.1%}", change])
    head = ["weights, method", "bits in all", "MB", "KL divergence", "of rtn's", "same top token", "perplexity"]
    return markdown(head, rows)


def quantize_methods(report: Report) -> str:
    """`quantize_quality.py`: the KL divergence alone, a column for each method."""
    schemes: dict[str, dict[str, str]] = {}
    for one in report["rows"]:
        scheme, _, method = one["name"].rpartition(" ")
        schemes.setdefault(scheme, {})[method] = f"{one['kl_mean']:.4f}"
    methods = ("rtn", "gptq", "gptaq")
    rows = [[scheme, *(schemes[scheme][method] for method in methods)] for scheme in sorted(schemes)]
    return markdown(["weights", *methods], rows)


CHOICES = (  # what a user wants, the options for it, the row that shows what it keeps, and that of its speed
    ("the same model, half the memory", "`--scheme int8`", "int8 rtn", "int8"),
    ("a third of the memory, at once", "`--scheme int4`", "int4 g32 rtn", "int4 g32"),
    ("a third of the memory, little loss", "`--scheme int4 --method gptq`", "int4 g32 gptq", "int4 g32"),
    ("the smallest file", "`--scheme int3 --group-size 128 --method gptq --gptaq`", "int3 g128 gptaq", "int3 g128"),
)


def quantize_choice(report: Report) -> str:
    """Which scheme and method to take. gptaq takes gptq's time as often as for the small model."""
    known = {one["name"]: one for one in report["rows"]}
    speeds = {one["name"]: one["speedup"] for one in committed("format-speeds")["rows"]}
    large = {one["method"]: one for one in committed("quantize-time")["rows"]}
    minutes = large["gptq"]["seconds"] / 60
    more = known["int4 g64 gptaq"]["seconds"] / known["int4 g64 gptq"]["seconds"]
    times = {"rtn": "seconds", "gptq": f"{minutes:.0f} minutes", "gptaq": f"{minutes * more:.0f} minutes (reckoned)"}
    rows = []
    for want, options, name, speed in CHOICES:
        one, method = known[name], name.rpartition(" ")[2]
        kept = [f"{one['bits_per_weight']:.1f}", f"{one['kl_mean']:.4f}", f"{speeds[speed]:.1f}×"]
        rows.append([want, options, *kept, times[method]])
    head = ["you want", "take", "bits in all", "KL divergence", "decode speed", "1.1 B on two cores"]
    return markdown(head, rows, left=2)


def format_speeds(report: Report) -> str:
    """`format_speeds.py`: what each format gives, and what it costs; llama.cpp's without a prediction."""
    rows = []
    for one in shown_formats(report["rows"]):
        speed = [f"{one['decode_tokens_per_second']:,.0f}", f"{one['speedup']:.2f}×", f"{one['mbu']:.0%}"]
        predicted = one.get("predicted_tokens_per_second")
        share = "" if predicted is None else f"{predicted / one['decode_tokens_per_second']:.2f}"
        size = [f"{one['bits_per_weight']:.2f}", f"{one['bytes_per_token'] / 1e6:.1f}"]
        loss = [f"{one['kl_mean']:.5f}", f"{one['perplexity']:.2f}"]
        rows.append([one["name"], *size, *speed, share, *loss])
    head = [
        "weights",
        "bits in all",
        "MB a token",
        "tokens/s",
        "speed-up",
        "MBU",
        "predicted / measured",
        "KL divergence",
        "perplexity",
    ]
    return markdown(head, rows)


def quantize_memory(report: Report) -> str:
    """`quantize_memory.py`."""
    rows = []
    for one in report["rows"]:
        error, over = one["relative_error"]["mean"], one["quantize"]["over_checkpoint_bytes"]
        size, ratio = f"{one['bytes'] / 1e9:.3f} GB", f"{one['load']['ratio']:.2f}"
        rows.append([one["name"], size, f"{one['seconds']:.0f}", f"{error:.2%}", f"{over / 1e6:.0f} MB", ratio])
    head = ["", "size", "seconds", "relative error", "quantize: over the checkpoint", "load: peak / size"]
    return markdown(head, rows)


def load_memory(report: Report) -> str:
    """`load_memory.py`."""
    rows = []
    for one in report["rows"]:
        size, peak = one["checkpoint_bytes"], one["peak_bytes"] - one["baseline_bytes"]
        cells = [f"{one['dtype']}, {one['shards']} shards", f"{size / 1e9:.2f} GB", f"{peak / 1e9:.2f} GB"]
        rows.append([*cells, f"{one['ratio']:.2f}"])
    return markdown(["checkpoint", "size", "peak above `import torch`", "peak / size"], rows)


def sharing(report: Report) -> str:
    """`sharing.py`: blocks saved by 2, 4 and 6 samples or beams, and the ends with other spreads of the lengths."""
    rows = []
    for one in (one for one in report["rows"] if one["scale"] == 1.0):
        same = [r["saved"] for r in report["rows"] if (r["lengths"], r["kind"]) == (one["lengths"], one["kind"])]
        two, six = ([saved[samples] for saved in same] for samples in ("2", "6"))
        low, high = one["published"]
        found = [f"{value}%" for value in one["saved"].values()]
        ends = f"{min(two)}-{max(two)} to {min(six)}-{max(six)}%"
        rows.append([one["lengths"], one["kind"], *found, ends, f"{low}-{high}%"])
    head = ["lengths", "", "2", "4", "6", "half and 1.5 times the spread", "published, 2 to 6"]
    return markdown(head, rows, left=2)


def cache_formats(report: Report) -> str:
    """`cache_formats.py`."""
    found = {(row["model"], row["kv_cache_dtype"]): row for row in report["quality"]}
    longest = max(report["settings"]["tokens"])
    of_longest = [row for row in report["speed"] if row["tokens"] == longest]
    times = {(row["what"], row["batch"], row["kv_cache_dtype"]): row["milliseconds"] for row in of_longest}
    fit, batches = report["tokens_per_gib"]["llama-7b"], report["settings"]["batches"]
    rows = []
    for cache in fit:
        own = [found[model, cache] for model in ("bfloat16", "bfloat16, outliers")]
        quality = [text for row in own for text in (f"{row['perplexity']:.2f}", f"{row['kl_mean']:.6f}")]
        speed = [f"{times[what, batch, cache]:.2f} ms" for batch in batches for what in ("attention", "step")]
        rows.append(["bfloat16" if cache == "auto" else cache, *quality, *speed, f"{fit[cache]:,}"])
    of_model = ["perplexity", "KL divergence, mean", "perplexity with outliers", "KL divergence"]
    parts = ("attention", "step")
    sequences = [f"{what}, {batch} sequence{'s' * (batch > 1)}" for batch in batches for what in parts]
    return markdown(["cache", *of_model, *sequences, "tokens a GiB"], rows)


def paged_decode(report: Report) -> str:
    """`paged_decode.py`."""
    rows = []
    for one in report["rows"]:
        contiguous, blocks, *small = (f"{one[kind] * 1e3:.2f} ms" for kind in ("contiguous", "blocks", "int8", "int4"))
        ratios = [f"{one[f'{kind}_ratio']:.3f}" for kind in ("int8", "int4")]
        beside = [cell for pair in zip(small, ratios, strict=True) for cell in pair]
        rows.append([one["what"], str(one["batch"]), contiguous, blocks, f"{one['ratio']:.3f}", *beside])
    head = ["", "sequences", "contiguous", "blocks", "blocks / contiguous"]
    return markdown([*head, "int8 blocks", "to bf16's", "int4 blocks", "to bf16's"], rows)


def serve_fairness(report: Report) -> str:
    """`serve_fairness.py`."""
    rows = [
        [f"{one['budget']:,}", *(f"{one[key] * 1e3:.0f} ms" for key in ("token", "pause", "first_token"))]
        for one in report["rows"]
    ]
    head = ["`token_budget`", "between two tokens, before", "longest pause during the prompt", "prompt read after"]
    return markdown(head, rows, left=0)


def serve_latency(report: Report) -> str:
    """`hasten bench serve --rates`."""
    rows = []
    for one in report["summary"]:
        first, each = one["ttft_ms"], one["tpot_ms"]
        rows.append(
            [
                "all at once" if one["rate"] is None else f"{one['rate']:g}",
                f"{one['output_tokens_per_second']:.0f}",
                f"{first['p50']:,.0f} ms ({first['p99']:,.0f})",
                f"{each['p50']:.0f} ms ({each['p99']:.0f})",
                f"{one['goodput_share']:.0%}",
            ]
        )
    head = ["requests/s", "output tokens/s", "TTFT, median (p99)", "TPOT, median (p99)", "goodput"]
    return markdown(head, rows, left=0)


def beside_vllm(report: Report) -> str:
    """`compare_serving.py`: all requests at once, beside vLLM and the bound of the machine."""
    rows = []
    for requests, bound in report["bounds"].items():
        found = report["output_tokens_per_second"][requests]
        cells = [f"{requests} requests", f"{found['vllm']:.1f}"]
        for name, dtype in (("hasten bf16", "bfloat16"), ("hasten int8", "int8")):
            ratio = report["ratios"][f"{name} / vllm at {requests}"]
            cells += [f"{found[name]:.1f}", f"{ratio:.2f}×", f"{bound[dtype]:.0f}"]
        rows.append(cells)
    head = ["output tokens/s", "vLLM, bf16", "hasten, bf16", "ratio", "bound", "hasten, int8", "ratio", "bound"]
    return markdown(head, rows)


def shared_samples(report: Report) -> str:
    """`compare_serving.py`: samples of one prompt that share its blocks, and the same as requests of their own."""
    speeds, kinds = report["output_tokens_per_second"], ("bf16", "int8")
    told = {
        "8 prompts, 4 samples shared": "4 samples of each of 8 prompts",
        "8 prompts, 4 requests each": "32 requests",
    }
    rows = [[text, *(f"{speeds[name][f'hasten {kind}']:.1f}" for kind in kinds)] for name, text in told.items()]
    rows.append(["ratio", *(f"{report['ratios'][f'hasten {kind}: shared / each']:.2f}×" for kind in kinds)])
    return markdown(["output tokens/s", *kinds], rows)


def sparse_perplexity(report: Report) -> str:
    """`sparse_perplexity.py`."""
    rows = []
    for one in report["rows"]:
        cells = [one["name"], f"{one['density']:.0%}", f"{one['perplexity']:.1f}"]
        for part in ("step", "forward"):
            cells += [f"{one[f'{part}_tokens_per_second']:,.0f}", f"{one[f'{part}_speed_over_dense']:.2f}×"]
        rows.append(cells)
    head = ["attention", "blocks", "perplexity", "training, tokens/s", "of dense", "forward, tokens/s", "of dense"]
    return markdown(head, rows)


def sparse_attention(report: Report) -> str:
    """`sparse_attention.py`."""
    rows = []
    for one in report["rows"]:
        cells = [one["name"], f"{one['density']:.1%}"]
        for part in ("forward", "both"):
            cells.append(f"{one[f'{part}_seconds'] * 1e3:.0f} ms")
            cells += [f"{one[f'{part}_over_share_of_{whole}']:.2f}" for whole in ("flash", "dense")]
        rows.append(cells)
    shares = ["÷ d·flash", "÷ d·native"]
    return markdown(["pattern", "blocks, d", "forward", *shares, "with backward", *shares], rows)


def sparse_decode(report: Report) -> str:
    """`sparse_decode.py`."""
    rows = [
        [
            one["name"],
            f"{1e3 * one['step_seconds']:.2f}",
            f"{1e3 * one['attention_seconds']:.2f}",
            f"{one['of_dense']:.2f}",
        ]
        for one in report["rows"]
    ]
    return markdown(["pattern", "ms a token", "more than after 64 tokens, ms", "of dense"], rows)


def race(report: Report) -> str:
    """`hasten bench race`: where each contestant stands after the last round."""
    per_step = report["settings"]["batch_size"] * report["settings"]["sequence_length"]
    rows = []
    for one in report["rows"]:
        last = one["rounds"][-1]
        step = f"{1e3 * per_step / last['tokens_per_second']:,.0f}"
        seconds, loss = f"{last['training_seconds']:.0f}", f"{last['validation_loss']:.3f}"
        rows.append([f"`{one['name']}`", f"{last['step']:.0f}", seconds, step, loss])
    return markdown(["rung", "steps", "seconds", "ms a step", "validation loss"], rows)


def largest_batch(report: Report) -> str:
    """`hasten bench batch`."""
    memory, tokens = report["settings"]["memory_bytes"] / 2**30, report["settings"]["sequence_length"]
    rows = [[f"`{one['name']}`", str(one["largest_batch"])] for one in report["rows"]]
    return markdown(["rung", f"rows of {tokens:,} tokens in {memory:g} GiB"], rows)


def int3_loops(report: Report) -> str:
    """`int3_loops.py`: the loops' rates, and what a kernel would gain."""
    gains = list(report["loops"][0]["pays"])
    rows = []
    for one in report["loops"]:
        speeds = [f"{one[f'{kind}_gb_per_second']:.0f} GB/s" for kind in ("int4", "int3")]
        rows.append([f"{one['isa']}, {one['rows']} row{'s' * (one['rows'] > 1)}", *speeds])
        rows[-1] += [f"{one['pays'][gain]:.2f}×" for gain in gains]
    return markdown(["", "int4", "int3", *(f"int3's gain at {gain} GB/s" for gain in gains)], rows)


RENDERERS: dict[str, Callable[[Report], str]] = {
    "attention-growth": attention_growth,
    "precision-bytes": lambda report: markdown(*precision_bytes.table(report)),
    "zero-bytes": lambda report: markdown(*zero.table(report), left=2),
    "zero-bytes offload": lambda report: markdown(*zero.copies_table(report)),
    "attention-bfloat16": attention_speed,
    "attention-bfloat16-amx": attention_speed,
    "attention-errors": attention_errors,
    "attention-errors scaling": attention_scaling,
    "attention-errors overflow": attention_overflow,
    "linear": linear_products,
    "linear-amx": linear_products,
    "linear int4": int4_products,
    "linear-amx int4": int4_products,
    **dict.fromkeys(("weight-formats", "weight-formats-avx2"), weight_formats),
    **dict.fromkeys(("prefill-attention", "prefill-attention-avx512", "prefill-attention-amx"), prefill_attention),
    "demo-ladder": demo_ladder,
    "quantize-perplexity": quantize_perplexity,
    "real-precision": real_precision,
    "quantize-quality choice": quantize_choice,
    "quantize-quality": quantize_quality,
    "quantize-quality-h100": quantize_methods,
    "format-speeds": format_speeds,
    "int3-loops": int3_loops,
    "quantize-memory": quantize_memory,
    "load-memory": load_memory,
    "sharing": sharing,
    "cache-formats": cache_formats,
    "paged-decode": paged_decode,
    "serve-fairness": serve_fairness,
    "serve-latency-llama-1.1b-int8": serve_latency,
    "compare-serving": beside_vllm,
    "compare-serving samples": shared_samples,
    "sparse-perplexity": sparse_perplexity,
    "sparse-attention": sparse_attention,
    "sparse-decode": sparse_decode,
    "race-character": race,
    "largest-batch-character": largest_batch,
    "largest-batch-gpt2-124m": largest_batch,
}
