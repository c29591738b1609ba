"""Does a folder by GPTQ decode at the speed of one rounded to nearest? Two folders, one rung, interleaved rounds.

hasten quantize MODEL --scheme int4 --group-size 32 --output RTN
hasten quantize MODEL --scheme int4 --group-size 32 --method gptq --output GPTQ
python benchmarks/gptq_decode.py RTN GPTQ
"""

import argparse
from pathlib import Path

from hasten.bench.generate import RUNGS, GenerateLadder
from hasten.bench.models import BenchmarkModel
from hasten.bench.process import Rung
from hasten.machine.files import write_json

RESULT = Path(__file__).parent / "results" / "gptq-decode.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rtn")
    parser.add_argument("gptq")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    ladder = GenerateLadder(
        model=options.rtn, device="cpu", dtype="bfloat16", prompt_tokens=64, new_tokens=64, rounds=options.rounds
    )
    made = [
        Rung(
            name,
            ("native fused steps", "int4 in groups of 32"),
            "hasten.bench.generate_rung:GenerateRung",
            {"ladder": ladder, "mode": RUNGS["native-int4"], "source": BenchmarkModel(model=folder)},
        )
        for name, folder in (("rtn", options.rtn), ("gptq", options.gptq))
    ]
    sizes = {rung.name: rung.arguments["source"].stored_bytes() for rung in made}
    settings = {"model": f"{ladder.source.name}, bfloat16, 64 prompt tokens", "bytes": sizes}
    report = ladder.measure(made, kind="generate", settings=settings, dtypes=())
    ladder.show(report | {"settings": report["settings"] | {"gptq": None, "left_out": {}}})
    write_json(RESULT, report)


if __name__ == "__main__":
    main()
