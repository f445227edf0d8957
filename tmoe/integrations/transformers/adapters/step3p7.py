"""Step-3.7: laid out like the interface's experts, and not on it."""

from __future__ import annotations

from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from ..experts import experts_forward


class TmoeStep3p7Experts(Step3p7Experts):
    """min(silu(gate), limit) · clamp(up, ±limit), the limit of its layer."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    forward = experts_forward
