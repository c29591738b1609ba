"""A layer's attention of one kernel for all forms of its calls."""

from hasten.ops.attention import LayerAttention
from hasten.ops.picker import Kernel


def layer_of(run, spec):
    return LayerAttention(spec, *[Kernel("one", run, lambda request: None)] * 4)
