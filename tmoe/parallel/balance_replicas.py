"""Which replica of an expert a token goes to, where the expert has n of them.

    replica = floor(n · frac((t + p) φ)),    φ = (√5 - 1) / 2

t is the token's number, and p shifts experts against one another, so that a token's popular experts
aren't all on the first replicas. The multiples of φ fill [0, 1) evenly, whichever stretch of tokens
chose the expert, or every how manyth of them: of m such tokens each replica gets m / n, give or
take a few. So replicas are used evenly without counting, the choice for a token depends on its
number and on the expert alone, and nothing waits for the device.
"""

from __future__ import annotations

from torch import Tensor

PHI = 2654435769  # of 2^32


def replica_of(number: Tensor, experts: Tensor, replicas: Tensor) -> Tensor:
    """number: of tokens, experts: their ids, replicas: how many each of these has; int64, of shapes
    that broadcast. Returns numbers below `replicas`."""
    shifted = number + experts * (experts + 1) // 2
    return ((shifted * PHI & 0xFFFFFFFF) * replicas) >> 32
