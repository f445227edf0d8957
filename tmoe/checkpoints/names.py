"""What the tensors of a quantised layer are called, method by method."""

from __future__ import annotations

import re
from dataclasses import dataclass

ROLES = ("data", "scale", "global_scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a layer's tensors, below the layer; more than one where checkpoints differ.

    Attributes:
        of_linear: for each role, the last part of the name: ``gate_proj.`` and this.
        of_fused: for each role, the ending of a tensor of all experts: ``gate_up_proj`` and this.
        transposed: fused tensors are (E, K, N), not (E, N, K).
        divides: global scales and scales of inputs stand for their reciprocals.
    """

    of_linear: dict[str, tuple[str, ...]]
    of_fused: dict[str, tuple[str, ...]]
    transposed: bool = False
    divides: tuple[str, ...] = ()

    def split(self, name: str) -> tuple[str, str] | None:
        """(layer, role) of a tensor's name; None for one that no quantised layer has. A fused
        layer's name ends with its projection."""
        layer, _, last = name.rpartition(".")
        for role, names in self.of_linear.items():
            if last in names:
                return layer, role
        if found := _FUSED.match(name):
            layer, ending = found.groups()
            for role, endings in self.of_fused.items():
                if ending in endings:
                    return layer, role
        return None


_FUSED = re.compile(r"(.*experts\.(?:gate_up_proj|up_proj|down_proj))(_\w+|)$")

_NAMES = {
    "fp8": Names(
        of_linear={
            "data": ("weight",),
            "scale": ("weight_scale_inv", "weight_scale", "scale", "qscale_weight"),
            "input_scale": ("activation_scale", "input_scale", "qscale_act"),
        },
        of_fused={
            "data": ("",),
            "scale": ("_scale_inv", "_scale"),
            "input_scale": ("_activation_scale",),
        },
    ),
    "modelopt": Names(
        of_linear={
            "data": ("weight",),
            "scale": ("weight_scale",),
            "global_scale": ("weight_scale_2",),
            "input_scale": ("input_scale",),
        },
        of_fused={
            "data": ("",),
            "scale": ("_weight_scale",),
            "global_scale": ("_weight_scale_2",),
            "input_scale": ("_input_scale",),
        },
        transposed=True,
    ),
    "compressed-tensors": Names(
        of_linear={
            "data": ("weight", "weight_packed"),
            "scale": ("weight_scale",),
            "global_scale": ("weight_global_scale",),
            "input_scale": ("input_scale", "input_global_scale"),
        },
        of_fused={},
        divides=("weight_global_scale", "input_global_scale"),
    ),
    "fbgemm_fp8": Names(
        of_linear={"data": ("weight",), "scale": ("weight_scale",)},
        of_fused={"data": ("",), "scale": ("_scale",)},
        transposed=True,
    ),
    "mxfp4": Names(
        of_linear={"data": ("weight",)},
        of_fused={"data": ("_blocks",), "scale": ("_scales",)},
    ),
}


def names_of(method: str) -> Names:
    return _NAMES["fp8" if method == "mxfp8" else method]
