"""Triton's interpreter without its largest costs; kernels compute the same.

At each launch, and at each call of a function inside a kernel, the interpreter looks at every name
of `triton.language` to replace the built-in ones, and puts them back after the launch: more than
half of its time. Nothing in a test process uses the original ones. A third of the rest goes into
describing the same few shapes and dtypes again and again, and another third into 64-bit copies of
integer sums, to look for overflows that it then doesn't report: without `debug` no assertion is
made of them.
"""

import functools
from dataclasses import replace

from triton.language import core
from triton.runtime import interpreter


def speed_up() -> None:
    """Let the interpreter remember what it finds out. Once per process, before any launch."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    core.block_type.__init__ = _with_known_shapes(core.block_type.__init__)
    core.tensor.__init__ = _like_others_of_its_shape(core.tensor.__init__)


def _once(patch):
    """Replace what a function needs at its first call only, and for good."""

    @functools.cache
    def patch_once(fn):
        patch(fn)
        return interpreter._LangPatchScope()  # holds no change, so restores none

    return patch_once


def _by_name(numpy_dtype):
    known = {}

    def by_name(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return by_name


def _with_known_shapes(init):
    @functools.lru_cache(maxsize=None, typed=True)
    def known(*sizes):
        made = core.block_type.__new__(core.block_type)
        init(made, core.int1, list(sizes))  # raises what is wrong with them, each time
        return made.shape, made.numel, str(made.shape)

    def init_from_known(self, element_ty, shape):
        sizes = [s.value if isinstance(s, core.constexpr) else s for s in shape]
        self.element_ty = element_ty
        self.shape, self.numel, text = known(*sizes)
        self.name = f"<{text}, {element_ty}>"

    return init_from_known


def _like_others_of_its_shape(init):
    known = {}

    def init_from_known(self, handle, type):
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in known:
            init(self, handle, type)
            known[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return init_from_known
