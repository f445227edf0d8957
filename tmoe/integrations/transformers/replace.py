"""`tmoe.replace_moe`: put the MoE modules of a loaded transformers model on tmoe, in place."""

from __future__ import annotations

from torch import nn

from tmoe.arguments import SCHEMES as NOT_QUANTIZED
from tmoe.checks import expect_type
from tmoe.formats import Scheme

from .register import register
from .report import Report


def replace_moe(
    model: nn.Module,
    scheme: str | None = None,
    *,
    routers: bool = True,
    progress: bool | None = None,
) -> Report:
    """Run the MoE modules of `model` on tmoe, in place; no parameter is moved, copied or renamed.

    Experts on transformers' interface are switched through their config. The modules of families
    that are not on it (Llama 4, DBRX, JetMoE's MLPs, LongCat-Flash, Step-3.7), and the routers of
    all, change class, to a subclass with another `forward`; a router is called as before and
    returns what it returned. Shared experts, hooks and state dict stay as they are. Calling it
    again is fine: it finds what runs on tmoe already. What it doesn't know, it leaves alone and
    reports.

    Copies and pickles of the model stay replaced; a process that loads such a pickle calls
    `register`.

    With a scheme the experts' weights are also quantised, in place and for good, a layer at a time:
    its old weights are let go before the next one begins. The new ones have the old names, no
    gradient, and the layout (E, 2I, H) and (E, H, I) also where the old ones were transposed.
    Biases, routers and shared experts stay as they are. A layer that can't be quantised keeps its
    weights and is reported. `save_pretrained` then writes what ``tmoe quantize`` makes of a model.

    Args:
        model: usually a model of transformers, or any module with one inside.
        scheme: None or "bf16", the weights as loaded; or a name of `tmoe.formats.SCHEMES`.
        routers: False leaves the routers to transformers. Called eagerly, without a CUDA graph or
            `torch.compile`, one of ours takes the host longer to launch.
        progress: show a progress bar while quantising; None shows it on a terminal.

    Returns:
        A `Report`, with the error of each quantised layer. A model without MoE gives an empty one,
        which says so when printed.

    Raises:
        ImportError: transformers is missing or has no experts interface.
        TypeError: `model` is not a module, `scheme` is not a string, `routers` is not a bool.
        ValueError: `scheme` has no such name.
    """
    expect_type(model, nn.Module, "replace_moe", "model")
    expect_type(routers, bool, "replace_moe", "routers")
    if scheme is not None:
        expect_type(scheme, str, "replace_moe", "scheme")
    if scheme in NOT_QUANTIZED:
        scheme = None
    if scheme is not None:
        Scheme.of(scheme, "replace_moe", or_bf16=True)
    register()
    from .switch import switch_all  # imports transformers

    report = Report()
    switch_all(model, report, routers)
    if scheme is not None:
        from .quantize_model import quantize_model
        from .save import prepare_saving

        quantize_model(model, report, scheme, progress)
        if report.errors:
            prepare_saving(model)
    return report
