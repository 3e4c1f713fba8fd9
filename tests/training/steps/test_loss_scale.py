"""The loss scale: every short history against its definition, its ends, its way through JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.core.errors import RunFailed
from echelon.core.plan import Precision
from echelon.proof.oracle.optimizers import OracleLossScale
from echelon.training.steps.loss_scale import FIXED_PATIENCE, LARGEST, LossScale

DYNAMIC = Precision(parameters="fp16", loss_scaling="dynamic", loss_scale=64.0, loss_scale_window=3)
FIXED = replace(DYNAMIC, loss_scaling="fixed")
GENTLE = replace(DYNAMIC, loss_scale_hysteresis=2)
LOW = replace(DYNAMIC, loss_scale=4.0, loss_scale_min=2.0)
ODD = replace(DYNAMIC, loss_scale=12.0, loss_scale_min=5.0, loss_scale_window=1)


def run(precision: Precision, history: str) -> LossScale:
    """Return the scale after steps: "x" overflowed, "." went well."""
    scale = LossScale(precision)
    for step in history:
        scale.after(overflowed=step == "x")
    return scale


def by_definition(precision: Precision, history: tuple[bool, ...]) -> float | None:
    """Return the scale after a history; None where it is exhausted. Looks back, keeps no state."""
    scale = precision.loss_scale
    for now, overflowed in enumerate(history):
        if overflowed:
            # Overflows since the scale last grew; up to the hysteresis they are forgiven.
            grown = max((i + 1 for i in range(now) if grows(precision, history, i)), default=0)
            if sum(history[grown : now + 1]) < precision.loss_scale_hysteresis:
                continue
            if scale <= precision.loss_scale_min:
                return None
            scale = max(scale / 2, precision.loss_scale_min)
        elif grows(precision, history, now):
            scale *= 2
    return scale


def grows(precision: Precision, history: tuple[bool, ...], now: int) -> bool:
    """Return whether step `now` ends a window: the n-th, 2n-th ... since the last overflow."""
    good = 0
    while good <= now and not history[now - good]:
        good += 1
    return good > 0 and good % precision.loss_scale_window == 0


@pytest.mark.parametrize("precision", [DYNAMIC, GENTLE, LOW, ODD])
def test_every_history_of_nine_steps_gives_the_scale_of_the_definition(
    precision: Precision,
) -> None:
    exhausted = 0
    for history in product((False, True), repeat=9):
        expected = by_definition(precision, history)
        scale = LossScale(precision)
        try:
            for overflowed in history:
                scale.after(overflowed=overflowed)
        except RunFailed:
            assert expected is None, history
            exhausted += 1
        else:
            assert scale.value == expected, history
            assert scale.value >= precision.loss_scale_min
    assert 0 < exhausted < 2**9


@pytest.mark.system("S43")
def test_it_halves_at_once_and_doubles_after_the_window() -> None:
    assert run(DYNAMIC, "").value == 64.0
    assert run(DYNAMIC, "x").value == 32.0
    assert run(DYNAMIC, "xx").value == 16.0
    assert run(DYNAMIC, "..").value == 64.0
    assert run(DYNAMIC, "...").value == 128.0
    assert run(DYNAMIC, "..x..").value == 32.0
    assert run(DYNAMIC, "..x...").value == 64.0
    assert run(DYNAMIC, ".......").value == 256.0


def test_hysteresis_forgives_the_first_overflows_since_the_scale_grew() -> None:
    assert run(GENTLE, "x").value == 64.0
    assert run(GENTLE, "x.x").value == 32.0
    assert run(GENTLE, "x.xx").value == 16.0
    assert run(GENTLE, "xx...x").value == 64.0
    assert run(GENTLE, "xx...xx").value == 32.0


def test_it_ends_on_the_minimum_also_where_halving_would_pass_it() -> None:
    assert run(ODD, "x").value == 6.0
    assert run(ODD, "xx").value == 5.0
    assert run(ODD, "xx.").value == 10.0


def test_an_overflow_at_the_minimum_ends_the_run_and_tells_the_last_ones() -> None:
    scale = run(LOW, ".x")
    assert scale.value == 2.0
    with pytest.raises(RunFailed) as caught:
        scale.after(overflowed=True)
    (problem,) = caught.value.problems
    assert problem.rule == "loss-scale-exhausted"
    assert "loss_scale_min = 2 too" in problem.message
    assert "in a row: 2" in problem.message
    assert "2 (scale 4), 3 (scale 2)" in problem.message
    assert caught.value.exit_code == 4
    assert run(replace(LOW, loss_scale_min=4.0, loss_scale_hysteresis=2), "x").value == 4.0


def test_a_fixed_scale_stays_and_gives_up_only_after_many_overflows_in_a_row() -> None:
    assert run(FIXED, "....x.xx......").value == 64.0
    patient = "x" * (FIXED_PATIENCE - 1)
    assert run(FIXED, patient + "." + patient).value == 64.0
    with pytest.raises(RunFailed, match="fixed loss scale 64") as caught:
        run(FIXED, patient + "." + patient + "x")
    assert caught.value.rules == ("loss-scale-exhausted",)
    message = caught.value.problems[0].message
    assert f"in a row: {FIXED_PATIENCE}" in message
    assert message.count("scale 64") == 1 + 8


def test_without_scaling_the_factor_is_one_and_nothing_overflows() -> None:
    scale = run(Precision(loss_scale=1024.0), "." * 5)
    assert not scale.active
    assert scale.value == 1.0
    with pytest.raises(AssertionError, match="ends the run"):
        scale.after(overflowed=True)
    assert run(FIXED, "").active
    assert run(DYNAMIC, "").active


def test_a_scale_that_nothing_holds_back_stays_where_a_loss_times_it_is_finite() -> None:
    scale = run(replace(DYNAMIC, loss_scale_window=1, loss_scale=3.0), "." * 200)
    assert scale.value == LARGEST
    scale.after(overflowed=True)
    assert scale.value == LARGEST / 2
    beyond = replace(DYNAMIC, loss_scale_window=1, loss_scale=LARGEST * 4)
    assert run(beyond, "..").value == LARGEST * 4


@given(
    st.sampled_from((DYNAMIC, GENTLE, LOW, ODD, FIXED)),
    st.text(".x", max_size=30),
    st.text(".x", max_size=30),
)
@settings(deadline=None)
def test_a_run_that_goes_on_from_its_state_is_the_run_that_never_stopped(
    precision: Precision, before: str, after: str
) -> None:
    try:
        through = run(precision, before)
    except RunFailed:
        return
    resumed = LossScale(precision)
    resumed.load(json.loads(json.dumps(through.state())))
    assert resumed.state() == through.state()
    for step in after:
        ends: list[str] = []
        for one in (through, resumed):
            try:
                one.after(overflowed=step == "x")
            except RunFailed as error:
                ends.append(str(error))
        assert resumed.state() == through.state()
        assert len(ends) in (0, 2)
        if ends:
            assert ends[0] == ends[1]
            return


def test_a_state_of_another_kind_of_scaling_is_not_gone_on_from() -> None:
    for saved, now in ((DYNAMIC, FIXED), (FIXED, DYNAMIC), (Precision(), DYNAMIC)):
        scale = LossScale(now)
        scale.load(run(saved, "....").state())
        assert scale.state() == LossScale(now).state()
    raised = LossScale(replace(LOW, loss_scale_min=3.0))
    raised.load(run(LOW, "x").state())
    assert raised.value == 3.0


@given(
    st.sampled_from((DYNAMIC, GENTLE, LOW, ODD, FIXED, Precision())),
    st.lists(st.booleans(), max_size=40),
)
@settings(deadline=None)
def test_the_formula_of_the_prover_is_the_same(precision: Precision, history: list[bool]) -> None:
    scale, oracle = LossScale(precision), OracleLossScale.start(precision)
    for overflow in history:
        overflowed = overflow and scale.active
        assert scale.value == oracle.scale
        try:
            scale.after(overflowed=overflowed)
        except RunFailed:
            return
        oracle.follow(precision, overflow=overflowed)
