"""A model's tensors, planned from a checkpoint's headers and read when transformers asks for them.

`CheckpointLoading.prepare` runs while the model is on the meta device: it puts experts on tmoe, has
their modules hold quantised weights without memory, and checks every name, dtype and shape. What it
leaves in `state_dict` then looks to transformers like an unquantised checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from tmoe.checkpoints import Checkpoint
from tmoe.checkpoints.header import TensorInfo
from tmoe.checkpoints.stacked import StoredExperts
from tmoe.checkpoints.stored import CODES, Stored
from tmoe.checks import expect

from .checkpoint_names import Destinations
from .load_share import Divide, plan_shares
from .quantized import (
    HELD,
    PADDED,
    hold_quantized,
    is_transposed,
    weight_names,
    why_not_quantized,
)
from .replace import replace_moe
from .report import Report
from .switch import expert_modules

OP = "from_pretrained"


class LazyTensor:
    """A tensor that is read when it is moved to its device: what transformers does with the slices
    of safetensors, it can do with this."""

    def __init__(
        self,
        dtype: torch.dtype,
        read: Callable[[torch.device, torch.dtype], Tensor],
        device: torch.device | None,
    ) -> None:
        """`device`: where it goes whatever is asked for, or None."""
        self.dtype, self._read, self._device = dtype, read, device

    def __getitem__(self, every: EllipsisType) -> LazyTensor:
        assert every is Ellipsis
        return self

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def to(
        self, device: str | torch.device | int | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        where = self._device or torch.device("cpu" if device is None else device)
        return self._read(where, dtype or self.dtype)


class CheckpointLoading:
    """The way of one checkpoint into one model.

    Attributes:
        state_dict: filled by `prepare`, from names to `LazyTensor`s.
        report: of `replace_moe`.
        shapes: of all parameters and buffers, as they have to be in the end.
        conversions: transformers' rules for names that the checkpoint needed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        scheme: str | None,
        dtype: torch.dtype,
        device: str | torch.device | None = None,
        divide: Divide | None = None,
    ) -> None:
        """`device`: where all tensors go; None = where transformers asks for them. `divide`: gives
        this rank its share of the experts."""
        self.checkpoint, self.scheme, self.dtype = checkpoint, scheme, dtype
        self.device = None if device is None else torch.device(device)
        self.state_dict: dict[str, LazyTensor] = {}
        self.report = Report()
        self.shapes: dict[str, torch.Size] = {}
        self.conversions: list[Any] = []
        self.stored: dict[str, StoredExperts] = {}
        self._divide = divide

    def __deepcopy__(self, memo: dict[int, Any]) -> CheckpointLoading:
        return self  # transformers copies configs, and this hangs on one

    def prepare(self, model: nn.Module) -> None:
        """Plan the loading of `model`, which is on the meta device.

        Raises ``ValueError``, with the file and the tensor, for whatever doesn't fit.
        """
        self.report = replace_moe(model)
        modules = {n: m for n, m in expert_modules(model) if why_not_quantized(m) is None}
        targets = {}
        for name, module in modules.items():
            for role, parameter in zip(("first", "down"), weight_names(module), strict=True):
                targets[f"{name}.{parameter}"] = (name, role)
        places = Destinations(self.checkpoint, model, targets, OP)
        self.conversions = places.conversions
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        for name in places.plain:
            self._plan_plain(
                name, self.checkpoint.info(name), shapes.get(places.target(name) or "")
            )
        for name, parts in places.dense.items():
            self._plan_dense(name, parts, shapes.get(places.target(name) or ""))
        for name, sources in places.experts.items():
            weights = [modules[name].get_parameter(n) for n in weight_names(modules[name])]
            first, down = sources.names(name, len(weights[0]), len(weights[1]), OP)
            stored = StoredExperts.find(
                self.checkpoint, first, down, range(len(weights[1])), self.scheme, OP,
                sources.transposed,
            )  # fmt: skip
            assert stored is not None  # `Destinations` found its scales
            self._plan_experts(name, modules[name], stored)
        if self._divide is not None:
            plan_shares(self, self._divide(model), places, OP)
        self.shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}

    def _plan_plain(self, name: str, info: TensorInfo, shape: torch.Size | None) -> None:
        codes = info.dtype in CODES and info.dtype.is_floating_point
        expect(not codes, OP, f"{info}", "beside its scales", info.words)
        if shape is not None:
            wanted = f"of shape {tuple(shape)}, as the config says"
            expect(info.shape == tuple(shape), OP, f"{info}", wanted, info.shape)

        self.state_dict[name] = self.of_view(name, lambda view: view)

    def of_view(self, name: str, take: Callable[[Tensor], Tensor]) -> LazyTensor:
        """A copy of what `take` takes of a view of a tensor of the checkpoint."""

        def read(device: torch.device, dtype: torch.dtype) -> Tensor:
            mine = take(self.checkpoint.view(name))
            return mine.to(device, dtype, copy=True, memory_format=torch.contiguous_format)

        return LazyTensor(self.checkpoint.info(name).dtype, read, self.device)

    def _plan_dense(self, name: str, parts: dict[str, str], shape: torch.Size | None) -> None:
        stored = Stored.find(self.checkpoint, name.removesuffix(".weight"), parts, OP)
        if shape is not None:
            stored.expect_shape(shape, "as the config says", OP)

        def read(device: torch.device, dtype: torch.dtype) -> Tensor:
            return stored.dequantize(dtype, device, OP)

        self.state_dict[name] = LazyTensor(self.dtype, read, self.device)

    def _plan_experts(self, name: str, module: nn.Module, stored: StoredExperts) -> None:
        names, E = weight_names(module), len(stored.experts)
        transposed = is_transposed(module)
        old = [module.get_parameter(n) for n in names]
        sizes = [p.shape[:0:-1] if transposed else p.shape[1:] for p in old]
        for matrices, (N, K) in zip((stored.first[0], (stored.down[0],)), sizes, strict=True):
            rows = N // len(matrices)
            for matrix in matrices:
                shape = (*((E,) if matrix.fused else ()), rows, K)
                matrix.expect_shape(shape, "as the config says", OP)
        biased = stored.padded != stored.first[0][0].rows and getattr(module, "has_bias", False)
        wanted = "a multiple of 128 where gate and up have biases and blocks of scales of their own"
        expect(not biased, OP, name, wanted, stored.first[0][0].rows)
        gate_up, down_proj = stored.empty(self.dtype, "meta")
        if stored.padded != stored.first[0][0].rows:
            _make_room(module, names, [gate_up.shape, down_proj.shape], transposed)
            vars(module)[PADDED] = True
        scales: dict[str, Tensor] = {}
        if stored.has_static_scales:
            scales = {k: torch.empty(E, device="meta") for k in ("input_scale", "hidden_scale")}
        hold_quantized(module, gate_up, down_proj, stored.scheme, **scales)
        self.stored[name] = stored
        reads = (stored.read_first, stored.read_down)
        self.plan_stored(name, stored, dict(zip(names, reads, strict=True)))

    def plan_stored(
        self,
        name: str,
        stored: StoredExperts,
        reads: Mapping[str, Callable[[torch.device, torch.dtype], Tensor]],
    ) -> None:
        """Give transformers the parameters of a module of quantised experts, and its scales."""
        for parameter, read in reads.items():
            lazy = LazyTensor(self.dtype, _as_parameter(read), self.device)
            self.state_dict[f"{name}.{parameter}"] = lazy
        for i, scale in enumerate(("input_scale", "hidden_scale")):
            if not stored.has_static_scales:
                continue

            def read_scale(device: torch.device, dtype: torch.dtype, i: int = i) -> Tensor:
                value = stored.input_scales(device)[i]
                assert value is not None
                return value

            lazy = LazyTensor(torch.float32, read_scale, self.device)
            self.state_dict[f"{name}.{HELD}.{scale}"] = lazy


def _make_room(
    module: nn.Module, names: tuple[str, str], shapes: list[torch.Size], transposed: bool
) -> None:
    """Let the module's weights, on the meta device, have the rows that fill the last blocks."""
    for name, (E, N, K) in zip(names, shapes, strict=True):
        owner, _, last = name.rpartition(".")
        like = torch.empty(E, *((K, N) if transposed else (N, K)), device="meta")
        setattr(module.get_submodule(owner), last, nn.Parameter(like))


def _as_parameter(
    read: Callable[[torch.device, torch.dtype], Tensor],
) -> Callable[[torch.device, torch.dtype], Tensor]:
    """A quantised weight has no gradient, which transformers would ask of a plain tensor."""

    def parameter(device: torch.device, dtype: torch.dtype) -> Tensor:
        return nn.Parameter(read(device, dtype), requires_grad=False)

    return parameter
