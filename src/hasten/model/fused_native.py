"""The native fused steps on a CPU: `FusedBlock`, which fused.py puts in the place of each readable block.

The steps: norm + q, k, v + rotary turn + cache write and attention, or norm + projections and what keeps a state;
output + residual; norm + gate, up + activation; down + residual, or the router and the experts that it chooses; the
gate of per-layer embeddings. All layers are one call (fused_stack.py) where their caches have the same slots, else each
is one. A layer whose experts have several formats, or ranks, is a call up to the residual behind its output, the
router, and the experts. The stream is float32 between them.
"""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hasten.machine.pages import SharedPages, return_freed_memory
from hasten.model.activations import XIELU
from hasten.model.config import ModelConfig
from hasten.model.experts import Experts, NormedExperts
from hasten.model.fused_block import FusedSteps, unknown_parts
from hasten.model.fused_experts import NO_MLP, NO_ROUTING, experts_call, routing_of, shared_mlp
from hasten.model.fused_linear import (
    ACTIVATION_ORDER,
    difference,
    fusion_conflict,
    gate_up_rows,
    interleave_gate_up,
    norm_arguments,
    norm_fields,
    packed,
    replace_linears,
    weight_plan,
)
from hasten.model.fused_mixer import NO_ATTENTION
from hasten.model.lora import AdapterChoice
from hasten.model.mlp import MLP
from hasten.model.rope import Rotation
from hasten.model.sharded import ShardedTransformer, SumOfRanks
from hasten.model.transformer import Block, Transformer
from hasten.ops.attention.spec import LARGEST_NATIVE
from hasten.ops.attention.view import KVView
from hasten.ops.cache_plan import CachePlan
from hasten.ops.calls import BlocksCall
from hasten.ops.linear import BFLOAT16, PackedLinear
from hasten.ops.linear.operator import LinearRequest, native_opt_in, native_unsupported
from hasten.ops.linear.weights import PLAIN
from hasten.ops.native import MISSING, library, native_ops

# In the order of the enum in ops/block/phases.h.
HEAD_NORM_ORDER = ("head", "rotated_head", "projection")

# Fields that the native steps support, of those that `unknown_parts` looks at.
_OF_HEADS = ("qk_norm", "rope", "query_beta", "rope_pairs", "sinks", "mixed_heads", "shared_keys", "value_norm")
_OF_ATTENTION = (*_OF_HEADS, "mixer", "latent", "attention_gate")
_BESIDE_EXPERTS = (*_OF_ATTENTION, "norm", "pre_norms", "residual_scale", "activation", "expert_norms", "block_scales")
_KNOWN = (*_BESIDE_EXPERTS, "parallel", "token_features")


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
    if isinstance(model, ShardedTransformer) and model.config.qk_norm == "projection":
        return "the fused steps know no norms over heads that several ranks have"
    if library() is None:
        return f"{MISSING}: `hasten doctor` says why"
    return fusion_conflict(model, _unsupported)


def _unsupported(request: LinearRequest) -> str | None:
    """Why the native product cannot serve a layer, or None; its activations are never float16 here."""
    wide = torch.float32 if request.dtype == torch.float16 else request.dtype
    return native_unsupported(replace(request, dtype=wide))


def native_shape_refusal(config: ModelConfig) -> str | None:
    """Why the native steps cannot run a model of this shape, or None."""
    size = max((config.head_dim_of(layer) for layer in config.layers if layer.attends), default=0)
    if size > LARGEST_NATIVE:
        return f"the head size is {size}; the fused steps go up to {LARGEST_NATIVE}"
    experts = {layer.experts for layer in config.layers}
    known = _BESIDE_EXPERTS if True in experts else _KNOWN
    part = unknown_parts(config, known=known if False in experts else (*known, "swiglu"))
    blocks = " of blocks with experts" if True in experts else ""
    return None if part is None else f"the fused steps{blocks} know {part}"


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
    reduce: PackedLinear  # those of the token gate, where there is one
    expand: PackedLinear
    cache_dtype = torch.bfloat16  # of keys and values
    stacks: WeakSet[Any]  # that have planned it: see `_has_changed`

    def __init__(self, block: Block, pages: SharedPages) -> None:
        """pages: where weights too small for large pages of their own are moved."""
        super().__init__(block)
        for name, place in (self._mixing() | self._beside()).items():
            setattr(self, name, settled(packed(block.get_submodule(place)), pages))  # type: ignore[arg-type]
        self.choice: AdapterChoice | None = None  # of adapters, whose factors `factors` holds by the name of our layer
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}
        if self.experts is not None:
            replace_linears(self.experts, lambda linear: settled(packed(linear), pages))
        elif isinstance(block.mlp, MLP):
            self.activation = ACTIVATION_ORDER.index(self.activation_name)
            gate, up = block.mlp.gate, block.mlp.up
            if gate is not None and difference(gate, up) is not None:
                self.gate, self.up = settled(packed(gate), pages), settled(packed(up), pages)
            else:
                self.inner = settled(packed(up) if gate is None else interleave_gate_up(gate, up), pages)
            self.down = settled(packed(block.mlp.down), pages)
        if block.token_gate is not None:
            for name in self._token_gate():
                setattr(self, name, settled(packed(getattr(block.token_gate, name)), pages))
        return_freed_memory()
        self.bind()

    def _mixing(self) -> dict[str, str]:
        """Our layers of attention, or of its mixer, and where each is in a readable block; the last is output.

        All others take the block's input.
        """
        if self.mixer is None:
            return {name: f"attention.{name}" for name in (*self.projections, "output")}
        return {name: f"mixer.{name}" for name in self.mixer.sizes.inputs} | {"output": "mixer.out"}

    def _beside(self) -> dict[str, str]:
        """A layer of latent attention that takes the latent of the queries."""
        return {"q_up": "attention.q_up"} if "q_down" in self._mixing() else {}

    def rows(self) -> dict[str, dict[str, Tensor]]:
        alone = self._mixing() | self._beside()
        if self.experts is None:
            alone |= {name: f"mlp.{name}" for name in ("gate", "up", "down") if hasattr(self, name)}
        alone |= {name: f"token_gate.{name}" for name in self._token_gate()}
        found = {name: {ours: torch.arange(getattr(self, name).out_features)} for name, ours in alone.items()}
        if hasattr(self, "inner"):
            gate, up = gate_up_rows(self.inner_size)
            parts = {"mlp.gate": gate, "mlp.up": up} if self.gated else {"mlp.up": torch.arange(self.inner_size)}
            found["inner"] = parts
        return found

    def _token_gate(self) -> tuple[str, ...]:
        return () if self.token_norm is None else ("reduce", "expand")

    def runs_on(self, place: Tensor) -> bool:
        return place.device.type == "cpu" and place.dtype == self._like.dtype

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_bound", "forward"):
            self._has_changed()
        super().__setattr__(name, value)

    def register_forward_hook(self, *given: Any, **options: Any) -> RemovableHandle:
        self._has_changed()
        return super().register_forward_hook(*given, **options)

    def register_forward_pre_hook(self, *given: Any, **options: Any) -> RemovableHandle:
        self._has_changed()
        return super().register_forward_pre_hook(*given, **options)

    def _has_changed(self) -> None:
        """Have the stacks look at their blocks again, which they do not in each step: that takes long."""
        for stack in self.__dict__.get("stacks", ()):
            stack.forget_plans()

    @property
    def joins_calls(self) -> bool:
        """Whether a call of several blocks may compute it: not where it was hooked or patched."""
        return "forward" not in self.__dict__ and not self._forward_hooks and not self._forward_pre_hooks

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "stacks"}

    def bind(self) -> None:
        ops, sums = native_ops(), self.attention_post_norm
        # eps, offset and centred are those of the first norm: all of a model are of one kind.
        weight, bias = _factors(self.attention_norm)
        first = sums if weight is None else self.attention_norm
        norm = norm_fields(first) | {"norm_weight": weight, "norm_bias": bias}
        experts: Any = self.experts
        routing: dict[str, Any] | None = NO_ROUTING
        if experts is not None:  # None: they are called apart
            routing = None if isinstance(sums, SumOfRanks) else routing_of(experts)
        apart = routing is None
        read = self.attention_norm if self.parallel else self.mlp_norm
        output_norm, mlp_norm, down_norm = (_factors(norm) for norm in (sums, read, self.mlp_post_norm))
        *inputs, output = (self._plan(name) for name in self._mixing())
        plan = ops.plan_block.default(
            **norm,
            **self._mixer(),
            residual_scale=self.residual_scale,
            parallel=self.parallel,
            qkv=inputs,
            output=output,
            output_norm_weight=output_norm[0],
            output_norm_bias=output_norm[1],
            mlp_norm_weight=mlp_norm[0],
            mlp_norm_bias=mlp_norm[1],
            **(NO_MLP if apart else self._mlp()),
            down_norm_weight=None if apart else down_norm[0],
            down_norm_bias=None if apart else down_norm[1],
            ranks=sums.group.plan if isinstance(sums, SumOfRanks) else None,
            **{name: self._plan(name) if name in self._token_gate() else None for name in ("reduce", "expand")},
            token_norm_weight=_factors(self.token_norm)[0],
            block_scale=1.0 if apart or self.scale is None else self.scale.item(),
            **(routing or NO_ROUTING),
        )
        self._bound = SimpleNamespace(
            plan=plan,
            apart=apart,
            experts=experts_call(experts) if apart else None,
            plan_stack=ops.plan_stack.default,
            blocks=ops.blocks.default,
            alone={rope: ops.plan_stack.default([plan], [rope]) for rope in (-1, 0)},  # by its rope_index
        )

    def _mixer(self) -> dict[str, Any]:
        """What mixes the tokens, as `plan_block` takes it: attention, or what keeps a state."""
        if self.mixer is not None:
            return NO_ATTENTION | {"mixer": self.mixer.plan()}
        spec, offset = self.spec, norm_arguments(self.attention_norm)[3]
        return {
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "q_norm": _factors(self.q_norm)[0],
            "k_norm": _factors(self.k_norm)[0],
            "head_norm": HEAD_NORM_ORDER.index(self.qk_norm or "head"),
            "rope_pairs": self.rope_pairs,
            "scale": spec.scale,
            "window": spec.window or 0,
            "softcap": spec.softcap or 0.0,
            "sinks": None if self.sinks is None else self.sinks.detach().float(),
            "attention_gate": self.attention_gate,
            "mixer": None,
            "latent": None if self.latent is None else self.latent.plan(self._plan("q_up") if self._beside() else None),
            # Norms have factors here, and values' are none: one, less what is added to it.
            "v_norm": torch.full((spec.head_dim,), 1 - offset) if self.normalises_values else None,
            "written": len(self.projections) - 1,
        }

    def _plan(self, name: str) -> Tensor:
        """The weight of a layer, with the factors of its adapters, as the native steps take it."""
        return weight_plan(getattr(self, name), *self.factors.get(name, (None, None)))

    @property
    def joins_experts(self) -> bool:  # type: ignore[override]
        """Whether the experts are a part of the block's native call."""
        return self.experts is not None and not self._bound.apart

    def parts(self) -> dict[str, tuple[nn.Module, ...]]:
        """The parts of the native call, in the order of their times, each with the layers whose weights it reads."""
        *inputs, output = (getattr(self, name) for name in self._mixing())
        found: dict[str, tuple[nn.Module, ...]] = {"qkv": tuple(inputs), "attention": (), "output": (output,)}
        if self.mixer is not None:
            found = {"inputs": tuple(inputs), "mixer": tuple(self.mixer.modules()), "output": (output,)}
        if self.latent is not None:
            before = (*inputs, *(getattr(self, name) for name in self._beside()), self.latent.keys)
            found |= {"qkv": before, "attention": (self, self.latent.values)}
        if isinstance(self.experts, Experts):
            each = tuple(self.experts.experts.modules())
            return found | {"routing": tuple(set(self.experts.modules()) - set(each)), "experts": each}
        inner = tuple(getattr(self, name) for name in ("inner", "gate", "up") if hasattr(self, name))
        return found | {"inner": inner, "down": tuple(getattr(self, name) for name in ("down", *self._token_gate()))}

    def _mlp(self) -> dict[str, Any]:
        """The block's MLP as `plan_block` takes it, or the one beside its experts."""
        if isinstance(self.experts, Experts):
            return shared_mlp(self.experts)
        weights = [self._plan(name) for name in ("inner", "gate", "up") if hasattr(self, name)]
        learned = self.learned_activation
        return {
            "mlp": weights,
            "inner_size": self.inner_size,
            "gated": self.gated,
            "activation": self.activation,
            "xielu": [factor.item() for factor in learned.factors()] if isinstance(learned, XIELU) else [],
            "down": self._plan("down"),
        }

    def forward(
        self,
        x: Tensor,
        rope: Rotation | None,
        layer: Any,
        features: Tensor | None = None,
        shared: KVView | None = None,
    ) -> Any:
        """x (B, T, C) -> (B, T, C) in float32, with the cache of the layer where it lends its keys and values.

        layer: the context of this kind of layer. features (B, T, P): what the tokens bring. shared: the cache of the
        layer whose keys it uses.
        """
        bound, x = self._bound, x.float()
        batch, tokens, _ = x.shape
        view: Any = None
        if self.mixer is None:
            spec = self.spec
            view = layer.view(batch=batch, tokens=tokens, kv_heads=spec.kv_heads, head_dim=spec.head_dim)
            view = view if shared is None else view._replace(k=shared.k, v=shared.v)
            view = view if self.latent is None else view._replace(v=view.k)  # also where nothing is kept
            metadata, slots, certain, cache = view.metadata, None, None, view.plan
            if cache is None:  # made for this call, as are the tensors
                cache = CachePlan([view.k], [view.v], () if view.seen is None else (view.seen,)).whole()
        else:
            state, slots, certain, metadata, cache = layer.state_view(
                batch=batch, tokens=tokens, sizes=self.mixer.sizes
            )
            cache = CachePlan([], [], states=[state]).whole() if cache is None else cache
        call = BlocksCall(
            x=x,
            stack=bound.alone[-1 if rope is None else 0],
            cache=cache,
            cos=[] if rope is None else [rope[0]],
            sin=[] if rope is None else [rope[1]],
            rope_rows=None,
            query_factors=[] if rope is None else rope[2:],
            slot_mapping=metadata.slot_mapping,
            query_start_loc=metadata.query_start_loc,
            seq_lens=metadata.seq_lens,
            first_slots=metadata.first_slots,
            block_table=metadata.block_table,
            block_size=metadata.block_size,
            rotated=metadata.rows.rotated,
            adapters=None if self.choice is None else self.choice.of(batch * tokens),
            state_slots=slots,
            certain=certain,
            features=None if features is None else features.float().reshape(1, batch * tokens, -1),
        )
        x = bound.blocks(*call)
        x = self._with_experts(x) if bound.apart else x
        return (x, view) if self.mixer is None and self.lends_keys else x

    def _with_experts(self, x: Tensor) -> Tensor:
        """The second half of a block whose experts are called apart."""
        experts: Any = self._bound.experts or self.experts
        normal = self.mlp_norm(x)
        found = experts(normal, x) if isinstance(self.experts, NormedExperts) else experts(normal)
        x = x + self.residual_scale * self.mlp_post_norm(found)
        return x if self.scale is None else x * self.scale


def _factors(norm: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """The weight and the bias of a norm, or None where it has none."""
    return (None, None) if norm is None else norm_arguments(norm)[:2]


def settled(linear: PackedLinear, pages: SharedPages) -> PackedLinear:
    """Move a layer's weight to memory from which a decode step streams it fastest; returns the layer."""
    # Ours alone: the tensor is known to the layer and to the call that counts, its memory to the tensor and this name.
    storage = linear.data.untyped_storage()
    own = sys.getrefcount(linear.data) == 2 and torch._C._storage_Use_Count(storage._cdata) == 2
    linear.data = pages.move(linear.data, taken=own)
    for name in ("scales", "zeros", "outer"):
        if (beside := getattr(linear, name)) is not None:
            setattr(linear, name, pages.move(beside))
    return linear
