"""Operators that are called through PyTorch's dispatcher only where calls are recorded."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.ops.triton_support import registered


@registered("hasten_test::doubled")
def doubled(x: torch.Tensor) -> torch.Tensor:
    """2 x, out of NumPy: neither a compiler nor a dispatch mode would see the addition."""
    return torch.from_numpy(x.numpy() + x.numpy())


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operator():
    x = torch.arange(3.0)
    with Seen() as seen:
        found = doubled(x)
    assert seen.names == ["hasten_test.doubled.default"]
    assert torch.equal(found, 2 * x)
    assert torch.equal(doubled(x), 2 * x)


def test_a_compiled_graph_holds_the_operator():
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = torch.arange(3.0)
    assert torch.equal(torch.compile(lambda x: doubled(x) + 1, backend=keep, fullgraph=True)(x), 2 * x + 1)
    assert "hasten_test.doubled.default" in graphs[0]
