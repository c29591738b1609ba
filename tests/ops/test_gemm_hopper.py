"""The product of many rows for Hopper GPUs: where a thread's words and rows are, compiled without a GPU, run on one."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hasten.ops.linear.layouts import CHUNKS, Operands
from hasten.ops.linear.triton_choice import choose_many_rows, many_rows
from hasten.ops.linear.weights import int4_format
from linear_cases import make_weight, rms
from triton_cases import FUSED_CASES, check_fused, needs_gpu, no_room, plain_linear, raised_by_triton

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
if sys.platform != "linux":
    pytest.skip("Triton's compiler is for Linux", allow_module_level=True)

SHARED = 228 << 10  # bytes that the programs of a multiprocessor share, with 1 KB each for the driver


@pytest.fixture(scope="module")
def kernels():
    return pytest.importorskip("hasten.ops.linear.gemm_hopper_kernels", reason="no Gluon for Hopper GPUs")


@pytest.mark.parametrize("r", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_words_lie_where_the_product_takes_them(kernels, bits, r):
    """The kernel's own reshaping, on PyTorch's tensors: rows of the product, and features 0 to 63 of each part."""
    features, rows = (128 if bits == 4 else 64), torch.arange(64 * r)
    weight = make_weight(64 * r, features, format=f"int{bits}", group_size=32, symmetric=True)
    data = CHUNKS.pack(weight).data
    words = kernels.in_product_order.fn(data.reshape(16 * r, 64), r)
    n = kernels.weight_row.fn(rows, r)
    assert torch.equal(n.sort().values, rows)
    assert torch.equal(words, data[n // 4, :, n % 4])
    assert torch.equal(kernels.in_weight_order.fn(n[:, None].repeat(1, 8), r, 8)[:, 3], rows)
    own = (1 << bits) - 1
    for part in range(features // 64):
        shifted = words >> (8 * part)
        low, high = ((torch.stack((w, w >> 16), 2) & own).reshape(-1, 32) for w in (shifted, shifted >> bits))
        found = torch.cat((low, high), 1)
        stored = weight.values.view(torch.uint8).int() ^ (128 if bits == 8 else 0)
        assert torch.equal(found, stored[n, 64 * part : 64 * part + 64])


def test_a_launch_that_is_refused_is_not_tried_again(monkeypatch):
    from hasten.errors import HastenWarning
    from hasten.ops.linear import gemm_hopper, triton_linear

    def mistaken(error):
        raise error

    class Refusing:
        refuse = staticmethod(mistaken)

        def __getitem__(self, grid):
            self.refuse(no_room())

    monkeypatch.setattr(gemm_hopper, "_failed", failed := [])
    monkeypatch.setattr(gemm_hopper, "_multiprocessors", lambda device: 8)
    monkeypatch.setattr(gemm_hopper.importlib, "import_module", lambda name: SimpleNamespace(many_rows=Refusing()))
    weight = CHUNKS.pack(make_weight(256, 256, format="int4", group_size=32, symmetric=True))
    operands = Operands(weight.data, weight.scales, weight.zeros, None, None, 256, int4_format(32))

    def multiply():
        x = torch.zeros(64, 256, dtype=torch.bfloat16)
        return gemm_hopper.multiply(x, operands, triton_linear.Beside(torch.bfloat16), lambda *_: None)

    with pytest.raises(RuntimeError, match="too many blocks"):  # of hasten's own code: no failure of Triton's
        multiply()
    assert not failed
    monkeypatch.setattr(Refusing, "refuse", staticmethod(raised_by_triton))
    with pytest.warns(HastenWarning, match="Triton cannot run it: .*too many blocks"):
        assert multiply() is None
    assert len(failed) == 1


@pytest.mark.parametrize("r", [1, 2])
def test_reading_words_has_no_bank_conflicts(kernels, r):
    """A warp's load takes as many of the 32 banks' turns as it has words for them, with the copy engine's swizzle."""
    layout = kernels.word_layout(r)
    layout = getattr(layout, "value", layout)
    width = 2 if r == 2 else 1  # words that a thread reads at once
    seen = set()
    for warp in range(4):
        for register in range(0, 8 * r, width):
            for some in range(0, 32, 32 // width):
                banks = []
                for lane in range(some, some + 32 // width):
                    for word in range(width):
                        block, column = place(layout, register + word, lane, warp)
                        seen.add((block, column))
                        inner = (column % 32 * 4) ^ (block % 8 * 16)  # bytes in a line of 128, as TMA swizzles them
                        banks.append(inner // 4)
                assert sorted(banks) == list(range(32))
    assert len(seen) == 16 * r * 64


def place(layout, register, lane, warp):
    """The block of rows and the column that a thread's register holds."""
    found = [0, 0]
    for bases, index in ((layout.reg_bases, register), (layout.lane_bases, lane), (layout.warp_bases, warp)):
        for bit, base in enumerate(bases):
            if index >> bit & 1:
                found = [found[0] ^ base[0], found[1] ^ base[1]]
    return tuple(found)


def overwritten(assembly):
    """Instructions that overwrite the left factor of a product that still runs, and how many products there are."""
    running, found, products = set(), [], 0
    for line in assembly.splitlines():
        match = re.match(r"\s+/\*\w+\*/\s+(?:@!?U?P\w+\s+)?([\w.]+)\s*(.*?);", line)
        if not match:
            continue
        name, arguments = match.groups()
        if name.startswith(("HGMMA", "IGMMA")):
            products += 1
            left = int(re.findall(r"\bR(\d+)\b", arguments)[1])
            running |= set(range(left, left + 4))
        elif name.startswith("WARPGROUP.DEPBAR"):
            running = set()
        elif not re.match(r"ST|SYNCS|BAR|BRA|RED|UTMA|WARP|EXIT|NOP|DEPBAR|MEMBAR", name):
            target = re.match(r"R(\d+)", arguments)
            width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            if target and running & set(range(int(target[1]), int(target[1]) + width)):
                found.append(line)
    return found, products


def steps(assembly):
    """The lines of each group's step, from its first words on to the end of its products."""
    found, lines = [], assembly.splitlines()
    for i, line in enumerate(lines):
        if "WARPGROUP.DEPBAR" in line:
            first = [j for j in range(i) if "SYNCS.PHASECHK" in lines[j]][-2]  # for its tiles, then for its turn
            found.append(lines[first:i])
    return found


CASES = [
    (8, 0, 256, 128, 1, {}),
    (8, 0, 128, 64, 3, {"bias": True, "residual": True}),
    (8, 32, 128, 32, 4, {"zeros": True, "gated": True}),
    (4, 32, 256, 128, 4, {}),
    (4, 32, 128, 128, 1, {"zeros": True, "gated": True, "dtype": "fp16"}),
    (4, 128, 128, 64, 2, {"bias": True}),
    (4, 256, 256, 32, 1, {"residual": True}),
    (8, 0, 192, 128, 3, {"bias": True}),
    (4, 32, 192, 128, 1, {"gated": True, "zeros": True}),
    (4, 32, 192, 64, 3, {"gated": True, "zeros": True, "dtype": "fp16"}),
    (8, 32, 192, 64, 1, {"zeros": True, "residual": True}),
    (4, 128, 192, 64, 2, {}),
    (8, 0, 256, 128, 1, {"rounded": True, "gated": True}),
    (8, 0, 192, 128, 3, {"rounded": True, "bias": True, "residual": True}),
    (4, 32, 128, 128, 2, {"early": True}),
    (4, 32, 128, 64, 4, {"early": True, "programs": 2, "residual": True}),
    (8, 0, 128, 64, 1, {"early": True, "programs": 2, "gated": True}),
    (4, 32, 128, 256, 4, {"early": True}),
    (8, 0, 128, 256, 1, {"early": True, "residual": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "group", "n", "m", "splits", "more"), CASES)
def test_machine_code(kernels, monkeypatch, tmp_path, bits, group, n, m, splits, more):
    """Weights reach the tensor cores from registers, which nothing overwrites meanwhile; nothing is spilled."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from hasten.ops.linear import gemm_hopper

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    rounded = more.get("rounded", False)
    config = many_rows(bits, group, n, m, splits, rounded=rounded, programs=more.get("programs", 1))
    config = replace(config, early=more.get("early", False))
    dtype, wanted = more.get("dtype", "bf16"), {name for name, yes in more.items() if yes is True}
    kinds = dict.fromkeys(("rows", "outputs", "n_size", "groups", "steps", "splits"), "i32")
    kinds |= {"scales": "*fp16" if group else "*fp32", "out": "*fp32" if "residual" in wanted else f"*{dtype}"}
    kinds |= {"zeros": "*u8" if bits == 4 else "*i8"} if "zeros" in wanted else {}
    kinds |= {name: "*fp32" for name in ("bias", "residual") if name in wanted}
    kinds |= {"parts": "*fp32", "counters": "*i32"} if splits > 1 else {}
    widths = (8 if rounded else 16, 32)
    layouts = [NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=width, rank=2) for width in widths]
    kinds["x_rows"] = f"tensordesc<{'i8' if rounded else dtype}[{m}, {1024 // widths[0]}],{layouts[0]!r}>"
    kinds["word_rows"] = f"tensordesc<i32[{n // (4 * config.groups)}, 64],{layouts[1]!r}>"
    kinds |= {"x_scales": "*fp32"} if rounded else {}
    known = {"BITS": bits, "GROUP": group, "ACTIVATION": 1, "GATED": "gated" in wanted, "M": m}
    known |= {"GROUPS": config.groups, "R": n // (64 * config.groups)}
    known |= {"CHUNKS": config.chunks, "SPLIT": splits > 1, "STAGES": config.stages}
    known |= {"EARLY": config.early}
    options = gemm_hopper.launch_options(config)
    known |= {"OWN": options.pop("OWN")}
    kernel = kernels.many_rows
    signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
    values = {(i,): known.get(name) for i, name in enumerate(kernel.arg_names) if name not in kinds}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name][0] == "*" or name == "outputs"
    }
    source = GluonASTSource(kernel, signature, values, aligned)
    result = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert result.metadata.shared <= SHARED // config.programs - 1024
    assert options["maxnreg"] * 32 * 4 * (config.groups + 1) * config.programs <= 1 << 16, "registers"
    ptx, cubin = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    ptx.write_text(result.asm["ptx"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    command = [tools / "ptxas", "-v", "--gpu-name", "sm_90a", ptx, "-o", cubin]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "Performance" not in said  # such as products that wait for each other
    assembly = subprocess.run([tools / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    # Each step of all groups: a product a 16 features and 64 rows, of int8 a 32.
    parts = (2 if bits == 4 else 1) * config.chunks
    products = parts * 4 * n // 64 // (2 if rounded else 1)
    assert not any(re.search(r"\b(LDL|STL)\b", line) for step in steps(assembly) for line in step), "nothing is spilled"
    assert overwritten(assembly) == ([], products)
    assert not re.search(r"GMMA\S* R\d+, gdesc", assembly), "the left factor comes from registers"
    assert re.search(r"st\.global\S*\.v4", result.asm["ptx"])


def test_work_items_cover_the_product(kernels):
    """Each tile's parts of K follow each other; the tiles of x for one tile of the weight are neighbours."""
    rows, m, tiles, steps, splits = 300, 128, 5, 22, 3
    items = [kernels.place_of.fn(number, rows, steps, splits, m) for number in range(3 * tiles * splits)]
    assert [one[:2] for one in items[:: 3 * splits]] == [(0, tile) for tile in range(tiles)]
    covered = {}
    for across, tile, split, first, own in items:
        assert covered.setdefault((across, tile), 0) == first, split
        covered[across, tile] += own
    assert set(covered) == {(across, tile) for across in range(3) for tile in range(tiles)}
    assert set(covered.values()) == {steps}


def test_choices_fit_the_kernel():
    for bits, group in ((4, 32), (4, 128), (8, 0), (8, 32)):
        for n, k in ((1, 1), (4096, 4096), (12_288, 4096), (4096, 11_008), (128_256, 2048)):
            for rows in (17, 33, 64, 65, 256, 1000):
                config = choose_many_rows(bits, group, rows, n, k)
                assert config.n in (128, 192, 256)
                with_zeros = choose_many_rows(bits, group, rows, n, k, with_zeros=True)
                assert with_zeros.n < 256  # 64 weight rows of a group: zeros need registers
                assert with_zeros.m < 256
                assert with_zeros.programs == 1
                assert config.m in (32, 64, 128, 256)
                assert config.m < 256 or config.n == 128
                assert config.programs == 1 or (config.n == 128 and config.m <= 64)
                assert config.chunks == 1 or (bits == 8 and not group)
                assert config.splits == 1 or config.splits * 512 <= k


FORMATS = [
    ("int8", 0, True),
    *(
        (name, group, symmetric)
        for name in ("int4", "int8")
        for group in (32, 64, 128, 256)
        for symmetric in (True, False)
    ),
]


TILES = [  # rows of x, weight rows and rows of x of a tile, parts of K, programs of a multiprocessor
    *((17, 128, 32, 1, 2), (30, 256, 32, 2, 1), (40, 192, 64, 2, 1), (64, 256, 64, 3, 1), (100, 128, 128, 8, 1)),
    *((300, 192, 128, 1, 1), (200, 192, 128, 3, 1), (300, 256, 128, 2, 1), (60, 128, 64, 4, 2), (200, 128, 64, 1, 2)),
    *((256, 128, 256, 1, 1), (300, 128, 256, 2, 1)),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("format", FORMATS)
def test_products_on_a_gpu(format):
    """Of every tile and number of parts, whatever the sizes are."""
    from hasten.ops.linear import gemm_hopper, triton_linear

    if torch.cuda.get_device_capability() != gemm_hopper.HOPPER:
        pytest.skip("the kernel is for Hopper GPUs")
    bits = int(format[0][3:])
    for size in ((70, 200), (1000, 2048), (4096, 1096)):
        weight = make_weight(*size, format=format[0], group_size=format[1], symmetric=format[2])
        weight, bias = weight.map(lambda tensor: tensor.cuda()), torch.randn(size[0]).cuda()
        packed = Operands(*CHUNKS.pack(weight), bias, size[0], weight.format)
        for rows, n, m, splits, programs in TILES:
            if not format[2] and (programs == 2 or m == 256):
                continue  # zeros need registers
            for dtype in (torch.bfloat16, torch.float16):
                x = torch.randn(rows, size[1]).to(dtype).cuda()
                config = many_rows(bits, format[1], n, m, splits, programs=programs)
                config = replace(config, early=rows % 3 != 1)
                assert gemm_hopper.serves(x, packed)
                exact = x.double() @ weight.dequantize().double().T + bias.double()
                plain = plain_linear(x, weight.dequantize(dtype), bias.to(dtype))
                for _ in range(2):  # the counters are left at 0
                    counters = triton_linear._counters
                    y = gemm_hopper.multiply(x, packed, triton_linear.Beside(dtype), counters, config)
                    assert rms(y - exact) <= 2 * rms(plain - exact)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(70, 200), (1000, 2048), (4096, 1096), (512, 136)])
def test_products_of_integers_on_a_gpu(size, dtype):
    """x is rounded to int8 as on a CPU, and the sums of integers are exact."""
    from hasten.ops.linear import gemm_hopper, triton_linear

    weight = make_weight(*size, format="int8")
    bias = torch.randn(size[0])
    packed = Operands(*CHUNKS.pack(weight.map(lambda tensor: tensor.cuda())), bias.cuda(), size[0], weight.format)
    for rows, n, splits in ((100, 128, 2), (300, 192, 1), (200, 192, 2), (65, 256, 1), (300, 256, 2)):
        x = torch.randn(rows, size[1]).to(dtype)
        x[3] = 0
        config = many_rows(8, 0, n, 128, splits, rounded=True)
        top = x.float().abs().amax(1, keepdim=True)
        integers = (x.float() * (127 / top.clamp(min=1e-30))).round().double()  # in float32, as a CPU does
        values, scales = weight.values.cuda().double(), weight.scales.double()
        exact = top.double() / 127 * (integers.cuda() @ values.T).cpu() * scales.T + bias.double()
        for _ in range(2):
            y = gemm_hopper.multiply(x.cuda(), packed, triton_linear.Beside(dtype), triton_linear._counters, config)
            worst = (y.cpu().double() - exact).abs().max()
            assert worst <= 1.1 * torch.finfo(dtype).eps / 2 * exact.abs().max()
        x[2, 5], x[1, 7] = float("nan"), float("inf")
        y = gemm_hopper.multiply(x.cuda(), packed, triton_linear.Beside(dtype), triton_linear._counters, config).cpu()
        assert y[1:3].isnan().all()
        assert y.isnan().any(1).sum() == 2


@pytest.mark.gpu
@needs_gpu
def test_activations_are_rounded_where_the_layer_says_so_on_a_gpu():
    from hasten.ops.linear import PackedLinear, gemm_hopper

    if torch.cuda.get_device_capability() != gemm_hopper.HOPPER:
        pytest.skip("the kernel is for Hopper GPUs")
    weight = make_weight(11008, 4096, format="int8").map(lambda tensor: tensor.cuda())
    x = torch.randn(256, 4096, device="cuda").bfloat16()
    exact = x.float() @ weight.dequantize().T
    errors = {}
    for activations in ("int8", "float"):
        y = PackedLinear.from_weight(weight, activations=activations, kernel="triton", dtype=torch.bfloat16)(x)
        errors[activations] = rms(y - exact) / rms(exact)
    assert errors["float"] < 0.003 < errors["int8"] < 0.02


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [17, 70, 300])
@pytest.mark.parametrize("format", [("int8", 0, True), ("int8", 32, False), ("int4", 32, True), ("int4", 128, False)])
def test_activation_gate_and_residual_on_a_gpu(rows, format):
    for size in ((128, 328), (4096, 4096), (1408, 5632), (192, 36)):
        for case in FUSED_CASES:
            check_fused(format, n=size[0], k=size[1], rows=rows, device="cuda", **case)


@pytest.mark.gpu
@needs_gpu
def test_a_nan_spoils_its_own_row_only_on_a_gpu():
    from hasten.ops.linear import PackedLinear

    x = torch.randn(40, 512, device="cuda").bfloat16()
    x[2, 5] = float("nan")
    weight = make_weight(300, 512, group_size=32).map(lambda tensor: tensor.cuda())
    y = PackedLinear.from_weight(weight, kernel="triton")(x)
    assert y[2].isnan().all()
    assert y.isnan().any(1).sum() == 1
