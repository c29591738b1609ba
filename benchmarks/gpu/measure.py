"""Measures hasten on one GPU beside its peers, within a budget of seconds, and runs the tests that need a GPU.

    python benchmarks/gpu/measure.py --out OUT --budget 480 --peers PEERS --wheels WHEELS
    python benchmarks/gpu/measure.py --out OUT --budget 150 --tests-only [--resume EARLIER/tests.jsonl]

The tests run beside the preparing of jobs, and alone when all is measured. OUT gets results.json
(written after every number), tests.jsonl, tables.txt, pytest.txt and the ends of all logs. PEERS, if given, has the
model files of gpt-fast (`gptfast-sdpa`: generate.py, model.py, quantize.py of commit 32971d3) and nanoGPT
(`nanogpt`: model.py of the head; `nanogpt-b3c17c6`, `nanogpt-77e7e04`). WHEELS, if given, are installed beside the
machine's packages. Scratch files go to $TMPDIR. `--device cpu --tiny` tries every job on a CPU.
"""

import argparse
import atexit
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from gpu.commands import Commands
from gpu.gpu_tests import LOG, ROOT, GpuTests
from gpu.harness import Background, Job, Run, measure, prepare
from gpu.plan import JOBS, PHASES, Phase
from gpu.report import tables

MARGIN = 6.0  # seconds at the end, for the tables
FOR_TESTS = 45.0  # and before them for the tests, which then have the whole machine
RESTART = 40.0  # seconds left, from which on the tests gain by starting again with more workers


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=480, help="seconds, all together")
    parser.add_argument("--peers", type=Path, help="the folder of the peers' model files")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels that the machine lacks")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the script")
    parser.add_argument("--only", default="", help="jobs whose names contain one of these, by commas")
    parser.add_argument("--memory", type=float, help="GB of the GPU to plan with (its own, if not given)")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2)), help="jobs preparing at a time")
    parser.add_argument("--test-workers", type=int, default=max(1, (os.cpu_count() or 2) * 3 // 4))
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--tests-only", action="store_true", help="the tests with the whole machine, and no job")
    parser.add_argument("--tests-first", default="", help="tests whose names contain one of these, by commas, begin")
    parser.add_argument(
        "--resume", type=Path, help="tests.jsonl of an earlier run: what passed there does not run again"
    )
    parser.add_argument("--no-commands", action="store_true")
    return parser.parse_args()


def environment(options: argparse.Namespace, scratch: Path, until: float) -> dict[str, str]:
    """What every process gets: the code's path, caches of compiled kernels that all share, and the jobs' settings."""
    site = scratch / "site"
    (site / "hasten-0.dist-info").mkdir(parents=True, exist_ok=True)
    (site / "hasten-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: hasten\nVersion: 0\n")
    if options.wheels:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile"]
        command += ["--no-cache-dir", "--upgrade", "--target", str(site), *map(str, options.wheels.glob("*.whl"))]
        subprocess.run(command, check=False)
    places = [ROOT / "src", ROOT / "benchmarks", site]
    own = {
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRITON_CACHE_DIR": str(scratch / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "OMP_NUM_THREADS": "2",
        "TEARDOWN_CUPTI": "0",  # profiling a process that has captured graphs
        "DISABLE_CUPTI_LAZY_REINIT": "1",
        "GPU_UNTIL": str(until),
        "GPU_DEVICE": options.device,
        "GPU_TINY": "1" if options.tiny else "",
        "GPU_TESTS_FIRST": options.tests_first,
        "GPU_PEERS": str(options.peers.resolve()) if options.peers else "",
    }
    return os.environ | own


def card() -> tuple[str, float]:
    """The GPU's name, clocks and power limit as nvidia-smi has them, and its GB."""
    asked = "name,driver_version,clocks.sm,clocks.mem,power.limit,temperature.gpu,memory.total"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits"]
    line = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return line, float(line.rpartition(",")[2]) * 1.048576e-3


def wanted(phase: Phase, options: argparse.Namespace) -> list[str]:
    """The phase's jobs that were asked for and whose peers are there."""
    parts = options.only.split(",")
    found = []
    for name in phase.names():
        needs = JOBS[name].needs
        if any(part in name for part in parts) and (not needs or (options.peers and (options.peers / needs).exists())):
            found.append(name)
    return found


def work(run: Run, options: argparse.Namespace, memory: float) -> None:
    beside: list[Background] = []
    tests = commands = None
    held = 0.0  # GB of what runs beside
    if not options.no_tests and options.device != "cpu":
        workers = max(1, options.test_workers // 3)  # with all, gpt-fast's models were not compiled in time
        tests = GpuTests(run, workers, beside=True)
        beside.append(tests)
        held = 1.2 * workers
    jobs: dict[str, Job] = {}
    for number, phase in enumerate(PHASES):
        names = wanted(phase, options)
        jobs |= {name: Job(run, name, JOBS[name]) for name in names if name not in jobs}
        needed = {name for group in phase.groups for name in group.names} & set(names)
        if number == 1 and not options.no_commands:
            commands = Commands(run, options.device)
            beside.append(commands)
        for one in beside:
            one.resume()
        until = phase.prepare * run.budget
        for job in jobs.values():
            job.signal(signal.SIGCONT)
        here = [jobs[name] for name in names]
        prepare(run, here, needed=needed, until=until, limit_gb=memory - held, most=options.jobs)
        if number == len(PHASES) - 1 and commands is not None:
            commands.finish(max(10.0, until - run.now()))
        for one in beside:
            one.pause()
        for job in jobs.values():
            job.signal(signal.SIGSTOP)
        measure(run, phase.groups, jobs, until=min(phase.measure * run.budget, run.budget - MARGIN))
    if tests is not None:
        tests.finish(0 if run.left() > RESTART else run.left())
        if run.left() > RESTART:  # now with the whole machine
            GpuTests(run, options.test_workers, beside=False).finish(run.left())


def main() -> None:
    options = arguments()
    started = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    (options.out / LOG).unlink(missing_ok=True)
    if options.resume:
        shutil.copyfile(options.resume, options.out / LOG)
    scratch = Path(tempfile.mkdtemp(prefix="hasten-gpu-"))
    line, memory = ("cpu", 80.0) if options.device == "cpu" else card()
    seconds = options.budget - MARGIN
    until = started + seconds - (0 if options.no_tests else FOR_TESTS)
    run = Run(options.out, scratch, seconds, environment(options, scratch, until), started)
    run.results["run"] = {"card": line, "date": time.strftime("%Y-%m-%d"), "budget": options.budget}
    run.say(line)
    atexit.register(run.end)
    # The native kernels are compiled once, before many processes ask for them.
    code = "from hasten.ops.native import library; library(); library(part='training')"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    native = subprocess.Popen([sys.executable, "-c", code], env=run.environment, **quiet)
    try:
        if options.tests_only:
            GpuTests(run, options.test_workers, beside=False).finish(run.left())
        else:
            work(run, options, options.memory or 0.96 * memory)
    except BaseException as error:
        run.say(f"the run ended: {type(error).__name__}: {error}")
    finally:
        run.end()
        native.kill()
        run.save()
        text = tables(run.results)
        (options.out / "tables.txt").write_text(text)
        print(text)
        logs = sorted(run.logs.glob("*.log"))
        (options.out / "logs.txt").write_text(
            "".join(f"==== {log.name}\n{log.read_text(errors='replace')[-4000:]}\n" for log in logs)
        )
        print(f"done in {run.now():.0f} s of {options.budget:.0f}", flush=True)


if __name__ == "__main__":
    main()
