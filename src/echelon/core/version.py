# SPDX-License-Identifier: Apache-2.0
"""The version of Echelon, and a hash of its source: what a result must say that it came from."""

from __future__ import annotations

import hashlib
from pathlib import Path

__version__ = "0.1.0"
DISTRIBUTION = "echelon-parallel"
"""The name in the package index; the package and the command are `echelon`."""


def source_hash() -> str:
    """Return a hash over the source files of the installed package, in hex."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
