"""Triton's interpreter without its largest costs; kernels compute the same.

At each launch, and at each call of a function inside a kernel, the interpreter looks at every name
of `triton.language` to replace the built-in ones, and puts them back after the launch: more than
half of its time. Nothing in a test process uses the original ones. A third of the rest goes into
describing the same few shapes and dtypes again and again, and another third into 64-bit copies of
integer sums, to look for overflows that it then doesn't report: without `debug` no assertion is
made of them. Of what is left, half goes into the rules of operands (`operators.py`).
"""

import functools
from dataclasses import replace

import numpy as np
from triton.language import core
from triton.runtime import interpreter

from tests import operators


def speed_up() -> None:
    """Let the interpreter remember what it finds out. Once per process, before any launch."""
    interpreter._patch_lang = _once(interpreter._patch_lang)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter._patch_attr = _patch_directly
    interpreter.TensorHandle.__init__ = _checked_at_once(interpreter.TensorHandle.__init__)
    interpreter._convert_float = _widening_by_a_shift(interpreter._convert_float)
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    core.block_type.__init__ = _with_known_shapes(core.block_type.__init__)
    core.tensor.__init__ = _like_others_of_its_shape(core.tensor.__init__)
    operators.remember()


def _once(patch):
    """Replace what a function needs at its first call only, and for good."""

    @functools.cache
    def patch_once(fn):
        patch(fn)
        return interpreter._LangPatchScope()  # holds no change, so restores none

    return patch_once


def _patch_directly(obj, name, member, builder, scope):
    """The same replacement of a built-in, without the check that one is inside a kernel."""
    built_in = getattr(member, "__wrapped__", member)  # else a method that calls a built-in
    semantic = interpreter.interpreter_semantic

    def replacement(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return built_in(*args, **kwargs)

    scope.set_attr(obj, name, replacement)


def _checked_at_once(init):
    """The same, with the check that the elements aren't too wide inline."""

    def fast(self, data, dtype, attr=None):
        if (
            data.itemsize > 1
            and not dtype.is_ptr()
            and data.itemsize * 8 > dtype.primitive_bitwidth
        ):
            init(self, data, dtype)  # raises what is wrong
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

    return fast


def _by_name(numpy_dtype):
    known = {}

    def by_name(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = numpy_dtype(dtype)
        return known[name]

    return by_name


def _widening_by_a_shift(convert):
    """bf16 is the upper half of fp32. (Subnormals the interpreter makes other numbers of.)"""

    def convert_float(x, from_type, to_type, rounding):
        if (from_type.name, to_type.name) == ("bf16", "fp32"):
            subnormal = (x & 0x7FFF) - np.uint16(1) < 0x7F  # 0 - 1 is the largest of all
            if not subnormal.any():
                return x.astype(np.uint32) << 16
        return convert(x, from_type, to_type, rounding)

    return convert_float


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
