"""A stand-in for FlashInfer that runs on a CPU: the same names, signatures, checks and answers.

    with stand_in.installed("0.7.4") as fake:
        ...  # `import flashinfer` finds the stand-in
    fake.calls  # what was called with what

An entry point refuses what the real launcher refuses, and answers by undoing the layout of the
weights that it is given. Where the real one would silently go wrong, the stand-in raises `Misuse`.
FlashInfer 0.7.4 was read for that, and the issues of older versions.

install     puts it in FlashInfer's place
faults      what known versions get wrong, and what a test may want to go wrong
checks      refusals and misuse
schemes     what the trtllm entry points take per number format
trtllm      their calls; routing: who gets which token
cutlass     the cutlass entry point's call
reading     the weights as given -> a kernel
kernel      what is computed; rounding: where precision is lost on the way; undo: layouts
"""

from tests.backends.flashinfer.stand_in.checks import Misuse
from tests.backends.flashinfer.stand_in.faults import FAULTS, faults_of
from tests.backends.flashinfer.stand_in.install import Fake, hidden, installed

__all__ = ["FAULTS", "Fake", "Misuse", "faults_of", "hidden", "installed"]
