"""How the suite decides that a result is right: as the benchmarks do."""

from tmoe.bench.reference import assert_matches

__all__ = ["assert_matches"]
