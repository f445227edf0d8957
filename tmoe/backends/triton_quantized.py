"""Experts with quantised weights as Triton kernels: quantise, gate_up, quantise, down, combine."""

from __future__ import annotations

import torch
from torch import Tensor

from tmoe.kernels.clear_tail import clear_tail
from tmoe.kernels.combine import combine
from tmoe.kernels.descriptors import is_one_matrix
from tmoe.kernels.grouped_gemm import grouped_gemm
from tmoe.kernels.launch import (
    cdiv,
    has_block_scaled_units,
    has_fp8_units,
    multiplies_block_scaled,
    specializes_warps,
)
from tmoe.kernels.quantize_ref import ALL_ROWS, Rows
from tmoe.kernels.sort import OneToken, SortedTokens, tile_rows
from tmoe.kernels.tiles import LayerTiles
from tmoe.kernels.used_tokens import used_tokens
from tmoe.kernels.weight_codes import Scales

from ..checks import expect
from ..dispatch.backend import NO_ADAPTERS
from ..dispatch.problem import (
    Adapters,
    ExpertsSpec,
    ExpertTensors,
    Problem,
    StaticScales,
    result_dtype,
)
from ..formats import FORMATS, QuantizedTensor
from ..formats.compute import block_of
from ..formats.format import FLOAT32
from ..formats.recipe import Recipe
from ..formats.scheme import SCHEMES
from ..options import current
from .triton_inputs import Inputs, order_tokens, round_rows, scale_of_rows, take_codes
from .triton_low_rank import low_rank_rows
from .triton_tiles import Tiles

MANY_COPIES = 4


def form(problem: Problem) -> str:
    """What happens to the codes of a quantised problem on its machine."""
    if problem.scheme is None or problem.op not in ("fused_experts", "grouped_gemm"):
        return ""
    scheme, machine = SCHEMES[problem.scheme], problem.machine
    dtype = str(problem.dtype).removeprefix("torch.")
    if scheme.inputs is None:
        return f"weights become {dtype} on their way to the matmul units"
    if scheme.inputs.format.scale is FLOAT32:
        if has_fp8_units(machine.architecture):
            return "e4m3 codes are multiplied as they are"
        return "no units for e4m3 are known here: codes become bf16"
    # Triton takes e4m3 by e2m1 apart on 12.x.
    taken_apart = scheme.name == "mxfp4_a8" and machine.architecture.startswith("sm_12")
    if has_block_scaled_units(machine.architecture) and not taken_apart:
        return "block-scaled codes are multiplied as they are"
    return f"no block-scaled units: rounded inputs and weights are multiplied as {dtype}"


def why_not_scales(scheme: str) -> str | None:
    """Why the kernels can't multiply under a scheme's scales, or None. Fine ones can't differ:
    `Format` fixes their blocks."""
    weights, inputs = SCHEMES[scheme].weights, SCHEMES[scheme].inputs
    for recipe in (*weights, *(() if inputs is None else (inputs,))):
        columns = recipe.block_shape[1]
        if recipe.format.scale is FLOAT32 and columns not in (None, 128):
            name = recipe.format.name
            return f"fp32 scales reach along a row or along 128 of it, those of {name} {columns}"
    return None


def quantized_experts(
    tensors: ExpertTensors,
    spec: ExpertsSpec,
    out: Tensor | None,
    scales: StaticScales,
    all_tiles: Tiles,
    adapters: Adapters = NO_ADAPTERS,
    before: Tensor | None = None,
) -> Tensor:
    """x (T, H) bf16 or fp32, or quantised as the scheme's inputs are -> (T, H); see
    `tmoe.dispatch.backend.Backend`. `before` receives what is activated; then, and with adapters,
    x isn't quantised, and the activated rows are stored as numbers."""
    x, gate_up_proj, down_proj, topk_weights, topk_ids, gate_up_bias, down_bias = tensors
    assert isinstance(gate_up_proj, QuantizedTensor) and isinstance(down_proj, QuantizedTensor)
    assert spec.scheme is not None
    plain = x.data if isinstance(x, QuantizedTensor) else x
    plain_rows = before is not None or any(factor is not None for factor in adapters)
    (T, K), (E, H, I) = topk_ids.shape, down_proj.shape
    S, activation, inputs = T * K, spec.activation, SCHEMES[spec.scheme].inputs
    tiles = _tiles(all_tiles, x, gate_up_proj, down_proj, spec, S / spec.num_experts, plain_rows)
    by_expert = plain_rows or _rounds_by_expert(inputs, scales, spec)
    order = order_tokens(topk_ids, spec, E, tiles, by_expert=by_expert)
    given = scales.input if plain is x else plain  # codes have their scales already
    _expect_static("fused_experts", inputs, input_scale=given, hidden_scale=scales.hidden)
    weights, offsets, written = topk_weights.contiguous(), None, ALL_ROWS
    if isinstance(order, SortedTokens):
        offsets, written = order.expert_offsets, Rows(count=order.expert_offsets[-1:])
    on_input = weights if spec.weight_on_input else None
    a, gather = Inputs(plain), True
    if isinstance(x, QuantizedTensor):
        a, gather = take_codes(x, order, tiles.gate_up.specialized)
    elif inputs is not None:
        a, gather = _round_tokens(
            x, inputs, scales.input, order, on_input, tiles.gate_up.specialized
        )
        on_input = on_input if gather else None
    # The first GEMM quantises what it stores if a static scale is known before the rows are, or if
    # its tiles have whole blocks of them.
    static = None
    if inputs is not None and inputs.format.scale is FLOAT32 and not plain_rows:
        static = scales.hidden
    blocks = None
    if tiles.gate_up.specialized and static is None:
        blocks = plain.new_empty(cdiv(I, 128), S, dtype=torch.float32).T  # by column
    # Rows that were quantised have the weight in them already, and the adapter's get it here.
    in_rows = weights if spec.weight_on_input and on_input is None else None
    first = low_rank_rows(
        plain, adapters.gate_up_a, adapters.gate_up_b, order, gather=True, row_weight=in_rows
    )
    is_quantised = static is not None or blocks is not None
    hidden = grouped_gemm(
        plain.new_empty(S, I, dtype=torch.float8_e4m3fn if is_quantised else x.dtype),
        a.data, gate_up_proj.data, order, tiles.gate_up,
        scales=_scales(gate_up_proj, a, static, blocks), bias=gate_up_bias, adapter=first,
        before=before,
        gather=gather, row_weight=on_input, weight_on_input=True,
        activation=activation.name, gated=activation.gated, interleaved=spec.interleaved,
        alpha=activation.alpha, limit=activation.limit,
    )  # fmt: skip
    second = low_rank_rows(hidden, adapters.down_a, adapters.down_b, order)
    a = Inputs(hidden, blocks)
    if static is not None:
        a = Inputs(hidden, scale_of_rows(static, offsets, S))
    elif inputs is not None and blocks is None:
        a = round_rows(
            hidden, inputs, scales.hidden, written, offsets,
            scales_by_column=tiles.down.specialized,
        )  # fmt: skip
    y = grouped_gemm(
        plain.new_empty(S, H, dtype=x.dtype), a.data, down_proj.data, order, tiles.down,
        scales=_scales(down_proj, a), adapter=second,
        bias=down_bias, row_weight=None if spec.weight_on_input else weights,
    )  # fmt: skip
    if out is None:
        out = plain.new_empty(T, H, dtype=result_dtype(x, spec.wide))
    return combine(y, order.slot_to_row, out)


def _tiles(
    all_tiles: Tiles,
    x: Tensor,
    gate_up_proj: QuantizedTensor,
    down_proj: QuantizedTensor,
    spec: ExpertsSpec,
    rows_per_expert: float,
    plain_rows: bool,
) -> LayerTiles:
    """Those of both GEMMs; `plain_rows`: what is between them is stored as numbers."""
    assert spec.scheme is not None
    I, in_halves = down_proj.shape[2], spec.activation.gated and not spec.interleaved
    kind = _kind(gate_up_proj, SCHEMES[spec.scheme].inputs)
    if kind == "fp8 blocks" and (not in_halves or I % 64 == 0) and not plain_rows:
        kind = _specialized(kind, x, gate_up_proj, down_proj)
    return all_tiles.choose(
        x,
        (gate_up_proj.data, down_proj.data),
        kind,
        rows_per_expert=rows_per_expert,
        intermediate=I,
        interleaved=spec.interleaved,
    )


def _round_tokens(
    x: Tensor,
    recipe: Recipe,
    scale: Tensor | None,
    order: SortedTokens | OneToken,
    on_input: Tensor | None,
    specialized: bool,
) -> tuple[Inputs, bool]:
    """x as the first GEMM takes it, and whether that has to gather it. If not, it is multiplied by
    `on_input` already."""
    if isinstance(order, OneToken):
        return round_rows(x, recipe, scale, ALL_ROWS, None, scales_by_column=False), True
    copies, gather, by_column = None, True, specialized
    if on_input is not None or (scale is not None and scale.numel() > 1):
        # A token's codes differ from row to row.
        K = order.slot_to_row.shape[1]
        rows, gather = Rows(order.row_to_slot, K, on_input, order.expert_offsets[-1:]), False
    elif specialized:  # they are wanted row by row
        rows, copies, gather = ALL_ROWS, order.slot_to_row, False
        # Beside each other a row's scales fill whole sectors, which pays where there are many rows.
        by_column = copies.shape[1] < MANY_COPIES
    elif _is_of_all(recipe) and scale is None:
        rows = Rows(used_tokens(order.slot_to_row))
    else:
        rows = ALL_ROWS
    a = round_rows(
        x, recipe, scale, rows, order.expert_offsets, scales_by_column=by_column, copies=copies
    )
    return a, gather


def quantized_grouped_gemm(
    a: Tensor,
    b: QuantizedTensor,
    expert_offsets: Tensor,
    bias: Tensor | None,
    out: Tensor | None,
    scheme: str,
    scale: Tensor | None,
    all_tiles: Tiles,
) -> Tensor:
    """a (S, D) bf16 or fp32 -> (S, N); see `tmoe.dispatch.backend.Backend`."""
    S, (E, N, _) = a.shape[0], b.shape
    expert_offsets, inputs = expert_offsets.contiguous(), SCHEMES[scheme].inputs
    _expect_static("grouped_gemm", inputs, a_scale=scale)
    kind, y = _kind(b, inputs), a.new_empty(S, N) if out is None else out
    if kind == "fp8 blocks" and y.stride(1) == 1:
        kind = _specialized(kind, a, b)
    tile = all_tiles.choose(a, (b.data,), kind, rows_per_expert=S / E, intermediate=N).down
    order = tile_rows(expert_offsets, S, block_m=tile.block_m)
    rows = Inputs(a)
    if inputs is not None:
        rows = round_rows(
            a, inputs, scale, Rows(count=expert_offsets[-1:]), expert_offsets,
            scales_by_column=tile.specialized,
        )  # fmt: skip
    grouped_gemm(y, rows.data, b.data, order, tile, scales=_scales(b, rows), bias=bias)
    return clear_tail(y, expert_offsets)


def _rounds_by_expert(inputs: Recipe | None, scales: StaticScales, spec: ExpertsSpec) -> bool:
    """Whether rows are rounded together, or each as its expert or its routing weight wants it."""
    if inputs is None:
        return False
    given = [scale for scale in (scales.input, scales.hidden) if scale is not None]
    of_others = _is_of_all(inputs) and len(given) < 2
    return of_others or spec.weight_on_input or any(scale.numel() > 1 for scale in given)


def _is_of_all(recipe: Recipe) -> bool:
    """Whether one scale serves all rows."""
    return recipe.format.has_global_scale or block_of(recipe.block_shape) == "tensor"


def _expect_static(op: str, recipe: Recipe | None, **scales: Tensor | None) -> None:
    """A dynamic scale of all rows makes each depend on the others."""
    if recipe is not None and _is_of_all(recipe) and current().batch_invariant:
        name = recipe.format.name
        wanted = f"given with batch_invariant: a dynamic scale of {name} is of all rows"
        for arg, scale in scales.items():
            expect(scale is not None, op, arg, wanted, None)


def _kind(weight: QuantizedTensor, inputs: Recipe | None) -> str:
    """Of multiplication, as the tile tables call it."""
    in_blocks = 128 in weight.block_shape
    if inputs is not None and inputs.format.scale is FLOAT32:
        return "fp8 blocks" if in_blocks else "fp8"
    if inputs is not None and multiplies_block_scaled(weight.device):
        return "block-scaled"
    if FORMATS[weight.format].is_packed:
        return "decoded pairs"
    return "decoded blocks" if in_blocks else "decoded"


def _specialized(kind: str, x: Tensor, *weights: QuantizedTensor) -> str:
    """`kind` with specialised warps, if such inputs and weights suit them."""
    suits = x.dtype == torch.bfloat16 and all(is_one_matrix(w.data) for w in weights)
    return f"{kind}, specialized" if suits and specializes_warps(x.device) else kind


def weight_scales(weight: QuantizedTensor) -> Scales:
    """Of the weights alone, as a kernel takes them."""
    return _scales(weight, Inputs(weight.data))


def _scales(
    weight: QuantizedTensor, a: Inputs, out: Tensor | None = None, out_blocks: Tensor | None = None
) -> Scales:
    rows, columns = weight.block_shape
    if weight.block_shape == (None, None) and weight.scale.ndim == 2:  # one for each half
        rows = weight.shape[1] // 2
    return Scales(
        weight.scale,
        rows or 0,
        columns or 0,
        weight.global_scale,
        a.scale,
        FORMATS[weight.format].is_packed,
        a.blocks,
        a.blocks is not None and a.data.dtype == torch.uint8,
        None if out is None else out.float(),
        out_blocks,
    )
