"""Products in FP8 for training: `fp8_linear`, `fp8_mlp`, and their parts, `rounded` and `product`."""

from hasten.ops.fp8.products import MULTIPLE, WIDEST, fp8_linear, fp8_mlp, product, rounded, why_not

__all__ = ["MULTIPLE", "WIDEST", "fp8_linear", "fp8_mlp", "product", "rounded", "why_not"]
