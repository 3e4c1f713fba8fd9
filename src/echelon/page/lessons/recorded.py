"""What ranks recorded for the lessons: files of `traces/`, read once.

They are made by ``python -m tests.page.lessons.record``, and a test records them again.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "traces"


def trace_path(name: str) -> Path:
    """Return where a recording is kept."""
    return _FOLDER / f"{name}.json"


@cache
def read_trace(name: str) -> dict[str, Any]:
    """Return a recording; callers must not change it."""
    return json.loads(trace_path(name).read_text(encoding="utf-8"))
