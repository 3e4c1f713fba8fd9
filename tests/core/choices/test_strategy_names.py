"""Names of other frameworks: each is one of ours, or says why it is none."""

from __future__ import annotations

from pathlib import Path

from echelon.core.choices.strategies import STRATEGIES, STRATEGY_NAMES, find_strategy, known_name

LATER = {"parameter-server"}
"""What the registry may have."""


def test_every_name_is_one_of_ours_or_says_why_not() -> None:
    for one in STRATEGY_NAMES:
        assert one.why
        assert one.ours in {*STRATEGIES, *LATER, ""}, one.name
        assert known_name(one.name) is one
        if one.ours in STRATEGIES:
            assert find_strategy(one.name) is STRATEGIES[one.ours]


def test_spellings_are_one_name() -> None:
    spelt = ("MirroredStrategy", "mirrored", "mirrored_strategy", "Mirrored Strategy")
    assert all(find_strategy(name) is STRATEGIES["dp"] for name in spelt)
    assert find_strategy("ZeRO-3") is STRATEGIES["zero3"]
    assert find_strategy("nothing") is None
    assert known_name("nothing") is None


def test_a_name_goes_through_the_registry_alone() -> None:
    assert find_strategy("ParameterServerStrategy") is STRATEGIES.get("parameter-server")


def test_the_guide_has_a_row_for_each_name() -> None:
    """S53: one table says what each name maps to, or that it is refused, and why."""
    guide = Path(__file__).parents[3] / "docs" / "guides" / "strategies.md"
    lines = guide.read_text(encoding="utf-8").splitlines()
    for one in STRATEGY_NAMES:
        ours = f"`{one.ours}`" if one.ours else "refused"
        assert f"| `{one.name}` | {one.tool} | {ours} | {one.why} |" in lines
