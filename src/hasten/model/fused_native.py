"""The native fused steps on a CPU: `FusedBlock`, which fused.py puts in the place of each readable block.

The steps: norm + q, k, v + rotary turn + cache write; attention; output + residual; norm + gate, up + activation; down
+ residual. All layers are one call where they are dense and their caches have the same slots, else each is one (with
experts three, and the readable experts). The residual stream is float32 between them.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from hasten.model.config import ModelConfig
from hasten.model.fused_block import FusedSteps
from hasten.model.fused_linear import (
    difference,
    fusion_conflict,
    gate_up_rows,
    interleave_gate_up,
    norm_arguments,
    packed,
    replace_linears,
    weight_arguments,
)
from hasten.model.interfaces import Context, LayerContext
from hasten.model.lora import AdapterChoice
from hasten.model.sharded import ShardedTransformer, SumOfRanks
from hasten.model.transformer import MLP, Block, Transformer
from hasten.ops.attention.spec import LARGEST_HEAD
from hasten.ops.linear import BFLOAT16, PackedLinear
from hasten.ops.linear.operator import LinearRequest, native_opt_in, native_unsupported
from hasten.ops.linear.weights import PLAIN
from hasten.ops.native import library, native_ops
from hasten.ops.pages import in_large_pages, return_freed_memory

ACTIVATION_ORDER = ("silu", "gelu", "gelu_tanh", "relu")  # in the order of the enum in ops/block/phases.h


def native_refusal(model: Transformer) -> str | None:
    """Why the native steps cannot run this model here, or None."""
    if model.device.type != "cpu":
        return f"these fused steps are native CPU code; the model is on {model.device}"
    if (reason := native_shape_refusal(model.config)) is not None:
        return reason
    if model.dtype not in PLAIN:
        dtype = str(model.dtype).removeprefix("torch.")
        return f"the fused steps take weights of bfloat16 or float16; the model is {dtype}"
    if isinstance(model, ShardedTransformer) and model.group.segment is None:
        return "the fused steps need ranks that share memory: native kernels, on one machine with Linux"
    if library() is None:
        return "the native kernels could not be built here (see the warning, and `hasten doctor`)"
    return fusion_conflict(model, _unsupported)


def _unsupported(request: LinearRequest) -> str | None:
    """Why the native product cannot serve a layer, or None; its activations are never float16 here."""
    wide = torch.float32 if request.dtype == torch.float16 else request.dtype
    return native_unsupported(replace(request, dtype=wide))


def native_shape_refusal(config: ModelConfig) -> str | None:
    """Why the native steps cannot run a model of this shape, or None."""
    if config.head_dim > LARGEST_HEAD:
        return f"the head size is {config.head_dim}; the fused steps go up to {LARGEST_HEAD}"
    return None


def native_waits(model: Transformer) -> str | None:
    """Why a model that could be fused is faster unfused on this processor, or None."""
    if model.quantization is not None or model.dtype != torch.bfloat16:
        return None
    return native_opt_in(LinearRequest(device=model.device, dtype=model.dtype, format=BFLOAT16, in_features=1))


class FusedBlock(FusedSteps):
    """The steps as native calls on a CPU (see the module's docstring)."""

    q: PackedLinear
    k: PackedLinear
    v: PackedLinear
    output: PackedLinear
    inner: PackedLinear  # gate and up interleaved, where they are of one format, or up of a layer without a gate
    gate: PackedLinear  # else, as up
    up: PackedLinear
    down: PackedLinear
    cache_dtype = torch.bfloat16  # of keys and values

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        attention = block.attention
        for name in ("q", "k", "v", "output"):
            setattr(self, name, settled(packed(getattr(attention, name))))
        self.choice: AdapterChoice | None = None  # of adapters, whose factors `factors` holds by the name of our layer
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        if self.experts is not None:
            replace_linears(self.experts, packed)
        elif isinstance(block.mlp, MLP):
            self.activation = ACTIVATION_ORDER.index(self.activation_name)
            gate, up = block.mlp.gate, block.mlp.up
            if gate is not None and difference(gate, up) is not None:
                self.gate, self.up = settled(packed(gate)), settled(packed(up))
            else:
                self.inner = settled(packed(up) if gate is None else interleave_gate_up(gate, up))
            self.down = settled(packed(block.mlp.down))
        return_freed_memory()
        self.bind()

    def rows(self) -> dict[str, dict[str, Tensor]]:
        alone = {"q": "attention.q", "k": "attention.k", "v": "attention.v", "output": "attention.output"}
        if self.experts is None:
            alone |= {name: f"mlp.{name}" for name in ("gate", "up", "down") if hasattr(self, name)}
        found = {name: {ours: torch.arange(getattr(self, name).out_features)} for name, ours in alone.items()}
        if hasattr(self, "inner"):
            gate, up = gate_up_rows(self.inner_size)
            parts = {"mlp.gate": gate, "mlp.up": up} if self.gated else {"mlp.up": torch.arange(self.inner_size)}
            found["inner"] = parts
        return found

    def runs_on(self, place: Tensor) -> bool:
        return place.device.type == "cpu" and place.dtype == self._like.dtype

    def bind(self) -> None:
        spec, ops = self.spec, native_ops()
        norms = [None if norm is None else norm_arguments(norm)[0] for norm in (self.q_norm, self.k_norm)]
        sizes = (spec.heads, spec.head_dim, *norms)
        scores = (spec.scale, spec.window or 0, spec.softcap or 0.0)

        def weight(name: str) -> Tensor:
            linear, factors = getattr(self, name), self.factors.get(name, (None, None))
            return ops.plan_weight.default(linear.out_features, linear.in_features, *weight_arguments(linear), *factors)

        qkv = [weight(name) for name in ("q", "k", "v")]
        if self.experts is None:
            # eps, offset and centred are those of the first norm: all of a model are of one kind.
            first = norm_arguments(self.attention_norm)
            sums = self.attention_post_norm
            post, mlp, mlp_post = (norm_arguments(norm)[:2] for norm in (sums, self.mlp_norm, self.mlp_post_norm))
            inner = [weight(name) for name in ("inner", "gate", "up") if hasattr(self, name)]
            ranks = sums.group.plan if isinstance(sums, SumOfRanks) else None
            plan = ops.plan_block.default(
                *(spec.kv_heads, *first, qkv, *sizes, *scores),
                *(weight("output"), *post, *mlp),
                *(inner, self.inner_size, self.gated, self.activation, weight("down"), *mlp_post),
                ranks,
            )
            self._bound = SimpleNamespace(blocks=ops.blocks.default, norm_linear=ops.norm_linear.default, plan=plan)
        else:
            self._bound = SimpleNamespace(
                attention_input=ops.attention_input.default,
                input_arguments=(*norm_arguments(self.attention_norm), qkv, *sizes),
                attention=ops.attention.default,
                scores=scores,
                linear_add=ops.linear_add.default,
                output=weight_arguments(self.output),
                output_norm=norm_arguments(self.attention_post_norm),
                summed=isinstance(self.attention_post_norm, SumOfRanks),
            )

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None, layer: LayerContext) -> Tensor:
        """x (B, T, C) -> (B, T, C) in float32."""
        spec, bound, x = self.spec, self._bound, x.float()
        batch, tokens, _ = x.shape
        view = layer.view(batch=batch, tokens=tokens, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
        k, v, metadata, seen = view
        if self.experts is None:
            tables = ([], [], [-1]) if rope is None else ([rope[0]], [rope[1]], [0])
            chosen = None if self.choice is None else self.choice.of(batch * tokens)
            step = (metadata.slot_mapping, *metadata.to_read)
            return bound.blocks(x, *tables, [k], [v], *step, [bound.plan], chosen, None, [] if seen is None else [seen])
        cos, sin = rope or (None, None)  # (B, T, dim/2)
        slots, rotated = metadata.slot_mapping, metadata.rows.rotated
        q = bound.attention_input(x, *bound.input_arguments, cos, sin, k, v, slots, rotated)  # (B·T, H, D)
        attended = bound.attention(q, k, v, *metadata.to_read, *bound.scores, seen)  # (B·T, H, D)
        if bound.summed:  # by the ranks, before the norm
            part = bound.linear_add(attended, *bound.output, torch.zeros_like(x), *norm_arguments(nn.Identity()))
            x = x + self.attention_post_norm(part)
        else:
            x = bound.linear_add(attended, *bound.output, x, *bound.output_norm)
        return x + self.mlp_post_norm(self.experts(self.mlp_norm(x)))


class FusedStack:
    """All blocks of a fused model in one native call, and its last norm and head in another.

    Separate calls cost more, because between them the weights evict Python's own data from the caches.

    times: None, or int64 (1 + 5·blocks): each call writes when the blocks began and when each of a block's PARTS
    ended, in nanoseconds of the steady clock.
    """

    PARTS = ("qkv", "attention", "output", "inner", "down")

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.times: Tensor | None = None
        self.rope_index = [layer.rope if model.config.ropes else -1 for layer in model.config.layers]

    def run(self, x: Tensor, ropes: Sequence[tuple[Tensor, Tensor]], context: Context) -> Tensor:
        """x (B, T, C) -> (B, T, C) in float32. Blocks that were hooked, replaced or patched are called one by one."""
        blocks: list[FusedBlock] = list(self.model.blocks)  # type: ignore[arg-type]
        cache = context.all_layers
        if cache is None or self.opened():
            return self.model.each_block(x, ropes, context.layers)
        cos, sin = [table[0] for table in ropes], [table[1] for table in ropes]
        plans = self.plans()
        step = (cache.metadata.slot_mapping, *cache.metadata.to_read)
        choice = blocks[0].choice
        chosen = None if choice is None else choice.of(x.shape[0] * x.shape[1])
        tables = (cos, sin, self.rope_index)
        how = (plans, chosen, self.times, cache.seen)
        return blocks[0]._bound.blocks(x.float(), *tables, cache.k, cache.v, *step, *how)

    def opened(self) -> bool:
        """Whether a block was hooked, replaced or patched, so that it has to be called itself."""
        return any(
            type(block) is not FusedBlock
            or "forward" in block.__dict__
            or block._forward_hooks
            or block._forward_pre_hooks
            for block in self.model.blocks
        )

    def plans(self) -> list[Tensor]:
        """The plan of each block for the native call of all blocks."""
        return [block._bound.plan for block in self.model.blocks]  # type: ignore[union-attr, misc]

    def scores(self, x: Tensor) -> Tensor:
        """x (…, C) before the last norm -> logits (…, out features of the head) in float32."""
        model = self.model
        norm, head = norm_arguments(model.norm), weight_arguments(model.head)
        first: FusedBlock = model.blocks[0]  # type: ignore[assignment]
        return first._bound.norm_linear(x, *norm, *head, model.head.out_features)


def settled(linear: PackedLinear) -> PackedLinear:
    """Move a layer's weight to memory from which a decode step streams it fastest; returns the layer."""
    # Ours alone: the tensor is known to the layer and to the call that counts, its memory to the tensor and this name.
    storage = linear.data.untyped_storage()
    own = sys.getrefcount(linear.data) == 2 and torch._C._storage_Use_Count(storage._cdata) == 2
    linear.data = in_large_pages(linear.data, taken=own)
    return linear
