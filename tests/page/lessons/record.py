"""Record what lessons show of real ranks: ``python -m tests.page.lessons.record [NAME ...]``.

A recording is a function that runs on a pool of ranks and returns plain values. It is kept as JSON
beside the lessons, and a test records again and finds the same.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echelon.launch.local.supervisor import RankPool
from echelon.page.lessons import traces
from tests.page.lessons.recordings.collectives import record_collectives
from tests.page.lessons.recordings.data_parallel import record_data_parallel
from tests.page.lessons.recordings.experts import record_travel
from tests.page.lessons.recordings.ring import record_ring

RECORDINGS: Mapping[str, Callable[[RankPool], dict[str, Any]]] = {
    "collectives": record_collectives,
    "data_parallel": record_data_parallel,
    "experts": record_travel,
    "ring": record_ring,
}
FOLDER = Path(traces.__file__).parent


def write(names: list[str]) -> None:
    """Record those named, or all, and keep them where the lessons read them."""
    with RankPool(4) as pool:
        for name in names or list(RECORDINGS):
            text = json.dumps(RECORDINGS[name](pool), separators=(",", ":"), sort_keys=True)
            (FOLDER / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")
            print(f"{name}: {len(text):,} bytes")


if __name__ == "__main__":
    write(sys.argv[1:])
