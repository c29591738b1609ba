"""Experts as the native steps of a CPU take them: within a block's call, or in one of their own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hasten.model.experts import Experts, NormedExperts
from hasten.model.fused_linear import ACTIVATION_ORDER, difference, norm_arguments, weight_plan
from hasten.ops.linear import PackedLinear
from hasten.ops.native import native_ops

# What `plan_block` takes for a block without experts.
_NORMS = ("router_norm", "expert_norm", "expert_post_norm", "shared_post_norm")
NO_ROUTING: dict[str, Any] = dict.fromkeys(("experts", "router", "choice_bias", "shared_gate", *_NORMS, "expert_scale"))
NO_ROUTING |= {"top_experts": 0, "expert_groups": 1, "kept_groups": 1, "group_scores": 2, "sigmoid_scores": False}
NO_ROUTING |= {"normalize_shares": False, "share_floor": 0.0, "share_scale": 1.0}
# And for one without an MLP.
NO_MLP: dict[str, Any] = {"mlp": [], "inner_size": 0, "gated": True, "activation": 0, "xielu": [], "down": None}


def routing_of(experts: Experts) -> dict[str, Any] | None:
    """How rows are sent to the experts, as `plan_block` takes it; None where only the readable experts run."""
    plan, config, shared, gate = experts_plan(experts), experts.config, experts.shared, experts.shared_gate
    beside: list[Any] = [] if shared is None else [shared.gate, shared.up, shared.down]
    linears = [experts.router, *beside, *([] if gate is None else [gate])]
    plain = all(isinstance(one, PackedLinear) and (one.bias is None or one is experts.router) for one in linears)
    limited = shared is not None and (config.swiglu_limit or config.up_offset)
    if plan is None or not plain or limited:
        return None
    router: Any = experts.router
    return {
        **_norms_of(experts),
        "experts": plan,
        "router": weight_plan(router),
        "choice_bias": experts.choice_bias,
        "shared_gate": weight_plan(gate) if isinstance(gate, PackedLinear) else None,
        "top_experts": config.experts_per_token,
        "expert_groups": config.expert_groups,
        "kept_groups": config.expert_top_groups,
        "group_scores": config.expert_group_scores,
        "sigmoid_scores": config.expert_scores == "sigmoid",
        "normalize_shares": config.normalize_experts,
        "share_floor": config.expert_sum_floor,
        "share_scale": config.expert_weight_scale,
    }


@torch.no_grad()
def _norms_of(experts: Experts) -> dict[str, Tensor | None]:
    """The weights of the norms that experts, their router and the MLP beside them have, and the scales of experts."""
    if not isinstance(experts, NormedExperts):
        return dict.fromkeys((*_NORMS, "expert_scale"))
    # The router's norm divides by the root mean square, and multiplies by the factors of its own.
    offset = norm_arguments(experts.expert_norm)[3]
    factors = experts.router_scale.float() * experts.config.hidden_size**-0.5 - offset
    norms = (experts.expert_norm, experts.expert_post_norm, experts.shared_post_norm)
    weights = [factors, *(norm_arguments(norm)[0] for norm in norms)]
    return {**dict(zip(_NORMS, weights, strict=True)), "expert_scale": experts.expert_scale.float()}


def shared_mlp(experts: Experts) -> dict[str, Any]:
    """The MLP beside the experts, which may be missing, as `plan_block` takes a block's."""
    shared: Any = experts.shared
    if shared is None:
        return NO_MLP
    return {
        "mlp": [weight_plan(shared.gate), weight_plan(shared.up)],
        "inner_size": shared.gate.out_features,
        "gated": True,
        "activation": ACTIVATION_ORDER.index(shared.activation_name),
        "xielu": [],
        "down": weight_plan(shared.down),
    }


def experts_plan(experts: Experts) -> Tensor | None:
    """The experts' weights as the native steps take them; None where only the readable experts run."""
    each: list[Any] = list(experts.experts)
    plans = {}
    for name in ("gate", "up", "down"):
        linears = [getattr(expert, name) for expert in each]
        alike = [one for one in linears if isinstance(one, PackedLinear)]
        if len(alike) < len(linears) or difference(*alike) is not None:
            return None
        plans[name] = [weight_plan(one) for one in alike]
    mlp = each[0]
    kind = {"activation": ACTIVATION_ORDER.index(mlp.activation_name), "limit": mlp.limit or 0.0}
    plan: Tensor = native_ops().plan_experts.default(**plans, **kind, up_offset=mlp.up_offset)
    return plan


def experts_call(experts: Experts) -> Callable[[Tensor], Tensor] | None:
    """The experts as one native call, x (B, T, C) float32 -> the same; None where only the readable ones run."""
    plan = experts_plan(experts)
    if plan is None or isinstance(experts, NormedExperts):
        return None
    call = native_ops().experts.default

    def run(x: Tensor) -> Tensor:
        shares, chosen = experts.route(x.flatten(0, -2))
        return experts.add_shared(call(plan=plan, x=x, chosen=chosen, shares=shares), x)

    return run
