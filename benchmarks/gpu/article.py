"""The ladder of the article's figures 2 and 3, by the command that users run (benchmarks/training_races.py article)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu.harness import BENCHMARKS
from gpu.worker import DEVICE, TINY, serve


def ladder(limit: float = 150) -> None:
    """Run it for at most `limit` seconds, never beyond the run's end; what is not done then is left out."""
    end = float(os.environ.get("GPU_UNTIL", "inf")) - 8

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as place:
            file, picture = Path(place) / "article.json", Path(place) / "article.png"
            command = [sys.executable, str(BENCHMARKS / "training_races.py"), "article", "--device", DEVICE]
            command += ["--json", str(file), "--picture", str(picture)]
            command += ["--tiny", "--rounds", "1", "--seconds", "1"] if TINY else []
            begin = time.time()
            process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
            try:
                status: Any = process.wait(max(1.0, min(limit, end - begin)))
            except subprocess.TimeoutExpired:
                status = f"ended after {time.time() - begin:.0f} s"
                os.killpg(process.pid, signal.SIGKILL)
            found = json.loads(file.read_text()) if file.exists() else {"error": f"no report; status {status}"}
            pictures = len(list(Path(place).glob("*.png")))
            return found | {"status": status, "seconds": time.time() - begin, "pictures": pictures}

    serve({"measure": measure})
