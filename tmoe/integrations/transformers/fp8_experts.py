"""transformers' fine-grained FP8 experts (`FP8Experts`) on tmoe, straight from their parameters.

They have a registry of experts implementations of their own. Codes are taken as they are, without
a copy and without waiting for the device; of the scales, e8m0 exponents and one-per-matrix scales
are spread out at each call.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tmoe.activation import Activation
from tmoe.formats import QuantizedTensor, decode_e8m0
from tmoe.ops import fused_experts

from .activations import ExpertsModule, elementwise_name, gated_by, owner_of_gate

_BLOCKS = "blocks of 128 x 128, or of 1 x 32 with e8m0 scales"


def fp8_experts_forward(
    self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Run an `FP8Experts` on tmoe, in the scheme that it has.

    Args:
        self: an `FP8Experts`. With blocks of 128 x 128 it is fp8_block, of 1 x 32 mxfp8; without
            blocks fp8_tensor with static scales of the inputs, else fp8_channel, which has a scale
            per token; with 4-bit weights mxfp4_a8.
        hidden_states: (T, H), float32, bfloat16 or float16.
        top_k_index: (T, K) int64. Ids outside [0, number of local experts) contribute exactly zero.
        top_k_weights: (T, K), any float dtype.

    Returns:
        (T, H), a new contiguous tensor in `hidden_states`' dtype.

    Raises:
        NotImplementedError: the module computes something that tmoe doesn't, with the numbers.
    """
    activation = _activation(self)
    reason = _why_not(self, activation)
    if reason is not None or activation is None:
        layer = f"{type(self).__name__}({self.num_experts} experts)"
        raise NotImplementedError(f"{layer}: {reason}; use experts_implementation='grouped_mm'")
    first = "gate_up_proj" if self.has_gate else "up_proj"
    scales = {}
    if self.activation_scheme == "static":
        scales["input_scale"] = getattr(self, f"{first}_activation_scale").detach()
        scales["hidden_scale"] = self.down_proj_activation_scale.detach()
    return fused_experts(
        hidden_states,
        _weight(self, first),
        _weight(self, "down_proj"),
        top_k_weights,
        top_k_index,
        activation=activation,
        scheme=_scheme(self),
        **scales,
    )


def why_not_fp8(experts: ExpertsModule) -> str | None:
    """Why tmoe can't run the module, or None. It looks at shapes and dtypes, at no value."""
    return _why_not(experts, _activation(experts))


def _why_not(experts: ExpertsModule, activation: Activation | None) -> str | None:
    if activation is None:
        return f"tmoe doesn't have the activation of {_words(experts)}"
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    block, static = experts.block_size, experts.activation_scheme == "static"
    for name in (first, "down_proj"):
        weight, scale = getattr(experts, name), getattr(experts, f"{name}_scale_inv")
        if weight.dtype not in (torch.float8_e4m3fn, torch.int8):
            return f"its {name} is {weight.dtype}, which isn't float8_e4m3fn or packed int8"
        E, N, K = weight.shape
        is_e8m0 = scale.dtype in (torch.float8_e8m0fnu, torch.uint8)
        wanted: tuple[tuple[int, ...], ...]
        if weight.dtype == torch.int8:
            if not is_e8m0:
                return f"{name}_scale_inv of 4-bit weights is {scale.dtype}, not e8m0"
            wanted = ((E, N, K // 16),)
        elif block is None:
            wanted = ((E, 1, 1), (E, 2, 1))
        elif tuple(block) == (128, 128):
            wanted = ((E, -(-N // 128), -(-K // 128)),)
        elif tuple(block) == (1, 32) and is_e8m0:
            wanted = ((E, N, K // 32),)
        else:
            return f"its block_size is {tuple(block)} with {scale.dtype} scales; tmoe has {_BLOCKS}"
        if tuple(scale.shape) not in wanted:
            got, forms = tuple(scale.shape), " or ".join(map(str, wanted))
            return f"{name}_scale_inv is {got}, not {forms} for a weight {tuple(weight.shape)}"
        if static and (block is not None or weight.dtype == torch.int8):
            return "static scales of the inputs go with one scale per matrix, not with blocks"
    return None


def _scheme(experts: ExpertsModule) -> str:
    if experts.down_proj.dtype == torch.int8:
        return "mxfp4_a8"
    if experts.block_size is None:
        return "fp8_tensor" if experts.activation_scheme == "static" else "fp8_channel"
    return "fp8_block" if tuple(experts.block_size) == (128, 128) else "mxfp8"


def _weight(experts: ExpertsModule, name: str) -> QuantizedTensor:
    """One read of each parameter; the codes are the parameter's own memory."""
    data, scale = getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach()
    (E, N, K), scheme = data.shape, _scheme(experts)
    if scheme in ("mxfp4_a8", "mxfp8"):
        format, scale, block = scheme.removesuffix("_a8"), scale.view(torch.uint8), (1, 32)
        shape = (E, N, 2 * K) if scheme == "mxfp4_a8" else (E, N, K)
        data = data.view(torch.uint8) if scheme == "mxfp4_a8" else data
        return QuantizedTensor(data, scale, None, format, block, shape, torch.bfloat16)
    if scale.element_size() == 1:
        scale = decode_e8m0(scale.view(torch.uint8))
    blocks: tuple[int | None, int | None] = (None, None)
    if scheme == "fp8_block":
        blocks = (128, 128)
    elif scheme == "fp8_channel":
        blocks = (1, None)
        scale = scale.expand(E, -1, N // scale.shape[1]).reshape(E, N)
    else:
        scale = scale.view(E, 2) if scale.shape[1] == 2 else scale.view(E)
    return QuantizedTensor(data, scale.float(), None, scheme, blocks, (E, N, K), torch.bfloat16)


def _activation(experts: ExpertsModule) -> Activation | None:
    """What `FP8Experts._apply_gate` computes, by the numbers that it took from the config."""
    if not experts.has_gate:
        name = elementwise_name(experts.act_fn)
        return None if name is None else Activation(name)
    owner = owner_of_gate(type(experts))
    if owner != "FP8Experts" or getattr(experts, "gate_softcap", None) is not None:
        return None
    alpha, limit = experts.swiglu_alpha, experts.swiglu_limit
    if alpha is not None:
        return None if limit is None else Activation.swiglu_oai(alpha, limit)
    if experts.limit is None:
        return gated_by(experts.act_fn)
    is_silu = elementwise_name(experts.act_fn) == "silu"
    return Activation.swiglu(experts.limit) if is_silu else None


def _words(experts: ExpertsModule) -> str:
    names = ("gate_softcap", "up_softcap", "swiglu_alpha", "swiglu_limit")
    numbers = [f"{n}={v}" for n in names if (v := getattr(experts, n, None)) is not None]
    return ", ".join([type(getattr(experts, "act_fn", None)).__name__, *numbers])


def is_fp8_experts(module: nn.Module) -> bool:
    """Whether it is transformers' `FP8Experts`, decorated or not."""
    return any(
        cls.__name__ == "FP8Experts" and cls.__module__.startswith("transformers.")
        for cls in type(module).__mro__
    )
