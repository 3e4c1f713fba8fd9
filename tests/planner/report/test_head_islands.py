"""What `echelon plan` says of islands that may be lost."""

from __future__ import annotations

from echelon.core.units import decimal_bytes
from echelon.cost.bytes.local_sgd import rejoin_bytes
from echelon.planner.report.head import island_facts
from tests.proof.layouts import layout
from tests.proof.run.local_sgd import NESTEROV, with_islands


def test_a_plan_says_with_how_few_islands_it_goes_on_and_what_that_takes() -> None:
    plan = with_islands(layout(tp=2), 3, min_islands=2, **NESTEROV)
    ((_, line),) = island_facts(plan)
    assert "goes on with 2 of 3 islands, each is started again up to 1 time" in line
    assert f"{decimal_bytes(rejoin_bytes(plan, 0))} to one that comes back" in line
    ((_, line),) = island_facts(with_islands(layout(), 3, min_islands=2, restarts=0))
    assert line.endswith("none is started again; rank 0 sends 0 B where one is missing") or (
        "none is started again" in line and "comes back" not in line
    )


def test_nothing_is_said_where_the_first_loss_ends_the_run() -> None:
    assert not list(island_facts(with_islands(layout(), 3)))
    assert not list(island_facts(layout()))
