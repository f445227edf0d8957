"""Who goes first where, as data: the filter says what is possible, this what is preferred."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Machine


@dataclass(frozen=True, slots=True)
class Row:
    """The order of backends on one kind of device, and the reason for each place."""

    device_type: str
    order: tuple[tuple[str, str], ...]  # (backend, reason), best first
    capabilities: tuple[tuple[int, int], ...] = ()  # none: all

    def fits(self, machine: Machine) -> bool:
        """Whether it is about that device."""
        of_capability = not self.capabilities or machine.capability in self.capabilities
        return self.device_type == machine.device_type and of_capability


TRITON = (
    "triton",
    "no separate gather, activation or scatter passes, no host sync; 2.02 times as fast as "
    "grouped_mm on an H200 in bf16 (bench/results/h200_beside.json)",
)
TORCH = ("torch", "plain torch, differentiable; several passes over the rows")
RANKING = (
    Row(
        "cuda",
        (
            ("flashinfer_trtllm", "kernels made for this GPU; not measured by us: tmoe.autotune"),
            ("flashinfer_cutlass", "where trtllm-gen has no kernel; not measured by us"),
            TRITON,
            # Not measured by us, and the first call would compile it: minutes, unasked.
            ("flashinfer", "only where it measures faster: tmoe.autotune"),
            TORCH,
        ),
        ((10, 0), (10, 3)),
    ),
    Row(
        "cuda",
        (TRITON, ("flashinfer_cutlass", "only where it measures faster: tmoe.autotune"), TORCH),
    ),
    Row(
        "cpu",
        (
            ("torch", "plain torch on the CPU's own matmul"),
            ("triton", "Triton's CPU interpreter: for learning and tests, 1-3 ms per program"),
        ),
    ),
)
ELSEWHERE = Row(
    "",
    (
        ("torch", "plain torch runs on any device that torch runs on"),
        ("triton", "not measured on this kind of device"),
    ),
)


def ranking(machine: Machine) -> dict[str, str]:
    """Backend name -> reason for its place, best first, on `machine`."""
    row = next((row for row in RANKING if row.fits(machine)), ELSEWHERE)
    return dict(row.order)
