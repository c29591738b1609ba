"""How weights, gradients and optimizer states lie on the ranks, as the training step sees it.

    Placement     whole, in one process
    Replicated    whole on every rank, gradients averaged (DistributedDataParallel)
    Sharded       a share on every rank: ZeRO 1-3 (arXiv 1910.02054) and HSDP, by FSDP2's `fully_shard`

The optimizer works on plain tensors, `optimizer_params`: the parameters; or this rank's shares of them; or copies in
float32, of 16-bit weights (masters) or on the host (offload). So one optimizer serves every placement. What it cannot
know from its own rows, the norm of a whole tensor (LAMB) or the whole matrix (Muon), it asks the placement for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.distributed.compressed import Errors, compressed_mean, no_errors
from hasten.distributed.mesh import TENSOR, mesh_of
from hasten.distributed.ranks import ALONE, Ranks


class Parts:
    """What an optimizer needs to know of whole tensors; here its tensors are whole."""

    def shape(self, part: Tensor) -> torch.Size:
        """Shape of the whole tensor."""
        return part.shape

    def norms(self, parts: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
        """Norms of whole tensors, (N,), from what this rank has of them. of: for each the one that is worked on."""
        return torch.stack(torch._foreach_norm(list(parts)))

    def whole(self, parts: Tensor, like: Tensor) -> Tensor:
        """(N, own rows, columns) of matrices of one shape -> (N, rows, columns). like: one that is worked on."""
        return parts

    def part(self, matrices: Tensor, like: Tensor) -> Tensor:
        """The inverse of `whole`."""
        return matrices


class Placement(Parts):
    """Everything whole, in one process. module: what is called forward. optimizer_params: tensors it updates, by name.

    copies: the device on which the optimizer has float32 copies of the weights, if it has any.
    """

    ranks: Ranks = ALONE
    module: nn.Module

    def __init__(self, model: Any, *, copies: torch.device | None = None) -> None:
        self.module = model
        self.copies = copies
        # Frozen ones are read from where they came from, and are nobody's to update or keep.
        self.parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer_params = {name: self._optimizer_param(p) for name, p in self.parameters.items()}
        # Of what the optimizer works on, all that is not the parameter itself.
        self._apart = [
            (p, self.optimizer_params[n])
            for n, p in self.parameters.items()
            if self.optimizer_params.get(n, p) is not p
        ]

    def _optimizer_param(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.copies is None:
            return parameter
        return nn.Parameter(self.local(parameter).detach().to(self.copies, torch.float32, copy=True))

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or gradient; without gradients of its own."""
        return tensor

    def micro_batch(self, *, last: bool) -> None:
        """A micro-batch begins. last: of its step, whose gradients must be everybody's."""

    @torch.no_grad()
    def collect(self) -> None:
        """Give the gradients to the tensors that the optimizer works on."""
        for parameter, own in self._apart:
            if self.copies is None:  # its storage may have moved
                own.data = self.local(parameter)
            own.grad = None if parameter.grad is None else self.local(parameter.grad).to(own.device, own.dtype)
            parameter.grad = None

    def zero_grad(self) -> None:
        """No gradients any more."""
        for tensor in (*self.parameters.values(), *self.optimizer_params.values()):
            tensor.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Give the optimizer's weights to the model, where they are copies."""
        for parameter, own in self._apart if self.copies is not None else ():
            self.local(parameter).copy_(own)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Give the model's weights to the optimizer, where it has copies: they were loaded."""
        for parameter, own in self._apart if self.copies is not None else ():
            own.copy_(self.local(parameter))

    def reshard(self) -> None:
        """Give up what was gathered for a forward pass that no backward pass follows."""

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor like `optimizer_params[name]` with its place in the whole one, for a checkpoint."""
        return tensor

    def own(self) -> dict[str, Tensor]:
        """What else a checkpoint keeps of this rank."""
        return {}

    def restore(self, own: dict[str, Tensor]) -> None:
        """The inverse of `own`; a rank that was not there is given the first one's."""


class Replicated(Placement):
    """Everything whole on every rank; while gradients are made they are averaged, a bucket at a time.

    unused: a parameter may have no gradient in a step (layer dropping, experts); finding out costs a walk of the graph.
    """

    def __init__(self, model: nn.Module, *, ranks: Ranks, unused: bool, copies: torch.device | None = None) -> None:
        super().__init__(model, copies=copies)
        # It would cut compiled graphs where buckets end; blocks are smaller, and it knows no checkpointing.
        torch._dynamo.config.optimize_ddp = False
        self.ranks = ranks
        self._ddp = nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=unused
        )
        self.module = self._ddp
        self._unused = unused
        self.averages: Callable[[], bool] = lambda: True  # whether gradients are; else they stay each rank's own
        self._errors: Errors | None = None

    def one_bit_mean(self, x: Tensor, kept: Tensor) -> Tensor:
        """The mean over ranks of x (n,), always of the same tensors, by one bit an element: see `compressed_mean`."""
        if self._errors is None:
            self._errors = no_errors(len(x), self.ranks.size, x.device)
        return compressed_mean(x, self._errors, kept)

    def own(self) -> dict[str, Tensor]:
        return {} if self._errors is None else self._errors.to_state()

    def restore(self, own: dict[str, Tensor]) -> None:
        if own:
            self._errors = Errors.of_state(own, self.ranks.size, next(iter(self.optimizer_params.values())).device)

    @torch.no_grad()
    def collect(self) -> None:
        for parameter, own in self._apart:
            own.grad = None if parameter.grad is None else parameter.grad.to(own.device, own.dtype)

    def zero_grad(self) -> None:
        # The gradients are views of the buckets. They stay there, or micro-batches would be summed beside them.
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self._unused or not gradients:
            super().zero_grad()
        else:
            torch._foreach_zero_(gradients)
            for _, own in self._apart:
                own.grad = None

    def micro_batch(self, *, last: bool) -> None:
        self._ddp.require_backward_grad_sync = last and self.averages()


class Sharded(Placement):
    """A share of each tensor that is trained on every rank, by rows; frozen ones are whole on all.

    stage 3: a block's weights are gathered for its forward pass and again for its backward pass; 2: they stay in
    between; 1: as 2, and between micro-batches, where gradients stay whole too and only the last one's are shared out.
    replicas: the shares are spread over size/replicas ranks, and gradients averaged over the replicas (HSDP).
    offload: shares, gradients and states are on the host, weights on the device while they are used. prefetch: blocks
    whose weights are gathered ahead of the one that runs.
    """

    def __init__(
        self,
        model: Any,
        *,
        ranks: Ranks,
        stage: int,
        replicas: int = 1,
        offload: bool = False,
        prefetch: int = 0,
        copies: torch.device | None = None,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        device = next(model.parameters()).device.type
        self.ranks, self.stage = ranks, stage
        self._meshes = {kind: mesh_of(kind, ranks, replicas) for kind in (device, "cpu")}
        mesh = self._meshes[device]
        if ranks.tensor > 1:
            mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)]
        self._group = mesh.get_group("shard")
        self._shards, self._index = mesh.size(-1), mesh.get_local_rank("shard")
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
        frozen = {parameter for parameter in model.parameters() if not parameter.requires_grad}
        common: dict[str, Any] = {"mesh": mesh, "offload_policy": policy, "ignored_params": frozen}
        blocks = [fully_shard(block, reshard_after_forward=stage == 3, **common) for block in model.blocks]
        # The backward pass begins with what the root has.
        self._root = fully_shard(model, reshard_after_forward=False, **common)
        self._units = [*blocks, self._root]
        for i, block in enumerate(blocks if prefetch else ()):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
        super().__init__(model, copies=copies)
        self._shapes: dict[Tensor, torch.Size] = {
            own: self.parameters[name].shape for name, own in self.optimizer_params.items()
        }
        # Of what all neighbours have whole, each counts its part.
        self._counted: dict[Tensor, Tensor] = {
            own: torch.tensor(1.0 if self.parameters[name].placements[-1].is_shard() else 1 / ranks.tensor).to(
                own.device
            )
            for name, own in self.optimizer_params.items()
        }

    def _optimizer_param(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.copies is not None:
            return super()._optimizer_param(parameter)
        return nn.Parameter(self.local(parameter))

    @torch.no_grad()
    def local(self, tensor: Tensor) -> Tensor:
        part: Tensor = cast(Any, tensor).to_local()
        return part

    def micro_batch(self, *, last: bool) -> None:
        if self.stage == 1:
            self._root.set_requires_gradient_sync(last)
            self._root.set_reshard_after_backward(last)

    def reshard(self) -> None:
        for unit in self._units:
            unit.reshard()

    def shape(self, part: Tensor) -> torch.Size:
        return self._shapes[part]

    def norms(self, parts: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
        squares = super().norms(parts, of).square()
        torch.distributed.all_reduce(squares, group=self._group)
        if self.ranks.tensor > 1:
            squares *= torch.stack([self._counted[one] for one in of])
            torch.distributed.all_reduce(squares, group=self._meshes[squares.device.type].get_group(TENSOR))
        return squares.sqrt()

    def whole(self, parts: Tensor, like: Tensor) -> Tensor:
        rows = self.shape(like)[0]
        most = -(-rows // self._shards)  # of a rank; the last ones may have fewer, or none
        sent = F.pad(parts, (0, 0, 0, most - parts.shape[1])).contiguous()
        found = [torch.empty_like(sent) for _ in range(self._shards)]
        torch.distributed.all_gather(found, sent, group=self._group)
        return torch.cat(found, dim=1)[:, :rows]

    def part(self, matrices: Tensor, like: Tensor) -> Tensor:
        first = -(-self.shape(like)[0] // self._shards) * self._index
        return matrices[:, first : first + like.shape[0]]

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        like, mesh = self.parameters[name], self._meshes[tensor.device.type]
        return DTensor.from_local(
            tensor, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
