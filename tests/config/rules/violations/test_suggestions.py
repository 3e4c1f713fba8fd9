"""Changes that are tried: what mends its fault and breaks nothing, the nearest first."""

from __future__ import annotations

from collections import Counter

from echelon.config.entries import Entry
from echelon.config.rules.violations import (
    BrokenRule,
    Trial,
    by_distance,
    changed_view,
    near_divisors,
    setting_changes,
)
from echelon.config.view import View

TP: BrokenRule = ("tp-divides-heads", "mesh.tp")
RANKS: BrokenRule = ("fits-cluster", "mesh")


def broken_rules(view: View) -> Counter[BrokenRule]:
    """Return what is broken where tp divides 12 and no more than 8 ranks are there."""
    tp, pp = view.integer("mesh.tp"), view.integer("mesh.pp")
    return Counter({TP: int(12 % tp > 0), RANKS: int(tp * pp > 8)}) + Counter()


def trial_of(mended: BrokenRule, **degrees: int) -> Trial:
    entries = {f"mesh.{axis}": Entry(value=n, source="a.toml:3") for axis, n in degrees.items()}
    view = View(entries=entries)
    return Trial(view=view, broken_rules=broken_rules, before=broken_rules(view), mended=mended)


def test_a_change_works_where_it_mends_its_own_fault_and_breaks_nothing() -> None:
    trial = trial_of(TP, tp=5, pp=1)
    changes = list(setting_changes("mesh.tp", (5, 7, 12, 6, 4, 3)))
    # 5 and 7 do not divide, 12 are too many ranks; two are told.
    assert trial.first(changes) == ["mesh.tp = 6", "mesh.tp = 4"]
    assert trial.first(changes, limit=9) == ["mesh.tp = 6", "mesh.tp = 4", "mesh.tp = 3"]
    both = trial_of(TP, tp=5, pp=4)
    # With 4 x 4 ranks the other fault stays as it was: the change still mends what it is about.
    assert both.works({"mesh.tp": 4})
    assert not both.works({"mesh.pp": 1})
    assert not both.is_legal({"mesh.tp": 4})
    assert both.is_legal({"mesh.tp": 2})


def test_ways_are_told_as_they_are_or_after_they_were_tried() -> None:
    trial = trial_of(TP, tp=5, pp=1)
    ways = ("fewer ranks", 7, {"mesh.tp": 4, "mesh.pp": 2}, {"mesh.tp": 8}, lambda _: ["so"])
    assert list(trial.suggestions(ways)) == [
        "fewer ranks",
        "7",
        "mesh.tp = 4 with mesh.pp = 2",
        "so",
    ]


def test_settings_are_changed_in_a_copy() -> None:
    view = trial_of(RANKS, tp=5, pp=2).view
    assert changed_view(view, {"mesh.tp": 2}).integer("mesh.tp") == 2
    assert (view.integer("mesh.tp"), view.integer("mesh.pp")) == (5, 2)


def test_the_nearest_numbers_come_first_and_the_smaller_of_two() -> None:
    assert by_distance([1, 2, 4, 6, 5], 5) == [4, 6, 2, 1]
    assert near_divisors(12, 5) == [4, 6, 3, 2, 1, 12]
    assert near_divisors(12, 4) == [3, 2, 6, 1, 12]
