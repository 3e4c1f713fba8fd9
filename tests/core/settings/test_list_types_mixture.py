"""The tables of `data.mixture` as parts."""

from __future__ import annotations

from echelon.core.settings.list_types import MixtureList, MixturePart, mixture_parts


def test_tables_are_parts_and_none_are_none() -> None:
    assert MixtureList().check("none") is None
    assert mixture_parts("none") == ()
    value = [{"path": "a", "weight": 2, "until_step": 7}, {"path": "b", "weight": 0.5}]
    assert MixtureList().check(value) is None
    assert mixture_parts(value) == (
        MixturePart(path="a", weight=2.0, until_step=7),
        MixturePart(path="b", weight=0.5),
    )


def test_the_table_that_does_not_fit_is_named() -> None:
    value = [{"path": "a", "weight": 2}, {"path": "b", "weight": True}]
    wrong = MixtureList().check(value)
    assert wrong is not None
    assert wrong.message.startswith("table 2 has no weight")
