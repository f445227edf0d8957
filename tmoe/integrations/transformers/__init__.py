"""Hugging Face transformers, 5.17 to 5.24: experts and routers of its MoE models on tmoe.

`register` adds ``"tmoe"`` to the names that ``experts_implementation`` takes; `replace_moe`
switches a loaded model over, in place, and says what it did. transformers is imported by those
calls, not before.
"""

from .load_model import from_pretrained
from .record_inputs import record_input_ranges
from .register import register
from .replace import replace_moe
from .report import Report

__all__ = ["Report", "from_pretrained", "record_input_ranges", "register", "replace_moe"]
