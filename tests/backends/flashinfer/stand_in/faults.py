"""What versions of FlashInfer get wrong, by name, and faults for tests that no version has.

From FlashInfer's issues and pull requests and its source; none was seen on a GPU by us.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version


@dataclass(frozen=True, slots=True)
class Fault:
    what: str
    since: str | None = None  # the first version that has it; None: none has
    mended: str = "0.8"  # the first one that hasn't


FAULTS = {
    "llama4_weight_twice": Fault(
        "the output is weighted although the input was", since="0.5.3", mended="0.6.16"
    ),
    "per_tensor_raises": Fault(
        "the per-tensor entry point raises on every call", since="0.6.8", mended="0.6.8.post1"
    ),
    "missing_tier": Fault(
        "more experts, or more per token, than were compiled for: NaN", since="0", mended="0.6.16"
    ),
    "deepseek_ungrouped_no_epsilon": Fault(
        "DeepSeekV3 without groups divides 0 by 0", since="0", mended="0.6.15"
    ),
    "deepseek_grouped_no_epsilon": Fault(
        "DeepSeekV3 with groups divides 0 by 0", since="0", mended="0.6.17"
    ),
    "deepseek_bias_cancels": Fault(
        "DeepSeekV3 without groups weighs by (sigmoid + bias) - bias: 0 beside a large bias",
        since="0", mended="0.6.18",
    ),
    "minimax_ignores_factor": Fault(
        "MiniMax2 ignores routed_scaling_factor", since="0", mended="0.6.13"
    ),
    "bf16_illegal_address": Fault(
        "the bf16 entry points read an illegal address", since="0", mended="0.6.18"
    ),
    "output_rows_unwritten": Fault(
        "cutlass with enable_alltoall and ep_size > 1 leaves tokens without local experts alone",
        since="0",
    ),
    "near_zero_scales_nan": Fault(
        "FP8 block scales below 1e-10 make cutlass's answer NaN", since="0"
    ),
    # A caller's mistake. Without the fault it is `Misuse`, with it what really happens.
    "scales_ignored": Fault("cutlass ignores scales unless use_deepseek_fp8_block_scale is set"),
    # For tests of whoever has to notice.
    "gate_up_swapped": Fault("the halves of the first projection change places"),
    "shuffle_ignored": Fault("rows are read as if they weren't shuffled"),
    "weight_twice": Fault("every answer is weighted twice"),
    "limit_in_raw_units": Fault(
        "limit and beta meet products before their scale where they should meet them after, and "
        "the other way round"
    ),
    "nan_answer": Fault("every answer is NaN"),
    "raises": Fault("every entry point raises RuntimeError"),
    "import_error": Fault("importing flashinfer raises RuntimeError, as for cubins of another one"),
}  # fmt: skip


def faults_of(version: str) -> frozenset[str]:
    """Names of the faults that this version has."""
    v = Version(version)
    return frozenset(
        name
        for name, fault in FAULTS.items()
        if fault.since is not None and Version(fault.since) <= v < Version(fault.mended)
    )


def checked(faults: Iterable[str]) -> frozenset[str]:
    """Raises ``ValueError`` for a name that isn't one of `FAULTS`."""
    names = frozenset(faults)
    if unknown := names - FAULTS.keys():
        raise ValueError(f"faults must be of {', '.join(FAULTS)}, got {', '.join(unknown)}")
    return names
