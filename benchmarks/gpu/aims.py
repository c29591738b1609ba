"""What the measurement was to reach, beside what it reached. Aims were set for an H100; ratios hold for any card."""

import statistics
from collections.abc import Iterator

from gpu.report import MODELS, Results, Table, copy_rate, engine_rate, every, median, where

FORMATS = ("bf16", "int8", "int4")
Aim = tuple[str, float | None, float, str]  # what, the figure, its aim, and "≥" or "≤"


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def _decode(results: Results) -> Iterator[Aim]:
    queued = {key: median(results, f"hasten-{key}", "measure", "queued") for key in MODELS}
    for format, rate, of_peer in (("bf16", 200, 1.19), ("int8", 300, 1.2), ("int4", 420, 1.38)):
        name, job = MODELS[f"7b-{format}"], f"gptfast-7b-{format}"
        source, mark = where(results, job)
        peer = median(source, job, "measure", "queued")
        yield f"{name}, one stream, tokens/s", queued[f"7b-{format}"], rate, "≥"
        yield f"{name}, beside gpt-fast{mark}", _over(queued[f"7b-{format}"], peer), of_peer, "≥"
    read = median(results, "hasten-7b-bf16", "measure", "bytes_per_token") or float("nan")
    yield "7B bf16, of the limit", _over(queued["7b-bf16"], copy_rate(results) / read), 0.94, "≥"
    yield "1.1B bf16, tokens/s", queued["1b-bf16"], 800, "≥"
    yield "1.1B int4, tokens/s", queued["1b-int4"], 1400, "≥"
    for format in FORMATS:
        user = [one["decode"] for one in every(results, f"hasten-7b-{format}", "user", "second")]
        found = _over(statistics.median(user), queued[f"7b-{format}"]) if user else None
        yield f"`hasten.generate`, 7B {format}, of the queued rate", found, 0.95, "≥"


def _serving(results: Results) -> Iterator[Aim]:
    def rate(job: str, count: int, key: str = "decode_tokens_per_s") -> float | None:
        return median(results, job, f"measure {count}", key)

    for count, share in ((1, 0.95), (64, 0.75), (256, 0.75)):
        static = rate("static-bf16", count)
        yield (
            f"engine, bf16, {count} at once, of the static step",
            _over(rate("engine-bf16", count), static),
            share,
            "≥",
        )
        whole = rate("engine-bf16", count, "whole_tokens_per_s")
        yield f"its whole run, {count} at once, of the static step", _over(whole, static), 0.6, "≥"
    for format in FORMATS[1:]:
        for count in (1, 64, 256):
            (own, mark), (plain, _) = (engine_rate(results, one, count) for one in (format, "bf16"))
            yield f"engine, {format} beside bf16, {count} at once{mark}", _over(own, plain), 1.0, "≥"


def _products(results: Results) -> Iterator[Aim]:
    """Microseconds of [n, k, format, rows, µs, GB/s]."""
    found = every(results, "products", "measure", "rows")
    times = {(n, k, format, rows): us for n, k, format, rows, us, *_ in (found[-1] if found else ()) if us}
    rates = {tuple(row[:4]): row[5] for row in (found[-1] if found else ()) if row[5]}
    sizes = list(dict.fromkeys(key[:2] for key in times))
    for format, limit, share, bits in (("int8", 9, 0.8, 8), ("int4-g32", 7, 0.65, 4.5)):
        yield f"{format}, 4096 × 4096, one row, µs", times.get((4096, 4096, format, 1)), limit, "≤"
        large = [size for size in sizes if size[0] * size[1] * bits / 8 >= 32e6]
        slowest = min((rates[*size, format, 1] for size in large if (*size, format, 1) in rates), default=None)
        found = _over(slowest, copy_rate(results) / 1e9)
        yield f"{format}, matrices of 32 MB and more, of the bandwidth, the least", found, share, "≥"
        for rows, aim, beside in ((16, 1.3, (format, 1)), (64, 1.0, ("bf16", 64)), (256, 1.0, ("bf16", 256))):
            ratios = [_over(times.get((*size, format, rows)), times.get((*size, *beside))) for size in sizes]
            most = max((one for one in ratios if one), default=None)
            other = "one row's" if beside[1] == 1 else "bf16's"
            yield f"{format}, {rows} rows, of {other} time, the most", most, aim, "≤"


def _training(results: Results) -> Iterator[Aim]:
    def beside(what: str, name: str, peer: str, key: str) -> tuple[str, float | None]:
        source, mark = where(results, peer)
        return f"{what}{mark}", _over(median(results, name, "measure", key), median(source, peer, "measure", key))

    for rows, memory in ((12, 0.75), (32, 0.65)):
        pair = f"hasten-{rows}", f"nanogpt-{rows}"
        yield *beside(f"GPT-2, {rows} rows, speed beside nanoGPT", *pair, "tokens_per_s"), 1.05, "≥"
        yield *beside(f"GPT-2, {rows} rows, its memory", *pair, "peak_gb"), memory, "≤"
    yield "GPT-2, launches a step", median(results, "hasten-12", "profile", "launches"), 544, "≤"
    fp8 = ("GPT-2, FP8, 32 rows, beside nanoGPT", "hasten-32-fp8", "nanogpt-32")
    yield *beside(*fp8, "tokens_per_s"), 1.15, "≥"
    wide = ("2,048 wide, FP8, beside nanoGPT", "hasten-wide-fp8", "nanogpt-wide")
    yield *beside(*wide, "tokens_per_s"), 1.3, "≥"


def _attention(results: Results) -> Iterator[Aim]:
    found = every(results, "attention", "measure", "rows")
    for row in found[-1] if found else ():
        if (row["head_dim"], row["tokens"], row["causal"]) == (128, 8192, True):
            ours, cudnn = row["tflops"]["flash-triton"], row["tflops"]["cudnn"]
            if isinstance(ours, list) and isinstance(cudnn, list):
                yield "our attention beside cuDNN, D128, 8k, forward", ours[0] / cudnn[0], 0.85, "≥"
                yield "the same with backward", ours[1] / cudnn[1], 0.85, "≥"


def aims(results: Results) -> Table:
    """Each aim, the figure, and whether it was met."""
    rows = []
    for part in (_decode, _serving, _products, _training, _attention):
        for what, value, aim, sign in part(results):
            if value is not None:
                met = value >= aim if sign == "≥" else value <= aim
                style = ",.0f" if aim > 20 else ".1f" if aim > 2 else ".2f"
                rows.append([what, f"{sign} {aim:,}", format(value, style), "yes" if met else "**no**"])
    return ["what", "aim", "measured", "met"], rows
