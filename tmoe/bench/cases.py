"""What is measured: a call, its inputs, how to see that it is right, and what it has to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tmoe

from ..dispatch.known import WITH_A_LAYOUT
from ..formats import SCHEMES
from ..shapes import MoEShape
from .peers import PEERS, Missing
from .reference import check_experts, check_quantized_experts, quantized
from .roofline import Work, device_name, experts_work, roof_of
from .shapes import routed_inputs

OURS = ("triton", "torch")  # backends of tmoe whose code is tmoe's; what others take is compared
BACKENDS = (*OURS, *WITH_A_LAYOUT, *PEERS)
STATIC = 0.01  # a scale of inputs of about unit size, where a checkpoint would bring one


@dataclass(frozen=True, slots=True)
class Case:
    """One operation of one layer at one number of tokens, by one backend."""

    operation: str
    shape: MoEShape
    tokens: int
    backend: str
    dtype: torch.dtype  # of the rows
    device: torch.device
    call: Callable[..., Any]
    inputs: Sequence[tuple[Tensor, ...]]
    check: Callable[..., None]  # of a result and its input; raises if it is wrong
    work: Work
    multiplies: torch.dtype  # whose peak counts
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """What has the same group is compared."""
        shown = [text for text in self.labels.values() if text != "random"]
        return " ".join([self.operation, *shown, self.shape.name, f"T={self.tokens}"])

    @property
    def calls(self) -> list[Callable[[], Any]]:
        return [partial(self.call, *tensors) for tensors in self.inputs]

    def verify(self) -> None:
        """Raise ``AssertionError`` if a result is wrong."""
        for tensors in self.inputs:
            self.check(self.call(*tensors), *tensors)

    def info(self, seconds: Sequence[float]) -> dict[str, Any]:
        """What is written down, given the seconds per call of each round."""
        us, roof = 1e6 * median(seconds), roof_of(self.device, self.multiplies)
        floor = self.work.floor_us(roof)
        return {
            "operation": self.operation,
            **self.labels,
            "shape": self.shape.name,
            "tokens": self.tokens,
            "backend": self.backend,
            "dtype": str(self.dtype).removeprefix("torch."),
            "us": us,
            "tflops": self.work.flops / (1e6 * us),
            "gbs": self.work.bytes / (1e3 * us),
            "floor_us": floor,
            "percent_of_floor": 100 * floor / us,
            "roof": f"{roof.tflops:.4g} TFLOP/s, {roof.gbs:.4g} GB/s, {roof.source}",
            "device": device_name(self.device),
        }


def num_inputs(num_tokens: int) -> int:
    """How many different inputs a round goes through: more where one call is short."""
    return 8 if num_tokens <= 128 else 3


def num_touched(all_ids: Sequence[Tensor]) -> float:
    """How many experts a call uses, on average over its inputs' topk_ids."""
    return sum(ids.unique().numel() for ids in all_ids) / len(all_ids)


def with_backend(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """A function of tmoe, run by that backend and no other."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with tmoe.options(backend=backend):
            return function(*args, **kwargs)

    return run


def prepared_weights(
    weights: Sequence[Tensor], scheme: str
) -> Sequence[Tensor | tmoe.QuantizedTensor]:
    """A layer's weights as `scheme` has them; "bf16" leaves them as they are."""
    if scheme == "bf16":
        return weights
    return [quantized(w, SCHEMES[scheme].weights[0]) for w in weights]


def experts_case(
    shape: MoEShape,
    tokens: int,
    backend: str,
    weights: Sequence[Any],
    *,
    scheme: str = "bf16",
    routing: str = "random",
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    """The routed experts, from topk_ids to output. Quantising the rows counts.

    weights: gate_up_proj and down_proj as `prepared_weights` gives them. Raises `peers.Missing` for
    a peer that isn't installed or hasn't this scheme, and for a backend of tmoe that has to prepare
    weights and can't.
    """
    inputs = [
        routed_inputs(shape, tokens, device, dtype, routing, seed)
        for seed in range(num_inputs(tokens))
    ]
    touched = num_touched([ids for _, _, ids in inputs])
    plain = scheme == "bf16"
    scales: dict[str, Tensor] = {}
    if not plain and SCHEMES[scheme].takes_scales:
        scale = torch.tensor(STATIC, device=device)
        scales = {"input_scale": scale, "hidden_scale": scale}

    def check(got: Tensor, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> None:
        gate_up_proj, down_proj = weights
        layer = (x, gate_up_proj, down_proj, topk_weights, topk_ids)
        if plain:
            check_experts(got, *layer)
        else:
            check_quantized_experts(got, *layer, scheme, scales)

    call = _layer(backend, weights, scheme, scales)
    if backend in WITH_A_LAYOUT:
        try:
            with tmoe.prepare():
                call(*inputs[0])
        except tmoe.NoBackendError as error:
            raise Missing(str(error)) from error
    moved = sum(w.nbytes for w in weights)
    return Case(
        operation="layer" if plain else "quantized_layer",
        shape=shape,
        tokens=tokens,
        backend=backend,
        dtype=dtype,
        device=device,
        call=call,
        inputs=inputs,
        check=check,
        work=experts_work(shape, tokens, touched, dtype.itemsize, moved),
        multiplies=torch.float8_e4m3fn if multiplies_fp8(scheme) else dtype,
        labels={**({} if plain else {"scheme": scheme}), "routing": routing},
    )


def multiplies_fp8(scheme: str) -> bool:
    """Whether the rows are FP8 codes, for which the tensor cores are twice as fast."""
    rows = None if scheme == "bf16" else SCHEMES[scheme].inputs
    return rows is not None and rows.format.name.startswith("fp8")


def _layer(
    backend: str,
    weights: Sequence[Any],
    scheme: str,
    scales: Mapping[str, Tensor],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if backend in PEERS:
        gate_up_proj, down_proj = weights
        return PEERS[backend].layer(gate_up_proj, down_proj, scheme, **scales)
    options = {} if scheme == "bf16" else {"scheme": scheme, **scales}
    layer = with_backend(tmoe.fused_experts, backend)
    return lambda x, topk_weights, topk_ids: layer(x, *weights, topk_weights, topk_ids, **options)
