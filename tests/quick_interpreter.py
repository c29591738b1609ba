"""Triton's interpreter without work that comes to nothing: it then takes a third of the time. conftest.py imports it.

As of Triton 3.6 the interpreter replaces all functions of triton.language again for each call of a device function,
although the kernel's launch has replaced them already; it computes every sum, difference and product of integers
twice, once in 64 bits, for an assertion that only holds in a builder with `debug`, which its own never is; and it
checks and describes the shape and dtype of every value, although a kernel has a handful of them.
"""

from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter

core = tl.core
_replace_all = interpreter._patch_lang
_make_block_type = core.block_type.__init__
_make_tensor = core.tensor.__init__
_np_dtype = interpreter._get_np_dtype
_broadcast = interpreter.interpreter_semantic.broadcast_impl_value


def replace_unless_done(fn):
    languages = [one for one in (tl, tl.core) if any(one is value for value in fn.__globals__.values())]
    if languages and not any(tl.core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()  # nothing to undo
    return _replace_all(fn)


_described: dict[tuple, dict] = {}  # (shape, element) -> a block type's attributes
_shapes: dict[tuple, tuple] = {}  # shape -> a tensor's shape and its number of elements
_np_dtypes: dict[str, object] = {}  # a Triton dtype's name -> numpy's dtype


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


interpreter._patch_lang = replace_unless_done
interpreter._get_np_dtype = np_dtype
interpreter.interpreter_semantic.broadcast_impl_value = broadcast
core.block_type.__init__ = make_block_type
core.tensor.__init__ = make_tensor
options = interpreter.interpreter_builder.options
assert not options.debug, "the assertion would hold"
interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
