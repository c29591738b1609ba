"""Limits of a device: measured (`measure`), or from the data sheets of GPUs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one device: bandwidth in bytes/s, rates in FLOP/s (OP/s for int8) by dtype name."""

    bandwidth: float
    rates: dict[str, float]


@dataclass(frozen=True, slots=True)
class Link:
    """The connection between ranks: an exchange takes `latency` seconds, plus `hop` for each further rank; a rank
    receives at `bandwidth` bytes/s. source: where the figures are from.
    """

    latency: float
    hop: float
    bandwidth: float
    source: str

    def seconds(self, *, exchanges: int, received: float, ranks: int) -> float:
        """Seconds for `exchanges` exchanges among `ranks` ranks, with `received` bytes in total for each rank."""
        return exchanges * (self.latency + (ranks - 1) * self.hop) + received / self.bandwidth


# (part of the device name, bytes/s of memory, dense bf16 FLOP/s without sparsity) from the data sheets; the first that
# matches counts, so longer names come before the shorter ones that they contain.
VENDOR_LIMITS = (
    ("H200 NVL", 4.8e12, 835e12),
    ("H200", 4.8e12, 989e12),
    ("H100 NVL", 3.9e12, 835e12),
    ("H100 PCIe", 2.0e12, 756e12),
    ("H100 80GB HBM3", 3.35e12, 989e12),
    ("A100-SXM4-80GB", 2.039e12, 312e12),
    ("A100 80GB PCIe", 1.935e12, 312e12),
    ("A100-SXM4-40GB", 1.555e12, 312e12),
    ("A100-PCIE-40GB", 1.555e12, 312e12),
    ("L40S", 0.864e12, 362e12),
    ("NVIDIA L4", 0.3e12, 121e12),
    ("RTX 4090", 1.008e12, 165e12),
    ("RTX 3090", 0.936e12, 71e12),
)


def vendor_limits(device_name: str) -> Limits | None:
    """The data sheet's figures for a name as torch.cuda.get_device_name() gives it; None for a device not listed."""
    padded = f" {device_name.lower()} "  # whole words: "L40" is no "L4", "GH200" is no "H200"
    for part, bandwidth, bfloat16 in VENDOR_LIMITS:
        if f" {part.lower()} " in padded:
            return Limits(bandwidth, {"bfloat16": bfloat16})
    return None
