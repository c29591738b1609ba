"""Gluon kernels run on the CPU, for which Triton has no interpreter: programs are threads, values PyTorch's tensors.

Layouts mean nothing here. An asynchronous copy arrives when it is waited for, and its place is NaN until then.
"""

import ctypes
import inspect
import re
import threading
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F

WAITED = 30.0  # seconds in which a kernel has to end


class Pointer:
    """Places in a flat tensor."""

    def __init__(self, memory, offset=0, safe=0):
        self.memory, self.offset = memory, offset
        self.safe = safe  # a place that may be read in the place of what is masked
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, more):
        return Pointer(self.memory, self.offset + more, self.safe)


class Shared:
    """Shared memory of a program."""

    def __init__(self, tensor):
        self.tensor, self.dtype, self.shape = tensor, tensor.dtype, list(tensor.shape)

    def index(self, i):
        return Shared(self.tensor[int(i)])

    def load(self, layout):
        return self.tensor.clone()

    def store(self, value):
        self.tensor.copy_(value)

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.tensor.view(-1).view(dtype).view(shape))


class Copies:
    """Asynchronous copies of a program, in groups."""

    def __init__(self, machine):
        self.machine = machine

    def async_copy_global_to_shared(self, place, source, mask=None):
        value = self.machine.load(source, mask=mask, other=0)
        place.tensor.fill_(float("nan") if place.dtype.is_floating_point else -1)
        self.machine.own.group.append((place.tensor, value))

    def commit_group(self):
        own = self.machine.own
        own.groups.append(own.group)
        own.group = []

    def wait_group(self, left):
        own = self.machine.own
        while len(own.groups) > left:
            for place, value in own.groups.pop(0):
                place.copy_(value)


class Machine:
    """What a kernel knows as `gl`."""

    int16, int32, int64, float16, float32, bfloat16 = (
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.float32,
        torch.bfloat16,
    )
    exp2, rsqrt, abs = staticmethod(torch.exp2), staticmethod(torch.rsqrt), staticmethod(torch.abs)
    static_range = range

    def __init__(self, warps=4):
        self.own, self.lock, self.warps, self.programs = threading.local(), threading.Lock(), warps, 1
        self.BlockedLayout = self.SliceLayout = self.SwizzledSharedLayout = lambda *args, **kwargs: None

    def constexpr(self, value):
        return value

    def num_warps(self):
        return self.warps

    def program_id(self, axis):
        return self.own.number

    def num_programs(self, axis):
        return self.programs

    def thread_barrier(self):
        pass

    def allocate_shared_memory(self, dtype, shape, layout):
        return Shared(torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype))

    def arange(self, start, stop, layout=None):
        return torch.arange(start, stop)  # of 64 bits: in sums with a scalar of 64 bits PyTorch would keep 32

    def zeros(self, shape, dtype, layout=None):
        return torch.zeros(shape, dtype=dtype)

    def full(self, shape, value, dtype, layout=None):
        return torch.full(shape, value, dtype=dtype)

    def where(self, condition, yes, no):
        return torch.where(torch.as_tensor(condition), torch.as_tensor(yes), torch.as_tensor(no))

    def minimum(self, a, b):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def maximum(self, a, b):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    def sum(self, x, axis):
        return x.sum(axis)

    def max(self, x, axis):
        return x.max(axis).values

    def split(self, x):
        return x.unbind(-1)

    def convert_layout(self, x, layout, assert_trivial=False):
        return x

    def expand_dims(self, x, axis):
        return x.unsqueeze(axis)

    def load(self, pointer, mask=True, other=0, cache_modifier=""):
        at = torch.as_tensor(pointer.offset).long()
        at, mask = torch.broadcast_tensors(at, torch.as_tensor(mask))
        found = pointer.memory[torch.where(mask, at, pointer.safe)]
        return torch.where(mask, found, torch.as_tensor(other).to(found.dtype))

    def store(self, pointer, value, mask=True):
        at, value = torch.as_tensor(pointer.offset).long(), torch.as_tensor(value).to(pointer.memory.dtype)
        at, value, mask = torch.broadcast_tensors(at, value, torch.as_tensor(mask))
        pointer.memory[at[mask]] = value[mask]

    def atomic_add(self, pointer, value, sem):
        time.sleep(0)
        with self.lock:
            before = int(pointer.memory[pointer.offset])
            pointer.memory[pointer.offset] += value
        return before

    def inline_asm_elementwise(self, *args, **kwargs):
        assert "prefetch" in args[0], "a program gave up waiting"


def everywhere(tensor):
    """All memory in the tensor's dtype, and the tensor's place in it: for offsets from one tensor to others."""
    low, size = 1 << 12, (1 << 47) - (1 << 12)
    memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(low), dtype=tensor.dtype)
    place = (tensor.data_ptr() - low) // tensor.itemsize
    return Pointer(memory, place, place)


def activate(x, number):
    """As triton_parts.py has it."""
    kinds = (lambda x: x, F.silu, F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.relu)
    return kinds[number](x)


def run(modules, kernel, programs, *args, warps=4, **constants):
    """Run a kernel of these modules as that many programs at once; tensors among the arguments are flat."""
    machine = Machine(warps)
    machine.programs = programs

    def same(fn=None, **options):
        return (lambda own: own) if fn is None else fn

    names = {"gl": machine, "gluon": SimpleNamespace(jit=same, constexpr_function=same), "activate": activate}
    names["async_copy"] = Copies(machine)
    text = "\n".join(map(inspect.getsource, modules))
    text = re.sub(r"\.to\(gl\.(\w+), bitcast=True\)", r".view(gl.\1)", text)
    exec("\n".join(line for line in text.splitlines() if not line.startswith(("from ", "import "))), names)
    errors = []

    @torch.inference_mode()
    def program(number):
        own = machine.own
        own.number, own.group, own.groups = number, [], []
        try:
            names[kernel](*(Pointer(a) if isinstance(a, torch.Tensor) else a for a in args), **constants)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=program, args=(number,), daemon=True) for number in range(programs)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + WAITED
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the programs wait for each other for ever"


def launch_blocks(self, *arguments, **known):
    """`DecodeLayers.launch` on the CPU."""
    from hasten.ops.block import decode, decode_kernels, decode_products

    given = [everywhere(one) if i in (1, 2) else one for i, one in enumerate(arguments)]
    given = [one.flatten() if isinstance(one, torch.Tensor) else one for one in given]
    known |= decode.constants(self.sizes, self.cut)
    run((decode_products, decode_kernels), "decode_layers", self.cut.programs, *given, **known)
