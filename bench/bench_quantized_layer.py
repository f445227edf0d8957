"""The routed experts with quantised weights, in every scheme; quantising the rows counts."""

from __future__ import annotations

import pytest

from tmoe.bench.cases import BACKENDS, experts_case, prepared_weights
from tmoe.formats import SCHEMES

IMPLEMENTATIONS = BACKENDS


@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_layer(
    measure_case, weights, shape, tokens, backend, routing, scheme, device, dtype
):
    measure_case(
        experts_case, shape, tokens, backend, prepared_weights(weights, scheme), scheme=scheme,
        routing=routing, device=device, dtype=dtype,
    )  # fmt: skip
