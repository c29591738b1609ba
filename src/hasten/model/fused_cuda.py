"""The fused steps on a GPU: `CudaBlock`, which fused.py puts in the place of each readable block.

The steps: norm + q, k, v; norms of q and k + rotary turn + cache write; attention; output + residual; norm + gate, up +
activation; down + residual. Each is one launch for a few rows. Experts are called as a module in the place of the last
two, and their products are few launches, too (ops/experts). Keys and values are reached through `layer.view()`
alone, so the same block serves steps over any cache, captured or not. The residual stream is float32.
"""

import os
import warnings
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hasten.errors import HastenWarning
from hasten.model.context import PlainLayer
from hasten.model.experts import experts_of
from hasten.model.fused_block import FusedSteps, unknown_parts
from hasten.model.fused_decode import decode_layers
from hasten.model.fused_linear import fusion_conflict, gate_up_rows, joined, mixed_formats, norm_arguments
from hasten.model.interfaces import Context, LayerContext
from hasten.model.mlp import MLP, Linear
from hasten.model.rope import Rotation
from hasten.model.sharded import ShardedTransformer
from hasten.model.transformer import Block, Transformer
from hasten.ops import triton_support
from hasten.ops.attention.cache_rows import PLAIN, RowFormat, turn
from hasten.ops.attention.spec import HALVES, LARGEST_HEAD
from hasten.ops.attention.view import KVView
from hasten.ops.linear import PackedLinear
from hasten.ops.linear.operator import KERNELS, LinearRequest

if TYPE_CHECKING:
    from hasten.ops.block.decode import DecodeLayers

GATE_ROWS = 32  # rows of gate, then of up, as `gate_up_rows` puts them


def runs_triton(model: Transformer) -> bool:
    """Whether this model would use the GPU's steps: on a GPU, or in Triton's interpreter."""
    if model.device.type == "cpu":
        return os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("HASTEN_ISA") == "none"
    return model.device.type == "cuda"


def cuda_refusal(model: Transformer) -> str | None:
    """Why a GPU's fused steps cannot run this model here, or None."""
    config, dtype = model.config, str(model.dtype).removeprefix("torch.")
    if model.dtype not in HALVES:
        return f"the fused steps compute in bfloat16 or float16; the model is {dtype}"
    if (reason := triton_support.refusal(model.device)) is not None:
        return reason
    if config.head_dim > LARGEST_HEAD and config.latent is None:
        return f"the head size is {config.head_dim}; the fused steps go up to {LARGEST_HEAD}"
    if isinstance(model, ShardedTransformer):
        return "the fused steps of a GPU know no ranks"
    for experts in filter(None, map(experts_of, model.blocks)):
        if (reason := experts.why_one_by_one(model.device)) is not None:
            return f"no kernel of a GPU computes all experts at once: {reason}"
    if config.attention_pattern is not None:
        return "the fused steps of a GPU know no sparse pattern"
    if (part := unknown_parts(config)) is not None:
        return f"the fused steps of a GPU know {part}"
    if config.qk_norm and config.norm != "rmsnorm":
        return "the fused steps of a GPU know no layer norm of queries and keys"
    if config.gated and config.intermediate_size % GATE_ROWS:
        return f"{config.intermediate_size} gated features are no multiple of {GATE_ROWS}"
    return cuda_conflict(model)


def cuda_conflict(model: Transformer) -> str | None:
    """Which layers of a checkpoint of several formats the fused steps cannot compute, or None."""
    return mixed_formats(model) or fusion_conflict(model, _unsupported)


def _unsupported(request: LinearRequest) -> str | None:
    return next(kernel for kernel in KERNELS if kernel.name == "triton").unsupported_reason(request)


class CudaBlock(FusedSteps):
    """The steps as Triton kernels (see the module's docstring)."""

    qkv: Linear
    inner: Linear  # gate and up interleaved
    place = "a GPU in bfloat16 or float16"
    one_launch = True  # of what is between the products of a decode step, unless that kernel could not be built

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        attention, mlp = block.attention, block.mlp
        self.qkv = joined([attention.q, attention.k, attention.v])
        self.output = attention.output
        if isinstance(mlp, MLP):
            self._take_mlp(mlp)
        self.bind()

    def _take_mlp(self, mlp: MLP) -> None:
        self.inner, self.down = mlp.up, mlp.down
        if mlp.gate is not None:
            gate, up = gate_up_rows(self.inner_size)
            order = torch.empty(2 * self.inner_size, dtype=torch.int64)
            order[gate], order[up] = torch.arange(self.inner_size), self.inner_size + torch.arange(self.inner_size)
            self.inner = joined([mlp.gate, mlp.up], order)

    def rows(self) -> dict[str, dict[str, Tensor]]:
        spec, hidden = self.spec, torch.arange(self.output.out_features)
        heads = spec.heads, spec.kv_heads, spec.kv_heads
        q, k, v = torch.arange(self.qkv.out_features).split([n * spec.head_dim for n in heads])
        found = {"qkv": {"attention.q": q, "attention.k": k, "attention.v": v}, "output": {"attention.output": hidden}}
        if self.experts is not None:
            return found
        gate, up = gate_up_rows(self.inner_size)
        inner = {"mlp.gate": gate, "mlp.up": up} if self.gated else {"mlp.up": torch.arange(self.inner_size)}
        return found | {"inner": inner, "down": {"mlp.down": hidden}}

    def bind(self) -> None:
        # Imported here, because they import Triton: only where a model is fused.
        from hasten.ops.attention import ragged
        from hasten.ops.attention.step import decode_step
        from hasten.ops.block import triton_steps
        from hasten.ops.linear.fused import FusedLinear, NormArguments

        norms = [None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm)]
        input_norm, inner_norm = (NormArguments(*norm_arguments(one)) for one in (self.attention_norm, self.mlp_norm))  # type: ignore[arg-type]
        dtype = self._like.dtype
        sizes = (0.0, 0.0) if self.q_norm is None else (self.q_norm.eps, self.q_norm.offset)
        self._bound = SimpleNamespace(
            qkv=FusedLinear(**product_weight(self.qkv), norm=input_norm, out_dtype=dtype),
            output=FusedLinear(**product_weight(self.output), out_dtype=dtype, in_place=True),
            post_norms=[self._post(norm) for norm in (self.attention_post_norm, self.mlp_post_norm)],
            inner_norm=inner_norm,
            normed=triton_steps.normed,
            add_normed=triton_steps.add_normed,
            place_heads=triton_steps.place_heads,
            qk_norms=(*norms, *sizes),
            attend=ragged.over_view,
            decode_step=decode_step,
            dtype=dtype,
            counters=ragged.counters_on(self._like.device),
        )
        if self.experts is None:
            inside: dict[str, Any] = {"norm": inner_norm}
            inside |= {"activation": self.activation_name, "gated": self.gated, "out_dtype": dtype}
            self._bound.inner = FusedLinear(**product_weight(self.inner), **inside)
            self._bound.down = FusedLinear(**product_weight(self.down), out_dtype=dtype, in_place=True)

    @staticmethod
    def _post(norm: nn.Module) -> tuple[Any, ...] | None:
        return None if isinstance(norm, nn.Identity) else norm_arguments(norm)

    def runs_on(self, place: Tensor) -> bool:
        return place.device.type == self._like.device.type and place.dtype in HALVES

    def forward(self, x: Tensor, rope: Rotation | None, layer: LayerContext) -> Tensor:
        """x (B, T, C) -> (B, T, C) in float32; an x in float32 may be overwritten."""
        bound, spec = self._bound, self.spec
        batch, tokens, _ = x.shape
        given: dict[str, Any] = {"like": x.new_empty(0, dtype=bound.dtype)} if isinstance(layer, PlainLayer) else {}
        view = layer.view(batch=batch, tokens=tokens, kv_heads=spec.kv_heads, head_dim=spec.head_dim, **given)
        rows = x.float().flatten(0, 1)  # (R, C)
        tables = (None, None) if rope is None else (rope[0].flatten(0, -2), rope[1].flatten(0, -2))
        rows = self.attention(rows, tables, view)
        if self.experts is not None:
            branch, post_norm = self.experts(bound.normed(rows, *bound.inner_norm, bound.dtype)), bound.post_norms[1]
            rows = rows + branch if post_norm is None else bound.add_normed(rows, branch, *post_norm)
            return rows.view(x.shape)
        return self._added(rows, bound.inner(rows), bound.down, bound.post_norms[1]).view(x.shape)

    def attention(self, x: Tensor, tables: tuple[Tensor | None, Tensor | None], view: KVView) -> Tensor:
        """x (R, C) plus the output of attention. tables: cos and sin (R, dim/2)."""
        bound, spec, step = self._bound, self.spec, view.metadata
        qkv = bound.qkv(x)
        if self.one_launch and step.max_query == 1 and step.rows == PLAIN and len(x) == len(step.seq_lens):
            attended = self._decoded(qkv, tables, view)
            if attended is not None:
                return self._added(x, attended.flatten(1), bound.output, bound.post_norms[0])
        (q_weight, k_weight, eps, offset), slots = bound.qk_norms, step.slot_mapping
        if step.rows == PLAIN:
            k, v = view.k, view.v
        else:  # rounded rows are written below
            k, v = qkv.new_empty(2, len(x), spec.kv_heads, spec.head_dim).unbind()
            slots = torch.arange(len(x), device=x.device)
        q = bound.place_heads(qkv, *tables, q_weight, k_weight, slots, k, v, spec.heads, eps, offset)
        if step.rows == PLAIN:
            attended = bound.attend(q, view, spec=spec, counters=bound.counters)
        else:
            view.k[step.slot_mapping], view.v[step.slot_mapping] = step.rows.write(k), step.rows.write(v)
            attended = self._over_rounded(q, view, step.rows)
        return self._added(x, attended.flatten(1), bound.output, bound.post_norms[0])

    def _decoded(self, qkv: Tensor, tables: tuple[Tensor | None, Tensor | None], view: KVView) -> Tensor | None:
        """Attention of one query for each sequence in one launch, or None if the kernel cannot be built here."""
        bound, spec, step = self._bound, self.spec, view.metadata
        q_weight, k_weight, eps, offset = bound.qk_norms
        places = (step.seq_lens, step.first_slots, step.block_table, step.block_size, bound.counters)
        longest = view.k.shape[0] if step.longest is None else step.longest
        scores = (spec.scale, spec.window or 0, spec.softcap or 0.0)
        given = (qkv, *tables, q_weight, k_weight, step.slot_mapping, view.k, view.v, *places, longest)
        try:
            return bound.decode_step(*given, spec.heads, eps, offset, *scores)
        except Exception as error:
            if not triton_support.failed(error):
                raise
            CudaBlock.one_launch = False
            reason = f"{type(error).__name__}: {error}"[:300]
            warnings.warn(f"a decode step has one launch more in each layer: {reason}", HastenWarning, stacklevel=2)
            return None

    def _over_rounded(self, q: Tensor, view: KVView, rows: RowFormat) -> Tensor:
        """Attention of q (R, H, D) over a cache in int8, or over an unpacked cache in int4."""
        bound, spec = self._bound, self.spec
        if rows.bits == 4:
            warnings.warn(INT4_CACHE, HastenWarning, stacklevel=2)
            k, v = (rows.read(t, spec.head_dim, q.dtype) for t in (view.k, view.v))
            return bound.attend(q, view._replace(k=k, v=v, metadata=view.metadata._replace(rows=PLAIN)), spec=spec)
        if not rows.rotated:
            return bound.attend(q, view, spec=spec, counters=bound.counters)
        attended = bound.attend(turn(q.float()).to(q.dtype), view, spec=spec, counters=bound.counters)
        return turn(attended.float()).to(q.dtype)

    def _added(self, x: Tensor, y: Tensor, product: Any, post_norm: tuple[Any, ...] | None) -> Tensor:
        """x + norm(product of y), float32; x may be overwritten."""
        if post_norm is None:
            return product(y, x)
        return self._bound.add_normed(x, product(y), *post_norm)


INT4_CACHE = "a GPU has no kernel for int4 caches: each layer's cache is unpacked in every step; int8 has one"


def product_weight(linear: Linear) -> dict[str, Any]:
    """A layer's weight in the form that `fused_linear` takes."""
    if isinstance(linear, PackedLinear):
        return {"weight": linear.operands}
    return {"weight": linear.weight.detach(), "bias": None if linear.bias is None else linear.bias.detach()}


class CudaStack:
    """All blocks of a fused model, and its last norm and head as one step.

    A step of one row over a 16-bit cache, static or paged, is one launch for all blocks if that kernel supports the
    model (ops/block/decode.py, Hopper GPUs).
    """

    one_launch = True  # unless the kernel could not be built

    def __init__(self) -> None:
        self._decode: DecodeLayers | None = None
        self._bound_to: list[Any] = []  # blocks' arguments that it was made of

    def __getstate__(self) -> dict[str, Any]:
        """State without prepared arguments and second references to weights; a copy makes its own."""
        return self.__dict__ | {"_decode": None, "_bound_to": []}

    def addresses(self, model: Transformer) -> tuple[int, ...]:
        """Addresses of all tensors of the model that a step reads; while they stay, a captured step is valid."""
        counters: Any = [block._bound.counters for block in model.blocks]  # type: ignore[union-attr]
        own = [] if self._decode is None else [self._decode.counter]
        bound = [experts.bound() for experts in filter(None, map(experts_of, model.blocks))]
        tables = [one.addresses for one in bound if one.addresses is not None]
        held = chain(model.parameters(), model.buffers(), counters, own, tables)
        return tuple(tensor.data_ptr() for tensor in held)

    def run(
        self,
        model: Transformer,
        x: Tensor,
        positions: Tensor,
        context: Context,
        features: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `Stack`; in float32."""
        x, ropes = x.float(), model.rotations(positions, context.stretched)
        single = x.shape[0] * x.shape[1] == 1 and features is None and rows is None and not triton_support.recorded()
        if single and self.one_launch and self._run_at_once(model, x, ropes, context):
            return x
        return model.each_block(x, ropes, context.layers, features=features, rows=rows)

    def _run_at_once(self, model: Transformer, x: Tensor, ropes: Sequence[Rotation], context: Context) -> bool:
        """Run all blocks on x (1, 1, C) in place by one launch, or return False."""
        bound: list[Any] = [block._bound for block in model.blocks]
        if len(bound) != len(self._bound_to) or any(a is not b for a, b in zip(bound, self._bound_to, strict=True)):
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                return False  # its buffers are made outside of graphs
            found = decode_layers(model)
            made = None if isinstance(found, str) else found
            if made is None or self._decode is None or made.reads() != self._decode.reads():
                self._decode = made  # else the weights are where they were: captured steps use its buffers
            self._bound_to = bound
        decode, step = self._decode, context.metadata
        if decode is None or step is None or step.rows != PLAIN:
            return False
        k, v = context.k[0], context.v[0]
        if k.dtype != model.dtype or step.max_query != 1 or k.stride() != v.stride():
            return False
        cos, sin = (table.flatten() for table in ropes[0])
        try:
            return decode(x.flatten(), cos, sin, context.views)
        except Exception as error:
            if not triton_support.failed(error):
                raise
            CudaStack.one_launch = False
            reason = f"{type(error).__name__}: {error}"[:300]
            message = "decode steps of one sequence are launched layer by layer, slower; one launch for all failed"
            warnings.warn(f"{message}: {reason}", HastenWarning, stacklevel=2)
            return False

    def why_not_one_launch(self, model: Transformer) -> str | None:
        """Why a step of one row is a few launches for each block, or None where it is one for all."""
        if not self.one_launch:
            return "it failed in an earlier step, as a warning said"
        found = decode_layers(model)
        return found if isinstance(found, str) else None

    def scores(self, model: Transformer, x: Tensor) -> Tensor:
        """x (…, C) before the last norm -> logits (…, out features of the head)."""
        from hasten.ops.linear.fused import NormArguments, fused_linear

        norm = NormArguments(*norm_arguments(model.norm))  # type: ignore[arg-type]
        rows = x.float().flatten(0, -2)
        found = fused_linear(rows, **product_weight(model.head), norm=norm, out_dtype=model.dtype)
        return found.view(*x.shape[:-1], -1)
