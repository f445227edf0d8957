"""What has to be mended in Triton's interpreter, where kernels run in it.

`mask & (row >= 0)`, a block and one condition, is a mask on a GPU. The interpreter repeats the
condition as whole numbers, and from Triton 3.9 on its loads and stores refuse what comes out ("mask
has unsupported dtype").
"""

from functools import wraps

from triton.runtime.interpreter import InterpreterBuilder


def mend() -> None:
    """Let a condition that is repeated stay one. Nothing but conditions is changed."""
    InterpreterBuilder.create_splat = _keeping_conditions(InterpreterBuilder.create_splat)


def _keeping_conditions(create_splat):
    @wraps(create_splat)
    def create(builder, type, value):
        block = create_splat(builder, type, value)
        if value.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    return create
