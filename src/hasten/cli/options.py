"""Options that every command that runs a model shares."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from hasten.errors import ConfigError

if TYPE_CHECKING:
    from hasten.model.transformer import Transformer


Threads = int | Literal["auto"]


def thread_count(threads: Threads) -> int | None:
    """What `configure`, ladders and recipes take: None for one a physical core. Raises ConfigError below 1."""
    if threads != "auto" and threads < 1:
        raise ConfigError(f"--threads is {threads}; it must be at least 1, or auto")
    return None if threads == "auto" else threads


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Which model, and how it is run."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A Hugging Face folder, or a hub id such as owner/name."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the weights; auto is the checkpoint's own. Where a processor only emulates it, products are in float32."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX."""
    threads: Threads = "auto"
    """CPU threads; auto is one for each physical core that this process may use."""
    pin: bool = False
    """Keep each thread on a core of its own (docs/kernels.md says when that helps)."""
    quantize: Literal["none", "int8", "int4"] = "none"
    """Round the weights after loading; `hasten quantize` does it once, has more settings and keeps the result."""
    fuse: bool = True
    """Run the native fused kernels where they fit (bfloat16 or quantized, on a CPU)."""

    def load(self) -> Transformer:
        """Load the model onto the device, with the threads and the seed set, quantized and fused as asked."""
        from hasten.machine import configure, resolve_device

        configure(threads=thread_count(self.threads), seed=getattr(self, "seed", None))
        model = self.read_model(str(resolve_device(self.device)))
        if self.quantize != "none":
            from hasten.quantization import Int4, Int8, quantize

            quantize(model, Int8() if self.quantize == "int8" else Int4())
        if self.fuse:
            from hasten.model.fused import fuse_where_it_fits

            fuse_where_it_fits(model)
        from hasten.model.wide import precision_of

        print(f"matrix products in {precision_of(model)}", file=sys.stderr)
        return model

    def read_model(self, device: str) -> Transformer:
        """The model as it lies in its folder."""
        from hasten.model.load import load

        return load(self.model, dtype=self.dtype, device=device)


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """The same for a command that generates by itself."""

    seed: int | None = None
    """Makes sampling reproducible."""
    ignore_eos: bool = False
    """Go on after the end-of-text token (for measuring)."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    max_new_tokens: int = 256
    temperature: float | None = None
    """0 takes the most likely token. The folder's generation_config.json decides by default, else 1."""
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    """Token ids and what is added to their scores: --logit-bias 50256 -100."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer and are not shown."""
    min_new_tokens: int = 0
