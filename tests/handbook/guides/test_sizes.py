"""Rows of the size guide, their corners, the preferences, and the layouts that guides name."""

from __future__ import annotations

import pytest

from echelon.handbook.guides.practices import NAMED, SIZES, rows_for
from echelon.handbook.guides.strategy import strategy_outcome
from tests.handbook.guides.situations import situation

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


@pytest.mark.system("S47")
@pytest.mark.parametrize(("words", "rows", "fits"), COVERED)
def test_rows_cover_what_they_say_and_their_corners_do_not_fit(
    words: str, rows: list[str], fits: list[bool]
) -> None:
    here = situation(words)
    found = rows_for(here)
    assert [row.id for row in found] == rows
    outcomes = [strategy_outcome(row.strategy, here) for row in found]
    assert [one is not None and one.fits for one in outcomes] == fits


def test_every_row_is_met_by_some_situation_above() -> None:
    assert {row for _, rows, _ in COVERED for row in rows} == {row.id for row in SIZES}


@pytest.mark.system("S59")
def test_named_layouts_have_the_states_that_were_checked_by_hand() -> None:
    found = {one.id: one for one in NAMED}
    assert found["llama-70b-64"].states_bytes == 35e9
    assert found["llama-70b-512"].states_bytes == pytest.approx(10.4e9, rel=1e-3)
    assert found["fine-tuning-4"].states_bytes == 28e9
    assert found["deepseek-v3-2048"].mesh.world_size == 2048
    assert all(one.fits for one in NAMED)
