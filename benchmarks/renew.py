"""Measure the published results again, those that most readers see first, and write the pages' tables (`make bench`).

    python benchmarks/renew.py                      # all that this machine can measure: a night on two quiet cores
    python benchmarks/renew.py --outdated           # those whose code has changed since (fresh.py)
    python benchmarks/renew.py NAME … [--suffix amx]      # some of them; as another machine's results

A failure leaves the old figures and goes on with the next result. The same command continues after an interruption:
runs/renewed.json has what was measured with the code of today.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import fresh
import tables

from hasten.machine.files import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
DONE = ROOT / "runs" / "renewed.json"
LONGEST = 3 * 3600  # seconds of one result
AVX2 = "benchmarks/as_avx2.sh "
LLAMA = "hasten bench generate --shape llama-1.1b --dtype bfloat16 --prompt-tokens 512 --new-tokens 64"
PAIR = "--model runs/code-45m/model --draft runs/code-4m/model"
# Names of results -> how they are measured. Added are the option that names the file and, after --picture, the picture.
# The others are in ELSEWHERE.
COMMANDS: dict[str, str] = {
    "generate-smollm2-135m": "hasten bench generate smollm2-135m --prompt-tokens 256 --new-tokens 64 --rounds 3 "
    "--gptq runs/smollm2-gptq --gptq-samples 32 --picture",
    "real-files": f"{AVX2}benchmarks/compare.py files --rounds 5",
    "real-files-ik": f"{AVX2}benchmarks/compare.py files --beside ik_llama.cpp --rounds 5",
    "real-files-uniform": "benchmarks/compare.py files --beside uniform",
    # of the guides
    "attention-bfloat16": "hasten bench attention --dtype bfloat16 --kernels native,flash "
    "--lengths 1024 2048 4096 8192 --rounds 5",
    "quantize-quality": "benchmarks/quantization.py quality --model runs/code-25m/model --kilobytes 100 "
    "--samples 64 --picture",
    "zero-bytes": "benchmarks/zero.py bytes",
    "precision-bytes": "benchmarks/precision.py bytes",
    "replica-kills": "benchmarks/replicas.py kills --concurrency 6",
    "replica-routing": "benchmarks/replica_routing.py",
    # generation
    "generate-gemma3-270m": "hasten bench generate gemma3-270m --prompt-tokens 256 --new-tokens 64 --rounds 3 "
    "--rungs static-cache,native-bf16,gguf-file,native-int8,int8-weight-only,native-int4,speculation",
    "generate-smollm2-135m-avx2": f"{AVX2}hasten bench generate smollm2-135m --prompt-tokens 256 --new-tokens 64 "
    "--rounds 3",
    "generate-llama-1.1b": LLAMA,
    "generate-llama-120m": "hasten bench generate --shape llama-120m --dtype bfloat16 --prompt-tokens 512 "
    "--new-tokens 64",
    "generate-qwen3.5-0.8b": "hasten bench generate --shape qwen3.5-0.8b --dtype bfloat16 --prompt-tokens 512 "
    "--new-tokens 64 --rungs static-cache,native-bf16,native-int8,native-int4",
    "batches-llama-1.1b": f"{LLAMA} --rungs native-bf16,native-int8,native-int4 --batches 1,8 --contexts 16,2048",
    "batches-llama-1.1b-avx2": f"{AVX2}{LLAMA} --rungs native-bf16,native-int8,native-int4 --batches 1,8 "
    "--contexts 16,2048 --rounds 3",
    "compiled-llama-1.1b": f"{LLAMA} --rungs static-cache-compiled,static-cache-compiled-int8,"
    "static-cache-compiled-int4",
    "heads-llama-120m": "hasten bench heads --shape llama-120m --dtype bfloat16 --prompt-tokens 2048 --new-tokens 64",
    "token-overhead": "benchmarks/profiling.py tokens",
    "start": "benchmarks/profiling.py start --models smollm2-135m gemma3-270m",
    "busy": "benchmarks/busy.py busy --rounds 10 --seconds 2 --formats bf16 int8 int4",
    "busy-follow": "benchmarks/busy.py follow",
    "busy-peers": "benchmarks/busy.py peers",
    # training
    "train-gpt2-124m": "hasten bench train --shape gpt2-124m --batch-size 2 --sequence-length 256 --steps 2 --picture",
    "train-character": "hasten bench train --recipe shakespeare-char --batch-size 12 --steps 2 --rounds 3 --picture",
    "race-character": "hasten bench race --batch-size 16 --seconds 8 --rounds 4 --steps 400 --picture",
    "largest-batch-character": "hasten bench batch --recipe shakespeare-char --memory 2 --picture",
    "largest-batch-gpt2-124m": "hasten bench batch --shape gpt2-124m --memory 4 --sequence-length 1024 --picture",
    "layer-dropping-gpt2": "hasten bench train --shape gpt2-124m --rungs native-kernels,layer-drop --batch-size 2 "
    "--sequence-length 256 --steps 4 --rounds 3",
    "layer-dropping": "benchmarks/training_races.py dropping --rates 1 2 --repetitions 3 --picture",
    "article-rungs": "benchmarks/training_figures.py rungs --steps 1 --picture",
    "article-reasons": "benchmarks/training_figures.py reasons",
    "article-batches": "benchmarks/training_races.py batches --memory 1 --update-rows 60 --rounds 5 --seconds 12 "
    "--steps 24 --picture",
    "train-demo-ranks": "hasten bench train --recipe demo --processes 2 --steps 2",
    "scaling": "benchmarks/zero.py scaling",
    "zero-start": "benchmarks/zero.py start",
    "zero-profile": "benchmarks/parallel.py zero",
    "lora": "benchmarks/finetuning.py lora --threads 1",
    "qat": "benchmarks/qat.py --model runs/code-25m/model --samples 32 --work runs/qat",
    "qat-128": "benchmarks/qat.py --model runs/code-25m/model --samples 128 --seeds 0 --work runs/qat-128 "
    "--cases 'int3 g32'",
    "qat-bits": "benchmarks/qat.py --model runs/qat-base/model --recipe demo --steps 150 --learning-rate 1e-3 "
    "--taught-rate 1e-3 --seeds 0 --cases 'int2 g32' 'int3 g32' --trained qat --methods rtn gptq --samples 32 "
    "--length 256 --kilobytes 100 --threads 1 --no-compile --work runs/qat-bits",
    "onebit-steps": "benchmarks/equal_steps.py onebit --only adamw 'onebit-adam 16.4%' 'onebit-adam 50.0%' "
    "'onebit-adam 16.4% exact'",
    "layer-dropping-steps": "benchmarks/equal_steps.py layer-dropping --rates 1",
    "layer-dropping-steps-43m": "benchmarks/equal_steps.py layer-dropping --rates 1 --hidden-size 512 "
    "--vocab-size 8192 --context 256 --steps 240 --learning-rate 1e-3 --precision auto "
    "--only 'no dropping, rate × 1' 'dropping, rate × 1'",
    "onebit-steps-long": "benchmarks/equal_steps.py onebit --steps 12200 --only adamw 'onebit-adam 16.4%'",
    "checkpoint-memory": "benchmarks/memory.py checkpoint",
    "kill-ranks": "benchmarks/soak.py ranks",
    # kernels
    "experts": f"{AVX2}benchmarks/compare.py shape --kinds BF16 Q8_0 Q4_0",
    "experts-ik": "benchmarks/compare.py shape --beside ik_llama.cpp --kinds Q8_0 Q4_0",
    "shape-dense": "benchmarks/compare.py shape --shape dense",
    "shape-hybrid": "benchmarks/compare.py shape --shape hybrid --rounds 2",
    "linear": "benchmarks/products.py linear",
    "weight-formats": "benchmarks/products.py formats",
    "weight-formats-avx2": f"{AVX2}benchmarks/products.py formats",
    "eval-rate-avx2": f"{AVX2}benchmarks/products.py eval",
    "prefill-attention": "benchmarks/attention.py prefill",
    "decode-attention": "benchmarks/attention.py decode",
    "attention-errors": "benchmarks/attention.py errors",
    "attention-growth": "hasten bench attention --rounds 3 --picture",
    "paged-decode": "benchmarks/cache.py paged-decode",
    "sparse-decode": "benchmarks/cache.py sparse-decode",
    "cache-formats": "benchmarks/cache.py formats --model runs/code-25m/model --recipe code-25m --kilobytes 100 "
    "--layers 6",
    "sparse-attention": "benchmarks/sparse.py attention",
    "sparse-perplexity": "benchmarks/sparse.py perplexity",
    # quantization
    "format-speeds": "benchmarks/speeds.py formats --model runs/code-25m/model --gptq runs/code-25m-gptq --rounds 12 "
    "--text runs/held-out.jsonl --picture",
    "quantize-memory": "benchmarks/memory.py quantize",
    "quantize-rounding": "benchmarks/quantize_versions.py rounding",
    "quantize-perplexity": "benchmarks/precision.py schemes",
    "real-precision": "benchmarks/precision.py published --samples 64 --length 512",
    "load-memory": "benchmarks/memory.py load",
    # serving, drafts, plans
    "serve-fairness": "benchmarks/serving.py fairness",
    "serve-restart": "benchmarks/serving.py restart",
    "serve-restart-1.1b": "benchmarks/serving.py restart --model llama-1.1b",
    "serve-soak": "benchmarks/soak.py server",
    "replica-throughput": "benchmarks/replicas.py throughput",
    "sharing": "benchmarks/sharing.py blocks",
    "speculation": f"benchmarks/speculation.py drafts {PAIR} --parts texts edits --prompts 4 --new-tokens 200 "
    "--rounds 3 --picture",
    "speculation-server": f"benchmarks/speculation.py drafts {PAIR} --parts many --rounds 2",
    "speculation-real": "benchmarks/speculation.py drafts --model smollm2-135m --parts kinds "
    "--weights bfloat16 file --own-layers 10 --prompts 2 --prompt-tokens 150 --new-tokens 96 --rounds 3",
    "shared-noise": f"benchmarks/draft_parts.py noise {PAIR}",
    "trees": f"benchmarks/draft_parts.py trees {PAIR}",
    "rows": "benchmarks/draft_parts.py rows --rounds 30",
    "rows-avx2": f"{AVX2}benchmarks/draft_parts.py rows --rounds 12",
    "draws": "benchmarks/draft_parts.py draws",
    "tensor-parallel": "benchmarks/parallel.py tensor --layers 22 --picture",
    "plan": "benchmarks/plan.py",
    "plan-ranks": "benchmarks/plan_ranks.py",
    "plan-training": "benchmarks/plan_training.py",
    "plan-70b": "hasten plan llama-70b --device a100-80gb --gpus 8 --goal latency --batch-size 1 --length 256 "
    "--new-tokens 200",
    # on no page
    "decode-overhead": "benchmarks/decode_overhead.py",
    "profile-overhead": "benchmarks/profiling.py overhead --model runs/demo/model",
    "grammar-pause": "benchmarks/soak.py grammar --model runs/demo/model",
}
# Names of results -> why `renew` leaves them out; the first that fits.
ELSEWHERE = {
    "gpu*": "needs a GPU: docs/results/gpu.md",
    "*-h100": "needs a GPU: docs/results/gpu.md",
    "*-amx": "needs a processor with AMX: run it there, with --suffix amx",
    "prefill-attention-avx512": "is beside the figures with AMX, on that processor",
    "versions-*": "compares two commits of its time",
    "mutants": "needs cosmic-ray, and its survivors a reader: docs/results/mutants.md",
    "compare*": "needs the other programs and their files: docs/in-depth/peers.md",
    "train-nanogpt*": "needs a checkout of nanoGPT: docs/results/training.md",
    "llama-cpp-drafts": "needs a build of llama.cpp: docs/results/speculation.md",
    "sharing-speed": "needs llama.cpp's Python package: docs/results/paged-cache.md",
    "*vllm*": "needs vLLM: docs/results/serving.md",
    "slow-link*": "needs root and minutes of a network of its own: docs/in-depth/slow-links.md",
    "profile-demo-*": "is copied from the folder that hasten profile writes",
    "demo-*": "is a run of hasten demo: docs/results/ladder.md",
    "wheel": "needs a wheel and the Pythons that it is tried with",
    "generate-llama-1.1b-ranks": "needs a folder of 1.1 B weights: docs/results/parallel-inference.md",
    "batches-llama-1.1b-avx2-fast": "is the run in which the memory was fast",
    "serve-latency-*": "needs a server of 1.1 B weights: docs/results/serving.md",
    "serve-start": "needs folders of several models: benchmarks/serving.py start",
    "all-together": "needs a folder by gptq and a draft: docs/results/speculation.md",
    "quantize-gptq-1.1b": "is one run of hasten quantize, 40 minutes",
    "quantize-time": "was measured on another processor: benchmarks/memory.py quantize-time",
    "quantize-quality-cpu": "was measured on another processor: benchmarks/quantization.py quality",
    "format-pair": "needs a folder by gptq: benchmarks/quantization.py pair",
    "decode-faces": "is the second half of decode-overhead",
    "first-token": "needs a folder of 1.1 B weights",
}


def order() -> list[str]:
    """The names of COMMANDS: the README's, the guides', those of other pages, and those of no page."""
    texts = [(page, page.read_text()) for page in tables.PAGES]

    def place(name: str) -> int:
        shown = re.compile(rf"table: {re.escape(name)} |results/{re.escape(name)}\.(?:json|png)")
        own = [page.relative_to(ROOT).parts for page, text in texts if shown.search(text)]
        return min((min(len(parts), 3) for parts in own), default=4)

    return sorted(COMMANDS, key=place)


def command_of(name: str, suffix: str = "") -> list[str]:
    """The words of a result's command, with the names of its files."""
    wrapper, words = [], shlex.split(COMMANDS[name])
    if words[0] == AVX2.strip():
        wrapper, words = words[:1], words[1:]
    place = f"benchmarks/results/{name}-{suffix}" if suffix else f"benchmarks/results/{name}"
    if words[-1] == "--picture":
        words.append(f"{place}.png")
    ladder = words[0] == "hasten" or words[1:2] in (["rungs"], ["batches"], ["dropping"])
    words += ["--json" if ladder else "--output", f"{place}.json"]
    if words[0] == "hasten":
        words[:1] = ["-m", "hasten"]
    return [*wrapper, sys.executable, *words]


def missing(name: str) -> str:
    """What the command needs that is not here, or ""."""
    found = [word for word in shlex.split(COMMANDS[name]) if word.startswith("runs/") and not (ROOT / word).exists()]
    made = ("runs/qat", "runs/qat-128", "runs/qat-bits")  # which the command makes
    gone = [word for word in found if word not in made]
    return f"{' and '.join(gone)} not there (make pair, make demo or the result's page makes it)" if gone else ""


def renew(name: str, suffix: str = "") -> int:
    """Measure one result; its exit status. Where that is not 0 the old files are back."""
    command = command_of(name, suffix)
    files = [ROOT / word for word in command if word.startswith("benchmarks/results/")]
    before = {path: path.read_bytes() for path in files if path.exists()}
    status: int | None = None
    print(" ".join(command), file=sys.stderr, flush=True)
    begun = time.monotonic()
    try:
        status = subprocess.run(command, cwd=ROOT, check=False, timeout=LONGEST).returncode
    except subprocess.TimeoutExpired:
        status = 124
    finally:
        if status != 0:  # also where it was interrupted
            for path in files:
                path.unlink(missing_ok=True)
            for path, content in before.items():
                path.write_bytes(content)
    print(f"{name}: {time.monotonic() - begun:.0f} s, exit status {status}\n", file=sys.stderr, flush=True)
    return status


def main() -> None:
    """Measure, with a line for each result that was left out or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)}; all by default")
    parser.add_argument("--outdated", action="store_true", help="only those whose code has changed since")
    parser.add_argument("--list", action="store_true", help="measure nothing; print what would be, and why not")
    parser.add_argument("--suffix", default="", help="after the names: another machine's results")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in COMMANDS]:
        raise SystemExit(f"no command measures {unknown[0]}: it {reason_of(unknown[0]) or 'is no result'}")
    names = [name for name in order() if name in (given.names or COMMANDS)]
    if given.outdated:
        old = {name for name, _, _ in fresh.outdated()}
        names = [name for name in names if name in old or not (RESULTS / f"{name}.json").exists()]
    done: dict[str, Any] = json.loads(DONE.read_text()) if DONE.exists() else {}
    failed = []
    for name in names:
        code, key = fresh.today(name), f"{name}-{given.suffix}" if given.suffix else name
        reason = "measured with this code" if done.get(key) == code and not given.names else missing(name)
        if reason or given.list:
            print(f"{name}: {reason or ' '.join(command_of(name, given.suffix))}", flush=True)
        elif renew(name, given.suffix):
            failed.append(name)
        else:
            done[key] = code
            DONE.parent.mkdir(exist_ok=True)
            write_json(DONE, done)
    if not given.list:
        subprocess.run([sys.executable, "benchmarks/tables.py"], cwd=ROOT, check=True)
    if failed:
        raise SystemExit(f"failed, with the old figures kept: {', '.join(failed)}")


def reason_of(name: str) -> str:
    """Why a result is not renewed, or ""."""
    return next((why for pattern, why in ELSEWHERE.items() if fnmatch(name, pattern)), "")


if __name__ == "__main__":
    main()
