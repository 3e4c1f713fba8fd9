"""Settings that are lists: words in an order, numbers."""

from __future__ import annotations

import pytest

from echelon.core.settings.list_types import NumberList, TextList, WordList

KINDS = WordList(options=("local", "global"), words=("local",))
FACTORS = NumberList(words=("none",))
TEXTS = TextList(words=("none",))


@pytest.mark.parametrize("value", ["local", ["local"], ["global", "local", "global"]])
def test_words_in_any_order_fit(value: object) -> None:
    assert KINDS.check(value) is None


@pytest.mark.parametrize("value", ["global", [], ["near"], 3, [1]])
def test_other_words_do_not(value: object) -> None:
    found = KINDS.check(value)
    assert found is not None
    assert found.suggestions == ('["local", "global"]',)


@pytest.mark.parametrize("value", ["none", [1], [0.5, 2.0]])
def test_numbers_fit(value: object) -> None:
    assert FACTORS.check(value) is None


@pytest.mark.parametrize("value", [[], [0.0], ["1"], 1.0, "auto", [True]])
def test_what_is_no_list_of_numbers_does_not(value: object) -> None:
    assert FACTORS.check(value) is not None


@pytest.mark.parametrize("value", ["none", ["one"], ["one", "two"]])
def test_texts_fit(value: object) -> None:
    assert TEXTS.check(value) is None


@pytest.mark.parametrize("value", [[], [""], [1], "one", ["one", 2]])
def test_what_is_no_list_of_texts_does_not(value: object) -> None:
    assert TEXTS.check(value) is not None
