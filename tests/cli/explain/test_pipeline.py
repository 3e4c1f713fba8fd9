"""`echelon explain pipeline` shows the closed forms, and that only a flush has the gradient."""

from __future__ import annotations

import json
import re

import pytest

from echelon.cli.main import main
from echelon.schedule.build import SCHEDULES, builder_of
from echelon.schedule.check import check_schedule
from echelon.schedule.simulate import Durations, simulate

pytestmark = pytest.mark.usefixtures("wide")

DURATIONS = {
    # F = B = W, cut among the stages of a rank.
    stages: Durations(
        forward_s=(1 / stages,) * 4 * stages,
        backward_s=(2 / stages,) * 4 * stages,
        input_gradient_s=(1 / stages,) * 4 * stages,
        weight_gradient_s=(1 / stages,) * 4 * stages,
        transfer_s=(0,) * (4 * stages - 1),
    )
    for stages in (1, 2)
}


def page(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return what the command prints."""
    assert main(["explain", "pipeline", *flags]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return output.out


def test_every_schedule_has_a_line_a_formula_and_a_reason_to_take_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys)
    for name, kind in SCHEDULES.items():
        assert f"  {kind.suits}\n" in text
        assert re.search(rf"^{name} +\d +[\d.]+ F ", text, re.MULTILINE)
        assert f"  {name}: {kind.paper}\n    idle  " in text
    assert "(p-1)(F+BW): the overhead is (p-1)/m, the fraction of the step (p-1)/(m+p-1)." in text
    assert max(map(len, text.splitlines())) <= 160
    assert "`" not in text


def test_the_numbers_are_those_of_the_simulator_and_the_checker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = json.loads(page(capsys, "--pp", "4", "--microbatches", "12", "--json"))["pipeline"]
    assert (found["num_ranks"], found["num_microbatches"], found["refused"]) == (4, 12, [])
    assert [row["name"] for row in found["schedules"]] == list(SCHEDULES)
    for row in found["schedules"]:
        stages = row["num_stages"] // 4
        numbers = {"num_stages": row["num_stages"], "num_ranks": 4, "num_microbatches": 12}
        schedule = builder_of(row["name"], **numbers).schedule()
        report = check_schedule(schedule)
        assert row["held_microbatches"] == max(report.peak_in_flight_per_rank) / stages
        assert row["num_messages"] == report.num_messages
        events = simulate(schedule, DURATIONS[stages]).events
        span = max(event.end for event in events)
        assert span == pytest.approx(36 + row["idle_forward_passes"])
        assert row["bubble_fraction"] == pytest.approx(row["idle_forward_passes"] / span)
        assert row["bubble_overhead"] == pytest.approx(row["idle_forward_passes"] / 36)


def test_eight_times_the_activations_of_1f1b(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpipe idles as long as 1f1b and holds 8 times as much" in page(
        capsys, "-p", "8", "-m", "64"
    )


def test_what_to_take_follows_from_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    text = page(capsys, "-p", "4", "-m", "8")
    assert "the smallest bubble: dualpipe (4.0 % of the step)" in text
    assert "hold no more than 1f1b (4): zb-v (5.9 % of the step)" in text
    assert "with m = 16, 1f1b idles 15.8 % of the step (here m = 2 p: 27.3 %)" in text


def test_a_schedule_that_does_not_fit_is_named_with_its_rule(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = page(capsys, "-p", "3", "-m", "2")
    assert "[schedule-even-ranks]" in text
    assert "1f1b with 3 stages needs at least 3 microbatches, but a step has 2" in text
    assert "gpipe" in text
    assert page(capsys, "-p", "1", "-m", "1")


def test_only_a_flush_has_the_gradient_of_one_device(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(page(capsys, "-p", "4", "-m", "8", "--json"))["pipeline"]["staleness"]
    assert [one["name"] for one in found if one["reference_gradient"]] == ["PipeDream-Flush"]
    two = next(one for one in found if one["name"] == "PipeDream-2BW")
    assert [stage["staleness"] for stage in two["stages"]] == [1] * 4
    assert [stage["kept"] for stage in two["stages"]] == [2] * 4
    text = page(capsys)
    assert re.search(r"PipeDream +each microbatch +3\.\.0 +4\.\.1 +of older weights", text)
    assert "only with one is the gradient that of one device" in text


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        (["pipeline", "--pp", "0"], ["prediction-in-range"]),
        (["pipeline", "-p", "-1", "-m", "0"], ["prediction-in-range"] * 2),
        (["pipeline", "-m", "1000000000"], ["prediction-in-range"]),
        (["pipeline", "--dp", "4"], ["bad-argument"]),
        (["zero", "--dp", "4", "--pp", "4"], ["bad-argument"]),
        (["tp-divides-heads", "-m", "4"], ["bad-argument"]),
        (["pipelin"], ["unknown-rule"]),
    ],
)
def test_what_has_no_answer_is_refused(
    capsys: pytest.CaptureFixture[str], flags: list[str], rules: list[str]
) -> None:
    assert main(["explain", *flags]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert re.findall(r"^error\[([a-z-]+)\]", output.err, re.MULTILINE) == rules
