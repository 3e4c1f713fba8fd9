"""Strategies beside one process, from Python: what is off, what is refused, what is no strategy."""

from __future__ import annotations

import pytest

import echelon as ec
from echelon.core.errors import ConfigError


@pytest.mark.slow
@pytest.mark.system("S56")
def test_a_strategy_is_proven_and_another_refused_with_its_rule() -> None:
    sharded, experts = ec.compare_strategies("nano", ("zero3", "ep"))
    assert sharded.holds
    assert sharded.deviations is not None
    assert list(sharded.deviations) == ["fp64", "fp32"]
    exact, own = sharded.deviations.values()
    for name in ("loss", "gradient", "parameter"):
        assert exact[name].error <= exact[name].allowed <= 1e-10
        # Rounding of float32 is seen, and is no more than one process makes.
        assert exact[name].error < own[name].error <= own[name].allowed
    assert experts.deviations is None
    assert experts.refused
    assert "experts" in experts.why


@pytest.mark.parametrize(
    ("names", "ranks", "told"),
    [(("tpp",), 2, "there is no strategy 'tpp'"), (("tp",), 1, "1 rank"), ((), 2, "no strategy")],
)
def test_a_mistake_is_told_before_any_rank(names: tuple[str, ...], ranks: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        ec.compare_strategies("nano", names, ranks=ranks)
    assert caught.value.rules == ("bad-argument",)
