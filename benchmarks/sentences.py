"""The README's sentences that are made of results: a report in, one paragraph out."""

import re
from textwrap import fill
from typing import Any

from gpu.report import every, median, ratio, shown, where


def paragraph(text: str) -> str:
    """The text in lines of at most 120 characters."""
    return fill(text, 120, break_on_hyphens=False, break_long_words=False)


def gpu(report: dict[str, Any]) -> str:
    """`gpu/report.py`. †: the peer's figure is of the earlier run."""
    results = report["results"]
    keys = ("7b-bf16", "7b-int8", "7b-int4")
    ours = [median(results, f"hasten-{key}", "measure", "queued") for key in keys]
    sources = [where(results, f"gptfast-{key}") for key in keys]
    theirs = [
        median(source, f"gptfast-{key}", "measure", "queued") for key, (source, _) in zip(keys, sources, strict=True)
    ]
    beside = [ratio(own, their) + mark.strip() for own, their, (_, mark) in zip(ours, theirs, sources, strict=True)]
    slow = theirs[0] and theirs[1] and theirs[1] < theirs[0]  # it reads half the bytes
    doubt = " (whose int8 was slower than its bf16 in this run)" if slow else ""
    source, mark = where(results, "nanogpt-12")
    trainers = (results, "hasten-12"), (source, "nanogpt-12")
    speeds = (median(at, job, "measure", "tokens_per_s") for at, job in trainers)
    peaks = (max(every(at, job, "measure", "peak_gb")) for at, job in trainers)
    card = results["run"]["card"].partition(",")[0].removeprefix("NVIDIA ")
    return paragraph(
        f"On one {card} it decodes a 7 B model at {' / '.join(map(shown, ours))} tokens/s in bf16 / int8 / int4, which "
        f"is {' / '.join(beside)} times the speed of gpt-fast beside it{doubt}, and trains GPT-2 124M at "
        f"{ratio(*speeds)}{mark} times nanoGPT's speed in {ratio(*peaks)} of its memory: "
        "[docs/results/gpu.md](docs/results/gpu.md) has all of it, with the aims that were missed."
    )


def real_files(report: dict[str, Any]) -> str:
    """`real_files.py`: the published files beside a peer."""
    pairs = report["pairs"]
    formats = (re.findall(r"Q\w+", pair["model"])[-1] for pair in pairs)
    names = " and ".join(f"{pair['hasten']} ({format})" for pair, format in zip(pairs, formats, strict=True))
    speeds = " and ".join(f"{pair['median']['hasten']['decode']:.0f}" for pair in pairs)
    decode, prefill = (" and ".join(f"{pair['ratio'][key]:.2f}" for pair in pairs) for key in ("decode", "prefill"))
    isa = "held to AVX2, as the peer's build is" if report["hasten"]["avx2_switch"] else report["hasten"]["isa"]
    return paragraph(
        f"On {report['threads']} cores of an {report['machine']['cpu']} ({isa}) it decodes {names} as they are "
        f"published at {speeds} tokens/s, {decode} times {pairs[0]['peer']}'s speed, and takes prompts in {prefill} "
        f"times as fast: [docs/results/kernels.md](docs/results/kernels.md#published-files)."
    )
