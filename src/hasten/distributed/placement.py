"""Placements of weights, gradients and optimizer states, as the training step sees them.

    Placement     whole, in one process
    Replicated    whole on every rank, gradients averaged (DistributedDataParallel)
    Sharded       a shard on every rank: ZeRO 1-3 (arXiv 1910.02054) and HSDP, by FSDP2's `fully_shard`

Beside both, experts may be divided among ranks (`expert_parallel`): each has some of them whole, and only their
gradients, and nothing of the others.

The optimizer updates plain tensors, `optimizer_params`: the parameters, this rank's shards of them, or float32 copies
(masters of 16-bit weights, or weights offloaded to the host). So one optimizer serves every placement. What it cannot
compute from its own rows, the norm of a whole tensor (LAMB) or a whole matrix (Muon), it gets from the placement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.distributed.compressed import Errors, compressed_mean, no_errors
from hasten.distributed.mesh import TENSOR, mesh_of
from hasten.distributed.ranks import ALONE, Ranks
from hasten.distributed.whole_tensors import Parts
from hasten.model.experts import Experts
from hasten.model.initialize import Put, Weights
from hasten.ops.linear.modules import PackedLinear

if TYPE_CHECKING:
    from hasten.distributed.expert_parallel import HeldExperts


class Placement(Parts):
    """The whole model in one process.

    module: what the step calls. parameters: what is trained, by name. optimizer_params: the tensors that the optimizer
    updates, by the same names. copies: the device of the optimizer's float32 copies of the weights, None for no copies.
    experts: those that this rank has, where ranks divide them.
    """

    ranks: Ranks = ALONE
    module: nn.Module

    def __init__(self, model: Any, *, copies: torch.device | None = None, experts: HeldExperts | None = None) -> None:
        self.module = model
        self.copies, self.experts = copies, experts
        # Frozen parameters are neither updated nor stored.
        self.parameters: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer_params = {name: self._optimizer_param(p) for name, p in self.parameters.items()}
        # (parameter, the optimizer's tensor) where these are two tensors.
        self._separate = [
            (p, self.optimizer_params[n])
            for n, p in self.parameters.items()
            if self.optimizer_params.get(n, p) is not p
        ]
        names = frozenset[str]() if experts is None else experts.own & self.parameters.keys()
        self._of_experts = {self.optimizer_params[name] for name in names}

    @property
    def has_whole_model(self) -> bool:
        """Whether this rank has every weight whole."""
        return self.experts is None

    @property
    def everywhere(self) -> dict[str, Tensor]:
        """What is trained on any rank, by name: `parameters`, and those of others' experts on the meta device."""
        return self.parameters if self.experts is None else {**self.parameters, **self.experts.elsewhere}

    def gradient_norm(self, gradients: Mapping[Tensor, Tensor]) -> Tensor:
        """Norm of all gradients of all ranks, from this rank's: {the optimizer's parameter: its gradient}."""
        others = {one: found for one, found in gradients.items() if one not in self._of_experts}
        norm = torch.linalg.vector_norm(self.norms(list(others.values()), list(others)))
        if self.experts is None:
            return norm
        own = [found for one, found in gradients.items() if one in self._of_experts]
        squares = torch.stack(torch._foreach_norm(own)).square().sum() if own else torch.zeros_like(norm)
        return (norm.square() + self.experts.sum(squares)).sqrt()

    def _average_experts(self) -> None:
        """Average the gradients of experts over the ranks that have the same ones."""
        if self.experts is not None:
            self.experts.average(one for name, one in self.parameters.items() if name in self.experts.own)

    def _optimizer_param(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.copies is None:
            return parameter
        return nn.Parameter(self.local(parameter).detach().to(self.copies, torch.float32, copy=True))

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a parameter or gradient, outside autograd."""
        return tensor

    def micro_batch(self, *, last: bool) -> None:
        """Prepare for a micro-batch. last: it is the step's last one, whose backward pass reduces the gradients."""

    @torch.no_grad()
    def collect(self) -> None:
        """Complete the gradients and move them to the optimizer's tensors."""
        self._average_experts()
        for parameter, own in self._separate:
            if self.copies is None:  # its storage may have moved
                own.data = self.local(parameter)
            own.grad = None if parameter.grad is None else self.local(parameter.grad).to(own.device, own.dtype)
            parameter.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for tensor in (*self.parameters.values(), *self.optimizer_params.values()):
            tensor.grad = None

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Copy the optimizer's weights into the model, where they are copies."""
        if self.copies is not None:
            for parameter, own in self._separate:
                self.local(parameter).copy_(own)

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Copy the model's weights, which were loaded, into the optimizer's copies, if it has any."""
        if self.copies is not None:
            for parameter, own in self._separate:
                own.copy_(self.local(parameter))

    def reshard(self) -> None:
        """Free the weights gathered for a forward pass that no backward pass follows."""

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor like `optimizer_params[name]` as part of the whole one (a DTensor if sharded), for a checkpoint."""
        return tensor

    def rank_state(self) -> dict[str, Tensor]:
        """Further tensors of this rank that a checkpoint keeps, by name."""
        return {}

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `rank_state` returned; a rank that the checkpoint does not have gets the first rank's."""


class Replicated(Placement):
    """The whole model on every rank; gradients are averaged bucket by bucket during the backward pass (DDP).

    unused: a parameter may have no gradient in a step (layer dropping, experts); finding out costs a walk of the graph.
    averages: whether the gradients are averaged; False leaves each rank its own. Experts that ranks divide are left to
    the base class.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        ranks: Ranks,
        unused: bool,
        copies: torch.device | None = None,
        experts: HeldExperts | None = None,
    ) -> None:
        super().__init__(model, copies=copies, experts=experts)
        # It would split compiled graphs at the ends of buckets; blocks are smaller, and it knows no checkpointing.
        torch._dynamo.config.optimize_ddp = False
        self.ranks = ranks
        if experts is not None:
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts.own)
        self._ddp = nn.parallel.DistributedDataParallel(
            model, broadcast_buffers=False, gradient_as_bucket_view=True, find_unused_parameters=unused
        )
        self.module = self._ddp
        self._unused = unused
        self.averages: Callable[[], bool] = lambda: True
        self._errors: Errors | None = None

    def one_bit_mean(self, x: Tensor, kept: Tensor) -> Tensor:
        """Mean over ranks of x (n,), the same tensor in every call, by `compressed_mean`: one bit an element."""
        if self._errors is None:
            self._errors = no_errors(len(x), self.ranks.size, x.device)
        return compressed_mean(x, self._errors, kept)

    def rank_state(self) -> dict[str, Tensor]:
        return {} if self._errors is None else self._errors.to_state()

    def load_rank_state(self, state: dict[str, Tensor]) -> None:
        if state:
            self._errors = Errors.of_state(state, self.ranks.size, next(iter(self.optimizer_params.values())).device)

    @torch.no_grad()
    def collect(self) -> None:
        self._average_experts()
        for parameter, own in self._separate:
            own.grad = None if parameter.grad is None else parameter.grad.to(own.device, own.dtype)
            if own in self._of_experts:
                parameter.grad = None

    def zero_grad(self) -> None:
        if self.experts is not None:
            for name in self.experts.own & self.parameters.keys():
                self.parameters[name].grad = self.optimizer_params[name].grad = None
        # The gradients are views of the buckets and are zeroed in place: new ones would be summed outside the buckets.
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if self._unused or not gradients:
            super().zero_grad()
        else:
            torch._foreach_zero_(gradients)
            for _, own in self._separate:
                own.grad = None

    def micro_batch(self, *, last: bool) -> None:
        self._ddp.require_backward_grad_sync = last and self.averages()


class Sharded(Placement):
    """Tensors sharded by rows over the ranks (FSDP2); frozen ones are whole on every rank, except at stage 3.

    stage 3: a block's weights are gathered for its forward pass and again for its backward pass. 2: they stay gathered
    in between. 1: they also stay gathered between micro-batches, gradients are accumulated whole, and only the last
    micro-batch's backward pass scatters them. replicas: groups of size/replicas ranks that each hold all shards;
    gradients are averaged over them (HSDP). offload: shards, gradients and optimizer states are on the host, weights on
    the device while they are used. prefetch: blocks whose weights are gathered ahead of the one that runs. experts:
    of ranks that divide them; these are whole.
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
        experts: HeldExperts | None = None,
        weights: Weights | None = None,
    ) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

        device = model.device.type
        self.ranks, self.stage, self.experts = ranks, stage, experts
        self._meshes = {kind: mesh_of(kind, ranks, replicas) for kind in (device, "cpu")}
        mesh = self._meshes[device]
        if ranks.tensor > 1:
            mesh = mesh[tuple(name for name in mesh.mesh_dim_names or () if name != TENSOR)]
        self._group = mesh.get_group("shard")
        self._shards, self._index = mesh.size(-1), mesh.get_local_rank("shard")
        policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
        if stage == 3:
            for module in model.modules():
                if isinstance(module, PackedLinear):
                    module.hold_as_parameters()
        # At stages 1 and 2 a shard of a frozen weight would only be kept beside the gathered one.
        whole = {parameter for parameter in model.parameters() if not parameter.requires_grad and stage < 3}
        if experts is not None:  # packed weights too, which were no parameters before
            layers = (module for module in model.modules() if isinstance(module, Experts))
            whole |= {parameter for layer in layers for parameter in layer.experts.parameters()}

        def shard(module: Any, *, reshard: bool) -> Any:
            return fully_shard(
                module, mesh=mesh, reshard_after_forward=reshard, offload_policy=policy, ignored_params=whole
            )

        blocks = [shard(block, reshard=stage == 3) for block in model.blocks]
        # The root's weights (head, last norm) are used again as soon as the backward pass begins.
        self._root = shard(model, reshard=False)
        self._units = [*blocks, self._root]
        if prefetch:
            for i, block in enumerate(blocks):
                block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + prefetch])
                block.set_modules_to_backward_prefetch(blocks[max(0, i - prefetch) : i][::-1])
        if weights is not None:
            place = torch.device("cpu") if offload else model.device
            model._apply(lambda one: torch.empty_like(one, device=place) if one.is_meta else one)
            weights(self._rows_into(model))
        super().__init__(model, copies=copies, experts=experts)
        self._shapes: dict[Tensor, torch.Size] = {
            own: self.parameters[name].shape for name, own in self.optimizer_params.items()
        }
        # A factor on squared norms: tensors that all tensor-parallel neighbours hold whole are counted once in total.
        self._counted: dict[Tensor, Tensor] = {}
        for name, own in self.optimizer_params.items() if ranks.tensor > 1 else ():
            split = self.parameters[name].placements[-1].is_shard()
            self._counted[own] = torch.tensor(1.0 if split else 1 / ranks.tensor).to(own.device)

    @property
    def has_whole_model(self) -> bool:
        return False

    def _rows_into(self, model: nn.Module) -> Put:
        """A function that puts this rank's rows of a whole tensor into a parameter, and returns them.

        Rows that the parameter has beyond the tensor's, of a padded vocabulary, become zero. Of experts that ranks
        divide, all rows are this rank's, or none.
        """

        @torch.no_grad()
        def put(name: str, whole: Tensor) -> Tensor:
            if self.experts is not None and self.experts.lacks(name):
                return whole[:0]
            owner, _, leaf = name.rpartition(".")
            module = model.get_submodule(owner)
            parameter = getattr(getattr(module, "base", module), leaf)  # of a layer with an adapter, the frozen one's
            local = self.local(parameter)
            first = 0 if local is parameter else -(-parameter.shape[0] // self._shards) * self._index
            rows = whole[first : first + len(local)]
            local[: len(rows)].copy_(rows)
            local[len(rows) :].zero_()
            return rows

        return put

    def _optimizer_param(self, parameter: nn.Parameter) -> nn.Parameter:
        if self.copies is not None:
            return super()._optimizer_param(parameter)
        part = self.local(parameter)
        return parameter if part is parameter else nn.Parameter(part)

    @torch.no_grad()
    def local(self, tensor: Tensor) -> Tensor:
        part: Tensor = cast(Any, tensor).to_local() if hasattr(tensor, "to_local") else tensor
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

    def divided(self, part: Tensor) -> bool:
        return part not in self._of_experts

    def norms(self, parts: Sequence[Tensor], of: Sequence[Tensor]) -> Tensor:
        squares = super().norms(parts, of).square()
        if self._of_experts:
            split = torch.tensor([self.divided(one) for one in of], device=squares.device)
            if not split.any():  # an expert may have no gradient here, and one elsewhere
                return squares.sqrt()
            summed = squares[split]
            torch.distributed.all_reduce(summed, group=self._group)
            return squares.masked_scatter(split, summed).sqrt()
        torch.distributed.all_reduce(squares, group=self._group)
        if self.ranks.tensor > 1:
            squares *= torch.stack([self._counted[one] for one in of])
            torch.distributed.all_reduce(squares, group=self._meshes[squares.device.type].get_group(TENSOR))
        return squares.sqrt()

    def whole(self, parts: Tensor, like: Tensor) -> Tensor:
        if not self.divided(like):
            return parts
        rows = self.shape(like)[0]
        most = -(-rows // self._shards)  # rows of a rank; the last ranks may have fewer, or none
        sent = F.pad(parts, (0, 0, 0, most - parts.shape[1])).contiguous()
        found = [torch.empty_like(sent) for _ in range(self._shards)]
        torch.distributed.all_gather(found, sent, group=self._group)
        return torch.cat(found, dim=1)[:, :rows]

    def part(self, matrices: Tensor, like: Tensor) -> Tensor:
        if not self.divided(like):
            return matrices
        first = -(-self.shape(like)[0] // self._shards) * self._index
        return matrices[:, first : first + like.shape[0]]

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        like, mesh = self.parameters[name], self._meshes[tensor.device.type]
        if not hasattr(like, "placements"):
            return tensor
        return DTensor.from_local(
            tensor, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
