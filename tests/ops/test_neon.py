"""The kernels for ARM, cross-compiled and run under an emulator: products against float64, and who is given which.

`apt-get install g++-aarch64-linux-gnu qemu-user` installs what it needs. An emulator says nothing about speed: the
instructions are counted in the machine code instead.
"""

import re
import shutil
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hasten.machine import Compiler
from hasten.machine.processor import arm_features
from hasten.ops.build import INSTRUCTION_SETS, SOURCES, flags_of
from hasten.ops.native import available_isas
from instruction_sets import needs_native
from linear_cases import PACKED_FORMATS, exact, layer_of, make_weight, random_weight, rms

CROSS, QEMU = "aarch64-linux-gnu-", shutil.which("qemu-aarch64")
HARNESS = Path(__file__).parent / "neon_products.cpp"
SETS = {"neon_i8mm": "max", "neon_dot": "cortex-a76", "portable": "cortex-a57"}  # and a processor with no more than it
# As in gemm.h.
FORMATS = ("bfloat16", "float16", "float8_e4m3fn", "int8", "int6", "int5", "int4", "int3", "int2", "iq4", "fp4")
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.int8, torch.int32, torch.uint8)
N, K, ROWS = 130, 512, 9
DOTS = ("sdot", "usdot", "usmmla", "bfmmla")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which(f"{CROSS}g++") and QEMU),
        reason="no cross compiler or emulator: apt-get install g++-aarch64-linux-gnu qemu-user",
    ),
]


def compile_for(isa, *arguments):
    flags = flags_of(INSTRUCTION_SETS[isa], Compiler(f"{CROSS}g++", "g++", "12"))
    include = Path(torch.__file__).parent / "include"
    command = [f"{CROSS}g++", *flags, f"-I{SOURCES}", f"-I{include}", *map(str, arguments)]
    subprocess.run(command, check=True, timeout=300)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A program that calls the products, for each instruction set; at -O1, which takes a third of the time."""
    folder = tmp_path_factory.mktemp("neon")
    for isa in SETS:
        compile_for(isa, "-O1", "-static", HARNESS, SOURCES / "linear" / "gemm.cpp", "-o", folder / isa)
    return folder


def run(built, isa, *arguments, cpu=None, problem=b""):
    command = [QEMU, "-cpu", cpu or SETS[isa], str(built / isa), *arguments]
    return subprocess.run(command, input=problem, capture_output=True, timeout=120)


def layer_for(name):
    if name in PACKED_FORMATS:
        weight = random_weight(name, N, K)
    else:
        element, _, group = name.partition(" g")
        weight = make_weight(N, K, format=element, group_size=int(group or 0), symmetric=not name.endswith("32"))
    return weight, layer_of(weight, kernel="native")


def products(built, isa, layer, x):
    """x (R, K), or its int8 values, scales (R, groups) -> (R, N), by a kernel under the emulator."""
    parts = [x] if isinstance(x, torch.Tensor) else list(x)
    rows, scales, zeros = len(parts[0]), layer.scales, layer.zeros
    scale_type = 0
    if scales is not None:
        levels = layer.outer is not None
        scale_type = SCALES.index(torch.float8_e8m0fnu if scales.dtype == torch.uint8 and not levels else scales.dtype)
    minima = zeros is not None and zeros.dtype == torch.float16
    blobs = [layer.data, scales, None if minima else zeros, zeros if minima else None, layer.outer]
    head = [FORMATS.index(layer.format.element), scale_type, N, K, layer.format.group_size, rows]
    head += [0 if blob is None else blob.numel() * blob.element_size() for blob in blobs]
    tensors = [torch.tensor(head), *(blob for blob in blobs if blob is not None), *parts]
    problem = b"".join(one.contiguous().flatten().view(torch.uint8).numpy().tobytes() for one in tensors)
    answer = run(built, isa, problem=problem)
    assert answer.returncode == 0, answer
    return torch.frombuffer(bytearray(answer.stdout), dtype=torch.float32).view(rows, -1)[:, :N]


@needs_native
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize("name", ["bfloat16", "float16", "fp8 row", "fp8 g32"])
def test_products_of_floats_err_at_most_twice_plain_pytorch(built, isa, name):
    weight, layer = layer_for(name)
    x = torch.randn(ROWS, K, generator=torch.Generator().manual_seed(1))
    if name != "float16":
        x = x.bfloat16().float()
    dtype, full = (torch.float16 if name == "float16" else torch.bfloat16), layer.dequantize()
    truth = exact(weight, x)
    plain = rms(F.linear(x.to(dtype), full.to(dtype)) - truth)
    y = products(built, isa, layer, x)
    assert rms(y - truth) <= 2 * plain
    for rows in (1, 2, 3, 8):
        assert torch.equal(products(built, isa, layer, x[:rows]), y[:rows]), rows


@needs_native
@pytest.mark.parametrize("isa", SETS)
@pytest.mark.parametrize(
    "name",
    ["int8", "int8 g32", "int8 g128", "int4 g32", "int4 g128", *(n for n in PACKED_FORMATS if not n.startswith("fp8"))],
)
def test_products_of_integers_err_at_most_twice_plain_float32(built, isa, name):
    weight, layer = layer_for(name)
    generator, size = torch.Generator().manual_seed(1), layer.format.group_size or K
    q = torch.randint(-127, 128, (ROWS, K), generator=generator).to(torch.int8)
    scales = torch.rand(ROWS, K // size, generator=generator) + 0.1
    sums = q.int().unflatten(1, (-1, size)).sum(-1).int()
    x = q.double() * scales.double().repeat_interleave(size, dim=1)
    truth = exact(weight, x)
    plain = rms(F.linear(x.float(), layer.dequantize().float()) - truth)

    def of(rows):
        return products(built, isa, layer, (q[:rows], scales[:rows].T, sums[:rows].T))

    y = of(ROWS)
    assert rms(y - truth) <= 2 * plain + 2.0**-22 * rms(truth)
    for rows in (1, 2, 3, 8):
        assert torch.equal(of(rows), y[:rows]), rows


def test_the_machine_code_has_the_dot_products(built):
    """Instructions of the program; and no set has what its processors lack."""
    counts = {}
    for isa in SETS:
        listing = subprocess.run(
            [f"{CROSS}objdump", "-d", "--no-show-raw-insn", str(built / isa)], check=True, capture_output=True
        ).stdout.decode()
        counts[isa] = Counter(re.findall(r"^\s+[0-9a-f]+:\s+(\w+)", listing, re.MULTILINE))
    used = {isa: {name for name in DOTS if count[name]} for isa, count in counts.items()}
    assert used == {"neon_i8mm": {"usdot", "usmmla", "bfmmla"}, "neon_dot": {"sdot"}, "portable": set()}
    assert min(counts["neon_i8mm"][name] for name in ("usdot", "usmmla", "bfmmla")) > 100
    assert counts["neon_dot"]["sdot"] > 500
    assert all(count["tbl"] > 10 and count["fmla"] > 100 for count in counts.values())


def test_a_processor_is_given_what_it_has(built, monkeypatch):
    for isa, cpu in SETS.items():
        words = [int(word) for word in run(built, "portable", "--features", cpu=cpu).stdout.split()]
        features = arm_features(*words)
        monkeypatch.setattr("hasten.ops.build.instruction_sets", lambda features=features: features)
        assert available_isas() == tuple(SETS)[list(SETS).index(isa) :], (cpu, features)


@needs_native
def test_what_a_processor_is_not_given_it_cannot_run(built, monkeypatch):
    _, layer = layer_for("int4 g32")
    x = torch.ones(1, K, dtype=torch.int8), torch.ones(K // 32, 1), torch.full((K // 32, 1), 32, dtype=torch.int32)
    monkeypatch.setitem(SETS, "neon_dot", SETS["portable"])
    with pytest.raises(AssertionError, match=str(-signal.SIGILL)):
        products(built, "neon_dot", layer, x)


@pytest.mark.parametrize(
    "file",
    [
        *("attention/native.cpp", "attention/train.cpp", "block/block.cpp", "linear/unpacked.cpp"),
        *("delta/delta.cpp", "ssd/mamba.cpp", "states/convolution.cpp", "states/mixer.cpp"),
    ],
)
def test_what_uses_the_products_compiles_for_arm(file):
    compile_for("neon_i8mm", "-fsyntax-only", SOURCES / file)
