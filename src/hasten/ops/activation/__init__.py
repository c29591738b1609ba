"""Activation functions of an MLP, fused with the operation beside each: `bias_gelu(z, bias)`, `silu_mul(gate, up)`.

The references are one line of PyTorch each. The native kernels (float32 and bfloat16, CPU) take one pass through memory
forward and one backward, which a compiler's elementwise code needs three for.
"""

from hasten.ops.activation.operator import KERNELS, ActivationRequest, Functions, bias_gelu, bind, silu_mul

__all__ = ["KERNELS", "ActivationRequest", "Functions", "bias_gelu", "bind", "silu_mul"]
