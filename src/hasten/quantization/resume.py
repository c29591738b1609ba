"""What a calibrated run keeps on the disk beside its output: the text that the model wrote, and finished blocks.

An interrupted run continues with them, and the export reads the blocks from there.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hasten.errors import CheckpointError, ConfigError
from hasten.machine.files import locked, replacing, save_json
from hasten.model.fingerprint import weights_digest
from hasten.model.layer_format import LayerFormat
from hasten.model.transformer import Transformer
from hasten.ops.linear.weights import QuantizedWeight
from hasten.quantization.block_task import BlockResult
from hasten.quantization.report import LayerReport

RULES = 2  # version of rounding and calibration: blocks that an earlier version finished are not continued
TEXT = "calibration.safetensors"
_FILES = r"settings\.json|(block-\d+|states|calibration)\.safetensors"
_OWN = re.compile(
    rf"lock|(states|before)\.spill|{_FILES}|\.({_FILES})\.[\d-]+\.partial"
)  # the last: cut off while it was written


@contextmanager
def _work_path(output: Path) -> Iterator[Path]:
    """Create the folder OUT.partial beside an output folder OUT, and hold its lock. It is removed if left empty.

    Raises CheckpointError where it cannot be written, ConfigError where it holds other files or another process works
    there.
    """
    output = Path(os.path.abspath(output))  # "." has no name to append to
    path = output.with_name(f"{output.name}.partial")
    try:
        path.mkdir(parents=True, exist_ok=True)
        foreign = sorted(one.name for one in path.iterdir() if not _OWN.fullmatch(one.name))
        if foreign:
            raise ConfigError(
                f"finished blocks are kept in {path}, which holds other files ({foreign[0]!r:.60}); move it away, "
                "or choose another output"
            )
        with locked(path / "lock", waiting=None):
            try:
                yield path
            finally:
                if path.exists() and [one.name for one in path.iterdir()] == ["lock"]:
                    shutil.rmtree(path)
    except Timeout:
        raise ConfigError(
            f"another process is quantizing into {output}; wait until it has ended, or choose another output"
        ) from None
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path}, where finished blocks are kept, cannot be written or read: {error}; make room, or remove it"
        ) from error


class KeptText:
    """Calibration text that a model wrote for a run into `output`, kept in OUT.partial.

    wanted: the settings that decide the text beside the model's weights.
    """

    def __init__(self, output: Path, model: Transformer, wanted: Mapping[str, int]) -> None:
        self._output = output
        self._identity = json.dumps({"model": _fingerprint(model), **wanted}, sort_keys=True)

    def read(self) -> Tensor | None:
        """The text, int64 (samples, length), or None if this model has not written it yet. Raises as `_work_path`."""
        with _work_path(self._output) as path:
            if not (path / TEXT).exists():
                return None
            with safe_open(path / TEXT, "pt") as file:
                if file.metadata().get("identity") != self._identity:
                    return None
                tokens: Tensor = file.get_tensor("tokens")
                return tokens

    def save(self, tokens: Tensor) -> None:
        """Keep the text. Raises as `_work_path`."""
        with _work_path(self._output) as path, replacing(path / TEXT) as temporary:
            save_file({"tokens": tokens}, temporary, {"identity": self._identity})


class WorkFolder:
    """The folder OUT.partial beside an output folder OUT. Use `open`, which removes it when all has ended well.

    It holds settings.json, which identifies the run; lock, which one process holds; block-00000.safetensors and so on,
    a file for each block's integers, scales and zeros; states.safetensors: the inputs of the block after the finished
    ones, and the keys and values that these lend; states.spill and before.spill: the samples' states of a run that
    spills them; calibration.safetensors: the text of `KeptText`.
    """

    def __init__(self, path: Path, formats: dict[str, LayerFormat]) -> None:
        self.path, self.formats = path, formats
        self._owner: dict[str, int] = {}  # the block of each layer
        self._last: tuple[int, BlockResult] | None = None

    @classmethod
    @contextmanager
    def open(
        cls, output: Path, model: Transformer, tokens: Tensor, formats: dict[str, LayerFormat], settings: str
    ) -> Iterator["WorkFolder"]:
        """Begin or continue the work of this very run.

        Raises CheckpointError where it cannot be written, ConfigError where it holds other files or finished blocks of
        another run, or another process works there.
        """
        identity = {
            "rules": RULES,
            "settings": settings,
            "tokens": hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest(),
            "model": _fingerprint(model),
            "layers": {name: str(layer) for name, layer in formats.items()},
        }
        with _work_path(output) as path:
            known = path / "settings.json"
            work = cls(path, formats)
            if not known.exists() or json.loads(known.read_text()) != identity:
                if done := work.blocks():
                    raise ConfigError(
                        f"{path} holds {done} finished blocks of a run with other settings, text or weights; "
                        "repeat that run, remove the folder, or choose another output"
                    )
                for stale in (*path.glob("*.json"), *path.glob("*.safetensors"), *path.glob(".*.partial")):
                    if stale.name != TEXT:
                        stale.unlink()
                save_json(known, identity)
            yield work
            shutil.rmtree(path)

    def blocks(self) -> int:
        """Number of finished blocks, which are not computed again."""
        file = self.path / "states.safetensors"
        if not file.exists():
            return 0
        with safe_open(file, "pt") as states:
            return int(states.metadata()["blocks"])

    def kept(self) -> list[dict[str, Tensor]]:
        """What the block after the finished ones needs, by names: of each walk."""
        found: dict[int, dict[str, Tensor]] = {}
        with safe_open(self.path / "states.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                own, _, walk = name.rpartition(".")
                found.setdefault(int(walk), {})[own] = file.get_tensor(name)
        return [found[walk] for walk in sorted(found)]

    def save(self, index: int, result: BlockResult, kept: Sequence[Mapping[str, Tensor]]) -> None:
        """Write a block, and what the next needs of each walk. That comes last: it marks the block as finished."""
        self.keep(index, result)
        named = {f"{name}.{i}": tensor for i, own in enumerate(kept) for name, tensor in own.items()}
        self._write("states", named, {"blocks": str(index + 1)})

    def keep(self, index: int, result: BlockResult) -> None:
        """Write a block's layers, unless they are there."""
        if self._owner.get(next(iter(result.weights))) == index:
            return
        tensors: dict[str, Tensor] = {}
        for name, weight in result.weights.items():
            self._owner[name] = index
            parts = {"values": weight.values, "scales": weight.scales, "zeros": weight.zeros}
            tensors |= {f"{name}.{key}": part for key, part in parts.items() if part is not None}
        reports = [asdict(report) | {"format": None} for report in result.reports]
        self._write(f"block-{index:05d}", tensors, {"reports": json.dumps(reports)})

    def load(self, index: int) -> BlockResult:
        """Read a finished block."""
        with safe_open(self.path / f"block-{index:05d}.safetensors", "pt") as file:
            found = json.loads(file.metadata()["reports"])
            reports = [LayerReport(**one | {"format": self.formats[one["name"]]}) for one in found]
            parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        weights = {
            report.name: QuantizedWeight(
                format=report.format.weight,
                values=parts[f"{report.name}.values"],
                scales=parts[f"{report.name}.scales"],
                zeros=parts.get(f"{report.name}.zeros"),
            )
            for report in reports
        }
        self._owner |= dict.fromkeys(weights, index)
        return BlockResult(weights, reports)

    def weight(self, name: str) -> QuantizedWeight:
        """Read a finished layer. Its block is cached for the other layers."""
        index = self._owner[name]
        if self._last is None or self._last[0] != index:
            self._last = (index, self.load(index))
        return self._last[1].weights[name]

    def _write(self, name: str, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        with replacing(self.path / f"{name}.safetensors") as temporary:
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary, metadata)


def _fingerprint(model: Transformer) -> dict[str, Any]:
    """Identify a model: its config, its dtype and a digest of its weights."""
    return {"weights": weights_digest(model), "dtype": str(model.dtype), "config": repr(model.config)[:20000]}
