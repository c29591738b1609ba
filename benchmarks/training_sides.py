"""The two trainers that compare_training.py sets beside each other: nanoGPT as its train.py runs it, and ours."""

from __future__ import annotations

import inspect
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare_training import Compare

RATE = 1e-3


class NanoGPT:
    """Its model.py, and the body of its train.py's loop."""

    flops: float = 0.0

    def __init__(self, options: Compare, vocab: int, work: Path, *, first: bool) -> None:
        import torch

        sys.path.insert(0, str(options.nanogpt))
        from model import GPT, GPTConfig  # type: ignore[import-not-found]

        sizes = options.sizes
        own = {"block_size": sizes.block, "n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.width}
        if options.shape != "gpt2-124m":  # there the checkout's own default is what the article changed
            own["vocab_size"] = vocab
        self.plain = GPT(GPTConfig(**own, dropout=0.0, bias=False))
        if first:
            torch.save(self.plain.state_dict(), work / "start.part")
            (work / "start.part").rename(work / "start.pt")
        self.plain.to(options.device)
        kind = options.device.partition(":")[0]
        settings = [0.1, RATE, (0.9, 0.99), kind]
        known = len(inspect.signature(self.plain.configure_optimizers).parameters)
        self.optimizer = self.plain.configure_optimizers(*settings[:known])  # once without the device
        self.autocast = torch.autocast(kind, dtype=torch.bfloat16, enabled=options.nanogpt_autocast)
        self.model = torch.compile(self.plain)

    def step(self, inputs: Any, targets: Any, rate: float) -> Any:
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast:
            _, loss = self.model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.plain.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def evaluate(self, inputs: Any, targets: Any) -> float:
        import torch

        self.plain.eval()
        with torch.no_grad(), self.autocast:
            return float(self.plain(inputs, targets)[1].item())


class Hasten:
    """Ours: the shape's recipe without dropout, started from the same weights."""

    def __init__(self, options: Compare, vocab: int, work: Path) -> None:
        from dataclasses import replace

        import torch

        from hasten.model.initialize import initialize
        from hasten.planning.cost import training_flops_per_token
        from hasten.training import RECIPES, build

        sizes = options.sizes
        recipe = RECIPES[sizes.recipe]
        shape = replace(recipe.model, layers=sizes.layers, hidden_size=sizes.width, heads=sizes.heads)
        optimizer = replace(recipe.optimizer, learning_rate=RATE, beta2=0.99)
        recipe = replace(recipe, dropout=0.0, model=shape, optimizer=optimizer)
        config = build.shape_config(recipe.model, vocab_size=vocab, positions=sizes.block)
        self.flops = training_flops_per_token(config, sizes.block)
        self.micro = options.micro_batch
        model = initialize(build.training_config(recipe, config), seed=0, device=torch.device(options.device))
        while not (work / "start.pt").exists():
            time.sleep(0.1)
        take_over(model, torch.load(work / "start.pt", map_location=options.device), vocab)
        self.trainer = build.training_step(model, recipe)

    def step(self, inputs: Any, targets: Any, rate: float) -> Any:
        from hasten.data import Batch

        batches = [
            Batch(inputs=inputs[i : i + self.micro], targets=targets[i : i + self.micro], documents=None)
            for i in range(0, len(inputs), self.micro)
        ]
        result = self.trainer.run(batches, learning_rate=rate)
        assert result is not None
        return result.loss

    def evaluate(self, inputs: Any, targets: Any) -> float:
        import torch

        from hasten.data import Batch

        self.trainer.model.eval()
        with torch.no_grad():
            total = self.trainer.loss(Batch(inputs=inputs, targets=targets, documents=None))
        return float(total) / targets.numel()


def take_over(model: Any, start: dict[str, Any], vocab: int) -> None:
    """nanoGPT's weights in our model; what it has no counterpart for, the biases, is zero at the start."""
    import torch

    with torch.no_grad():
        model.embedding.weight[:vocab] = start["transformer.wte.weight"][:vocab]  # theirs may be padded
        model.positions.weight.copy_(start["transformer.wpe.weight"])
        for index, block in enumerate(model.blocks):
            theirs = f"transformer.h.{index}."
            joined = start[f"{theirs}attn.c_attn.weight"].chunk(3)
            for layer, weight in zip((block.attention.q, block.attention.k, block.attention.v), joined, strict=True):
                layer.weight.copy_(weight)
            block.attention.output.weight.copy_(start[f"{theirs}attn.c_proj.weight"])
            block.mlp.up.weight.copy_(start[f"{theirs}mlp.c_fc.weight"])
            block.mlp.down.weight.copy_(start[f"{theirs}mlp.c_proj.weight"])
