"""Record what ranks do, for the lessons: ``python -m tests.page.lessons.record NAME``.

A recording is made by real ranks over Gloo and kept in `src/echelon/page/lessons/traces/`; a test
beside its lesson records again, and finds the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from echelon.launch.local.pool import RankPool
from echelon.page.lessons.recorded import trace_path
from tests.page.lessons.context.ring_trace import record_ring
from tests.page.lessons.experts.travel_trace import record_travel

RECORDINGS: Mapping[str, Callable[[RankPool], dict[str, Any]]] = {
    "ring": record_ring,
    "experts": record_travel,
}
"""What makes each recording on a pool of ranks, by the name of its file."""


def main(names: list[str]) -> None:
    """Record what is named, or everything."""
    with RankPool(4) as pool:
        for name in names or RECORDINGS:
            found = RECORDINGS[name](pool)
            text = json.dumps(found, separators=(",", ":"))
            trace_path(name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
