"""The memory of weights that leave and come in: slice, largest tensor, and little beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.training.weights.memory.paths import ALLOWED_BYTES, SLICES, WAYS, ZERO

ROOT = Path(__file__).parents[4]
SMALL_BYTES = 12_000_000
"""What one thread takes beside slice and largest tensor: buffers, lists of places, code."""


def measured(home: Path, size: str, threads: int, ways: Sequence[str]) -> dict[str, int]:
    """Return by how many bytes each way is over, measured in a process that has done nothing."""
    options = ["--sizes", size, "--threads", str(threads), "--home", str(home), "--ways", *ways]
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.weights.memory", "--json", *options],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src:.", "OMP_NUM_THREADS": "1"},
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        # What was measured is not nothing: a tensor at least was held, or the slice of a rank.
        assert line["taken"]["resident"] > min(line["largest"], line["held"] or line["largest"]) / 2
    return {line["way"]: line["over"] for line in lines}


@pytest.mark.slow
def test_a_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    over = measured(tmp_path, "small", 1, ["dcp"])
    assert set(over) == {"to dcp", *(f"from dcp, {name}" for name in SLICES)}
    assert max(over.values()) <= SMALL_BYTES, over


@pytest.mark.slow
@pytest.mark.parametrize("size", ["small", "small-wide"])
def test_a_tensor_is_held_at_a_time_on_each_way(size: str, tmp_path: Path) -> None:
    over = measured(tmp_path, size, 1, WAYS)
    assert len(over) == len(WAYS) * (1 + len(SLICES)) - len(ZERO)
    assert max(over.values()) <= SMALL_BYTES, over


@pytest.mark.slow
def test_more_threads_hold_no_more_than_is_allowed(tmp_path: Path) -> None:
    over = measured(tmp_path, "small-wide", 8, WAYS)
    assert max(over.values()) <= ALLOWED_BYTES, over
