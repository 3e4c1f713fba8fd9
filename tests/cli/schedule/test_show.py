"""A schedule is drawn with its facts, and written into new files."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from echelon.cli.main import main
from echelon.schedule.build import SCHEDULES, build_schedule
from echelon.schedule.files import read_schedule_file

GOOD = "rank 0, F0.0, F0.1, BW0.0, BW0.1\nrank 1, F1.0, F1.1, BW1.0, BW1.1\n"


STUCK = "rank 0, F0.0, BW0.0, F0.1, BW0.1\nrank 1, F1.0, F1.1, BW1.0, BW1.1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    path.write_text(GOOD)
    return path


def test_show_draws_a_schedule_with_its_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "1f1b", "-p", "4", "-m", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 4 ranks, 4 microbatches; F 1, B 1, W 1, BW 2, transfer 0 slots"
    slot = 4
    assert lines[3].startswith("rank 0  F0--F1--F2--F3--" + "." * 6 * slot + "B0======")
    assert "makespan   21 slots, 12 of them busy" in lines
    assert "bubble     42.86 % of the step, 75.00 % of the work" in lines
    assert "in flight  4, 3, 2, 1 at most on each rank" in lines
    assert lines[-1].startswith("messages   24")


def test_times_are_those_that_were_given(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "show", "gpipe", "-p", "4", "-m", "4", "--json"]
    assert main([*command, "--slots", "1,0.5,0.5"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 14
    assert main([*command, "--slots", "1,0.5,0.5,0.25"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan"] == 14 + 6 * 0.25


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_shown_and_written(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, csv = tmp_path / "figure.svg", tmp_path / f"{name}.csv"
    flags = ["-p", "2", "-m", "4", "--out", str(svg), "--out", str(csv)]
    assert main(["schedule", "show", name, *flags]) == 0
    assert capsys.readouterr().err == f"written: {svg}\nwritten: {csv}\n"
    ElementTree.fromstring(svg.read_text())
    builder = SCHEDULES[name]
    stages = builder.stages_for(2, builder.default_virtual_stages)
    built = build_schedule(name, num_stages=stages, num_ranks=2, num_microbatches=4)
    assert read_schedule_file(csv).schedule == built
    assert main(["schedule", "check", str(csv)]) == 0
    capsys.readouterr()
    assert main(["schedule", "show", str(csv), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == name


def test_a_search_keeps_its_limit_and_says_how_good_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["schedule", "show", "auto", "-p", "2", "-m", "4", "--most-in-flight", "2,1"]
    assert main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["name"] == "auto"
    first, last = result["peak_in_flight_per_rank"]
    assert first <= 2
    assert last == 1
    assert 12 < result["lower_bound"] <= result["makespan"] <= 15
    assert main(command) == 0
    assert f"none takes less than {result['lower_bound']:g}" in capsys.readouterr().out
    assert main(["schedule", "show", "auto", "-p", "2", "-m", "0"]) == 2
    assert capsys.readouterr().err.startswith("error[prediction-in-range]: --microbatches 0")


def test_virtual_stages_are_stages_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["schedule", "show", "interleaved-1f1b", "-p", "2", "-m", "4", "--json"]
    assert main([*command, "--virtual-stages", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["stage_ranks"] == [0, 1, 0, 1, 0, 1]


def test_a_file_that_exists_is_left_as_it_is(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", "show", "1f1b", "-p", "2", "-m", "2", "--out", str(file)]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("error[never-overwrite]")
    assert "mine-2.csv" in output.err
    assert file.read_text() == GOOD


@pytest.mark.parametrize(
    ("arguments", "rule", "works"),
    [
        (["1f2b", "-p", "2", "-m", "2"], "schedule-known", "1f1b"),
        (["1f1b"], "bad-argument", "echelon schedule show 1f1b -p 4 -m 8"),
        (["1f1b", "-p", "2"], "bad-argument", "-p 2 -m 8"),
        (["1f1b", "-p", "4", "-m", "2"], "schedule-needs-microbatches", "-m 4"),
        (
            ["1f1b", "-p", "2", "-m", "2", "--virtual-stages", "2"],
            "schedule-stages-per-rank",
            "--virtual-stages 1",
        ),
        (["1f1b", "-p", "0", "-m", "2"], "schedule-stages-per-rank", "-p 1"),
        (["1f1b", "-p", "2", "-m", "2", "--slots", "1,1"], "bad-argument", "1,1,1,0"),
        (["1f1b", "-p", "2", "-m", "2", "--slots", "1,1,nan,0"], "bad-argument", "1,1,1,0"),
        (["1f1b", "-p", "2", "-m", "2", "--slots", "0,0,0,1"], "bad-argument", "1,1,1,0"),
        (["absent.csv"], "no-such-file", ""),
        (["FILE", "-p", "2"], "bad-argument", "echelon schedule show"),
        (["STUCK"], "schedule-cannot-deadlock", ""),
    ],
)
def test_what_cannot_be_shown_exits_2(
    file: Path,
    arguments: list[str],
    rule: str,
    works: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments == ["STUCK"]:
        file.write_text(STUCK)
    arguments = [str(file) if word in ("FILE", "STUCK") else word for word in arguments]
    assert main(["schedule", "show", *arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error[{rule}]")
    assert works in output.err
