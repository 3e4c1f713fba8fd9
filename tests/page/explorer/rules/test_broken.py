"""What is said of a rule, and of what has no effect."""

from __future__ import annotations

from echelon.page.explorer.rules.broken import Broken, rest_text, without_effect
from tests.page.explorer.rules.examples import broken


def test_what_has_no_effect_is_told_where_it_has_none() -> None:
    assert list(without_effect(False, "why")) == []
    assert list(without_effect(True, "why")) == [Broken(rule="no-effect", message="why")]
    assert rest_text(8, 3) == "8 % 3 = 2"
    assert broken() == {}
