"""Operators that are called through PyTorch's dispatcher only where calls are recorded."""

from types import ModuleType

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hasten.ops.triton_support import failed, registered
from triton_cases import no_room, raised_by_triton


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


def mistaken():
    raise no_room()


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (lambda: raised_by_triton(no_room()), True),
        (mistaken, False),
        (lambda: raised_by_triton(torch.OutOfMemoryError("CUDA out of memory")), False),
        (lambda: ModuleType("triton.experimental.gluon").no_such_part, True),
        (lambda: ModuleType("numpy").no_such_part, False),
        (lambda: __import__("triton.no_such_module"), True),
        (lambda: __import__("no_such_module"), False),
        (lambda: object().no_such_part, False),
    ],
    ids=["launch", "mistake", "memory", "part of Triton", "part of another", "Triton's module", "module", "attribute"],
)
def test_what_triton_cannot_do_is_known_from_other_errors(work, expected):
    with pytest.raises((RuntimeError, ImportError, AttributeError)) as found:
        work()
    assert failed(found.value) == expected
