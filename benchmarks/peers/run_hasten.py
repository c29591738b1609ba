"""hasten's fused steps on a folder: in bfloat16, or as `hasten quantize` wrote it."""

import protocol
import torch

import hasten
from hasten.engine.given_texts import GivenTexts
from hasten.machine import configure
from hasten.ops.native import library

given = protocol.arguments()
configure(threads=given.threads, seed=0)
model = hasten.fuse(hasten.load(given.model, dtype="bfloat16"))
decoder = GivenTexts(model, batch=1, capacity=given.work.prefill + given.work.decode)


def feed(ids: list[int]) -> None:
    if decoder.lengths[0] and len(ids) == 1:
        decoder.decode(torch.tensor(ids))
    else:
        decoder.prefill([ids])


native = library()
protocol.take_turns(
    protocol.steps(given.work, lambda: decoder.truncate(0), feed, vocabulary=model.config.vocab_size),
    packages=["hasten", "torch"],
    isa="none" if native is None else native.isa,
    torch_cpu_capability=torch.backends.cpu.get_cpu_capability(),
)
