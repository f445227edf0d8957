"""Other libraries' models on tmoe's operations; none of them is imported before it is asked for."""

from . import transformers

__all__ = ["transformers"]
