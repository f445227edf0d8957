"""Triton's interpreter without its largest cost; kernels compute the same.

At each launch, and at each call of a function inside a kernel, the interpreter looks at every name
of `triton.language` to replace the built-in ones, and puts them back after the launch. That took
more than half of the time of the kernel tests. Nothing in a test process uses the original ones.
"""

import functools

from triton.runtime import interpreter


def keep_language_patched() -> None:
    """Let the interpreter replace what a function needs at its first call only, and for good."""
    patch = interpreter._patch_lang

    @functools.cache
    def patch_once(fn):
        patch(fn)
        return interpreter._LangPatchScope()  # holds no change, so restores none

    interpreter._patch_lang = patch_once
