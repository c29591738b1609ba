"""`hasten explain attention`: which kernel serves a call, and why not the others, on this machine or another."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from hasten.cli.options import JsonOption, same_fields
from hasten.effects import KIND, ON_CUDA, Facts, Needs, Unless, facts_of
from hasten.errors import ConfigError
from hasten.machine import resolve_device
from hasten.ops.picker import explain

if TYPE_CHECKING:
    from hasten.ops.attention import AttentionRequest

OF_CALL = Unless("layer")  # a layer is bound before these are known
IN_WORDS = ("mask", "key_padding", "key_lengths", "bias", "alibi", "sinks", "documents", "dropout")


@dataclass(frozen=True, kw_only=True)
class ExplainAttention(JsonOption):
    """Show which attention kernel serves a call of this shape, and for every other kernel the reason against it."""

    shape: Annotated[tuple[int, ...], tyro.conf.arg(metavar="B,T,H,D")] = (1, 1024, 16, 64)
    """Sequences, queries, query heads, head size."""
    kv_heads: int | None = None
    """Key/value heads; as many as query heads by default."""
    keys: Annotated[int | None, OF_CALL] = None
    """Keys (S); as many as queries by default, more than queries when a cache holds earlier ones."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "bfloat16"
    """The dtype of q, k and v."""
    causal: Annotated[bool, Unless("block_mask")] = True
    """A query sees the keys up to its own position (an explicit mask includes that)."""
    window: int | None = None
    """A query sees only the last N keys."""
    mask: Annotated[bool, OF_CALL] = False
    """An explicit boolean mask (T, S) or (B, T, S)."""
    key_padding: Annotated[bool, OF_CALL] = False
    """A mask (B, S) of padding keys, with gaps or on a GPU."""
    key_lengths: Annotated[bool, OF_CALL] = False
    """Padding keys at the end of each row, as lengths, or on a CPU as a mask."""
    bias: Annotated[bool, OF_CALL] = False
    """A bias is added to the scores."""
    learned_bias: Annotated[bool, OF_CALL] = False
    """The bias is learned: it needs a gradient."""
    alibi: Annotated[bool, OF_CALL] = False
    """Linear biases by distance."""
    softcap: float | None = None
    """Scores are soft-capped (Gemma 2)."""
    sinks: bool = False
    """A learned logit of each head joins the softmax (gpt-oss)."""
    block_mask: bool = False
    """A block-sparse pattern."""
    block_size: Annotated[int, Needs("block_mask")] = 64
    """Positions in a block of the pattern."""
    documents: Annotated[bool, OF_CALL] = False
    """Documents packed by cumulative lengths."""
    dropout: Annotated[bool, OF_CALL] = False
    """Probabilities are dropped."""
    gradient: Annotated[bool, OF_CALL] = True
    """For training; --no-gradient is inference."""
    layer: bool = False
    """Show what a model's layer is bound to, for all of its calls, instead of one call."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:INDEX; cuda is answered even if there is none."""
    capability: Annotated[str | None, ON_CUDA] = None
    """Compute capability of the CUDA device, as 8.0; its own by default, 9.0 if there is none."""
    kernel: str | None = None
    """Force this kernel."""
    json: str | None = None
    """Write {"operator", "request", "kernel", "others": [{kernel, reason}], "score_bytes"} to a file; "-": stdout."""

    def facts(self) -> Facts:
        """Facts that conditions of options depend on; a GPU need not be here."""
        return {KIND: lambda: "cuda"} if self.device.partition(":")[0] == "cuda" else facts_of(self.device)

    def run(self) -> None:
        from hasten.ops.attention import KERNELS

        request, absent = self.request()
        choice = explain(KERNELS, request, forced=self.kernel)
        score_bytes = self.score_bytes(request)
        others = [{"kernel": name, "reason": reason} for name, reason in choice.others]
        asked = asdict(request) | {"device": str(request.device), "dtype": request.dtype_name}
        facts = {"operator": "attention", "request": asked, "kernel": choice.kernel, "others": others}
        if not self.write(facts | {"score_bytes": score_bytes}):
            return
        if absent:
            found = ".".join(map(str, request.compute_capability()))
            print(f"There is no CUDA device here; this is what one of compute capability {found} would run.")
        print(f"attention, {self.words(request)}: {choice.kernel}")
        for name, reason in choice.others:
            print(f"    not {name}: {reason}")
        if score_bytes is not None:
            print(f"All scores, in float32, would take {score_bytes / 2**20:,.1f} MiB.")

    def request(self) -> tuple[AttentionRequest, bool]:
        """The request, and whether its CUDA device is absent. Raises ConfigError for invalid numbers."""
        import torch

        from hasten.ops.attention import AttentionRequest, AttentionSpec
        from hasten.ops.attention.checks import check_causal, check_heads, check_numbers

        if len(self.shape) != 4 or min(self.shape) < 1:
            shape = ",".join(map(str, self.shape))
            raise ConfigError(f"--shape wants four whole numbers from 1 on, B,T,H,D; found {shape}")
        for option, found in (("--kv-heads", self.kv_heads), ("--keys", self.keys), ("--block-size", self.block_size)):
            if found is not None and found < 1:
                raise ConfigError(f"{option} is {found}; it must be at least 1")
        batch, queries, heads, size = self.shape
        kv_heads = heads if self.kv_heads is None else self.kv_heads
        keys = queries if self.keys is None else self.keys
        causal = self.causal and not self.block_mask  # a block mask says by itself what is causal
        check_heads(heads, kv_heads)
        check_numbers(window=self.window, softcap=self.softcap, scale=None)
        masked = self.mask or self.documents or self.block_mask
        check_causal(queries=queries, keys=keys, window=self.window, causal=causal, masked=masked)
        absent = self.device.partition(":")[0] == "cuda" and not torch.cuda.is_available()
        device = torch.device("cuda") if absent else resolve_device(self.device)
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": size, "scale": size**-0.5}
        spec = AttentionSpec(**same_fields(self, AttentionSpec) | sizes | {"causal": causal})
        call = same_fields(self, AttentionRequest) | {"batch": batch, "queries": queries, "keys": keys}
        call |= {"bias": self.bias or self.learned_bias, "bias_gradient": self.learned_bias}
        call["block_size"] = self.block_size if self.block_mask else None
        if self.layer:
            call = {name: call[name] for name in ("block_mask", "block_size", "sinks")}
        call |= {"device": device, "dtype": getattr(torch, self.dtype), "capability": self._capability()}
        return AttentionRequest(spec=spec, **call), absent

    def words(self, request: AttentionRequest) -> str:
        """The request in one line."""
        spec = request.spec
        heads = f"{spec.heads} heads" if spec.groups == 1 else f"{spec.heads}/{spec.kv_heads} heads"
        equal = request.queries == request.keys
        length = f"{request.queries} tokens" if equal else f"{request.queries} queries over {request.keys} keys"
        parts = ["a layer" if request.layer else f"{request.batch} x {length}", f"{heads} of {spec.head_dim}"]
        parts += [request.dtype_name, str(request.device)]
        parts.append("causal" if spec.causal else "block mask" if request.block_mask else "not causal")
        parts += [f"window {spec.window}"] if spec.window is not None else []
        parts += [name.replace("_", " ") for name in IN_WORDS if getattr(request, name)]
        parts += [f"soft cap {spec.softcap:g}"] if spec.softcap is not None else []
        return ", ".join(parts)

    def score_bytes(self, request: AttentionRequest) -> int | None:
        """Bytes of all scores in float32, which kernels with linear memory save."""
        if request.batch is None or request.queries is None or request.keys is None:
            return None
        return 4 * request.batch * request.spec.heads * request.queries * request.keys

    def _capability(self) -> tuple[int, int] | None:
        if self.capability is None:
            return None
        try:
            major, minor = (int(part) for part in self.capability.split("."))
        except ValueError:
            raise ConfigError(f"--capability wants a number such as 8.0; found {self.capability!r}") from None
        return major, minor
