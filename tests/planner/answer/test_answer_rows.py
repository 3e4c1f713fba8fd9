"""Rows have the same columns whatever the answer, each documented, with a unit in its name."""

from __future__ import annotations

from math import isnan
from pathlib import Path

import pytest

from echelon.planner.answer.answer import PlanAnswer, RowValue, plan_row
from echelon.planner.recommend.recommend import Recommendation, recommend
from echelon.planner.search.request import SearchAim, make_request

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guides" / "plan.md"
NAMES = frozenset(
    {
        *("preferred_for", "plan", "context", "optimizer_offload", "schedule", "timed"),
        *("recompute_operators", "gather", "reduce"),
    }
)


def rows_of(
    model: str, cluster: str, *pins: str, price: float | None = None
) -> list[dict[str, RowValue]]:
    """Return the rows of an answer."""
    request = make_request(model, cluster=cluster, pins=pins, aim=SearchAim(price=price))
    found = recommend(request)
    assert isinstance(found, Recommendation)
    return [plan_row(one) for one in PlanAnswer(found=found).plans]


@pytest.fixture(scope="module", name="rows")
def _rows() -> list[dict[str, RowValue]]:
    return rows_of("nano", "8xh100", "devices=8", "pp=2")


@pytest.mark.slow
def test_columns_are_the_same_for_every_answer(rows: list[dict[str, RowValue]]) -> None:
    columns = [*rows[0]]
    assert len({*columns}) == len(columns)
    others = rows_of("mixtral-8x7b", "16xh100", "tp=1", "cp=1", "pp=2", price=2.5)
    for row in (*rows, *others):
        assert [*row] == columns
        assert {name for name, value in row.items() if isinstance(value, str)} == NAMES
    assert all(isinstance(row["price_of_a_million_tokens"], float) for row in (*rows, *others))
    assert all(isnan(float(row["price_of_a_million_tokens"])) for row in rows)


def test_terms_add_up_to_their_totals(rows: list[dict[str, RowValue]]) -> None:
    for row in rows:
        names = [*row]
        terms = names[names.index("fit_probability") + 1 :]
        seconds = sum(float(row[name]) for name in terms if name.endswith("_s"))
        held = sum(float(row[name]) for name in terms if name.endswith("_bytes"))
        assert seconds == pytest.approx(row["step_s"])
        assert held == pytest.approx(row["held_bytes"])
        assert all(name.endswith(("_s", "_bytes")) for name in terms)
        assert row["pp"] == 2
        assert row["devices"] == 8
        assert 0.0 <= float(row["fit_probability"]) <= 1.0


def test_the_guide_names_every_column(rows: list[dict[str, RowValue]]) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    names = [*rows[0]]
    own = names[: names.index("fit_probability") + 1]
    banded = {name for name in own if f"{name}_low" in own}
    ends = {f"{name}_{end}" for name in banded for end in ("low", "high")}
    assert [name for name in own if name not in ends and f"`{name}`" not in text] == []
