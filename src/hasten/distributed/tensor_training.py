"""Tensor and sequence parallelism while training (arXiv 1909.08053, 2205.05198), in one mesh with FSDP2.

A rank has some heads of every attention, some columns of every MLP, and some words of embedding and head; there it
computes all tokens. In between (norms, residual stream) it has the full width and some tokens of each row. Attention
and MLP therefore begin with an all-gather of tokens and end with a reduce-scatter; torch's parallel styles express this
as a plan.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hasten.distributed.mesh import TENSOR, mesh_of
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.model.attention import Attention
from hasten.model.config import ModelConfig
from hasten.model.swap import take_over
from hasten.model.transformer import Transformer
from hasten.ops.loss.chunked import chunked
from hasten.ops.loss.kernels import Head


class SplitTransformer(Transformer):
    """A model whose blocks are split over the ranks of a mesh's dimension `tensor`; it computes losses, not logits."""

    group: dist.ProcessGroup

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        # The result is an asynchronous tensor, whose gradient a compiled block would lose: the copy waits for it.
        return super().embed(tokens, positions).clone()

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Sum of the token losses of x (B, T, C); every rank computes the logits of its own words only."""
        from torch.distributed.tensor import Partial, Replicate

        shared: Any = x
        x = shared.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]).flatten(0, -2)
        weight, kind = self.head.weight.to_local(), x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        first = dist.get_rank(self.group) * weight.shape[0]
        head = Head(weight, self.config.vocab_size, None, self.config.logit_softcap, first, self.meet)
        with torch.autocast(kind, enabled=False):
            return chunked(x.to(dtype), targets.flatten(), head)

    def meet(self, numbers: Tensor, operation: str) -> Tensor:
        """Reduce `numbers` over the group, in place; operation: "sum" or "max"."""
        dist.all_reduce(numbers, dist.ReduceOp.SUM if operation == "sum" else dist.ReduceOp.MAX, group=self.group)
        return numbers


def apply_tensor_parallel(model: Transformer, ranks: Ranks, replicas: int) -> Transformer:
    """Split every block over `ranks.tensor` neighbouring ranks, in place; returns the model with this rank's part.

    Call it before kernels are chosen. Raises ConfigError for a model that cannot be split so.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    check_split(model.config, ranks.tensor)
    mesh = mesh_of(model.device.type, ranks, replicas)[TENSOR]
    tokens, tied = Shard(1), model.tied

    def gathered(*others: None) -> PrepareModuleInput:
        return PrepareModuleInput(input_layouts=(tokens, *others), desired_input_layouts=(Replicate(), *others))

    def looked_up() -> RowwiseParallel:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)

    plan: dict[str, Any] = {"embedding": looked_up(), "positions": looked_up()}
    plan |= {"norm": SequenceParallel(), "head": ColwiseParallel()}
    inner: dict[str, Any] = {"attention": gathered(None, None), "mlp": gathered()}
    inner |= {f"{kind}_norm": SequenceParallel() for kind in ("attention", "mlp")}
    if model.config.post_norms:
        inner |= {f"{kind}_post_norm": SequenceParallel(use_local_output=True) for kind in ("attention", "mlp")}
    inner |= {f"attention.{name}_norm": SequenceParallel(sequence_dim=2, use_local_output=True) for name in "qk"}
    inner |= {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")}
    inner |= {name: RowwiseParallel(output_layouts=tokens) for name in ("attention.output", "mlp.down")}
    plan |= {f"blocks.*.{name}": style for name, style in inner.items()}
    there = {name.replace("blocks.0.", "blocks.*.") for name, _ in model.named_modules()}
    parallelize_module(model, mesh, {name: plan[name] for name in plan.keys() & there}, src_data_rank=None)
    for module in model.modules():
        if isinstance(module, Attention):
            heads, kv_heads = module.spec.heads // ranks.tensor, module.spec.kv_heads // ranks.tensor
            module.spec = replace(module.spec, heads=heads, kv_heads=kv_heads)
    if tied:
        model.tie()
    made = take_over(SplitTransformer, model)
    made.group = mesh.get_group()
    return made


def check_split(config: ModelConfig, degree: int) -> None:
    """Raise ConfigError for a model whose blocks cannot be split over `degree` ranks (2 or more)."""
    if config.latent is not None:
        raise ConfigError("parallel.tensor does not support a model with latent attention; leave it at 1")
    for what, size in (
        ("key/value heads", config.kv_heads),
        ("heads", config.heads),
        ("columns of the MLP", config.intermediate_size),
        ("positions", config.max_positions if config.learned_positions else degree),
        ("words (--techniques.pad-vocabulary-to)", config.padded_vocab_size),
    ):
        if size % degree:
            raise ConfigError(f"parallel.tensor is {degree}, which the model's {size:,} {what} cannot be split into")
    found = [
        (config.experts, "experts"),
        (config.dropout, "dropout"),
        (config.parallel, "blocks whose attention and MLP read the same stream"),
        (not config.pre_norms, "blocks without norms before attention and MLP"),
        (config.qk_norm == "projection", "norms over all heads of its queries together"),
        (config.attention_sinks, "attention sinks"),
        (config.activation == "xielu", "activations that learn"),
        (not config.norm_weights, "norms without weights"),
        (config.logit_scale != 1.0, "scaled logits"),
        (config.attention_pattern, "a sparse attention pattern"),
        (config.keeps_states, config.mixer.name if config.mixer else ""),
        (config.has_single_halves, "layers of one half"),
        (config.attention_gate, "gates of attention"),
        (config.mixed_heads, "heads of several sizes"),
        (config.shares_keys, "layers that use the keys of others"),
        (config.token_features, "per-layer embeddings"),
        (config.block_scales, "learned scales of its blocks"),
        (config.value_norm, "norms of its values"),
    ]
    for value, what in found:
        if value:
            raise ConfigError(f"parallel.tensor does not support a model with {what}; leave it at 1")
