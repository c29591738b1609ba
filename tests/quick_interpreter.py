"""Make Triton's interpreter leave out work that comes to nothing, which takes most of its time. conftest.py imports it.

As of Triton 3.6 the interpreter replaces all functions of triton.language again for each call of a device function,
although the kernel's launch has replaced them already; it computes every sum, difference and product of integers
twice, once in 64 bits, for an assertion that only holds in a builder with `debug`, which its own never is; it checks
and describes the shape and dtype of every value, although a kernel has a handful of them; it takes floats of 16 and 8
bits apart into sign, exponent and mantissa to convert them; and it computes erf one element at a time.
"""

from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

core = tl.core
_replace_all = interpreter._patch_lang
_make_block_type = core.block_type.__init__
_make_tensor = core.tensor.__init__
_np_dtype = interpreter._get_np_dtype
_broadcast = interpreter.interpreter_semantic.broadcast_impl_value
_convert = interpreter._convert_float
_unwrap = core._unwrap_if_constexpr


def replace_unless_done(fn):
    languages = [one for one in (tl, tl.core) if any(one is value for value in fn.__globals__.values())]
    if languages and not any(tl.core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()  # nothing to undo
    return _replace_all(fn)


def replace_member(obj, name, member, builder, scope):
    """Give a function of the language the interpreter's semantic, without asking whether it has one."""
    plain = getattr(member, "__wrapped__", member)  # without what `core.builtin` puts around it
    semantic = interpreter.interpreter_semantic

    def call(*given, **named):
        named["_semantic"] = semantic
        return plain(*given, **named)

    scope.set_attr(obj, name, call)


_described: dict[tuple, dict] = {}  # (shape, element) -> a block type's attributes
_shapes: dict[tuple, tuple] = {}  # shape -> a tensor's shape and its number of elements
_others: dict[tuple, core.block_type] = {}  # (block type, element) -> the same shape of other elements
_np_dtypes: dict[str, object] = {}  # a Triton dtype's name -> numpy's dtype
_tables: dict[tuple, np.ndarray] = {}  # (from, to) -> the bits of all values of 8 bits in another dtype


def make_block_type(self, element_ty, shape):
    """Initialize a block type; one of the same shape and element was checked and described before."""
    key = (tuple(getattr(size, "value", size) for size in shape), element_ty.name)
    known = _described.get(key)
    if known is None:
        _make_block_type(self, element_ty, shape)
        _described[key] = {name: getattr(self, name) for name in ("shape", "numel", "name")}
    else:
        self.element_ty = element_ty
        self.__dict__.update(known)


def with_element_ty(self, scalar_ty):
    """Return the block type of the same shape with other elements, the same object each time."""
    key = self.name, scalar_ty.name
    if key not in _others:
        _others[key] = core.block_type(scalar_ty, self.shape)
    return _others[key]


def unwrap(value):
    """Return what a constexpr holds; a tensor, and most values are one, holds nothing else."""
    return value if value.__class__ is core.tensor else _unwrap(value)


def make_tensor(self, handle, type):
    """Initialize a tensor; those of one shape share the tuple that has it."""
    key = tuple(type.shape.values) if type.is_block() else ()
    known = _shapes.get(key)
    if known is None:
        _make_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel
    else:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known


def np_dtype(dtype):
    """Return numpy's dtype of a Triton dtype; a block has that of its elements."""
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _np_dtype(dtype.scalar)
    return _np_dtypes[name]


def broadcast(lhs, rhs):
    """Broadcast two values to one shape; blocks of the same shape have it."""
    if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
        return lhs, rhs
    return _broadcast(lhs, rhs)


def convert(values, source, target, rounding):
    """Convert the bits of floats: bfloat16 is the upper half of a float32, cut off as the interpreter does."""
    if source.name == "bf16" and target.name == "fp32":
        return values.astype(np.uint32) << np.uint32(16)
    if source.name == "fp32" and target.name == "bf16" and rounding is None:
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if source.primitive_bitwidth == 8 and target.primitive_bitwidth > 8:
        key = source.name, target.name
        if key not in _tables:
            _tables[key] = _convert(np.arange(256, dtype=np.uint8), source, target, rounding)
        return _tables[key][values.view(np.uint8)]
    return _convert(values, source, target, rounding)


def erf(x):
    """Compute erf in float64, as math.erf does, and return it in the dtype of x."""
    return torch.erf(torch.tensor(x, dtype=torch.float64)).numpy().astype(x.dtype)


interpreter._patch_lang = replace_unless_done
interpreter._patch_attr = replace_member
interpreter._get_np_dtype = np_dtype
interpreter._convert_float = convert
interpreter.np_erf_fp32 = interpreter.np_erf_fp64 = erf
interpreter.interpreter_semantic.broadcast_impl_value = broadcast
core.block_type.__init__ = make_block_type
core.block_type.with_element_ty = with_element_ty
core.block_type.to_ir = lambda self, builder: self  # the interpreter's types are the language's own
core._unwrap_if_constexpr = unwrap
core.tensor.__init__ = make_tensor
options = interpreter.interpreter_builder.options
assert not options.debug, "the assertion would hold"
interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
