"""Layers over several devices, with `torch.distributed`: where experts are, and who sends what."""

from .placement import Placement

__all__ = ["Placement"]
