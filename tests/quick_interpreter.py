"""Triton's interpreter without work that comes to nothing: it then takes half the time. conftest.py imports it.

As of Triton 3.6 the interpreter replaces all functions of triton.language anew for each call of a device function,
although the kernel's launch has replaced them already; and it computes every sum, difference and product of integers
twice, once in 64 bits, for an assertion that only stands in a builder with `debug`, which its own never is.
"""

from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter

_replace_all = interpreter._patch_lang


def replace_unless_done(fn):
    languages = [one for one in (tl, tl.core) if any(one is value for value in fn.__globals__.values())]
    if languages and not any(tl.core.is_builtin(language.load) for language in languages):
        return interpreter._LangPatchScope()  # nothing to undo
    return _replace_all(fn)


interpreter._patch_lang = replace_unless_done
options = interpreter.interpreter_builder.options
assert not options.debug, "the assertion would stand"
interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
