"""Mixture of experts: each token is sent to the few MLPs that a router scores highest (Switch, Mixtral)."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hasten.errors import HastenWarning
from hasten.model.config import LayerConfig, ModelConfig
from hasten.model.grouped_experts import BoundExperts, could_run, experts_request
from hasten.model.mlp import MLP, Linear
from hasten.model.norms import norm_of, over_rms
from hasten.ops import triton_support
from hasten.ops.experts import KERNELS, ExpertsRequest, Grouped


def route(logits: Tensor, config: ModelConfig, choice_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose experts by the router's logits (N, E): their weights, in float32, and their numbers, (N, k) each.

    choice_bias: float32 (E,), added to the scores that choose and not to those that weigh (arXiv 2408.15664).
    Normalised softmax scores are the softmax of the chosen logits alone.
    """
    logits = logits.float()
    scores = _sigmoid(logits) if config.expert_scores == "sigmoid" else logits.softmax(dim=-1)  # (N, E)
    choice = scores if choice_bias is None else scores + choice_bias
    if config.expert_groups > 1:
        choice = _in_best_groups(choice, config)
    chosen = choice.topk(config.experts_per_token, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if config.normalize_experts:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(config.expert_sum_floor)
    return weights * config.expert_weight_scale, chosen


def _sigmoid(x: Tensor) -> Tensor:
    """The sigmoid, rounded from float64: a number has the same bits wherever it is in a batch.

    PyTorch computes the last elements of a tensor by scalar code, whose float32 results differ from the vectorised.
    """
    return x.double().sigmoid().to(x.dtype)


def _in_best_groups(choice: Tensor, config: ModelConfig) -> Tensor:
    """Scores (N, E) with -inf outside the groups kept: those whose best ones sum highest (arXiv 2412.19437)."""
    grouped = choice.unflatten(-1, (config.expert_groups, -1))  # (N, G, E/G)
    sums = grouped.topk(config.expert_group_scores, dim=-1).values.sum(dim=-1)  # (N, G)
    best = sums.topk(config.expert_top_groups, dim=-1).indices
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)  # (N, G)
    return grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)


def kept_dtype(name: str, dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of a parameter of a model in `dtype` (None: as it is stored): choice biases stay in float32.

    They differ from each other by less than 16 bits hold, and the differences choose the experts.
    """
    return torch.float32 if dtype is not None and name.endswith(".choice_bias") else dtype


class Experts(nn.Module):
    """Top-k routing over `config.experts` MLPs, and where the model has one an MLP beside them for every token.

    narrow, widen: the products before and behind the experts, where these read a narrower stream, or None.
    """

    failed: ClassVar[dict[torch.device, str]] = {}  # why no kernel of all experts is used there: an earlier error

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config, width = config, config.expert_width
        self.narrow: Linear | None = None
        self.widen: Linear | None = None
        if config.expert_latent:
            self.narrow = nn.Linear(config.hidden_size, width, bias=False)
            self.widen = nn.Linear(width, config.hidden_size, bias=False)
        self.all_take_part = False  # also experts that no row has chosen: then each has a gradient
        # `routed`, given the experts of this rank, where other ranks have the others (expert parallelism).
        self.exchange: Callable[[nn.ModuleList, Tensor, Tensor, Tensor], Tensor] | None = None
        self._bound: BoundExperts | None = None
        self.router = nn.Linear(config.hidden_size, config.experts, bias=config.router_bias)
        self.choice_bias = nn.Parameter(torch.empty(config.experts)) if config.expert_choice_bias else None
        self.experts = nn.ModuleList(MLP(config, config.expert_size, width) for _ in range(config.experts))
        self.shared: nn.Module | None = MLP(config, config.shared_size) if config.shared_size else None
        self.shared_gate = nn.Linear(config.hidden_size, 1, bias=False) if config.shared_gate else None

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for rows (N, C): their shares of a row's output, float32, and their numbers, (N, k) each."""
        return route(self.router(rows), self.config, self.choice_bias)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # (N, C)
        read = rows if self.narrow is None else self.narrow(rows)
        found = self.routed(read, *self.route(rows))
        return self.add_shared(found if self.widen is None else self.widen(found), rows).view_as(x)

    def routed(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Outputs (N, C) of the chosen experts for rows (N, C), added up by their shares."""
        if self.exchange is not None:
            return self.exchange(self.experts, rows, shares, chosen)
        grouped = self._grouped(rows, shares)
        if grouped is None:
            return self.one_by_one(rows, shares, chosen)
        if torch.compiler.is_compiling():
            return grouped(rows, shares, chosen)
        try:
            return grouped(rows, shares, chosen)
        except Exception as error:
            capturing = rows.is_cuda and torch.cuda.is_current_stream_capturing()  # which ends with any error
            if capturing or not triton_support.failed(error):
                raise
            reason = f"it failed in an earlier call: {type(error).__name__}: {error}"[:300]
            Experts.failed[rows.device] = reason
            message = f"experts are called one by one, which is slower; the kernel of all at once: {reason}"
            warnings.warn(message, HastenWarning, stacklevel=2)
            return self.one_by_one(rows, shares, chosen)

    def one_by_one(self, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """`routed`, each expert called as a module: reading which are chosen waits for a GPU, and ends a graph."""
        dtype = torch.promote_types(rows.dtype, torch.float32)  # a sum of experts is rounded once
        out = torch.zeros_like(rows, dtype=dtype)
        for index in range(len(self.experts)) if self.all_take_part else chosen.unique().tolist():
            row, slot = torch.where(chosen == index)
            out.index_add_(0, row, self.experts[index](rows[row]).to(dtype) * shares[row, slot, None])
        return out.to(rows.dtype)

    def _grouped(self, rows: Tensor, shares: Tensor) -> Grouped | None:
        """The kernel of all experts at once, where it can compute this call: there are no gradients."""
        if self.all_take_part or not could_run(rows.device) or rows.device in Experts.failed:
            return None
        if torch.is_grad_enabled():
            trained = chain((rows, shares), self.experts.parameters())
            if any(tensor.requires_grad for tensor in trained):
                return None
        bound = self.bound()
        return bound.run if rows.dtype == bound.request.inner.dtype else None

    def bound(self) -> BoundExperts:
        """The kernel, chosen at the first call and when a weight was replaced.

        A compiler calls this while it traces a layer; its graph takes the layer's kernel as it was bound last, without
        looking at weights: call this after one was replaced (`hasten.engine.compiled` does, before each step).
        """
        self._bind()
        assert self._bound is not None
        return self._bound

    def _bind(self) -> None:
        if self._bound is None or not self._bound.current:
            self._bound = BoundExperts(self.experts)

    # A compiler calls it instead of tracing it. torch.compiler.assume_constant_result sets this too, but imports the
    # compiler.
    _bind._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def request(self, device: torch.device | None = None) -> ExpertsRequest:
        """The request to a kernel, for `explain`. device: of the weights, if they are still on the meta device."""
        found = experts_request(list(self.experts), device)
        reason = Experts.failed.get(found.inner.device)
        return found if reason is None else replace(found, unusual=reason)

    def why_one_by_one(self, device: torch.device | None = None) -> str | None:
        """Why no kernel computes all experts at once, or None. device: as in `request`."""
        return KERNELS[0].unsupported_reason(self.request(device))

    def add_shared(self, out: Tensor, x: Tensor) -> Tensor:
        """Add to the experts' output (…, C) that of the MLP which every token of x (…, C) passes, if there is one."""
        if self.shared is None:
            return out
        shared: Tensor = self.shared(x)
        return out + (shared if self.shared_gate is None else shared * _sigmoid(self.shared_gate(x)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = None if self.choice_bias is None else self.choice_bias.detach()
        super()._apply(fn, recurse)
        if before is not None and self.choice_bias is not None and self.choice_bias.itemsize < before.itemsize:
            self.choice_bias = nn.Parameter(before.to(self.choice_bias.device))  # `kept_dtype`
        self._bound = None  # `fn` may have given the tensors other memory
        return self

    def __getstate__(self) -> dict[str, Any]:
        """State without the kernel, which holds addresses; a copy chooses its own."""
        return self.__dict__ | {"_bound": None}


def mlp_of(config: ModelConfig, layer: LayerConfig) -> nn.Module:
    """Create a layer's MLP, or its experts."""
    if not layer.experts:
        return MLP(config, config.inner_of(layer))
    return NormedExperts(config) if config.expert_norms else Experts(config)


def experts_of(block: nn.Module) -> Experts | None:
    """The experts of a block, readable or fused, if it has any."""
    held = (getattr(block, name, None) for name in ("experts", "mlp"))
    return next((one for one in held if isinstance(one, Experts)), None)


class NormedExperts(Experts):
    """Experts beside an MLP, with norms of their own before and behind each (Gemma 4).

    The router reads the stream divided by its root mean square, scaled for each feature; expert_scale (E,) multiplies
    the weights of the chosen experts.
    """

    shared: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.shared_post_norm, self.expert_norm, self.expert_post_norm = (norm_of(config, hidden) for _ in range(3))
        self.router_scale = nn.Parameter(torch.empty(hidden))
        self.expert_scale = nn.Parameter(torch.empty(config.experts))

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        normal = over_rms(rows, self.config.norm_eps).to(rows.dtype)
        shares, chosen = super().route(normal * self.router_scale * self.config.hidden_size**-0.5)
        return shares * self.expert_scale.float()[chosen], chosen

    def forward(self, x: Tensor, stream: Tensor | None = None) -> Tensor:
        """x (B, T, C): what the MLP reads, the stream behind the block's own norm; the others read `stream`."""
        assert stream is not None, "its router reads the stream before the block's norm"
        rows = stream.flatten(0, -2)  # (N, C)
        routed = self.routed(self.expert_norm(rows), *self.route(rows)).view_as(x)
        return self.shared_post_norm(self.shared(x)) + self.expert_post_norm(routed)
