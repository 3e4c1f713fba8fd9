"""Rows of the size guide, their corners, the preferences, and the layouts that guides name."""

from __future__ import annotations

import pytest

from echelon.planner.guides.agreement import advise
from echelon.planner.guides.layouts import NAMED
from echelon.planner.guides.preferences import PREFERENCES
from echelon.planner.guides.sizes import SIZES, rows_for
from echelon.planner.guides.strategy import Degrees, Strategy, outcome
from tests.planner.guides.situations import plan_of, situation

LONG = "batch.sequence_length=131072 model.max_positions=131072"


COVERED = [
    ("llama2-7b 1xa100-80gb", ["size-1b-7b"], [False]),
    ("llama2-7b 8xa100-80gb", ["size-1b-7b"], [True]),
    ("llama3-70b 8xh100", ["size-7b-70b"], [False]),
    ("llama3-70b 64xh100", ["size-7b-70b", "size-70b-500b"], [True, True]),
    ("llama3.1-405b 64xh100", ["size-70b-500b"], [False]),
    ("deepseek-v3 2048xh100 recompute.policy=full", ["size-500b-experts"], [True]),
    ("gpt2 8xh100", [], []),
    (f"llama3-8b 64xh100 {LONG}", ["size-7b-70b", "size-long-context"], [False, True]),
]


@pytest.mark.parametrize(("words", "rows", "fits"), COVERED)
def test_rows_cover_what_they_say_and_their_corners_do_not_fit(
    words: str, rows: list[str], fits: list[bool]
) -> None:
    here = situation(words)
    found = rows_for(here)
    assert [row.id for row in found] == rows
    outcomes = [outcome(row.strategy, here) for row in found]
    assert [one is not None and one.fits for one in outcomes] == fits


def test_every_row_is_met_by_some_situation_above() -> None:
    assert {row for _, rows, _ in COVERED for row in rows} == {row.id for row in SIZES}


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ("gpt2 8xh100", {"prefer-tp-link", "prefer-tp-wide", "prefer-pp-deep", "prefer-pp-batch"}),
        (
            "llama3-70b 64xh100",
            {"prefer-pp-nodes", "prefer-pp-memory", "prefer-dp-network", "prefer-dp-batch"},
        ),
        ("llama2-7b 4xcpu", {"prefer-tp-block", "prefer-pp-memory"}),
    ],
)
def test_preferences_answer_with_numbers(words: str, reasons: set[str]) -> None:
    found = {preference.id: answer for preference, answer in advise(situation(words)).preferences}
    assert set(found) == {preference.id for preference in PREFERENCES}
    assert {name for name in reasons if not found[name].yes} == set()
    assert all(
        any(ch.isdigit() for ch in answer.why) or "one" in answer.why for answer in found.values()
    )
    assert not found["prefer-dp-fits"].yes or words.startswith("gpt2")


def test_named_layouts_have_the_states_that_were_checked_by_hand() -> None:
    found = {one.id: one for one in NAMED}
    assert found["llama-70b-64"].states_bytes == 35e9
    assert found["llama-70b-512"].states_bytes == pytest.approx(10.4e9, rel=1e-3)
    assert found["fine-tuning-4"].states_bytes == 28e9
    assert found["deepseek-v3-2048"].mesh.world_size == 2048
    assert all(one.fits and not one.tensor_ranks_cross for one in NAMED)


def test_a_strategy_tells_what_a_plan_does_otherwise() -> None:
    plan = plan_of("llama3-70b 64xh100 mesh.tp=8 mesh.pp=4 mesh.dp_shard=2 zero.stage=1")
    wanted = Strategy(name="x", zero=(3,), tp=Degrees(2, 4))
    assert wanted.differs_from(plan) == ("tp 8, not 2 to 4", "pp 4, not 1", "ZeRO 1, not 3")
    assert (
        Strategy(name="y", zero=(1,), tp=Degrees(8, 8), pp=Degrees(2, 8)).differs_from(plan) == ()
    )


def test_no_split_is_told_where_a_strategy_cannot_use_all_devices() -> None:
    assert outcome(Strategy(name="z", tp=Degrees(3, 3)), situation("llama3-70b 64xh100")) is None
