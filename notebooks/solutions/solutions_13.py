"""Solutions of notebook 13."""

import math


def bits(chances):
    # A byte with chance 1/2 is worth one bit, one with chance 1/256 eight.
    return sum(-math.log2(chance) for chance in chances) / len(chances)


def specialisation(ids, is_kind, expert):
    of_kind = [chosen for chosen, kind in zip(ids, is_kind, strict=True) if kind]

    def share(tokens):
        return sum(expert in chosen for chosen in tokens) / len(tokens)

    return share(of_kind) / share(ids)
