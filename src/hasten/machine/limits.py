"""What the makers of GPUs say their devices can do, to quote utilisation as others quote it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VendorLimits:
    """Data-sheet figures: bytes/s of memory, dense (no sparsity) bf16 FLOP/s."""

    bandwidth: float
    bfloat16: float


# (part of the device name, figures) from the data sheets; the first that matches counts, so the longer names stand
# before the shorter ones they contain.
VENDOR_LIMITS = (
    ("H200 NVL", VendorLimits(4.8e12, 835e12)),
    ("H200", VendorLimits(4.8e12, 989e12)),
    ("H100 NVL", VendorLimits(3.9e12, 835e12)),
    ("H100 PCIe", VendorLimits(2.0e12, 756e12)),
    ("H100 80GB HBM3", VendorLimits(3.35e12, 989e12)),
    ("A100-SXM4-80GB", VendorLimits(2.039e12, 312e12)),
    ("A100 80GB PCIe", VendorLimits(1.935e12, 312e12)),
    ("A100-SXM4-40GB", VendorLimits(1.555e12, 312e12)),
    ("A100-PCIE-40GB", VendorLimits(1.555e12, 312e12)),
    ("L40S", VendorLimits(0.864e12, 362e12)),
    ("NVIDIA L4", VendorLimits(0.3e12, 121e12)),
    ("RTX 4090", VendorLimits(1.008e12, 165e12)),
    ("RTX 3090", VendorLimits(0.936e12, 71e12)),
)


def vendor_limits(device_name: str) -> VendorLimits | None:
    """The figures for a device name as torch.cuda.get_device_name() gives it; None for a device not listed."""
    padded = f" {device_name.lower()} "  # whole words: "L40" is no "L4", "GH200" is no "H200"
    for part, limits in VENDOR_LIMITS:
        if f" {part.lower()} " in padded:
            return limits
    return None
