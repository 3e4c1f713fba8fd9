"""Preferences answer with numbers."""

from __future__ import annotations

import pytest

from echelon.handbook.guides.practices import PREFERENCES, advise
from tests.handbook.guides.situations import situation


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
