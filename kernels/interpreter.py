"""What has to be mended in Triton's interpreter, where kernels run in it.

`mask & (row >= 0)`, a block and one condition, is a mask on a GPU. The interpreter repeats the
condition as whole numbers, and from Triton 3.9 on its loads and stores refuse what comes out ("mask
has unsupported dtype").

A GPU computes all lanes of a block, also those that a mask keeps from memory: a softmax of no
experts is 0 / 0 there, the sigmoid of a score that stands for none is 1 / (1 + inf). The
interpreter is NumPy, which warns of them, and of the infinities that a kernel means to have.
"""

from functools import wraps

from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


def mend() -> None:
    """Let a condition that is repeated stay one, and arithmetic be as silent as a GPU's. No result
    but that of conditions is changed."""
    InterpreterBuilder.create_splat = _keeping_conditions(InterpreterBuilder.create_splat)
    silent = interpreter.np.errstate(all="ignore")
    GridExecutor.__call__ = silent(GridExecutor.__call__)


def _keeping_conditions(create_splat):
    @wraps(create_splat)
    def create(builder, type, value):
        block = create_splat(builder, type, value)
        if value.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    return create
