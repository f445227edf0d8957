"""lm-evaluation-harness on a model with its experts on tmoe.

``python -m tmoe.integrations.lm_eval`` takes what ``lm_eval`` takes, in a process that knows tmoe,
so both of these work:

    --model hf --model_args pretrained=MODEL,experts_implementation=tmoe
    --model tmoe --model_args pretrained=MODEL[,scheme=nvfp4]

The second one is ``hf`` with `tmoe.replace_moe`: it also covers the families that are not on
transformers' experts interface, quantises the experts if a scheme is given, and prints the report.
"""

from __future__ import annotations

import sys
from typing import Any


def register_lm_eval() -> None:
    """Make the experts implementation and the model type ``"tmoe"`` known to lm_eval; once.

    Raises:
        ImportError: lm_eval is missing, or transformers.
    """
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    from .transformers import register, replace_moe

    register()

    @register_model("tmoe")
    class TmoeLM(HFLM):
        """`HFLM` with its model's experts on tmoe."""

        def _create_model(self, *args: Any, scheme: str | None = None, **kwargs: Any) -> None:
            super()._create_model(*args, **kwargs)
            report = replace_moe(self._model, scheme)
            print(report, file=sys.stderr)
            if not report.replaced:
                raise ValueError("lm_eval: --model tmoe needs a model with MoE modules; use hf")


def main() -> None:
    """lm_eval's own command line."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "lm_eval":
            raise
        print('tmoe.integrations.lm_eval needs lm_eval: pip install "lm_eval[hf]"', file=sys.stderr)
        raise SystemExit(2) from error
    register_lm_eval()
    cli_evaluate()


if __name__ == "__main__":
    main()
