"""Names of parameters that belong together."""

from __future__ import annotations

import re


def family_of(name: str) -> str:
    """Return the name of a parameter without its block."""
    return re.sub(r"^layers\.\d+\.", "layers.*.", name)
