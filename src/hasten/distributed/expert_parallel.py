"""Expert parallelism while training (GShard, arXiv 2006.16668): each rank has some experts of every layer.

Ranks read rows of their own, and route them with the whole router. Each row's copies then travel to the ranks that have
its experts (all-to-all), and their results travel back; the backward pass sends gradients the opposite way. Four ranks
with 8 experts in groups of 2:

    rank                 0        1        2        3
    experts            0 … 3    4 … 7    0 … 3    4 … 7
    exchanges rows with  1        0        3        2        `HeldExperts.group`
    averages gradients
    of experts with      2        3        0        1        `HeldExperts.same`
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hasten.distributed.mesh import expert_groups
from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError
from hasten.model.config import ModelConfig
from hasten.model.experts import Experts
from hasten.model.transformer import Transformer


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """The experts that this rank has, of a model that `apply_expert_parallel` has divided.

    own: names of their parameters. elsewhere: the trained parameters of all others by name, on the meta device. absent:
    names of the modules that other ranks have. group: ranks that have all experts together. same: ranks that have the
    same ones; None: only this one.
    """

    own: frozenset[str]
    elsewhere: Mapping[str, Tensor]
    absent: frozenset[str]
    group: dist.ProcessGroup
    same: dist.ProcessGroup | None

    def lacks(self, name: str) -> bool:
        """Whether a parameter belongs to an expert that only other ranks have."""
        parts = name.split(".")
        return any(".".join(parts[:count]) in self.absent for count in range(1, len(parts)))

    def sum(self, number: Tensor) -> Tensor:
        """Sum a tensor over the ranks that have all experts together, in place."""
        dist.all_reduce(number, group=self.group)
        return number

    def average(self, parameters: Iterable[nn.Parameter]) -> None:
        """Average gradients over the ranks that have the same experts; an expert that no row reached keeps none."""
        if self.same is None:
            return
        parameters = list(parameters)
        reached = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
        dist.all_reduce(reached, dist.ReduceOp.MAX, group=self.same)
        for parameter, anywhere in zip(parameters, reached.tolist(), strict=True):
            if anywhere:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                parameter.grad /= self.same.size()  # before the sum, as float16 might overflow
                dist.all_reduce(parameter.grad, group=self.same)


def check_experts(config: ModelConfig, degree: int) -> None:
    """Raise ConfigError for a model whose experts cannot be divided among `degree` ranks (2 or more)."""
    if not config.experts:
        raise ConfigError(f"parallel.experts is {degree}, and the model has no experts; leave it at 1")
    if config.experts % degree:
        raise ConfigError(
            f"parallel.experts is {degree}, which does not divide the model's {config.experts} experts; "
            f"choose a divisor of {config.experts}"
        )


def apply_expert_parallel(model: Transformer, ranks: Ranks, degree: int) -> HeldExperts:
    """Keep only this rank's `1/degree` of every layer's experts, a range of them, in place.

    Their parameters keep their names. Call it when the layers are those that are trained, and before they are compiled.
    Raises ConfigError for a model that cannot be divided so.
    """
    check_experts(model.config, degree)
    group, same = expert_groups(model.device.type, ranks, degree)
    size = model.config.experts // degree
    first = size * group.rank()
    absent: set[str] = set()
    own: set[str] = set()
    elsewhere: dict[str, Tensor] = {}
    for name, module in list(model.named_modules()):
        if not isinstance(module, Experts):
            continue
        held = nn.ModuleList()
        for number, expert in enumerate(module.experts):
            place = f"{name}.experts.{number}"
            parameters = {f"{place}.{leaf}": one for leaf, one in expert.named_parameters()}
            if first <= number < first + size:
                held.add_module(str(number), expert)
                own |= parameters.keys()
            else:
                absent.add(place)
                elsewhere |= {
                    leaf: torch.empty_like(one, device="meta") for leaf, one in parameters.items() if one.requires_grad
                }
        module.experts = held
        # A compiled block's graph ends here and goes on behind it: how many rows travel is known only when they do.
        module.exchange = torch.compiler.disable(ExpertExchange(group))
    return HeldExperts(frozenset(own), elsewhere, frozenset(absent), group, same)


class ExpertExchange:
    """Computes what `Experts.routed` does together with the ranks of a group, each of which has a range of the experts.

    All ranks call it equally often, and so their backward passes do, whichever experts their rows chose.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks = group, group.size()

    def __call__(self, experts: nn.ModuleList, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Outputs (N, C) for rows (N, C) of this rank. experts: this rank's; shares, chosen (N, k): as in `routed`."""
        choices = chosen.flatten()  # (N·k,)
        order = choices.argsort(stable=True)  # by expert, and so by rank
        row = order // chosen.shape[-1]
        counts = torch.bincount(choices, minlength=self.ranks * len(experts)).view(self.ranks, -1)
        arriving = torch.empty_like(counts)  # (ranks, own experts): how many rows each rank has for each of ours
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = counts.sum(dim=1).tolist(), arriving.sum(dim=1).tolist()
        x, kind = rows[row], rows.device.type
        if torch.is_autocast_enabled(kind):  # the dtype in which experts multiply: fewer bytes travel
            x = x.to(torch.get_autocast_dtype(kind))
        if torch.is_grad_enabled() and not x.requires_grad:
            x = x.detach().requires_grad_()  # other ranks wait for gradients, even if no row of theirs came here
        # Gradients of experts are sums over the ranks, and all others are averages (`Placement`): what comes in is
        # divided by the number of ranks, and what goes out is multiplied by it again.
        x = _Exchanged.apply(x, sent, received, self.ranks, self.group)
        x = _Exchanged.apply(computed(experts, x, arriving.tolist()), received, sent, 1 / self.ranks, self.group)
        return torch.zeros_like(rows).index_add_(0, row, x * shares.flatten()[order, None].to(rows.dtype))


def computed(experts: nn.ModuleList, rows: Tensor, counts: list[list[int]]) -> Tensor:
    """Results (M, C) of experts for rows (M, C). counts: consecutive rows for each of them, from each rank.

    An expert without rows is not called.
    """
    parts = list(rows.split([count for own in counts for count in own]))
    for number, expert in enumerate(experts):
        own = parts[number :: len(experts)]
        sizes = [len(part) for part in own]
        if any(sizes):
            parts[number :: len(experts)] = expert(torch.cat(own)).to(rows.dtype).split(sizes)
    return torch.cat(parts)


class _Exchanged(torch.autograd.Function):
    """Rows sent to and received from each rank of a group: all-to-all. scale: a factor on the gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], scale: float, group: Any) -> Tensor:
        ctx.about = sent, received, scale, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        sent, received, scale, group = ctx.about
        return _all_to_all(gradients[0], received, sent, group) * scale, None, None, None, None


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out
