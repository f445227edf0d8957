"""Put ``"tmoe"`` on transformers' registries of experts implementations."""

from __future__ import annotations

from types import ModuleType

NAME = "tmoe"


def register() -> None:
    """Make ``experts_implementation="tmoe"`` a valid choice in transformers; twice is fine.

    After it, ``from_pretrained(..., experts_implementation="tmoe")``, ``from_config`` and
    ``model.set_experts_implementation("tmoe")`` work. transformers accepts the name silently for
    models whose experts don't use its interface; `tmoe.replace_moe` handles those and reports what
    it did.

    Raises:
        ImportError: transformers is missing, or older than 5.0 (which has no experts interface).
    """
    moe = import_experts_interface()
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

    from .experts import experts_forward
    from .fp8_experts import fp8_experts_forward

    moe.ExpertsInterface.register(NAME, experts_forward)
    FP8ExpertsInterface.register(NAME, fp8_experts_forward)


def import_experts_interface() -> ModuleType:
    """``transformers.integrations.moe``, or an ImportError that says what to install."""
    try:
        from transformers.integrations import moe
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "transformers":
            raise  # transformers is there and misses something: its own message is better
        raise ImportError(
            "tmoe.integrations.transformers needs transformers >= 5.17 (its experts interface): "
            'pip install "tmoe[transformers]"'
        ) from error
    return moe
