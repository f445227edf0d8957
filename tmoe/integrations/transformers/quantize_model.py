"""Quantise the experts of a loaded model in place, a layer at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from torch import Tensor, nn

from tmoe.formats import ErrorSums, QuantizedTensor, Scheme
from tmoe.formats.by_expert import quantize_by_expert, why_not_quantize
from tmoe.formats.recipe import Recipe
from tmoe.progress import progress_bar

from .activations import ExpertsModule
from .quantized import (
    PARALLEL,
    hold_quantized,
    is_transposed,
    scheme_of,
    weight_names,
    why_not_quantized,
)
from .report import Report
from .switch import expert_modules

Made = tuple[QuantizedTensor, ErrorSums]


def quantize_model(model: nn.Module, report: Report, scheme: str, progress: bool | None) -> None:
    """Quantise what `report` says runs on tmoe, and add to it what that did.

    A layer's old weights are let go before the next layer begins, so what is needed beside the
    model is one layer in the new format and one expert.
    """
    recipe = Scheme.of(scheme, "replace_moe").weights[0]
    owners = _owners(model)
    shared: dict[int, Made] = {}  # weights of more than one layer
    report.scheme = scheme
    layers = [(name, module) for name, module in expert_modules(model) if report.covers(name)]
    with progress_bar(len(layers), "layers", progress) as step:
        for name, experts in layers:
            step(name)
            reason = _why_not(name, experts, recipe, owners)
            if reason is None:
                try:
                    report.errors[name] = _quantize_layer(experts, scheme, recipe, owners, shared)
                except ValueError as error:
                    reason = str(error)
            if reason is not None:
                report.not_quantized[name] = reason
    for replaced in report.replaced:
        inside = (
            name for name, _ in layers if f"{name}.".startswith(f"{replaced}.") or not replaced
        )
        if next(inside, None) is None:
            cls = type(model.get_submodule(replaced)).__name__
            report.not_quantized[replaced] = f"tmoe doesn't quantise the experts of {cls}"


def _quantize_layer(
    experts: ExpertsModule,
    scheme: str,
    recipe: Recipe,
    owners: dict[int, list[nn.Module]],
    shared: dict[int, Made],
) -> dict[str, ErrorSums]:
    made = []
    for arg, weight, usual in _weights(experts):
        if id(weight) in shared:
            made.append(shared[id(weight)])
            continue
        try:
            made.append(quantize_by_expert(usual, recipe))
        except ValueError as error:
            raise ValueError(f"{arg}, {error}") from None
        if len(owners[id(weight)]) > 1:
            shared[id(weight)] = made[-1]
    (gate_up, gate_up_error), (down, down_error) = made
    hold_quantized(experts, gate_up, down, scheme)
    return dict(zip(weight_names(experts), (gate_up_error, down_error), strict=True))


def _weights(experts: ExpertsModule) -> Iterator[tuple[str, Tensor, Tensor]]:
    """For each projection its name, its parameter, and that as (E, N, K)."""
    names = weight_names(experts)
    num_experts = experts.get_parameter(names[1]).shape[0]
    for name in names:
        parameter = experts.get_parameter(name)
        # LongCat-Flash has rows for experts that don't exist.
        usual = parameter.detach()[:num_experts]
        transposed = is_transposed(experts)
        yield name, parameter, usual.transpose(1, 2) if transposed else usual


def _why_not(
    name: str, experts: ExpertsModule, recipe: Recipe, owners: dict[int, list[nn.Module]]
) -> str | None:
    if held := scheme_of(experts).name:
        return f"it is quantised already, as {held}"
    if PARALLEL in vars(experts):
        return "it is divided among ranks; quantise first, then divide"
    if "base_layer" in name.split("."):
        return "PEFT wraps it; merge or unload the adapter first"
    if reason := why_not_quantized(experts):
        return reason
    for arg, parameter, usual in _weights(experts):
        if parameter.is_meta:
            return f"{arg} is offloaded or not loaded yet (it is on the meta device)"
        if type(usual) is not Tensor:
            return f"{arg} is a {type(usual).__name__}; quantise before distributing the model"
        if reason := why_not_quantize(usual.shape, usual.dtype, recipe.format):
            return f"{arg}: {reason}"
        kinds = {type(owner).__name__ for owner in owners[id(parameter)]} - {type(experts).__name__}
        if len(owners[id(parameter)]) > 1 and kinds:
            return f"{arg} is shared with {', '.join(sorted(kinds))}"
    return None


def _owners(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that each parameter, by id, belongs to: tied ones belong to several."""
    owners = defaultdict(list)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners[id(parameter)].append(module)
    return owners
