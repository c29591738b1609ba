"""A branch added to the residual stream and the next norm, in one pass: `add_norm(stream, branch, branch_bias, norm)`.

The reference is three lines of PyTorch. The Triton kernel reads and writes each row once forward and once backward, and
gives the gradients of the norm and of the branch's bias in the same pass.
"""

from hasten.ops.residual.norm import Norm
from hasten.ops.residual.operator import KERNELS, AddNormRequest, add_norm, bind, normalized

__all__ = ["KERNELS", "AddNormRequest", "Norm", "add_norm", "bind", "normalized"]
