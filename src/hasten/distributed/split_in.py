"""A model that is none of our families, split over ranks by the roles of its modules (`split_in`).

Roles are found from how a block is built, not from names: of the linear layers that one module owns, the last takes
what the others put out. So these are cut by columns and the last by rows (Megatron-LM, arXiv 1909.08053), by torch's
own `ColwiseParallel` and `RowwiseParallel`. What a module does between them cannot be seen: a block that is split is
compared with the whole one, and what changes its output, or fails, stays whole.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hasten.distributed.ranks import Ranks
from hasten.errors import ConfigError

TOLERANCE = 256  # roundings of the largest number of a block's output: sums are made in another order


@dataclass(frozen=True, slots=True)
class SplitReport:
    """split: modules of a block of which each rank holds a share, and the head. whole: others, and why."""

    split: list[str] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)


class _Seen(Exception):
    """What the first block of a model was called with."""


def split_in(model: nn.Module, ranks: Ranks) -> SplitReport:
    """Split a decoder of PyTorch's modules, in place, over ranks that all hold it whole and call this at once.

    model: such as a transformers model, called with token ids (B, T). Afterwards all ranks see the same logits. Raises
    ConfigError where no repeated blocks are found.
    """
    report, blocks = SplitReport(), _blocks(model)
    mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.size,))
    given, options = _inputs_of(model, blocks[0])
    with torch.no_grad():
        expected = _first(blocks[0](*given, **options))
        for name, owner in list(blocks[0].named_modules()):
            linears = _roles(owner)
            if linears is None:
                continue
            reason = _impossible(owner, ranks.size)
            if reason is None:
                trial = deepcopy(blocks[0])
                _split(trial.get_submodule(name), linears, mesh)
                reason = _difference(partial(trial, *given, **options), expected)
                if ranks.any(reason is not None):
                    reason = reason or "another rank found a difference"
            where = name or type(owner).__name__
            if reason is not None:
                report.whole[where] = reason
                continue
            report.split.append(where)
            for block in blocks:
                _split(block.get_submodule(name), linears, mesh)
    _split_head(model, report, mesh)
    return report


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The longest list of modules of one kind that own linear layers."""
    lists = [list(one) for one in model.modules() if isinstance(one, nn.ModuleList)]
    lists = [one for one in lists if any(isinstance(part, nn.Linear) for part in one[0].modules())]
    if not lists:
        raise ConfigError(f"{type(model).__name__} has no list of blocks with linear layers, so it cannot be split")
    return max(lists, key=len)


def _inputs_of(model: nn.Module, block: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model calls its first block with, for a few tokens."""

    def seen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Seen(args, kwargs)

    hook = block.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        with torch.no_grad():
            model(torch.arange(2, 9, device=next(model.parameters()).device)[None], use_cache=False)
    except _Seen as found:
        return found.args[0], found.args[1]
    finally:
        hook.remove()
    raise ConfigError(f"{type(model).__name__} does not call its blocks when it is called with token ids")


def _roles(owner: nn.Module) -> tuple[list[str], str] | None:
    """The linear layers that a module owns: those that are cut by columns, and the last, by rows; None: there are none.

    All columns take what the block passes on, and the last puts out as much.
    """
    found = [name for name, child in owner.named_children() if isinstance(child, nn.Linear)]
    if len(found) < 2:
        return None
    *columns, row = (owner.get_submodule(name) for name in found)
    width = row.out_features
    return (found[:-1], found[-1]) if all(one.in_features == width for one in columns) else None


def _heads(owner: nn.Module) -> Iterator[tuple[str, int]]:
    """How many heads of each kind a module says that it has."""
    for name, value in vars(owner).items():
        if isinstance(value, int) and name.endswith("heads"):
            yield name, value


def _impossible(owner: nn.Module, size: int) -> str | None:
    for name, count in _heads(owner):
        if count % size:
            return f"{name} is {count}, which {size} ranks cannot share evenly"
    return None


def _split(owner: nn.Module, linears: tuple[list[str], str], mesh: Any) -> None:
    """Give a module its share, and the number of heads in it."""
    columns, row = linears
    styles: dict[str, Any] = {name: ColwiseParallel() for name in columns} | {row: RowwiseParallel()}
    parallelize_module(owner, mesh, styles, src_data_rank=None)
    for name, count in list(_heads(owner)):
        setattr(owner, name, count // mesh.size())


def _difference(call: Callable[[], Any], expected: Tensor) -> str | None:
    """Why a split block is not the whole one; None: it is, but for rounding."""
    try:
        found = _first(call())
    except Exception as error:  # whatever the module does between its layers
        return f"split it fails: {str(error).splitlines()[0]:.100}"
    if found.shape != expected.shape:
        return f"split it puts out {tuple(found.shape)}, whole {tuple(expected.shape)}"
    off = float((found - expected).abs().max() / expected.abs().max())
    if not off <= TOLERANCE * torch.finfo(expected.dtype).eps:
        return f"split its output is another one, by {off:.1g}"
    return None


def _first(output: Any) -> Tensor:
    """The states among what a block puts out."""
    found = output if isinstance(output, Tensor) else output[0]
    assert isinstance(found, Tensor)
    return found


def _split_head(model: nn.Module, report: SplitReport, mesh: Any) -> None:
    """The words of the head (a linear layer beside the blocks) over the ranks, where it has a matrix of its own."""
    heads = [(name, child) for name, child in model.named_children() if isinstance(child, nn.Linear)]
    tables = [one.weight for one in model.modules() if isinstance(one, nn.Embedding)]
    for name, head in heads:
        if any(table is head.weight for table in tables):
            report.whole[name] = "it is the embedding's matrix, which stays whole"
            continue
        parallelize_module(model, mesh, {name: ColwiseParallel(output_layouts=Replicate())}, src_data_rank=None)
        report.split.append(name)
