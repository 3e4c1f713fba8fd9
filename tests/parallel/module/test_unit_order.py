"""In which order units are used, what ranks agree on, and what a sweep gathers and frees."""

from __future__ import annotations

from echelon.parallel.module.unit_order import (
    FirstStepTrace,
    GatherSchedule,
    UnitEvent,
    UnitOrder,
    agree_on_order,
)


def use(*units: str) -> list[UnitEvent]:
    """Return the events of units that come one after the other."""
    events: list[UnitEvent] = []
    for unit in units:
        events.append(("enter", unit))
        events.append(("leave", unit))
    return events


def test_ranks_agree_on_what_all_of_them_do_alike() -> None:
    alike = FirstStepTrace(forwards=[use("a", "b", "c")] * 2, backwards=[use("c", "b", "a")])
    assert agree_on_order([alike, alike]) == UnitOrder(
        forward=tuple(use("a", "b", "c")), backward=tuple(use("c", "b", "a"))
    )
    without = FirstStepTrace(forwards=[use("a", "c")], backwards=[use("c", "a")])
    assert agree_on_order([alike, without]).units == {"a", "c"}
    swapped = FirstStepTrace(forwards=[use("b", "a", "c")], backwards=[use("c", "a", "b")])
    assert agree_on_order([alike, swapped]).units == {"c"}
    twice = FirstStepTrace(forwards=[use("a", "b", "a", "c")], backwards=[use("c", "b", "a")])
    assert agree_on_order([twice, twice]).units == {"b", "c"}
    odd = FirstStepTrace(forwards=alike.forwards, backwards=alike.backwards, irregular={"b"})
    assert agree_on_order([alike, odd]).units == {"a", "c"}
    nothing = agree_on_order([alike, FirstStepTrace()])
    assert (nothing.forward, nothing.backward) == ((), ())


def test_a_unit_without_backward_is_gathered_for_its_forward_only() -> None:
    noted = FirstStepTrace(forwards=[use("a", "b")], backwards=[[("enter", "b")]])
    order = agree_on_order([noted, noted])
    assert order.forward == tuple(use("a", "b"))
    assert order.backward == (("enter", "b"),)


USERS = {"A": ("a",), "B": ("b",), "C": ("c",), "AC": ("a", "c")}


def test_a_sweep_gathers_each_bucket_once_and_frees_it_after_its_last_unit() -> None:
    sweep = GatherSchedule(use("a", "b", "c"), USERS, ahead=1)
    turn = sweep.enter("a")
    assert (turn.gather, turn.after, turn.over) == (["A", "AC", "B"], ["C"], [])
    assert sweep.leave("a") == ["A"]
    assert sweep.enter("b").gather == ["C"]
    assert sweep.leave("b") == ["B"]
    assert sweep.enter("c").gather == []
    assert sorted(sweep.leave("c")) == ["AC", "C"]
    assert sweep.end() == ([], [])
    assert sweep.ends() == ["A", "B", "AC", "C"]


def test_a_sweep_takes_part_in_what_is_left_out() -> None:
    sweep = GatherSchedule(use("a", "b", "c"), USERS, ahead=0)
    turn = sweep.enter("c")
    assert (turn.skipped, turn.gather) == (["A", "B"], ["AC", "C"])
    assert sweep.passed("a")
    assert sweep.passed("b")
    assert sweep.end() == (["AC", "C"], [])
    assert not sweep.passed("a")
    assert sweep.end() == ([], ["A", "AC", "B", "C"])


def test_a_unit_around_another_is_whole_until_it_ends() -> None:
    events: list[UnitEvent] = [("enter", "o"), ("enter", "i"), ("leave", "i"), ("leave", "o")]
    sweep = GatherSchedule(events, {"O": ("o",), "I": ("i",)}, ahead=0)
    assert sweep.enter("o").gather == ["O"]
    assert sweep.enter("i").gather == ["I"]
    assert sweep.leave("i") == ["I"]
    assert sweep.leave("o") == ["O"]
