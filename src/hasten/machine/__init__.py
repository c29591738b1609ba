"""What this machine is and can do. Importing it probes nothing and does not import torch."""

from hasten.machine.caches import cache_folder, cache_places, cache_root, cache_sizes
from hasten.machine.compiler import Compiler, find_compiler
from hasten.machine.describe import describe
from hasten.machine.device import configure, resolve_device, resolve_dtype
from hasten.machine.limits import Limits, Link, vendor_limits
from hasten.machine.measure import MATRIX_DTYPES, matrix_rate, measure_limits, product_limits
from hasten.machine.memory import available_memory, peak_memory, process_memory, reset_peak_memory
from hasten.machine.precision import ProductPrecision, emulated, training_precision
from hasten.machine.processor import amx_permitted, available_cores, instruction_sets
from hasten.machine.threads import Threads, thread_count

__all__ = [
    "MATRIX_DTYPES",
    "Compiler",
    "Limits",
    "Link",
    "ProductPrecision",
    "Threads",
    "amx_permitted",
    "available_cores",
    "available_memory",
    "cache_folder",
    "cache_places",
    "cache_root",
    "cache_sizes",
    "configure",
    "describe",
    "emulated",
    "find_compiler",
    "instruction_sets",
    "matrix_rate",
    "measure_limits",
    "peak_memory",
    "process_memory",
    "product_limits",
    "reset_peak_memory",
    "resolve_device",
    "resolve_dtype",
    "thread_count",
    "training_precision",
    "vendor_limits",
]
