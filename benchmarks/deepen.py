"""A Llama with more blocks that computes the same: between its blocks come new ones that add nothing yet.

    python benchmarks/deepen.py --model runs/code-25m/model --layers 12 --output runs/code-45m-start

A new block is a copy of the one before it whose two output projections are zero (LLaMA Pro, arXiv 2401.02415), so
training goes on from the loss that the model has.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Deepen:
    """Add blocks to a model."""

    model: Path
    """A Llama's folder, not quantized, in one file."""

    layers: int
    """Blocks of the result: a multiple of the model's."""

    output: Path
    """The new folder."""

    def run(self) -> None:
        import torch
        from safetensors.torch import load_file, save_file

        config = json.loads((self.model / "config.json").read_text())
        layers = config["num_hidden_layers"]
        copies, rest = divmod(self.layers, layers)
        if rest or copies < 2:
            raise SystemExit(f"--layers {self.layers} is not two or more times the model's {layers}")
        if (self.output / "config.json").exists():  # which is written last
            raise SystemExit(f"{self.output} is there already")
        weights = {}
        for name, weight in load_file(self.model / "model.safetensors").items():
            before, inside_layers, after = name.partition(".layers.")
            if not inside_layers:
                weights[name] = weight
                continue
            number, _, inside = after.partition(".")
            adds = "o_proj." in inside or "down_proj." in inside
            for copy in range(copies):
                new = torch.zeros_like(weight) if copy and adds else weight.clone()
                weights[f"{before}.layers.{int(number) * copies + copy}.{inside}"] = new
        self.output.mkdir(parents=True, exist_ok=True)
        save_file(weights, self.output / "model.safetensors", metadata={"format": "pt"})
        for file in (*self.model.glob("tokenizer*"), *self.model.glob("generation_config.json")):
            shutil.copy(file, self.output)
        (self.output / "config.json").write_text(json.dumps(config | {"num_hidden_layers": self.layers}, indent=2))


if __name__ == "__main__":
    import tyro

    tyro.cli(Deepen).run()
