"""When fragments meet, and when what comes of it is applied."""

from __future__ import annotations

from echelon.core.choices.local_sgd import LocalSgd


def test_without_rounds_nothing_meets() -> None:
    assert not LocalSgd().active
    assert [LocalSgd().meets_after(step) for step in range(3)] == [(), (), ()]


def test_a_whole_model_meets_at_the_end_of_each_round() -> None:
    local = LocalSgd(every=3, islands=2)
    assert [local.meets_after(step) for step in range(6)] == [(), (), (0,), (), (), (0,)]
    assert [local.ends_round(step) for step in range(3)] == [False, False, True]


def test_fragments_meet_each_in_its_own_step_the_last_at_the_end_of_a_round() -> None:
    local = LocalSgd(every=4, islands=2, fragments=2)
    assert [local.meets_after(step) for step in range(6)] == [(), (0,), (), (1,), (), (0,)]
    each = LocalSgd(every=3, islands=2, fragments=3)
    assert [each.meets_after(step) for step in range(4)] == [(0,), (1,), (2,), (0,)]
    assert [each.fragment_of(layer, is_last=False) for layer in range(4)] == [0, 1, 2, 0]
    assert (each.fragment_of(None, is_last=False), each.fragment_of(None, is_last=True)) == (0, 2)


def test_what_comes_late_is_applied_so_many_steps_after_its_meeting() -> None:
    local = LocalSgd(every=3, islands=2, delay=2)
    assert [local.changes_after(step) for step in range(6)] == [(), (), (), (), (0,), ()]
    assert (local.own_share, LocalSgd(every=3, islands=2).own_share) == (0.5, 0.0)


def test_the_plan_of_an_island_says_which_it_is() -> None:
    part = LocalSgd(every=3, islands=4).part(2)
    assert (part.is_part, part.active, part.islands, part.island) == (True, False, 4, 2)
