"""Sort: put the S = T·K (token, slot) rows in expert order, and cut them into tiles.

Slot s = t·K + k is the k-th expert of token t.

    expert_offsets[e] = number of slots whose expert is < e: e owns rows [offsets[e], offsets[e+1])
    slot_to_row[s]    = expert_offsets[e_s] + number of slots s' < s of the same expert
    row_to_slot       = its inverse

The sort is stable: rows of one expert stand in token order, and every run gives the same order.
Slots whose id lies outside [first_expert, first_expert + E) have no row: slot_to_row = -1.
Each expert's rows are cut into tiles of BLOCK_M rows for the grouped GEMM. A tile is three numbers,
so that a program has all it needs after one load: expert, first row, row behind the last.

Up to RECOUNT_SLOTS slots this is one launch: each program counts all slots itself, places its own
block of slots and writes its share of the tiles. Beyond, two launches count first: block by block,
then summed up over the blocks.

A single token's slots need no sort (`OneToken`): with small experts that launch is a tenth of a
layer's time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tmoe.kernels.launch import cdiv, launch, next_power_of_2, pdl_options

RECOUNT_SLOTS = 1024  # beyond, programs that each count everything would do quadratic work


@dataclass(frozen=True, slots=True)
class SortedTokens:
    """The expert order of the rows, computed once and handed on. All int32."""

    expert_offsets: Tensor  # (E+1,)  exclusive; rows from expert_offsets[E] on do not exist
    row_to_slot: Tensor  # (S,)    only the first expert_offsets[E] entries are written
    slot_to_row: Tensor  # (T, K)  -1 = the expert is not local
    tiles: Tensor  # (max_tiles, 3)  expert, first row, end row; the first num_tiles are written
    num_tiles: Tensor  # (1,)
    taken: Tensor  # (1,)  0: where a GEMM's programs count the tiles that they take
    block_m: int  # rows per tile
    top_k: int  # K

    @property
    def most_tiles(self) -> int:
        return len(self.tiles)

    @property
    def arguments(self) -> tuple:
        """What a grouped GEMM's kernel takes: row_to_slot to top_k."""
        return (self.row_to_slot, self.tiles, self.num_tiles, None, self.most_tiles, self.top_k)


@dataclass(frozen=True, slots=True)
class OneToken:
    """The rows of a single token as they are: row k is slot k, and a tile by itself.

    Kernels read a row's expert from topk_ids. A slot whose expert is not local has a row that is
    neither written nor read.
    """

    topk_ids: Tensor  # (1, K), any integer dtype and strides
    first_expert: int
    num_experts: int  # E

    @property
    def most_tiles(self) -> int:
        return self.topk_ids.shape[1]

    @property
    def arguments(self) -> tuple:
        """What a grouped GEMM's kernel takes: row_to_slot to top_k."""
        return (None, None, None, self.token, self.most_tiles, self.topk_ids.shape[1])

    @property
    def token(self) -> tuple[Tensor, int, int, int]:
        """What `token_expert` takes."""
        return self.topk_ids, self.topk_ids.stride(1), self.first_expert, self.num_experts

    @property
    def slot_to_row(self) -> OneToken:
        """What `combine` takes instead of an array."""
        return self


def max_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """The most tiles that so many rows and experts can give: a grid size known without a sync."""
    return (num_rows + min(num_rows, num_experts) * (block_m - 1)) // block_m


@triton.jit
def _local_expert(ids, inside, first_expert, num_experts):
    local = inside & (ids >= first_expert) & (ids < first_expert + num_experts)
    return tl.where(local, ids - first_expert, num_experts).to(tl.int32)


@triton.jit
def _load_experts(topk_ids, slots):
    """Local expert of each slot; `num_experts` where there is none."""
    topk_ids_ptr, stride_t, stride_k, num_slots, top_k, first_expert, num_experts = topk_ids
    inside = slots < num_slots
    offsets = (slots // top_k).to(tl.int64) * stride_t + (slots % top_k) * stride_k
    ids = tl.load(topk_ids_ptr + offsets, mask=inside, other=-1)
    return _local_expert(ids, inside, first_expert, num_experts)


@triton.jit
def token_expert(token, slot):
    """(local expert of a slot of the only token, whether there is one)"""
    topk_ids_ptr, stride_k, first_expert, num_experts = token
    expert = _local_expert(tl.load(topk_ids_ptr + slot * stride_k), True, first_expert, num_experts)
    return expert, expert < num_experts


@triton.jit(do_not_specialize=["num_slots", "top_k", "first_expert", "num_experts"])
def _count_kernel(
    block_counts_ptr,  # (num_blocks, E) int32  written
    topk_ids_ptr,  # (T, K)
    stride_t, stride_k, num_slots, top_k, first_expert, num_experts,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (num_blocks,). How many slots of one block each expert gets."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    topk_ids = (topk_ids_ptr, stride_t, stride_k, num_slots, top_k, first_expert, num_experts)
    block = tl.program_id(0)
    chosen = _load_experts(topk_ids, block * BLOCK_S + tl.arange(0, BLOCK_S))
    counts = tl.histogram(chosen, BLOCK_E, mask=chosen < num_experts)
    experts = tl.arange(0, BLOCK_E)
    ptrs = block_counts_ptr + block * num_experts + experts
    tl.store(ptrs, counts, mask=experts < num_experts)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["num_blocks", "num_experts"])
def _scan_kernel(
    block_counts_ptr,  # (num_blocks, E) int32  in: of each block; out: of the blocks before it
    expert_counts_ptr,  # (E,) int32  written: of all blocks
    num_blocks, num_experts,
    CHUNK: tl.constexpr, BLOCK_E: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (cdiv(E, BLOCK_E),). Sum up each expert's counts from block to block."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, num_blocks, CHUNK):
        blocks = first + tl.arange(0, CHUNK)
        ptrs = block_counts_ptr + blocks[:, None] * num_experts + experts[None, :]
        mask = (blocks < num_blocks)[:, None] & (experts < num_experts)[None, :]
        counts = tl.load(ptrs, mask=mask, other=0)
        tl.store(ptrs, before[None, :] + tl.cumsum(counts, 0) - counts, mask=mask)
        before += tl.sum(counts, 0)
    tl.store(expert_counts_ptr + experts, before, mask=experts < num_experts)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _write_tiles(
    tiles_ptr, num_tiles_ptr, experts, first_rows, counts, part, num_parts, BLOCK_M: tl.constexpr
):
    """Tile j of every expert, for j = part, part + num_parts, …"""
    num_tiles = (counts + BLOCK_M - 1) // BLOCK_M
    first_tile = tl.cumsum(num_tiles, 0) - num_tiles
    for j in range(part, tl.max(num_tiles, 0), num_parts):
        ptrs = tiles_ptr + 3 * (first_tile + j)
        has_tile = j < num_tiles
        start = j * BLOCK_M
        tl.store(ptrs, experts, mask=has_tile)
        tl.store(ptrs + 1, first_rows + start, mask=has_tile)
        tl.store(ptrs + 2, first_rows + tl.minimum(start + BLOCK_M, counts), mask=has_tile)
    if part == 0:
        tl.store(num_tiles_ptr, tl.sum(num_tiles, 0))


@triton.jit(do_not_specialize=["num_slots", "top_k", "first_expert", "num_experts"])
def _sort_kernel(
    expert_offsets_ptr,  # (E+1,)  written
    row_to_slot_ptr,  # (S,)  written
    slot_to_row_ptr,  # (S,)  written
    tiles_ptr,  # (max_tiles, 3)  written
    num_tiles_ptr,  # (1,)  written
    taken_ptr,  # (1,)  written: 0
    counts_before_ptr,  # (num_blocks, E), read if not RECOUNT
    expert_counts_ptr,  # (E,), read if not RECOUNT
    topk_ids_ptr,  # (T, K)
    stride_t, stride_k, num_slots, top_k, first_expert, num_experts,
    RECOUNT: tl.constexpr, ALL_SLOTS: tl.constexpr,  # if RECOUNT: S, rounded up to a power of two
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (num_blocks,). Program b places the slots of block b."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        if RECOUNT:
            tl.extra.cuda.gdc_launch_dependents()
    topk_ids = (topk_ids_ptr, stride_t, stride_k, num_slots, top_k, first_expert, num_experts)
    block = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts

    # How many slots each expert gets: in all, and in the blocks before this one.
    if RECOUNT:
        slots = tl.arange(0, ALL_SLOTS)
        chosen = _load_experts(topk_ids, slots)
        is_local = chosen < num_experts
        counts = tl.histogram(chosen, BLOCK_E, mask=is_local)
        counts_before = tl.histogram(chosen, BLOCK_E, mask=is_local & (slots < block * BLOCK_S))
    else:
        counts = tl.load(expert_counts_ptr + experts, mask=is_expert, other=0)
        ptrs = counts_before_ptr + block * num_experts + experts
        counts_before = tl.load(ptrs, mask=is_expert, other=0)
    first_rows = tl.cumsum(counts, 0) - counts

    # A slot's row: its expert's first row still free, plus its rank among equals in the block.
    index = tl.arange(0, BLOCK_S)
    slots = block * BLOCK_S + index
    chosen = _load_experts(topk_ids, slots)
    is_local = chosen < num_experts
    earlier_equal = (chosen[None, :] == chosen[:, None]) & (index[None, :] < index[:, None])
    rank = tl.sum(earlier_equal.to(tl.int32), 1)
    row = tl.gather(first_rows + counts_before, tl.where(is_local, chosen, 0), 0) + rank
    tl.store(slot_to_row_ptr + slots, tl.where(is_local, row, -1), mask=slots < num_slots)
    tl.store(row_to_slot_ptr + row, slots, mask=is_local)

    if block == 0:
        tl.store(expert_offsets_ptr + experts, first_rows, mask=is_expert)
        tl.store(expert_offsets_ptr + num_experts, tl.sum(counts, 0))
        tl.store(taken_ptr, 0)
    _write_tiles(
        tiles_ptr, num_tiles_ptr, experts, first_rows, counts, block, tl.num_programs(0), BLOCK_M
    )
    if USE_PDL and not RECOUNT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["num_experts"])
def _tiles_kernel(
    tiles_ptr,  # (max_tiles, 3)  written
    num_tiles_ptr,  # (1,)  written
    taken_ptr,  # (1,)  written: 0
    expert_offsets_ptr,  # (E+1,)
    num_experts,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (P,). The tiles of rows that are sorted already; the programs share them."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    first_rows = tl.load(expert_offsets_ptr + experts, mask=is_expert, other=0)
    counts = tl.load(expert_offsets_ptr + experts + 1, mask=is_expert, other=0) - first_rows
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    if part == 0:
        tl.store(taken_ptr, 0)
    _write_tiles(tiles_ptr, num_tiles_ptr, experts, first_rows, counts, part, num_parts, BLOCK_M)


def _int32_arrays(device: torch.device, *sizes: int) -> list[Tensor]:
    """Arrays cut from one allocation, each on 16 bytes, since Triton compiles for the alignment."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + (size + 3) // 4 * 4)
    memory = torch.empty(starts[-1], dtype=torch.int32, device=device)
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


def sort_tokens(
    topk_ids: Tensor, *, num_experts: int, block_m: int, first_expert: int = 0
) -> SortedTokens:
    """Sort the rows of `topk_ids` (T, K), any integer dtype and strides, by local expert.

    `num_experts` counts the local experts, `block_m` is the GEMM's rows per tile. No host sync.
    """
    (T, K), E = topk_ids.shape, num_experts
    S, device = T * K, topk_ids.device
    most = max_tiles(S, E, block_m)
    # A block's ranks come from block_s² comparisons. Measured on an H200 with 128 and 256 experts:
    # blocks of 128 slots by 4 warps take twice the time up to 1024 slots, 1.4 times beyond.
    recount = S <= RECOUNT_SLOTS
    block_s = 32 if recount else 64 if S <= 16384 else 128
    num_warps = 1 if not recount else 4 if S <= 256 else 8
    num_blocks = cdiv(S, block_s)
    counted = (0, 0) if recount else (num_blocks * E, E)
    arrays = _int32_arrays(device, E + 1, S, S, 3 * most, 1, 1, *counted)
    offsets, row_to_slot, slot_to_row, tiles, num_tiles, taken = arrays[:6]
    ids = (topk_ids, *topk_ids.stride(), S, K, first_expert, E)
    blocks = {"BLOCK_S": block_s, "BLOCK_E": max(16, next_power_of_2(E))}
    pdl = pdl_options(device)
    if S == 0:
        offsets.zero_()
        num_tiles.zero_()
        taken.zero_()
    else:
        if not recount:
            block_counts, expert_counts = arrays[6:]
            launch(_count_kernel, (num_blocks,), block_counts, *ids, **blocks, **pdl)
            launch(
                _scan_kernel, (cdiv(E, 16),),
                block_counts, expert_counts, num_blocks, E, CHUNK=128, BLOCK_E=16, **pdl,
            )  # fmt: skip
        all_slots = max(16, next_power_of_2(S)) if recount else 0
        launch(
            _sort_kernel, (num_blocks,),
            *arrays, *ids, RECOUNT=recount, ALL_SLOTS=all_slots, BLOCK_M=block_m,
            num_warps=num_warps, **blocks, **pdl,
        )  # fmt: skip
    tiles, slot_to_row = tiles.view(most, 3), slot_to_row.view(T, K)
    return SortedTokens(offsets, row_to_slot, slot_to_row, tiles, num_tiles, taken, block_m, K)


def tile_rows(expert_offsets: Tensor, num_rows: int, *, block_m: int) -> SortedTokens:
    """Tiles of `num_rows` rows that stand in expert order already: row r is slot r, K is 1."""
    E, device = expert_offsets.numel() - 1, expert_offsets.device
    most = max_tiles(num_rows, E, block_m)
    tiles, num_tiles, taken = _int32_arrays(device, 3 * most, 1, 1)
    launch(
        _tiles_kernel, (16,),
        tiles, num_tiles, taken, expert_offsets, E,
        BLOCK_M=block_m, BLOCK_E=max(16, next_power_of_2(E)), **pdl_options(device),
    )  # fmt: skip
    none = expert_offsets.new_empty(0)
    tiles = tiles.view(most, 3)
    return SortedTokens(expert_offsets, none, none, tiles, num_tiles, taken, block_m, 1)


def sort_ref(
    topk_ids: Tensor, *, num_experts: int, first_expert: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """(expert_offsets, row_to_slot, slot_to_row) in torch; row_to_slot has the local rows only."""
    local = topk_ids.flatten().long() - first_expert
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    order = torch.argsort(local, stable=True)
    counts = torch.bincount(local, minlength=num_experts + 1)[:num_experts]
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row_to_slot = order[: int(offsets[-1])]
    slot_to_row = torch.full_like(local, -1)
    slot_to_row[row_to_slot] = torch.arange(len(row_to_slot), device=local.device)
    return offsets.int(), row_to_slot.int(), slot_to_row.view(topk_ids.shape).int()
