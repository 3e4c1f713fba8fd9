"""With how many workers a run goes on, as it stands in a run file and in a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.load import load_job
from tests.config.problems import SMALL, write

SETS = [
    "mesh.dp_replicate=3",
    "batch.global_sequences=12",
    "servers.count=1",
    "servers.updates=asynchronous",
    'train.validate_every="never"',
]


@pytest.mark.parametrize(("said", "least"), [('"all"', "all"), ("3", "all"), ("2", 2), ("1", 1)])
def test_as_many_workers_as_there_are_is_all_of_them(
    tmp_path: Path, said: str, least: object
) -> None:
    """S07: so a run that needs all is one plan, however it says so."""
    job = load_job(write(tmp_path, SMALL), [*SETS, f"servers.min_workers={said}"])
    updates = job.plan.mathematics.updates
    assert (updates.min_workers, updates.is_elastic) == (least, least != "all")
