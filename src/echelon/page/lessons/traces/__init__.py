# SPDX-License-Identifier: Apache-2.0
"""What ranks recorded, for lessons that show it: JSON files, read by name.

`tests/page/lessons/record.py` writes them with real ranks, and a test records them again.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.resources import files
from typing import Any


@lru_cache(maxsize=16)
def read_trace(name: str) -> dict[str, Any]:
    """Return a recording; FileNotFoundError for a name that nobody recorded."""
    folder = files(__package__ or "echelon.page.lessons.traces")
    return json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
