"""The optimizer's step on fixed tensors: norm, clipping, AdamW and 16-bit copies, without reading anything on the host.

It updates the state of `torch.optim.AdamW` in its own format, so that checkpoints, resuming and other code see that
optimizer. The numbers that change from step to step (learning rates, bias corrections) are in `scalars`, a tensor at a
fixed address, where a captured step reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.ops.triton_support import refusal
from hasten.training.copies import WeightCopies


def why_not_fixed(optimizer: torch.optim.Optimizer) -> str | None:
    """Why an optimizer's step cannot be taken by `Update`, or None."""
    if type(optimizer) is not torch.optim.AdamW:
        return f"its optimizer is {type(optimizer).__name__}, and only AdamW's step is captured"
    if any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
        return "AdamW is used with amsgrad or maximize"
    if not all(group["fused"] for group in optimizer.param_groups):
        return "techniques.fused_optimizer is off"
    return None


class Update:
    """The step of an AdamW on fixed tensors.

    parameters: all that the optimizer updates. clip: maximum gradient norm, or None. copies: 16-bit weights to write.
    kernel: "triton" or "torch"; None: the first that fits. scalars: [learning rate of each group, 1 - β1ᵗ,
    sqrt(1 - β2ᵗ)].
    """

    def __init__(
        self,
        optimizer: torch.optim.AdamW,
        parameters: Sequence[Tensor],
        *,
        clip: float | None,
        copies: WeightCopies | None,
        kernel: str | None = None,
    ) -> None:
        self.optimizer, self.parameters, self.clip, self.copies = optimizer, list(parameters), clip, copies
        device = self.parameters[0].device
        self._prepare_state(device)
        self.steps = int(self.step.item())
        self.scalars = torch.zeros(len(optimizer.param_groups) + 2, dtype=torch.float32, device=device)
        self._fused: Any = None
        if kernel != "torch" and (kernel == "triton" or refusal(device) is None):
            from hasten.training.triton_adamw import FusedUpdate, why_not

            if why_not(self) is None:
                self._fused = FusedUpdate(self)

    @property
    def kernel(self) -> str:
        """Name of the kernel in use: "triton" or "torch"."""
        return "torch" if self._fused is None else "triton"

    def _prepare_state(self, device: torch.device) -> None:
        """Create AdamW's state as AdamW does, with one step count for all parameters."""
        shared: Tensor | None = None
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                    state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                if shared is None:
                    shared = state["step"].to(device)
                state["step"] = shared
        assert shared is not None
        self.step = shared

    def current(self) -> bool:
        """Whether the optimizer still has the state that this was created for; loading a checkpoint replaces it."""
        return self.optimizer.state[self.parameters[0]].get("step") is self.step

    def flush(self) -> None:
        """After a capture, make the copies that could not be made during it."""
        if self._fused is not None:
            self._fused.flush()

    def next_scalars(self) -> list[float]:
        """Count a step and return its numbers for `scalars`."""
        self.steps += 1
        first = self.optimizer.param_groups[0]
        beta1, beta2 = first["betas"]
        corrections = [1 - beta1**self.steps, math.sqrt(1 - beta2**self.steps)]
        return [float(group["lr"]) for group in self.optimizer.param_groups] + corrections

    @torch.no_grad()
    def run(self, gradients: Sequence[Tensor]) -> Tensor:
        """Clip, update, and write the copies; returns the gradients' norm before clipping, 0-dim float32.

        gradients: one for each of `parameters`, in any floating dtype; they may be modified.
        """
        self.step.add_(1)
        if self._fused is not None:
            norm: Tensor = self._fused.run(gradients)
            return norm
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients), 2, dtype=torch.float32)))
        wide = [one if one.dtype == torch.float32 else one.float() for one in gradients]
        if self.clip is not None:
            torch._foreach_mul_(wide, torch.clamp(self.clip / (norm + 1e-6), max=1.0))
        by_parameter = dict(zip(self.parameters, wide, strict=True))
        for index, group in enumerate(self.optimizer.param_groups):
            members = group["params"]
            states = [self.optimizer.state[parameter] for parameter in members]
            torch._fused_adamw_(
                members,
                [by_parameter[parameter] for parameter in members],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                lr=self.scalars[index],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )
        if self.copies is not None:
            pairs = list(self.copies.pairs())
            if pairs:
                torch._foreach_copy_([copy for _, copy in pairs], [parameter for parameter, _ in pairs])
            if self.copies.fp8 is not None:
                self.copies.fp8.measure()
        return norm
