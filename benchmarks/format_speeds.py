"""How fast a model decodes in each format of its weights, in interleaved rounds of one ladder.

    python benchmarks/format_speeds.py --model runs/code-25m/model --gptq GPTQ_INT4_G32 \\
        --text held-out.jsonl --output benchmarks/results/format-speeds.json

The folders are made by `hasten quantize` (rounding to nearest, which has the speed of every method: the last row, a
folder by GPTQ, is there to show it).
"""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

CASES = {  # name -> options of hasten quantize, rung
    "bfloat16": (None, "native-bf16"),
    "int8": (["--scheme", "int8"], "native-int8"),
    "int8, 16-bit activations": (None, "int8-weight-only"),
    "int4 g128": (["--scheme", "int4", "--group-size", "128"], "native-int4"),
    "int4 g64": (["--scheme", "int4", "--group-size", "64"], "native-int4"),
    "int4 g32": (["--scheme", "int4", "--group-size", "32"], "native-int4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatSpeeds:
    """Measure decoding."""

    model: Path
    """The model's folder, in plain weights."""

    gptq: Path | None = None
    """The same in int4 g32 by GPTQ."""

    text: str | None = None
    """Also score each format on the first 200 KB of this, by the products that are timed."""

    rounds: int = 20
    """Every format once in each."""

    output: Path | None = None
    """Where to write the JSON; a table is printed in any case."""

    def run(self) -> None:
        from hasten.bench.generate import RUNGS, GenerateLadder
        from hasten.bench.models import BenchmarkModel
        from hasten.bench.process import Rung
        from hasten.machine.files import write_json

        with tempfile.TemporaryDirectory(prefix="hasten-format-speeds-") as place:
            wanted = [(name, *case, self.model) for name, case in CASES.items()]
            if self.gptq is not None:
                wanted.append(("int4 g32 by gptq", None, "native-int4", self.gptq))
            ladder = GenerateLadder(
                model=str(self.model),
                device="cpu",
                text=self.text,
                dtype="bfloat16",
                prompt_tokens=256,
                new_tokens=128,
                rounds=self.rounds,
            )
            made = []
            for name, options, mode, folder in wanted:
                if options is not None:
                    folder = Path(place) / name.replace(" ", "-")
                    command = ["quantize", str(self.model), *options, "--output", str(folder)]
                    subprocess.run([sys.executable, "-m", "hasten", *command], check=True, stdout=subprocess.DEVNULL)
                arguments = {"ladder": ladder, "mode": RUNGS[mode], "source": BenchmarkModel(model=str(folder))}
                techniques = RUNGS[mode].techniques
                made.append(Rung(name, techniques, "hasten.bench.generate_rung:GenerateRung", arguments))
            settings = {"model": self.model.parent.name, "prompt_tokens": ladder.prompt_tokens}
            report = ladder.measure(made, kind="generate", settings=settings, dtypes=())
            ladder.show(report | {"settings": report["settings"] | {"gptq": None, "left_out": {}}})
        if self.output is not None:
            write_json(self.output, report)


if __name__ == "__main__":
    import tyro

    tyro.cli(FormatSpeeds).run()
