"""The GPUs that every kernel is compiled for: what each allows, and its matmul instruction."""

from __future__ import annotations

from dataclasses import dataclass

from triton.backends.compiler import GPUTarget


@dataclass(frozen=True)
class Target:
    name: str
    shared: int  # bytes one program may hold: CUDA's opt-in limit per block (HW01), AMD's LDS
    matmul: str  # the tensor-core instruction of a full tile

    @property
    def gpu_target(self) -> GPUTarget:
        if self.name.startswith("gfx"):
            return GPUTarget("hip", self.name, 64)
        return GPUTarget("cuda", int(self.name.removeprefix("sm_")), 32)

    @property
    def capability(self) -> tuple[int, int]:
        return divmod(int(self.name.removeprefix("sm_")), 10)

    def matmul_of(self, block_m: int) -> tuple[str, ...]:
        """What may multiply a tile of so many rows. Below 64 it is a warp by itself, or, from
        Triton 3.9 on, its weights are the 64 rows of the larger instruction."""
        return (self.matmul,) if block_m >= 64 else ("mma.sync", self.matmul)


TARGETS = {
    target.name: target
    for target in (
        # It has 166,912; sm_86 and sm_89, which run the same kernels, haven't.
        Target("sm_80", shared=101_376, matmul="mma.sync"),
        Target("sm_89", shared=101_376, matmul="mma.sync"),
        Target("sm_90", shared=232_448, matmul="wgmma"),
        Target("sm_100", shared=232_448, matmul="tcgen05.mma"),
        Target("sm_103", shared=232_448, matmul="tcgen05.mma"),
        Target("sm_120", shared=101_376, matmul="mma.sync"),
        Target("gfx942", shared=65_536, matmul="v_mfma"),
        Target("gfx950", shared=163_840, matmul="v_mfma"),
    )
}

# What is special about sm_89 is that it multiplies e4m3, without TMA.
WITH_E4M3 = ("sm_89",)
EVERY_GPU = tuple(name for name in TARGETS if name not in WITH_E4M3)
WITHOUT_TMA = ("sm_80",)
# Without those whose tables and code paths others have, with as much shared memory or less: sm_80
# has sm_120's table and instructions, and reads weights by pointers as gfx942 does.
EVERY_KIND = ("sm_90", "sm_100", "sm_120", "gfx942")
EVERY_TOOLCHAIN = ("sm_90", "gfx942")
MEASURED = ("sm_90",)
