"""Training GPT-2 124M: nanoGPT as its train.py runs it, hasten's recipe from the same weights, rungs of the ladder."""

import contextlib
import inspect
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gpu.worker import DEVICE, PEERS, TINY, kernel_table, memory, patient, serve, sync

RATE, PEAK = 1e-3, 798e12  # bf16 FLOP/s of an H100 on random data, as MFU is quoted
VOCAB, BLOCK = (50_257, 1024) if not TINY else (250, 16)
SHAPES = {
    "gpt2-124m": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "wide": {"n_layer": 8, "n_head": 16, "n_embd": 2048},
}
Take = Callable[[Any, Any, float], Any]


def sizes_of(shape: str) -> dict[str, int]:
    """Under nanoGPT's names."""
    return SHAPES[shape] if not TINY else {"n_layer": 2, "n_head": 2, "n_embd": 32}


def peer_model(checkout: str, shape: str) -> Any:
    """nanoGPT's model with its own initialization, seeded."""
    sys.path.insert(0, str(PEERS / checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.manual_seed(1337)
    extra = {"vocab_size": VOCAB} if TINY else {}
    with contextlib.redirect_stdout(sys.stderr):
        return GPT(GPTConfig(block_size=BLOCK, dropout=0.0, bias=False, **sizes_of(shape), **extra))


def recipe_of(shape: str, batch: int) -> Any:
    """The default recipe at the peer's sizes, without dropout."""
    from hasten.training import RECIPES

    recipe, sizes = RECIPES["gpt2-124m"], sizes_of(shape)
    model = replace(recipe.model, layers=sizes["n_layer"], hidden_size=sizes["n_embd"], heads=sizes["n_head"])
    data = replace(recipe.data, batch_size=batch, context=BLOCK, accumulation=1)
    optimizer = replace(recipe.optimizer, learning_rate=RATE, beta2=0.99)
    return replace(recipe, dropout=0.0, model=model, data=data, optimizer=optimizer)


def config_of(recipe: Any) -> Any:
    from hasten.training import build

    return build.shape_config(recipe.model, vocab_size=VOCAB, positions=BLOCK)


def flops_per_token(shape: str) -> float:
    from hasten.planning.cost import training_flops_per_token

    return float(training_flops_per_token(config_of(recipe_of(shape, 1)), BLOCK))


def run_trainer(take: Take, shape: str, batch: int, steps: int, forget: Callable[[], Any]) -> None:
    """take(inputs, targets, rate) -> loss: warm it up, then serve its commands."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCAB, (4, batch, BLOCK + 1), generator=generator).to(DEVICE)
    data = [(r[:, :-1].contiguous(), r[:, 1:].contiguous()) for r in rows]
    losses: list[Any] = []
    flops = flops_per_token(shape)

    def go(count: int) -> None:
        found = []
        for _ in range(count):
            index = len(losses) + len(found)
            found.append(take(*data[index % len(data)], RATE * min(1.0, (index + 1) / 101)))
        losses.extend(found)

    begin = time.perf_counter()
    for _ in range(5):
        patient(lambda: (go(1), sync()), forget)
    warm = round(time.perf_counter() - begin, 1)

    def measure() -> dict[str, Any]:
        go(2)
        sync()
        begin = time.perf_counter()
        go(steps)
        sync()
        seconds = time.perf_counter() - begin
        speed = steps * batch * BLOCK / seconds
        found = {"tokens_per_s": speed, "ms": 1e3 * seconds / steps, "mfu": flops * speed / PEAK, "warm_s": warm}
        return found | memory()

    def profile() -> dict[str, Any]:
        return kernel_table(lambda: go(3), 3, 24)

    def loss() -> dict[str, Any]:
        return {"steps": len(losses), "losses": [round(float(x), 4) for x in losses[:80]]}

    serve({"measure": measure, "profile": profile, "losses": loss})


def nanogpt(batch: int, shape: str = "gpt2-124m", checkout: str = "nanogpt", steps: int = 20) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    plain = peer_model(checkout, shape).to(DEVICE)
    kind = DEVICE.partition(":")[0]
    settings = [0.1, RATE, (0.9, 0.99), kind]
    known = len(inspect.signature(plain.configure_optimizers).parameters)  # once without the device
    with contextlib.redirect_stdout(sys.stderr):
        optimizer = plain.configure_optimizers(*settings[:known])
    model = torch.compile(plain) if DEVICE != "cpu" else plain
    autocast = torch.autocast(kind, dtype=torch.bfloat16)

    def take(inputs: Any, targets: Any, rate: float) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = rate
        with autocast:
            _, loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    run_trainer(take, shape, batch, steps, lambda: optimizer.zero_grad(set_to_none=True))


def our_trainer(shape: str, batch: int, techniques: dict[str, Any] | None) -> tuple[Any, Take]:
    """The step of the default recipe from nanoGPT's weights, where it is there; `techniques` changes some of it."""
    from peers.nanogpt import take_over

    from hasten.data import Batch
    from hasten.model.initialize import initialize
    from hasten.training import build

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    recipe = recipe_of(shape, batch)
    changes = dict(techniques or {}) | ({"compile": False} if DEVICE == "cpu" else {})
    recipe = replace(recipe, techniques=replace(recipe.techniques, **changes))
    model = initialize(build.training_config(recipe, config_of(recipe)), seed=0, device=torch.device(DEVICE))
    if (PEERS / "nanogpt").exists():
        start = {name: value.to(DEVICE) for name, value in peer_model("nanogpt", shape).state_dict().items()}
        take_over(model, start, VOCAB)
        del start
    step = build.training_step(model, recipe)

    def take(inputs: Any, targets: Any, rate: float) -> Any:
        loss = step.run([Batch(inputs=inputs, targets=targets, documents=None)], learning_rate=rate).loss
        return loss.clone() if isinstance(loss, torch.Tensor) else loss  # a captured step writes the next one there

    return step, take


def hasten(batch: int, shape: str = "gpt2-124m", steps: int = 20, techniques: dict[str, Any] | None = None) -> None:
    """The default recipe."""
    step, take = our_trainer(shape, batch, techniques)
    run_trainer(take, shape, batch, steps, step.where.forget)


def text_losses(batch: int, steps: int = 500, techniques: dict[str, Any] | None = None) -> None:
    """The loss over steps on real text."""
    from gpu import text

    steps = steps if not TINY else 4
    rows = text.batches(text.tokens(VOCAB, 40_000_000 if not TINY else 100_000), steps, batch, BLOCK + 1)
    take = our_trainer("gpt2-124m", batch, techniques)[1]

    def losses() -> dict[str, Any]:
        found, begin = [], time.perf_counter()
        for index, row in enumerate(rows.to(DEVICE)):
            found.append(take(row[:, :-1].contiguous(), row[:, 1:].contiguous(), RATE * min(1.0, (index + 1) / 101)))
        values = [round(float(one), 4) for one in found]
        return {"losses": values, "seconds": round(time.perf_counter() - begin, 1), **memory()}

    serve({"losses500": losses})
