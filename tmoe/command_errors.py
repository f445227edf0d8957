"""What a command says of an error."""

from __future__ import annotations

import re


def said_by(command: str, error: Exception) -> str:
    """ "op: arg must be ..." with the command in place of a Python function that its user never
    called; any other sentence as it is."""
    return re.sub(r"^\w+(\.of)?: (?=.+ (must|can't) )", f"{command}: ", str(error))
