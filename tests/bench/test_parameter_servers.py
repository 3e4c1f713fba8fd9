"""The table of synchronous and asynchronous servers: what each cell is made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.parameter_servers import BEGIN, END, KINDS, RankOutcome, table_text, with_table
from bench.parameter_servers import run_rank as target
from echelon.launch.local.messages import find_target, name_target

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "replicas" / "parameter-servers.md"


def ranks(seconds: float, losses: list[float], staleness: list[int]) -> list[RankOutcome]:
    """Return two workers and two servers of a run of eight steps."""
    worker = RankOutcome(seconds=seconds, losses=losses, sent=800, staleness=[])
    server = RankOutcome(seconds=0.0, losses=[], sent=0, staleness=staleness)
    return [worker, worker, server, server]


def test_each_cell_is_measured_or_derived() -> None:
    """S06, S07, A16: medians of seconds, recorded staleness, formulas of bytes."""
    losses = [4.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0]
    found = {
        name: [ranks(2.0, losses, [0, 2] if updates.applies_each else [0, 0])]
        for name, updates in KINDS.items()
    }

    rows = [line.split(" | ") for line in table_text(found, steps=8, pause_s=0.06).splitlines()]

    cells = {row[0].removeprefix("| "): [one.strip(" |") for one in row[1:]] for row in rows[2:]}
    assert cells["seconds of the run (measured, median)"] == ["2.00"] * 4
    assert cells["mean staleness (recorded)"] == ["0.00", "0.00", "1.00", "1.00"]
    bound = "largest staleness (recorded) of what the bound allows (derived)"
    assert cells[bound] == ["0 of 0", "0 of 0", "2 of 5", "2 of 5"]
    assert cells["bits of the synchronous losses (compared)"] == ["yes"] * 4
    assert cells["bytes a worker sends in a step (counted)"] == ["100"] * 4


@pytest.mark.system("S50")
def test_the_page_has_the_table_of_the_script() -> None:
    """S06, A16: its columns, and every row."""
    page = PAGE.read_text(encoding="utf-8")
    shown = page.split(BEGIN)[1].split(END)[0].strip()
    head, _, *rows = shown.splitlines()
    assert all(f" {name} |" in head for name in KINDS)
    made = table_text(
        {name: [ranks(1.0, [1.0] * 8, [0])] for name in KINDS}, steps=8, pause_s=0.06
    ).splitlines()
    assert [row.split(" | ")[0] for row in rows] == [row.split(" | ")[0] for row in made[2:]]
    assert with_table(page, shown) == page


def test_ranks_find_what_they_run() -> None:
    """S06: by a name that does not depend on how the script was started."""
    assert find_target(name_target(f"bench.parameter_servers:{target.__name__}")) is target
